"""How long scoring will take on this CPU: arithmetic over a measured matrix product. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

_EFFICIENCY = 0.7
"""Share of the matrix-product rate that a forward pass reaches."""
_VOCABULARY_FLOPS = 60
"""Cost of one vocabulary entry's exponentials and sums, in multiply-add equivalents."""
_PASS_SECONDS = 0.01
_LOAD_SECONDS = 0.05
_START_SECONDS = 4.0
_READ_BYTES_PER_SECOND = 5e8


@dataclass(frozen=True)
class PassCost:
    """What one checkpoint costs: parameters (None = unknown), vocabulary and size on disk."""

    parameters: int | None
    vocab_size: int | None
    bytes: int


def seconds(passes: list[tuple[PassCost, int]], checkpoints: list[PassCost], max_tokens: int) -> float | None:
    """Estimated wall time of the given (checkpoint, tokens) passes; None where a size is unknown."""
    if any(cost.parameters is None for cost, _ in passes):
        return None
    if not passes:
        return 0.0
    work = sum(
        tokens * (2.0 * (cost.parameters or 0) + _VOCABULARY_FLOPS * (cost.vocab_size or 0)) for cost, tokens in passes
    )
    overhead = sum(-(-tokens // max_tokens) for _, tokens in passes) * _PASS_SECONDS
    loading = sum(_LOAD_SECONDS + cost.bytes / _READ_BYTES_PER_SECOND for cost in checkpoints)
    return _START_SECONDS + work / (_EFFICIENCY * matmul_rate()) + overhead + loading


def matmul_rate(size: int = 768, repeats: int = 3) -> float:
    """Best float32 matrix-product rate seen, FLOP/s."""
    a = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best
