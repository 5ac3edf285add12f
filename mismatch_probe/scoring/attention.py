"""Causal attention over packed sequences: responses to one prompt share its keys and values.

All tokens of a pass lie in one row, so that every other layer does no work twice and none on padding. Attention alone
knows the layout: a trunk attends to itself, a branch to its trunk and to itself. transformers calls ``attend`` for
every layer of a model whose attention implementation is ``NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from mismatch_probe.scoring.packing import Pack, Trunk

NAME = "mismatch_probe"
_QUERIES = 1024
"""Queries whose mask is held at once."""
_BLOCK = 128
"""Queries of one block of a short trunk."""


class UnsupportedAttentionError(Exception):
    """A layer asks for what the packed attention does not compute (sinks, a position bias, attention both ways)."""


@dataclass
class Memory:
    """Keys and values of the trunk that the next passes continue, a pair a layer."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Pass:
    """The layout of the forward pass that is running, and how many layers have attended."""

    trunks: tuple[Trunk, ...]
    memory: Memory
    layer: int = 0
    masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)


_running: list[_Pass] = []
_HARMLESS = {"position_ids", "cache_position"}
"""Tensors that layers pass to their attention without asking it for anything."""


@dataclass
class Windows:
    """Windows that the model asked masks for, and those that its layers gave to their attention, since the last look.

    A layer whose window is in its mask alone would see everything here, where there are no masks.
    """

    asked: set[int | None] = field(default_factory=set)
    given: set[int | None] = field(default_factory=set)


seen_windows = Windows()


@contextmanager
def _layout(trunks: tuple[Trunk, ...], memory: Memory) -> Iterator[_Pass]:
    """Forward passes inside the context hold one packed row that is laid out so."""
    _running.append(_Pass(trunks, memory))
    try:
        yield _running[-1]
    finally:
        _running.pop()


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in transformers' calling convention: (1, heads, N, d) -> (1, N, heads, d).

    Without a layout the rows are sequences of their own, right-padded: (B, heads, T, d).

    Raises:
        UnsupportedAttentionError: the layer asks for more than causal attention with a window and a cap.
    """
    unknown = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    if attention_mask is not None or dropout or unknown or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(", ".join(unknown) or "a mask, dropout or attention both ways")
    seen_windows.given.add(sliding_window or None)
    masks = _running[-1].masks if _running else {}
    kernel = _Kernel(scaling, sliding_window or None, softcap, masks)
    if not _running:
        return kernel.rows(query, key, value, 0).transpose(1, 2), None
    state = _running[-1]
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for trunk in state.trunks:
        span = slice(trunk.start, trunk.stop)
        if trunk.kept:
            keys, values = state.memory.layers[state.layer]
        else:
            keys, values = key[:, :, span], value[:, :, span]
            out[:, span] = kernel.rows(query[:, :, span], keys, values, 0).transpose(1, 2)
        if trunk.keep:
            state.memory.layers.append((keys.clone(), values.clone()))
        # A window hides the beginning of a long trunk from every branch.
        hidden = 0 if kernel.window is None else max(0, trunk.length - kernel.window + 1)
        for start, stop in trunk.branches:
            own = slice(start, stop)
            whole = (
                torch.cat([keys[:, :, hidden:], key[:, :, own]], dim=2),
                torch.cat([values[:, :, hidden:], value[:, :, own]], dim=2),
            )
            out[:, own] = kernel.rows(query[:, :, own], *whole, trunk.length - hidden).transpose(1, 2)
    state.layer += 1
    return out, None


@dataclass(frozen=True)
class _Kernel:
    """Causal attention with a scale, a window (how many places, its own included, a token sees) and a cap.

    ``masks`` keeps those of the pass: every layer needs the same ones.
    """

    scale: float | None
    window: int | None
    softcap: float | None
    masks: dict[tuple[int, ...], Tensor]

    def rows(self, query: Tensor, key: Tensor, value: Tensor, before: int) -> Tensor:
        """Queries at places ``before``, ``before`` + 1, ... over keys at places 0, 1, ...; (B, heads, n, d)."""
        count = query.shape[2]
        step = _QUERIES
        if before == 0 and self.softcap is None and (self.window is None or count <= self.window):
            # torch's causal kernel on a CPU computes most of what it then masks, where the rows are few.
            if query.is_cuda or not _BLOCK < count <= 8 * _BLOCK:
                return self._product(query, key, value, None)
            step = _BLOCK
        blocks = []
        for start in range(0, count, step):
            stop = min(start + step, count)
            first = 0 if self.window is None else max(0, before + start - self.window + 1)
            keys = slice(first, before + stop)
            seen = self._mask(query, before + start - first, stop - start)
            blocks.append(self._product(query[:, :, start:stop], key[:, :, keys], value[:, :, keys], seen))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _mask(self, query: Tensor, before: int, count: int) -> Tensor:
        """0 where a query sees a key and -inf where not, (count, before + count); queries begin at place ``before``."""
        name = before, count, self.window or 0
        if name not in self.masks:
            place = torch.arange(before, before + count, device=query.device)[:, None]
            other = torch.arange(before + count, device=query.device)
            hidden = other > place
            if self.window is not None:
                hidden |= other <= place - self.window
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            self.masks[name] = mask.masked_fill_(hidden, -torch.inf)
        return self.masks[name]

    def _product(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and (query.is_cuda or self.softcap is not None):
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            groups = 1
        if self.softcap is None:
            return scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=groups > 1
            )
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        assert mask is not None
        return (scores + mask).softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value


def run_packed(body: Any, pack: Pack, memory: Memory, device: torch.device) -> Tensor:
    """Final hidden states of one packed row, (N, H).

    Args:
        body: a transformers model whose attention implementation is ``NAME``.
        pack: the tokens and their layout.
        memory: the keys and values that a cut prompt group passes on.
        device: where the model is.
    """
    if not any(trunk.kept for trunk in pack.trunks):
        memory.layers.clear()
    ids, places = (torch.from_numpy(array)[None].to(device) for array in (pack.ids, pack.places))
    with _layout(pack.trunks, memory):
        states: Tensor = body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
    return states[0]


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Stands in for the masks of transformers; notes the window that one would have had."""
    seen_windows.asked.add(local_size)


AttentionMaskInterface.register(NAME, _no_mask)
AttentionInterface.register(NAME, attend)
