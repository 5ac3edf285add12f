"""Which head pass a network's states go through: ``head`` in torch, or ``head_triton``, fused, where it is proved."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mismatch_probe.errors import UsageError, in_a_line
from mismatch_probe.scoring import head
from mismatch_probe.scoring.head import PairScores, TokenScores
from mismatch_probe.scoring.network import Network
from mismatch_probe.scoring.sketch import Factors, HeadSketch

HEADS = ("auto", "torch", "triton")
_TOKENS = 70
"""Tokens that the proof takes: more than one block."""
_TOLERANCE = 1e-3
"""Largest difference from torch that the proof allows, in nats; rounding gives 1e-5."""


def score(
    network: Network,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> tuple[TokenScores, Factors | None]:
    """As ``head.score``."""
    found: tuple[TokenScores, Factors | None] = _module(network.fused, sketch).score(
        network, hidden, token_ids, temperature, chunk_elements, sketch
    )
    return found


def compare(
    stale: tuple[Network, Tensor],
    trainer: tuple[Network, Tensor],
    token_ids: Tensor,
    half: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> PairScores:
    """As ``head.compare``."""
    module = _module(stale[0].fused and trainer[0].fused, sketch)
    found: PairScores = module.compare(stale, trainer, token_ids, half, temperature, chunk_elements, sketch)
    return found


def choose(network: Network, wanted: str) -> str:
    """Set ``network.fused``, once the kernels gave what torch gives on a few of its own states.

    Args:
        network: just loaded.
        wanted: one of ``HEADS``; ``auto`` takes the kernels on CUDA where they work.

    Returns:
        What the user should know, empty for nothing.

    Raises:
        UsageError: the kernels were asked for by name, and Triton is missing or they do not work here.
    """
    if wanted == "torch" or (wanted == "auto" and not network.weight.is_cuda):
        return ""
    if find_spec("triton") is None:
        reason, known = "it needs the package triton: pip install triton", True
    else:
        from mismatch_probe.scoring.head_triton import why_not_supported

        reason, known = why_not_supported(network), True
        if not reason:
            reason, known = _why_not_equal(network), False
    network.fused = not reason
    if reason and wanted == "triton":
        raise UsageError(f"--head triton: {reason}. Use --head torch")
    return "" if known or not reason else f"{network.path.name}: the head pass runs in torch, not in Triton: {reason}"


def _module(fused: bool, sketch: HeadSketch | None) -> ModuleType:
    if not fused or (sketch is not None and sketch.rows is None):
        return head
    from mismatch_probe.scoring import head_triton

    return head_triton


@torch.inference_mode()
def _why_not_equal(network: Network) -> str:
    """Both head passes on a few states; where they differ, or the kernels fail, the reason."""
    from mismatch_probe.scoring import head_triton

    ids = (torch.arange(_TOKENS, device=network.weight.device) * 7919) % network.vocab_size
    states = network.hidden(ids[None, : _TOKENS // 2]).expand(2, -1, -1).reshape(-1, network.hidden_size)
    sketch = HeadSketch(network.weight)
    # Neighbouring places stand in for a second network's states.
    pair = (network, states), (network, states.roll(1, 0))
    arguments: Any = (*pair, ids, ids % 2, 0.8, 1 << 24, None if sketch.rows is None else sketch)
    try:
        found = head_triton.compare(*arguments)
        one, _ = head_triton.score(network, states, ids, 0.8, 1 << 24)
    # A compiler and a driver fail in ways of their own; torch does not need either.
    except Exception as error:
        return in_a_line(error)
    expected = head.compare(*arguments)
    gap = max(
        _gap(one.logprob, expected.stale.logprob),
        _gap(found.trainer.logprob, expected.trainer.logprob),
        _gap(found.stale.entropy, expected.stale.entropy),
        _gap(found.kl_stale_trainer, expected.kl_stale_trainer),
        _gap(found.total_variation, expected.total_variation),
        _gap(found.bias_sum, expected.bias_sum),
    )
    if found.factors is not None and expected.factors is not None:
        gap = max(gap, _gap(found.factors.centred, expected.factors.centred))
    return "" if gap <= _TOLERANCE else f"the two differ by {gap:.1e}"


def _gap(one: Tensor, other: Tensor) -> float:
    gap = float((one - other).abs().max())
    return gap if gap == gap else float("inf")
