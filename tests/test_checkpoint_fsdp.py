"""FSDP shards as verl and SkyRL save them, written by fully_shard and distribute_tensor on four gloo ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from transformers import AutoModelForCausalLM

from mismatch_probe.checkpoints.describe import describe, digest
from mismatch_probe.checkpoints.huggingface import load_model
from mismatch_probe.checkpoints.layouts import Layout, layout_of
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import ROOT, Hostile, gap, load, logits

HEADS = ("untied", "tied")
RANK = "model_world_size_4_rank_{}.pt"


def whole(sharded: Path, head: str):
    return AutoModelForCausalLM.from_pretrained(sharded / head / "model").eval()


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded / "untied" / "fsdp", tmp_path / "fsdp"))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "grid"])
def test_shards_are_merged_along_their_mesh(sharded: Path, head: str, mesh: str) -> None:
    """61 vocabulary rows over 4 ranks are uneven; hsdp keeps replicas over 2 x 2; grid splits both dimensions."""
    path, model = sharded / head / mesh, whole(sharded, head)
    assert layout_of(path) is Layout.FSDP
    tensors = open_tensors(path)
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    assert gap(path, model) <= 1e-6
    tied = load(path).lm_head.weight is load(path).model.embed_tokens.weight
    assert not tied and load(path).config.tie_word_embeddings == (head == "tied")


@pytest.mark.parametrize("inner", ["actor", "policy", ""])
def test_shards_are_found_below_the_step(copy: Path, sharded: Path, tmp_path: Path, inner: str) -> None:
    """verl writes global_step_N/actor, SkyRL global_step_N/policy."""
    step = tmp_path / "global_step_3"
    shutil.copytree(copy, step / inner, dirs_exist_ok=True)
    assert config_dir(step) == step / inner / "huggingface"
    assert gap(step, whole(sharded, "untied")) <= 1e-6


def test_shards_are_described_from_their_headers(sharded: Path) -> None:
    found, plain = describe(sharded / "tied" / "fsdp"), describe(sharded / "tied" / "model")
    assert (found.parameters, found.vocab_size, found.hidden_size) == (plain.parameters, 61, 32)
    assert found.dtypes == ("F32",) and found.layout == "FSDP shards"


def test_describing_needs_no_torch(sharded: Path) -> None:
    program = """
import sys
from pathlib import Path
from mismatch_probe.checkpoints.describe import describe, digest
base = Path(sys.argv[1]) / "model"
for name in ("model", "fsdp", "hsdp", "dcp", "parts"):
    assert describe(base.parent / name, base).parameters and digest(base.parent / name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(sharded / "untied")], check=True, cwd=ROOT)


def test_the_config_may_be_the_bases(copy: Path, sharded: Path) -> None:
    shutil.rmtree(copy / "huggingface")
    with pytest.raises(CheckpointError, match="FSDP shards without config"):
        load(copy)
    assert gap(copy, whole(sharded, "untied"), base=sharded / "untied" / "model") <= 1e-6


def test_a_head_trained_apart_from_a_tied_config_stays_apart(sharded: Path, tmp_path: Path) -> None:
    model = whole(sharded, "tied")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"] += 0.1
    torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    found = logits(load(tmp_path, base=sharded / "tied" / "model"))
    model.lm_head.weight = torch.nn.Parameter(state["lm_head.weight"])
    assert torch.equal(found, logits(model))


def test_plain_tensors_are_replicas_or_follow_each_other(sharded: Path, tmp_path: Path) -> None:
    """Without DTensors a shard is told from a replica by its values; a wrong guess cannot fit the config's shapes."""
    state = whole(sharded, "untied").state_dict()
    for rank in range(2):
        half = {name: value if value.ndim == 1 else value.chunk(2)[rank].clone() for name, value in state.items()}
        torch.save(half, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert gap(tmp_path, whole(sharded, "untied"), base=sharded / "untied" / "model") <= 1e-6


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_rank_is_named(copy: Path, rank: int) -> None:
    (copy / RANK.format(rank)).unlink()
    for attempt in (describe, load, open_tensors):
        with pytest.raises(CheckpointError, match=rf"model_world_size_4_rank_{rank}\.pt is missing \(3 of 4"):
            attempt(copy)


def test_files_of_two_saves_are_not_mixed(copy: Path) -> None:
    shutil.copy(copy / RANK.format(0), copy / "model_world_size_8_rank_0.pt")
    with pytest.raises(CheckpointError, match="shards of 4 and 8 world sizes"):
        describe(copy)


def test_ranks_that_disagree_are_refused(copy: Path, sharded: Path) -> None:
    shutil.copy(sharded / "untied" / "grid" / RANK.format(1), copy / RANK.format(1))
    with pytest.raises(CheckpointError, match=r"rank_1\.pt: .* is not split as in the first"):
        describe(copy)
    shutil.copy(copy / RANK.format(0), copy / RANK.format(1))
    with pytest.raises(CheckpointError, match="the ranks' parts give shape"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 10, 3000, -1])
def test_a_torn_rank_is_one_line(copy: Path, keep: int) -> None:
    file = copy / RANK.format(2)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"rank_2\.pt: not a file of torch\.save 1\.6 or later, or torn") as error:
        load(copy)
    assert "\n" not in str(error.value)


def test_a_hostile_rank_runs_nothing(copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    torch.save({"lm_head.weight": Hostile(witness)}, copy / RANK.format(1))
    for attempt in (describe, digest, open_tensors, load):
        if attempt is digest:
            digest(copy)
            continue
        with pytest.raises(CheckpointError, match=r"it names (posix|os)\.system.*Nothing in it was run"):
            attempt(copy)
    assert not witness.exists()
    torch.load(copy / RANK.format(1), weights_only=False)
    assert witness.exists()  # the file is hostile indeed


def test_sums_that_are_not_finished_are_refused(tmp_path: Path) -> None:
    """A Partial placement is a sum over ranks that has not been taken."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        summed = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
        torch.save({"w": summed}, tmp_path / "model_world_size_1_rank_0.pt")
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(CheckpointError, match="a DTensor placed as Partial"):
        open_tensors(tmp_path)


def test_no_process_group_is_left_behind(sharded: Path) -> None:
    before = dict(os.environ)
    load_model(sharded / "untied" / "fsdp", torch.device("cpu"), torch.bfloat16)
    assert not torch.distributed.is_initialized() and dict(os.environ) == before
