"""A Hugging Face model as Megatron lays its tensors out, from the documented names: the way back from what is tested.

The fixtures under ``tests/fixtures/megatron`` come from Megatron-Core itself; these vary what those do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import save_dcp

Tensors = dict[str, torch.Tensor]


def megatron_tensors(
    model: Any, *, stacked: bool = True, multiple: int = 128, prefix: str = "", weights: Tensors | None = None
) -> Tensors:
    """The tensors under Megatron's names; the vocabulary is padded with numbers that must never come back.

    ``weights`` are the model's by the names that files have, where a model in memory has others.
    """
    weights, config = weights or model.state_dict(), model.config
    named = {
        "embedding.word_embeddings.weight": _padded(weights["model.embed_tokens.weight"], multiple),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        named["output_layer.weight"] = _padded(weights["lm_head.weight"], multiple)
    layers = [_layer(weights, f"model.layers.{number}.", config) for number in range(config.num_hidden_layers)]
    if stacked:
        named |= {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    else:
        for number, layer in enumerate(layers):
            named |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return {prefix + name: tensor.contiguous() for name, tensor in named.items()}


def write_megatron(folder: Path, model: Any, **how: Any) -> None:
    """``folder/iter_0000001`` and, beside it, ``folder/huggingface/config.json``."""
    save_dcp(megatron_tensors(model, **how), folder / "iter_0000001")
    model.config.save_pretrained(folder / "huggingface")


def _layer(weights: Tensors, at: str, config: Any) -> Tensors:
    kinds = ("weight", "bias") if f"{at}self_attn.q_proj.bias" in weights else ("weight",)
    made = {f"self_attention.linear_qkv.{kind}": _interleaved(weights, at, kind, config) for kind in kinds}
    if f"{at}mlp.gate.weight" in weights:
        inner = [f"{at}mlp.experts.{number}." for number in range(config.num_experts)]
        made["mlp.experts.experts.linear_fc1.weight"] = torch.stack([_gate_up(weights, at) for at in inner])
        downs = [weights[f"{at}down_proj.weight"] for at in inner]
        made["mlp.experts.experts.linear_fc2.weight"] = torch.stack(downs)
    else:
        made["mlp.linear_fc1.weight"] = _gate_up(weights, f"{at}mlp.")
    for name, raw in (
        ("mlp.gate.weight", "mlp.router.weight"),
        ("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
        ("mlp.down_proj.weight", "mlp.linear_fc2.weight"),
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight"),
        ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight"),
    ):
        if at + name in weights:
            made[raw] = weights[at + name]
    return made


def _gate_up(weights: Tensors, at: str) -> torch.Tensor:
    return torch.cat([weights[f"{at}gate_proj.weight"], weights[f"{at}up_proj.weight"]])


def _interleaved(weights: Tensors, at: str, kind: str, config: Any) -> torch.Tensor:
    """Group by group: the query heads of the group, its key head, its value head."""
    query, key, value = (weights[f"{at}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
    groups = config.num_key_value_heads
    parts = zip(query.chunk(groups), key.chunk(groups), value.chunk(groups), strict=True)
    return torch.cat([tensor for group in parts for tensor in group])


def _padded(table: torch.Tensor, multiple: int) -> torch.Tensor:
    extra = -len(table) % multiple
    return torch.cat([table, torch.full((extra, table.shape[1]), torch.nan, dtype=table.dtype)])
