"""How many layers, heads and words a Megatron checkpoint's model has: its tensors alone do not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints.files import read_json
from mismatch_probe.checkpoints.pickles import Stub
from mismatch_probe.checkpoints.torchfile import read_torch_file
from mismatch_probe.errors import CheckpointError

_QK_NORM = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_QKV_BIAS = ("self_attention.linear_qkv.bias",)
_FAMILIES: dict[str, tuple[str, ...]] = {"llama": (), "qwen2": _QKV_BIAS, "qwen3": _QK_NORM, "qwen3_moe": _QK_NORM}
"""Model types that are converted, with what their layers have beyond the common tensors."""


@dataclass(frozen=True)
class Shape:
    """``groups`` are key-value heads; ``vocab`` is None where padding cannot be told from words, ``experts``
    are those of a layer that routes to experts, 0 in a dense model.

    ``needed`` are tensors that each layer must have beyond the common ones, ``said_by`` the file with the numbers.
    """

    layers: int
    heads: int
    groups: int
    head_dim: int
    vocab: int | None
    tied: bool
    experts: int
    needed: tuple[str, ...]
    said_by: Path


def config_folders(path: Path) -> tuple[Path, ...]:
    """Where ``config.json`` can lie: in the checkpoint, or in verl's ``huggingface`` folder in or beside it."""
    return path, path / "huggingface", path.parent / "huggingface"


def read_shape(path: Path, base: Path | None) -> Shape:
    """From ``config.json`` in or beside the checkpoint or in ``base``, otherwise from the arguments in ``common.pt``.

    Raises:
        CheckpointError: none of them is there and readable, or the model is of another family.
    """
    for folder in (*config_folders(path), *([base, base / "huggingface"] if base else [])):
        file = folder / "config.json"
        if file.is_file():
            return _of_config(read_json(file), file)
    file = path / "common.pt"
    arguments = _arguments(file)
    if arguments is None:
        raise CheckpointError(
            f"{path}: no config.json, in it or in huggingface/ beside it, and common.pt does not say how many heads "
            "the model has. Put the base model's config.json there, or name its directory (adapter_base in run.toml)"
        )
    return _of_arguments(arguments, file)


def _of_config(config: dict[str, Any], file: Path) -> Shape:
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise CheckpointError(
            f"{file}: model_type {kind!r}: of Megatron checkpoints, {', '.join(_FAMILIES)} are read. "
            "Export it with its framework's converter to Hugging Face files"
        )
    heads = _count(config, "num_attention_heads", file)
    bias = _QKV_BIAS if config.get("attention_bias") and kind != "qwen2" else ()
    return _checked(
        Shape(
            layers=_count(config, "num_hidden_layers", file),
            heads=heads,
            groups=_count(config, "num_key_value_heads", file, heads),
            head_dim=_count(config, "head_dim", file, _count(config, "hidden_size", file) // heads),
            vocab=_count(config, "vocab_size", file),
            tied=config.get("tie_word_embeddings") is True,
            experts=_count(config, "num_experts", file, config.get("num_local_experts")) if kind == "qwen3_moe" else 0,
            needed=(*_FAMILIES[str(kind)], *bias),
            said_by=file,
        )
    )


def _of_arguments(arguments: dict[str, Any], file: Path) -> Shape:
    if arguments.get("apply_layernorm_1p") or arguments.get("layernorm_zero_centered_gamma"):
        raise CheckpointError(
            f"{file}: norms are stored minus one (apply_layernorm_1p), which is not read. "
            "Export the checkpoint with its framework's converter to Hugging Face files"
        )
    heads = _count(arguments, "num_attention_heads", file)
    grouped = arguments.get("group_query_attention")
    vocab = arguments.get("vocab_size")
    return _checked(
        Shape(
            layers=_count(arguments, "num_layers", file),
            heads=heads,
            groups=_count(arguments, "num_query_groups", file, heads) if grouped else heads,
            head_dim=_count(arguments, "kv_channels", file, _count(arguments, "hidden_size", file) // heads),
            vocab=vocab if isinstance(vocab, int) else None,
            tied=not arguments.get("untie_embeddings_and_output_weights"),
            experts=_count(arguments, "num_experts", file) if arguments.get("num_experts") else 0,
            needed=(
                *(_QK_NORM if arguments.get("qk_layernorm") else ()),
                *(_QKV_BIAS if arguments.get("add_qkv_bias") else ()),
            ),
            said_by=file,
        )
    )


def _checked(shape: Shape) -> Shape:
    if shape.heads % shape.groups:
        raise CheckpointError(
            f"{shape.said_by}: {shape.heads} heads do not divide into {shape.groups} groups. Copy it anew"
        )
    return shape


def _count(table: dict[str, Any], key: str, file: Path, default: int | None = None) -> int:
    value = table.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {key} is {value!r}, not a count. Name the directory of the model's config.json")
    return value


def _arguments(file: Path) -> dict[str, Any] | None:
    """Megatron's ``args`` as ``common.pt`` holds them: names and plain values, None where there are none.

    Enums and other objects in it stay inert: their classes are neither looked up nor called.
    """
    if not file.is_file():
        return None
    try:
        common = read_torch_file(file, others_inert=True)
    except CheckpointError:
        return None
    arguments = common.get("args") if isinstance(common, dict) else None
    return arguments.state if isinstance(arguments, Stub) and isinstance(arguments.state, dict) else None
