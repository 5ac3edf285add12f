"""Importance weights at three levels, and those of their numbers that rest on a few giants."""

from __future__ import annotations

from mismatch_probe.stats.ratios import Levels, group_log_means, sequence_sums
from mismatch_probe.stats.tails import max_weight_share, pareto_k
from mismatch_probe.stats.types import Floats


def level_log_weights(log_weights: Floats, levels: Levels) -> dict[str, Floats]:
    """Log-weights of the units at each level: tokens (n,), sequences (S,), prompt groups (G,); nats, NaN = null."""
    sequence = sequence_sums(log_weights, levels)
    return {"token": log_weights, "sequence": sequence, "prompt": group_log_means(sequence, levels)}


def weight_health(log_weights: Floats) -> dict[str, float]:
    """``pareto_k`` and ``max_weight_share``: extremes of a set of weights, which have no interval.

    No sum over groups gives them, and leaving out the group that holds the largest weight changes what is asked.

    Args:
        log_weights: nats, (n,). NaN = null and left out.
    """
    return {"pareto_k": pareto_k(log_weights), "max_weight_share": max_weight_share(log_weights)}
