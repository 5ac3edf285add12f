"""Score bias: what the mismatch does to the mean score, in logit space.

At a prefix the score of a softmax in its logits is e_a - pi. Sampling from mu while differentiating pi_s adds the mean
mu - pi_s; stale weights add pi_s - pi; together mu - pi. Its size at a prefix is the total variation. The mean vector
over a step's prefixes is what accumulates when it keeps its direction from step to step.
Source: Marek and Ryabinin (2026), "Score Centering Stabilizes Off-policy RL", restated in logit space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.types import Floats, Ints


@dataclass(frozen=True, eq=False)
class MeanBias:
    """The mean bias vector of a step, with the noise that a split of the prompt groups into halves shows.

    ``vector`` (V,); ``norm`` its L2 length. ``noise`` estimates the standard error of the vector, as an L2 length:
    sqrt(n_a n_b) / n times the distance between the halves' means. ``split_half_cosine`` compares the halves: near 1
    the direction is real, near 0 it is noise. NaN where a half is empty or a vector is zero, and a length beyond
    float64 is NaN as well.
    """

    vector: Floats
    norm: float
    noise: float
    split_half_cosine: float


def mean_bias(sums: Floats, tokens: Ints) -> MeanBias:
    """Mean vector from the halves' sums.

    Args:
        sums: sum of the bias vectors over the tokens of each half, (2, V).
        tokens: tokens of each half, (2,).
    """
    n = int(tokens.sum())
    vector = sums.sum(axis=0) / n if n else np.full(sums.shape[1], np.nan)
    if not tokens.all():
        return MeanBias(vector, _norm(vector), math.nan, math.nan)
    first, second = sums[0] / tokens[0], sums[1] / tokens[1]
    noise = math.sqrt(float(tokens[0]) * float(tokens[1])) / n * _norm(first - second)
    return MeanBias(vector, _norm(vector), noise, cosine(first, second))


def discrepancy_bias_sums(discrepancy: Floats, token_ids: Ints, half: Ints, vocab_size: int) -> tuple[Floats, Ints]:
    """Sums of one-sample estimates of mu - pi_s, (2, V), and tokens, (2,), by half of the prompt groups.

    With a drawn from mu, (1 - pi_s(a)/mu(a)) e_a has the mean mu - pi_s, wherever mu covers pi_s: only the sampled
    token's log-probs are needed. Null discrepancies and unknown tokens (ids below 0) are left out.

    Args:
        discrepancy: D, nats, (n,).
        token_ids: (n,).
        half: 0 or 1, (n,).
        vocab_size: V.
    """
    known = ~np.isnan(discrepancy) & (token_ids >= 0)
    excess = -np.expm1(discrepancy[known])
    cell = half[known] * vocab_size + token_ids[known]
    sums = np.bincount(cell, weights=excess, minlength=2 * vocab_size).astype(np.float64, copy=False)
    return sums.reshape(2, vocab_size), np.bincount(half[known], minlength=2).astype(np.int64)


def sampled_total_variation(discrepancy: Floats) -> Floats:
    """Terms whose mean over tokens drawn from mu is the mean total variation between mu and pi_s, (n,).

    TV = 1/2 sum |mu - pi_s| = 1/2 E_mu |1 - pi_s/mu|, wherever mu covers pi_s.
    """
    return np.abs(np.expm1(discrepancy)) / 2


def cosine(a: Floats, b: Floats) -> float:
    """Cosine of two vectors; NaN when one of them is zero or null."""
    one, two = _norm(a), _norm(b)
    return float((a / one) @ (b / two)) if one > 0 and two > 0 else math.nan


def _norm(vector: Floats) -> float:
    largest = float(np.abs(vector).max(initial=0.0))
    # Relative to the largest entry: squares leave float64 long before lengths do.
    length = largest * float(np.linalg.norm(vector / largest)) if largest else 0.0
    return length if math.isfinite(length) else math.nan
