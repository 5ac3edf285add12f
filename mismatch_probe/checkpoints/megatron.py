"""Megatron ``torch_dist`` checkpoints of Llama, Qwen2, Qwen3 and Qwen3-MoE, under Hugging Face names.

Megatron fuses what transformers keeps apart: query, key and value of a group of heads lie side by side, gate over up,
and layers, and the experts of a layer, are stacked along a first axis unless the save gave each a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_probe.checkpoints.dcp import read_dcp
from mismatch_probe.checkpoints.megatron_shape import Shape, read_shape
from mismatch_probe.checkpoints.pickles import MAX_PICKLE_BYTES
from mismatch_probe.checkpoints.sources import Chunked, LazyTensors, Source
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_MARKS = (b"embedding.word_embeddings.weight", b"self_attention.linear_qkv.weight")
_WRAPPERS = re.compile(r"^(?:module\.|model\d*\.)+")
_NOT_WEIGHTS = re.compile(r"optim|_extra_state|rotary_pos_emb|^rng_state|^rerun_state|^data_iterator")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.experts\.)(?:(\d+)\.)?(linear_fc[12]\.\w+)")
_EXPORT = "Export it with its framework's converter to Hugging Face files"

_WHOLE = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Tensors of a layer that are alike on both sides."""
_UNFUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that were not fused into the linear layer after them, by the name of those that were."""
_QKV, _GATE_UP = "self_attention.linear_qkv", "mlp.linear_fc1.weight"
_NEEDED = (
    *("self_attention.linear_qkv.layer_norm_weight", f"{_QKV}.weight", "self_attention.linear_proj.weight"),
    "mlp.linear_fc1.layer_norm_weight",
)


@dataclass(frozen=True)
class Part:
    """A tensor that is made from another one when it is read."""

    source: Source
    shape: tuple[int, ...]
    make: Callable[[torch.Tensor], torch.Tensor]

    @property
    def dtype(self) -> str:
        """As the other one's."""
        return self.source.dtype

    def load(self) -> torch.Tensor:
        """Read the other one and make this."""
        return self.make(self.source.load()).clone()  # a view would keep the whole in memory


def matches(path: Path) -> bool:
    """True for a torch DCP checkpoint whose tensors go by Megatron's names."""
    file = path / ".metadata"
    try:
        data = file.read_bytes() if file.stat().st_size <= MAX_PICKLE_BYTES else b""
    except OSError:
        return False
    return all(mark in data for mark in _MARKS)


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """The model's tensors by Hugging Face name, each read when it is asked for.

    Args:
        path: the directory of ``.metadata`` and ``*.distcp``.
        base: where a ``config.json`` is, if it is neither in nor beside ``path``.

    Raises:
        CheckpointError: a tensor is missing or unknown, shapes do not fit the config, or nothing says how many heads
            there are.
    """
    raw = read_dcp(path, lambda name: _NOT_WEIGHTS.search(name) is None).sources
    found = {_WRAPPERS.sub("", name): source for name, source in raw.items()}
    shape = read_shape(path, base)
    layers, rest = _layers(path, found, shape)
    names = _top(path, rest, shape)
    for number, layer in enumerate(layers):
        _check_complete(path, number, layer, shape)
        for name, source in _converted(path, layer, shape):
            names[f"model.layers.{number}.{name}"] = source
    return LazyTensors(names)


def _layers(path: Path, found: dict[str, Source], shape: Shape) -> tuple[list[dict[str, Source]], dict[str, Source]]:
    """The tensors of each layer by their names in it, and those of no layer."""
    layers: list[dict[str, Source]] = [{} for _ in range(shape.layers)]
    rest: dict[str, Source] = {}
    for name, source in found.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            rest[name] = source
            continue
        inner = _UNFUSED.get(match[2], match[2])
        numbers = range(source.shape[0] if source.shape else 0) if match[1] is None else [int(match[1])]
        if max(numbers, default=0) >= shape.layers or (match[1] is None and len(numbers) != shape.layers):
            raise CheckpointError(
                f"{path}: {name} has more or fewer layers than the {shape.layers} of {shape.said_by}. {_EXPORT}"
            )
        for number in numbers:
            own = _item(source, number) if match[1] is None else source
            layers[number].update(_experts(inner, own, shape))
    return layers, rest


def _experts(name: str, source: Source, shape: Shape) -> dict[str, Source]:
    """A stack of a layer's experts taken apart; anything else as it is."""
    match = _EXPERT.fullmatch(name)
    if match is None or match[2] is not None or source.shape[:1] != (shape.experts,):
        return {name: source}
    return {f"{match[1]}{number}.{match[3]}": _item(source, number) for number in range(shape.experts)}


def _item(source: Source, number: int) -> Source:
    """One layer or expert of a stack; of a stack in pieces only its own are read."""
    shape = source.shape[1:]
    if not isinstance(source, Chunked):
        return Part(source, shape, partial(_at, number))
    pieces = []
    for offsets, piece in source.pieces:
        inside = number - offsets[0]
        if 0 <= inside < piece.shape[0]:
            pieces.append((offsets[1:], Part(piece, piece.shape[1:], partial(_at, inside))))
    return Chunked(source.name, source.where, shape, source.dtype, tuple(pieces))


