"""torch DCP and the sharded safetensors of HuggingFaceStorageWriter, written by torch on four gloo ranks."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM

from mismatch_probe.checkpoints.dcp import read_dcp
from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.checkpoints.layouts import Layout, layout_of
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import Hostile, gap, load, save_dcp
from tests.tiny import save_model

HEADS = ("untied", "tied")


def whole(sharded: Path, head: str):
    return AutoModelForCausalLM.from_pretrained(sharded / head / "model").eval()


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded / "untied" / "dcp", tmp_path / "dcp"))


def rewrite(folder: Path, change) -> None:
    """Alter the real metadata and write it back."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("head", HEADS)
def test_dcp_is_read_without_a_process_group(sharded: Path, head: str) -> None:
    path, model = sharded / head / "dcp", whole(sharded, head)
    assert layout_of(path) is Layout.DCP
    tensors = open_tensors(path)
    assert set(tensors) == set(model.state_dict())  # the optimizer beside the model is left out
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    assert gap(path, model) <= 1e-6 and not torch.distributed.is_initialized()


def test_raw_names_and_the_optimizer_are_there_for_who_asks(sharded: Path) -> None:
    raw = read_dcp(sharded / "untied" / "dcp")
    assert "app.model.lm_head.weight" in raw and "app.step" not in raw
    moment = raw["app.optimizers.0"]
    assert moment.abs().sum() > 0 and moment.shape == (61, 32)


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "model._orig_mod.", "trainer.module."])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_prefixes_of_trainers_are_taken_off(tmp_path: Path, prefix: str, kind: str) -> None:
    model = save_model(tmp_path / "model", kind)
    state = {prefix + name: value for name, value in model.state_dict().items()}
    save_dcp(state, tmp_path / "dcp")
    assert set(open_tensors(tmp_path / "dcp")) == set(model.state_dict())
    assert gap(tmp_path / "dcp", model, base=tmp_path / "model") <= 1e-6


def test_an_optimizer_beside_bare_names_is_left_out(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in model.state_dict().items()}
    save_dcp({**model.state_dict(), **moments}, tmp_path / "dcp")
    assert set(read_dcp(tmp_path / "dcp")) > set(moments)
    assert gap(tmp_path / "dcp", model, base=tmp_path / "model") <= 1e-6


def test_two_models_in_one_checkpoint_are_not_mixed(tmp_path: Path) -> None:
    state = {f"{side}.model.embed_tokens.weight": torch.ones(3, 2) for side in ("policy", "reference")}
    save_dcp(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"several models \(policy\., reference\.\)"):
        open_tensors(tmp_path)


def test_dtypes_are_kept(tmp_path: Path) -> None:
    state = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)
    }
    save_dcp(state, tmp_path)
    found = read_dcp(tmp_path)
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float())


def test_dcp_is_described_from_its_metadata(sharded: Path) -> None:
    found, plain = describe(sharded / "tied" / "dcp"), describe(sharded / "tied" / "model")
    assert (found.parameters, found.dtypes, found.layout) == (plain.parameters, ("F32",), "torch DCP")


def test_prime_rl_keeps_it_below_trainer_and_takes_the_bases_config(copy: Path, sharded: Path, tmp_path: Path) -> None:
    (copy / "config.json").unlink()
    (tmp_path / "step_5").mkdir()
    shutil.move(copy, tmp_path / "step_5" / "trainer")
    with pytest.raises(CheckpointError, match="torch DCP without config"):
        describe(tmp_path / "step_5")
    base = sharded / "untied" / "model"
    assert config_dir(tmp_path / "step_5", base) == base
    assert gap(tmp_path / "step_5", whole(sharded, "untied"), base) <= 1e-6


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "__2_0.distcp").unlink()
    for attempt in (describe, load):
        with pytest.raises(CheckpointError, match=r"__2_0\.distcp is missing"):
            attempt(copy)


def test_a_save_that_was_not_finished_is_said(copy: Path) -> None:
    (copy / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="the save was not finished"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_torn_metadata_is_one_line(copy: Path, keep: int) -> None:
    file = copy / ".metadata"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"\.metadata: not read") as error:
        load(copy)
    assert "\n" not in str(error.value)


def test_a_torn_data_file_is_named(copy: Path) -> None:
    file = copy / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: ends before"):
        load(copy)


