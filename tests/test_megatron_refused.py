"""Megatron checkpoints that are incomplete, of another model, or hostile: refused by name, and nothing is run."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import Hostile, edit_json, save_dcp
from tests.tiny import save_model
from tests.write_megatron import Tensors, megatron_tensors

FIXTURE = Path(__file__).parent / "fixtures" / "megatron" / "qwen3_stacked_tp2" / "iter_0000003"
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A Qwen3's directory, and its tensors as Megatron names them, a layer a key."""
    path = tmp_path_factory.mktemp("megatron") / "hf"
    return path, megatron_tensors(save_model(path, "qwen3"), stacked=False)


def refused(path: Path, base: Path | None, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tensors(path, base)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("output_layer.weight", "decoder.final_layernorm.weight"),
        *(f"decoder.layers.1.{QKV}.layer_norm_weight", f"decoder.layers.0.{FC1}.layer_norm_weight"),
        *("decoder.layers.1.self_attention.linear_proj.weight", f"decoder.layers.1.{FC1}.weight"),
        *("decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.self_attention.k_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, original: tuple[Path, Tensors], name: str) -> None:
    base, tensors = original
    save_dcp({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "a")
    refused(tmp_path / "a", base, f"{name} is missing")


def test_half_of_a_split_pair_is_missing_by_name(tmp_path: Path, original: tuple[Path, Tensors]) -> None:
    base, tensors = original
    changed = dict(tensors)
    changed[f"decoder.layers.0.{FC1}.weight_v"] = changed.pop(f"decoder.layers.0.{FC1}.weight")[:48]
    save_dcp(changed, tmp_path / "a")
    refused(tmp_path / "a", base, f"decoder.layers.0.{FC1}.weight_w is missing")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoder.layers.0.mlp.router.weight", "not known: decoder.layers.0.mlp.router.weight"),
        ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", "not known: decoder.layers.0.mlp.experts"),
        (f"decoder.layers.0.{QKV}.adapter.linear_in.weight", "not known: decoder.layers.0.self_attention"),
        ("mtp.layers.0.eh_proj.weight", "not known: mtp.layers.0.eh_proj.weight"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(
    tmp_path: Path, original: tuple[Path, Tensors], name: str, text: str
) -> None:
    base, tensors = original
    save_dcp({**tensors, name: torch.ones(2, 2)}, tmp_path / "a")
    refused(tmp_path / "a", base, text)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_hidden_layers", 1, "more or fewer layers than the 1 of"),
        ("num_hidden_layers", 3, "decoder.layers.2."),
        ("num_attention_heads", 2, "asks for"),
        ("num_key_value_heads", 3, "4 heads do not divide into 3 groups"),
        ("vocab_size", 1000, "at least 1000 rows"),
        ("model_type", "gpt_neox", "model_type 'gpt_neox'"),
        ("num_hidden_layers", "two", "num_hidden_layers is 'two', not a count"),
        ("head_dim", 0, "head_dim is 0, not a count"),
    ],
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, original: tuple[Path, Tensors], field: str, value: Any, text: str
) -> None:
    base, tensors = original
    save_dcp(tensors, tmp_path / "a")
    shutil.copytree(base, tmp_path / "huggingface")
    edit_json(tmp_path / "huggingface" / "config.json", **{field: value})
    refused(tmp_path / "a", None, text)


def test_stacks_of_another_depth_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "hf", "llama")
    save_dcp(megatron_tensors(model), tmp_path / "a")
    for layers in (1, 3):
        edit_json(tmp_path / "hf" / "config.json", num_hidden_layers=layers)
        refused(tmp_path / "a", tmp_path / "hf", f"more or fewer layers than the {layers} of")


def test_an_odd_gate_and_up_is_refused(tmp_path: Path, original: tuple[Path, Tensors]) -> None:
    base, tensors = original
    save_dcp({**tensors, f"decoder.layers.0.{FC1}.weight": torch.ones(95, 32)}, tmp_path / "a")
    refused(tmp_path / "a", base, "gate and up of one size")


def common(path: Path, **arguments: Any) -> Path:
    """A copy of the fixture alone, with other arguments in its common.pt."""
    shutil.copytree(FIXTURE, path)
    known = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 4, "num_query_groups": 2}
    torch.save({"args": argparse.Namespace(**{**known, **arguments}), "iteration": 3}, path / "common.pt")
    return path


def test_without_heads_anywhere_the_config_is_asked_for(tmp_path: Path) -> None:
    path = common(tmp_path / "a")
    for content in (None, b"", {"iteration": 3}, {"args": {"num_layers": 2}}):
        if content is None:
            (path / "common.pt").unlink()
        elif isinstance(content, bytes):
            (path / "common.pt").write_bytes(content)
        else:
            torch.save(content, path / "common.pt")
        refused(path, None, "does not say how many heads")


def test_padding_stays_where_nothing_says_the_vocabulary(tmp_path: Path) -> None:
    path = common(tmp_path / "a", group_query_attention=True, qk_layernorm=True)
    assert open_tensors(path)["model.embed_tokens.weight"].shape == (64, 8)


def test_norms_stored_minus_one_are_refused(tmp_path: Path) -> None:
    refused(common(tmp_path / "a", apply_layernorm_1p=True), None, "apply_layernorm_1p")


def test_nothing_in_a_hostile_common_pt_is_run(tmp_path: Path) -> None:
    """An object beside the arguments stays inert; the arguments are still read."""
    witness = tmp_path / "ran"
    path = common(tmp_path / "a", group_query_attention=True, evil=Hostile(witness))
    assert len(open_tensors(path)) == 24 and not witness.exists()


def test_nothing_in_a_hostile_metadata_is_run(tmp_path: Path) -> None:
    import pickle

    witness = tmp_path / "ran"
    marks = ["embedding.word_embeddings.weight", "self_attention.linear_qkv.weight", Hostile(witness)]
    shutil.copytree(FIXTURE, tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(marks))
    refused(tmp_path / "a", None, "Nothing in it was run")
    assert not witness.exists()