def _top(path: Path, rest: dict[str, Source], shape: Shape) -> dict[str, Source]:
    wanted = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    _refuse_unknown(path, rest.keys() - wanted.keys())
    names: dict[str, Source] = {}
    for raw, name in wanted.items():
        source = rest.get(raw)
        if source is not None:
            names[name] = source if name == "model.norm.weight" else _without_padding(path, raw, source, shape)
        elif name != "lm_head.weight" or not shape.tied:
            raise _missing(path, raw, shape)
    return names


def _without_padding(path: Path, name: str, source: Source, shape: Shape) -> Source:
    """Megatron pads the vocabulary to a multiple of 128 times the number of tensor-parallel ranks."""
    vocab = shape.vocab
    if vocab is None or source.shape[0] == vocab:
        return source
    if source.shape[0] < vocab:
        raise _misfit(path, name, source, f"at least {vocab} rows", shape)
    return Part(source, (vocab, *source.shape[1:]), partial(_rows, 0, vocab))


def _check_complete(path: Path, number: int, layer: dict[str, Source], shape: Shape) -> None:
    experts = {f"mlp.experts.experts.{expert}." for expert in range(shape.experts)}
    routed = any(name.startswith(("mlp.experts.", "mlp.router.")) for name in layer)
    known, needed = {*_WHOLE, f"{_QKV}.weight", f"{_QKV}.bias"}, {*_NEEDED, *shape.needed}
    if not shape.experts:
        known.remove("mlp.router.weight")
    elif routed:
        needed.add("mlp.router.weight")
    for prefix in (*experts, "mlp."):
        whole, halves = f"{prefix}linear_fc1.weight", {f"{prefix}linear_fc1.weight_{half}" for half in "wv"}
        down = f"{prefix}linear_fc2.weight"
        known |= {whole, *halves, down}
        if routed == (prefix in experts):
            needed |= {down, *(halves if halves & layer.keys() else {whole})}
    _refuse_unknown(path, {f"decoder.layers.{number}.{name}" for name in layer.keys() - known})
    for name in sorted(needed - layer.keys()):
        raise _missing(path, f"decoder.layers.{number}.{name}", shape)


def _converted(path: Path, layer: dict[str, Source], shape: Shape) -> Iterable[tuple[str, Source]]:
    for name, source in layer.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            for inner, part in _converted(path, {f"mlp.{expert[3]}": source}, shape):
                yield f"mlp.experts.{expert[2]}.{inner.removeprefix('mlp.')}", part
        elif name in _WHOLE:
            yield _WHOLE[name], source
        elif name == _GATE_UP:
            half = source.shape[0] // 2
            if source.shape[0] != 2 * half:
                raise _misfit(path, name, source, "gate and up of one size", shape)
            for letter, first in (("gate", 0), ("up", half)):
                made = Part(source, (half, *source.shape[1:]), partial(_rows, first, first + half))
                yield f"mlp.{letter}_proj.weight", made
        else:
            yield from _attention(path, name, source, shape)


def _attention(path: Path, name: str, source: Source, shape: Shape) -> Iterable[tuple[str, Source]]:
    """Query, key and value: group by group [the group's query heads, its key head, its value head]."""
    heads = shape.heads // shape.groups
    rows = shape.groups * (heads + 2) * shape.head_dim
    if source.shape[0] != rows:
        raise _misfit(path, name, source, f"{rows} rows", shape)
    kind = name.removeprefix(f"{_QKV}.")
    for letter, first, last in (("q", 0, heads), ("k", heads, heads + 1), ("v", heads + 1, heads + 2)):
        size = shape.groups * (last - first) * shape.head_dim
        made = Part(source, (size, *source.shape[1:]), partial(_heads, shape, first, last))
        yield f"self_attn.{letter}_proj.{kind}", made


def _at(number: int, whole: torch.Tensor) -> torch.Tensor:
    return whole[number]


def _rows(first: int, last: int, whole: torch.Tensor) -> torch.Tensor:
    return whole[first:last]


def _heads(shape: Shape, first: int, last: int, whole: torch.Tensor) -> torch.Tensor:
    """Heads ``first`` to ``last`` of each group, the groups one after another."""
    grouped = whole.reshape(shape.groups, -1, shape.head_dim, *whole.shape[1:])
    return grouped[:, first:last].reshape(-1, *whole.shape[1:])


def _refuse_unknown(path: Path, names: Iterable[str]) -> None:
    unknown = sorted(names)
    if not unknown:
        return
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    raise CheckpointError(
        f"{path}: tensors that are not known: {', '.join(unknown[:3])}{more}. Of Megatron checkpoints, Llama, Qwen2, "
        f"Qwen3 and Qwen3-MoE are read. {_EXPORT}"
    )


def _missing(path: Path, name: str, shape: Shape) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} is missing, which the model of {shape.said_by} has. Copy the checkpoint anew from the run"
    )


def _misfit(path: Path, name: str, source: Source, wanted: str, shape: Shape) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} has shape {list(source.shape)}, and {shape.said_by} asks for {wanted}. "
        "Name the directory of the model's own config.json"
    )
