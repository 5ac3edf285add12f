"""Megatron checkpoints of Qwen3-MoE: experts stacked along an axis of their own, or a key each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import edit_json, gap, save_dcp
from tests.tiny import CONFIGS
from tests.write_megatron import Tensors, megatron_tensors

EXPERTS = "mlp.experts.experts."


def save_experts(path: Path, **extra: object) -> tuple[Any, Tensors]:
    """A random Qwen3-MoE, and its tensors as files name them."""
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{**CONFIGS["qwen3"], **sizes, "tie_word_embeddings": False, **extra})
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model, load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The directory of a Qwen3-MoE, and its tensors as Megatron names them, a layer a key."""
    path = tmp_path_factory.mktemp("experts") / "hf"
    model, weights = save_experts(path)
    return path, megatron_tensors(model, stacked=False, weights=weights)


def split(tensors: Tensors) -> Tensors:
    """An expert a key, gate and up apart: Megatron's newest mode."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        if EXPERTS not in name:
            apart[name] = tensor
            continue
        for number, own in enumerate(tensor):
            key = name.replace(EXPERTS, f"{EXPERTS}{number}.")
            if "linear_fc1" in name:
                apart[f"{key}_w"], apart[f"{key}_v"] = (half.clone() for half in own.chunk(2))
            else:
                apart[key] = own.clone()
    return apart


@pytest.mark.parametrize("stored", ["stacked", "a layer a key", "an expert a key", "first layer dense"])
def test_logits_equal_the_original_models(tmp_path: Path, stored: str) -> None:
    extra = {"mlp_only_layers": [0]} if stored == "first layer dense" else {}
    model, weights = save_experts(tmp_path / "hf", **extra)
    tensors = megatron_tensors(model, stacked=stored == "stacked", weights=weights)
    save_dcp(split(tensors) if stored == "an expert a key" else tensors, tmp_path / "megatron")
    found = open_tensors(tmp_path / "megatron", tmp_path / "hf")
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
    assert gap(tmp_path / "megatron", model, base=tmp_path / "hf") <= 1e-5


@pytest.mark.parametrize(
    ("name", "split_up"),
    [
        ("decoder.layers.1.mlp.router.weight", False),
        (f"decoder.layers.1.{EXPERTS}2.linear_fc2.weight", True),
        (f"decoder.layers.0.{EXPERTS}3.linear_fc1.weight_v", True),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, original: tuple[Path, Tensors], name: str, split_up: bool) -> None:
    base, tensors = original
    kept = split(tensors) if split_up else tensors
    save_dcp({key: tensor for key, tensor in kept.items() if key != name}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is missing"):
        open_tensors(tmp_path / "a", base)


@pytest.mark.parametrize(
    "name", ["mlp.shared_experts.linear_fc1.weight", "mlp.router.expert_bias", f"{EXPERTS}9.linear_fc2.weight"]
)
def test_what_qwen3_moe_does_not_have_is_refused(tmp_path: Path, original: tuple[Path, Tensors], name: str) -> None:
    base, tensors = original
    save_dcp({**tensors, f"decoder.layers.1.{name}": torch.ones(2, 2)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=f"not known: decoder.layers.1.{re.escape(name)}"):
        open_tensors(tmp_path / "a", base)


def test_another_number_of_experts_is_refused(tmp_path: Path, original: tuple[Path, Tensors]) -> None:
    base, tensors = original
    shutil.copytree(base, tmp_path / "hf")
    edit_json(tmp_path / "hf" / "config.json", num_local_experts=5)
    save_dcp(tensors, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"experts\.linear_fc1\.weight"):
        open_tensors(tmp_path / "a", tmp_path / "hf")
