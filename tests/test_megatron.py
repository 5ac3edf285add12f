"""Megatron torch_dist checkpoints: those that Megatron-Core wrote, and its layouts made from Hugging Face models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mismatch_probe.checkpoints import dcp, megatron
from mismatch_probe.checkpoints.compare import State, compare_checkpoints
from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.entry import main
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import gap, load, save_dcp
from tests.planted import Planted
from tests.tiny import save_model
from tests.write_megatron import megatron_tensors, write_megatron

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"
WRITTEN = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
ITERATION = "iter_0000003"
VARIANTS = [
    ("llama", False, {}),
    ("llama", True, {"num_key_value_heads": 4}),
    ("llama", False, {"head_dim": 16}),
    ("qwen2", False, {"num_key_value_heads": 1}),
    ("qwen2", True, {}),
    ("qwen3", False, {"head_dim": 16}),
    ("qwen3", True, {"num_key_value_heads": 1}),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy of what Megatron-Core wrote for a Qwen3."""
    return Path(shutil.copytree(FIXTURES / "qwen3_stacked_tp2", tmp_path / "written")) / ITERATION


@pytest.mark.parametrize("name", WRITTEN)
@torch.inference_mode()
def test_logits_are_those_of_megatrons_own_forward_pass(name: str) -> None:
    """Written and run by megatron-core 0.16.1: a layer a key and stacked, gate and up apart, two ranks."""
    recorded = load_file(FIXTURES / name / "logits.safetensors")
    path = FIXTURES / name / ITERATION
    assert find(path) == (Layout.MEGATRON, path)
    logits = load(path)(input_ids=recorded["ids"]).logits
    assert logits.shape == recorded["logits"].shape
    assert float((logits - recorded["logits"]).abs().max()) <= 1e-5 < float(recorded["logits"].std()) / 100


def test_the_fixtures_have_what_each_case_is_about() -> None:
    names = {name: set(dcp.read_dcp(FIXTURES / name / ITERATION)) for name in WRITTEN}
    assert "decoder.layers.1.mlp.linear_fc1.weight_w" in names["llama_split_tp2"]
    assert "decoder.layers.1.self_attention.linear_qkv.bias" in names["qwen2_per_layer"]
    assert "decoder.layers.self_attention.q_layernorm.weight" in names["qwen3_stacked_tp2"]
    assert "output_layer.weight" not in names["qwen3_stacked_tp2"]
    for raw in names.values():
        assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in raw


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "a layer a key"])
@pytest.mark.parametrize(("kind", "tied", "extra"), VARIANTS)
def test_logits_equal_the_original_models(
    tmp_path: Path, kind: str, tied: bool, extra: dict[str, int], stacked: bool
) -> None:
    model = save_model(tmp_path / "hf", kind, tied=tied, **extra)
    write_megatron(tmp_path / "run", model, stacked=stacked)
    path = tmp_path / "run" / "iter_0000001"
    assert gap(path, model) <= 1e-5
    tensors = open_tensors(path)
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], parameter), name


@pytest.mark.parametrize("prefix", ["module.", "model.module.", "model0."])
def test_prefixes_of_wrappers_come_off(tmp_path: Path, prefix: str) -> None:
    model = save_model(tmp_path / "hf", "llama")
    write_megatron(tmp_path / "run", model, prefix=prefix)
    assert gap(tmp_path / "run" / "iter_0000001", model) <= 1e-5


def test_norms_that_were_not_fused_are_read(tmp_path: Path) -> None:
    model = save_model(tmp_path / "hf", "qwen3")
    tensors = megatron_tensors(model)
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        tensors[f"decoder.layers.{plain}"] = tensors.pop(f"decoder.layers.{fused}")
    save_dcp(tensors, tmp_path / "megatron")
    assert gap(tmp_path / "megatron", model, base=tmp_path / "hf") <= 1e-5


