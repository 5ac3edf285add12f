"""The weights that corrections give to tokens, and what they would give had there been no discrepancy.

Every correction multiplies a token's policy gradient A (e_a - pi) x^T with a weight. Null entries do not occur here:
callers leave out sequences whose D, L or advantage is not known at every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.ratios import Levels, sequence_sums
from mismatch_probe.stats.types import Bools, Floats

CORRECTIONS = ("none", "token_tis", "token_mask", "sequence_is", "geometric_mask", "ppo_clip", "dlc")
TARGETS = ("token", "per-decision", "sequence")
DEFAULT_TARGET = "token"


@dataclass(frozen=True)
class Bounds:
    """Where corrections cut: ratios, not logarithms.

    ``cap`` of truncated importance sampling; band of the token mask; band of the geometric mean of a sequence's
    ratios; ``clip`` is PPO's epsilon. The defaults are those in common use: 2 and [0.5, 5] (verl), [0.99, 1.01]
    (SkyRL), 0.2 (Schulman et al. 2017).
    """

    cap: float = 2.0
    mask: tuple[float, float] = (0.5, 5.0)
    geometric: tuple[float, float] = (0.99, 1.01)
    clip: float = 0.2


def correction_weights(
    discrepancy: Floats, lag: Floats, advantage: Floats, levels: Levels, bounds: Bounds
) -> dict[str, Floats]:
    """Weight of each token under each correction that is linear in e_a - pi, (n,) each: all but ``dlc``.

    ``none`` 1; ``token_tis`` min(e^d, cap); ``token_mask`` e^d inside the band, else 0 (IcePop); ``sequence_is`` e^(sum
    of d over the response); ``geometric_mask`` 1 where e^(mean of d over the response) is inside its band, else 0;
    ``ppo_clip`` the gradient of PPO's objective anchored at pi_s: e^L where it is not clipped, else 0.
    With D = 0 they are what the correction does to tokens that pi_s itself had drawn.

    Args:
        discrepancy: D, nats, (n,).
        lag: L, nats, (n,).
        advantage: A, (n,).
        levels: which sequence each token belongs to.
        bounds: where they cut.
    """
    d = discrepancy + lag
    sums = sequence_sums(d, levels)
    lengths = np.bincount(levels.sequence, minlength=levels.n_sequences)
    geometric = _inside(sums / np.maximum(lengths, 1), bounds.geometric)
    with np.errstate(over="ignore"):
        return {
            "none": np.ones(len(d)),
            "token_tis": np.exp(np.minimum(d, math.log(bounds.cap))),
            "token_mask": np.exp(np.where(_inside(d, bounds.mask), d, -np.inf)),
            "sequence_is": np.exp(sums)[levels.sequence],
            "geometric_mask": geometric[levels.sequence].astype(np.float64),
            "ppo_clip": np.exp(np.where(ppo_clips(lag, advantage, bounds.clip), -np.inf, lag)),
        }


def ppo_clips(log_ratio: Floats, advantage: Floats, clip: float) -> Bools:
    """Whether PPO's objective is flat at a token: r > 1 + clip and A > 0, or r < 1 - clip and A < 0, (n,).

    Args:
        log_ratio: log r, nats, (n,). NaN = null, never clipped.
        advantage: A, (n,).
        clip: epsilon, below 1.
    """
    high, low = log_ratio > math.log1p(clip), log_ratio < math.log1p(-clip)
    return (high & (advantage > 0)) | (low & (advantage < 0))


def target_log_weights(log_ratio: Floats, levels: Levels, target: str) -> Floats:
    """Log-weight of each token in the on-policy target, nats, (n,); sums of log-ratios, so parts of them add up.

    ``token``: its own. ``per-decision``: summed from the start of its response up to it. ``sequence``: summed over its
    response.

    Args:
        log_ratio: nats, (n,); the tokens of a response stand together, in order.
        levels: which sequence each token belongs to.
        target: one of TARGETS.

    Raises:
        ValueError: an unknown target.
    """
    if target == "token":
        return log_ratio
    if target == "sequence":
        return sequence_sums(log_ratio, levels)[levels.sequence]
    if target != "per-decision":
        raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
    running = np.empty_like(log_ratio)
    starts = np.flatnonzero(np.diff(levels.sequence, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(log_ratio)], strict=True):
        # Each response on its own: a difference of sums over the step would carry the step's rounding.
        running[start:stop] = np.cumsum(log_ratio[start:stop])
    return running


def _inside(log_ratio: Floats, band: tuple[float, float]) -> Bools:
    inside: Bools = (log_ratio >= math.log(band[0])) & (log_ratio <= math.log(band[1]))
    return inside