def test_garbage_in_a_data_file_is_named(copy: Path) -> None:
    file = copy / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: not a file of torch\.save"):
        load(copy)


def test_hostile_metadata_runs_nothing(copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    rewrite(copy, lambda metadata: setattr(metadata, "planner_data", Hostile(witness)))
    for attempt in (layout_of, config_dir):
        attempt(copy)
    for attempt in (describe, open_tensors, load):
        with pytest.raises(CheckpointError, match=r"it names (posix|os)\.system.*Nothing in it was run"):
            attempt(copy)
    assert not witness.exists()
    pickle.loads((copy / ".metadata").read_bytes())
    assert witness.exists()  # the file is hostile indeed


def test_hostile_tensors_run_nothing(tmp_path: Path) -> None:
    witness, payload = tmp_path / "witness", io.BytesIO()
    folder = tmp_path / "dcp"
    save_dcp({"model.embed_tokens.weight": torch.ones(50, 20)}, folder)
    torch.save(Hostile(witness), payload)
    file = folder / "__0_0.distcp"
    data = payload.getvalue()
    file.write_bytes(data + bytes(max(0, file.stat().st_size - len(data))))
    rewrite(folder, lambda m: [setattr(i, "length", len(data)) for i in m.storage_data.values()])
    rewrite(folder, lambda m: [setattr(e, "size", torch.Size([5, 2])) for e in m.state_dict_metadata.values()])
    rewrite(folder, lambda m: [setattr(e.chunks[0], "sizes", e.size) for e in m.state_dict_metadata.values()])
    with pytest.raises(CheckpointError, match="Nothing in it was run"):
        dict(open_tensors(folder))
    assert not witness.exists()


@pytest.mark.parametrize("where", ["../outside.distcp", "/etc/hostname", "a\\b", ".."])
def test_no_path_leaves_the_checkpoint(copy: Path, where: str) -> None:
    rewrite(copy, lambda metadata: [setattr(i, "relative_path", where) for i in metadata.storage_data.values()])
    with pytest.raises(CheckpointError, match="points outside of the checkpoint"):
        describe(copy)


def test_declared_sizes_are_held_against_the_files(copy: Path) -> None:
    """10^15 elements are an error before anything is allocated, in the whole tensor and in its pieces."""

    def grow(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["app.model.model.norm.weight"]
        entry.size = torch.Size([10**15])

    rewrite(copy, grow)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: its pieces do not cover shape \(10{15},\)"):
        describe(copy)

    def grow_pieces(metadata: Metadata) -> None:
        for chunk in metadata.state_dict_metadata["app.model.model.norm.weight"].chunks:
            chunk.sizes = torch.Size([10**15])

    rewrite(copy, grow_pieces)
    with pytest.raises(CheckpointError, match=r"\d+ bytes are there"):
        describe(copy)


@pytest.mark.parametrize("head", HEADS)
def test_parts_of_ranks_are_merged(sharded: Path, head: str) -> None:
    path, base = sharded / head / "parts", sharded / head / "model"
    assert layout_of(path) is Layout.SHARDED
    assert gap(path, whole(sharded, head), base) <= 1e-6
    assert describe(path, base).parameters == describe(base).parameters


def test_a_missing_part_is_named(sharded: Path, tmp_path: Path) -> None:
    folder, base = tmp_path / "policy" / "weights" / "model", sharded / "untied" / "model"
    shutil.copytree(sharded / "untied" / "parts", folder)
    assert gap(tmp_path, whole(sharded, "untied"), base) <= 1e-6  # where NeMo-RL keeps them
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match="its pieces do not cover shape"):
        describe(tmp_path, base)


def test_parts_that_do_not_say_their_place_are_refused(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded / "untied" / "parts", tmp_path / "parts")
    file = sorted((tmp_path / "parts").glob("*.safetensors"))[1]
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(CheckpointError, match="DCP_SHARDING_INFO makes no sense"):
        open_tensors(tmp_path / "parts")


def test_nemo_rl_keeps_the_config_in_a_hidden_folder(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy" / "weights" / "model"
    shutil.copytree(sharded / "tied" / "parts", folder)
    (folder / ".hf_metadata").mkdir()
    shutil.copy(sharded / "tied" / "model" / "config.json", folder / ".hf_metadata")
    assert gap(tmp_path, whole(sharded, "tied")) <= 1e-6