def test_a_head_that_was_trained_apart_from_a_tied_config_is_kept(tmp_path: Path) -> None:
    model = save_model(tmp_path / "hf", "qwen3", tied=True)
    head = torch.randn(128, 32)
    save_dcp({**megatron_tensors(model), "output_layer.weight": head}, tmp_path / "megatron")
    assert torch.equal(open_tensors(tmp_path / "megatron", tmp_path / "hf")["lm_head.weight"], head[:61])


def test_a_layer_of_a_stack_is_read_without_the_others(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    load_piece = dcp.Piece.load

    def watch(piece: dcp.Piece) -> torch.Tensor:
        read.append(piece.shape)
        return load_piece(piece)

    monkeypatch.setattr(dcp.Piece, "load", watch)
    tensors = open_tensors(written)
    assert read == []
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    assert down.shape == (8, 12) and read == [(1, 8, 6)] * 2  # two ranks
    assert down.untyped_storage().nbytes() == down.numel() * 4


@pytest.mark.parametrize("inner", ["actor/dist_ckpt", "actor/model/dist_ckpt", "policy/weights/iter_0000000", "."])
def test_the_places_of_verl_nemo_rl_and_slime_are_known(tmp_path: Path, written: Path, inner: str) -> None:
    shutil.copytree(written, tmp_path / "step" / inner)
    shutil.copytree(written.parent / "huggingface", (tmp_path / "step" / inner).parent / "huggingface")
    layout, root = find(tmp_path / "step")
    assert layout is Layout.MEGATRON and root == tmp_path / "step" / inner
    assert list(open_tensors(tmp_path / "step")) == list(open_tensors(written))


def test_it_is_described_from_its_headers(written: Path) -> None:
    found = describe(written)
    assert (found.layout, found.architecture) == ("Megatron torch_dist", "Qwen3ForCausalLM")
    assert found.parameters == sum(parameter.numel() for parameter in load(written).parameters())
    assert found.vocab_size == 61 and found.dtypes == ("F32",)


def test_two_of_a_run_are_compared_without_a_config(tmp_path: Path, written: Path, capsys) -> None:
    """slime writes no config.json: common.pt says how heads and layers lie."""
    shutil.rmtree(written.parent / "huggingface")
    load(FIXTURES / "qwen3_stacked_tp2" / ITERATION).save_pretrained(tmp_path / "exported")
    found = compare_checkpoints(written, tmp_path / "exported")
    assert found.of(State.IDENTICAL) == list(found.tensors) and len(found.tensors) == 24
    assert main(["inspect", "--weights", str(written), str(tmp_path / "exported")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "24 tensors: 24 identical." in said and "no config.json in A" in said


@pytest.mark.parametrize("name", WRITTEN)
def test_common_pt_says_the_same_as_the_config(tmp_path: Path, name: str) -> None:
    shutil.copytree(FIXTURES / name / ITERATION, tmp_path / "alone")
    alone, whole = open_tensors(tmp_path / "alone"), open_tensors(FIXTURES / name / ITERATION)
    assert list(alone) == list(whole)
    for tensor in whole:
        assert torch.equal(alone[tensor], whole[tensor])


def test_a_run_with_such_checkpoints_is_decomposed_to_the_same_bits(planted: Planted, tmp_path: Path) -> None:
    run = Path(shutil.copytree(planted.path, tmp_path / "run", ignore=shutil.ignore_patterns("mismatch_probe")))
    for path in sorted((run / "checkpoints").iterdir()):
        model = load(path, dtype=torch.float64)
        (path / "model.safetensors").unlink()
        save_dcp(megatron_tensors(model), path)
        assert find(path)[0] is Layout.MEGATRON
    assert main(["decompose", str(run), "-q"]) == 0
    for table in ("tokens", "sequences.parquet", "steps.parquet"):
        made, known = (pq.read_table(where / "mismatch_probe" / table) for where in (run, planted.path))
        assert made.equals(known)


def test_a_dcp_of_other_names_is_no_megatron(tmp_path: Path) -> None:
    save_dcp({"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "dcp")
    assert not megatron.matches(tmp_path / "dcp") and not megatron.matches(tmp_path)
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        megatron.read_tensors(tmp_path, None)
