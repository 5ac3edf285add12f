"""Intervals of what a set of importance weights is worth: everything that follows from sums over prompt groups."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.intervals import (
    LOG,
    LOG_MINUS_LOG,
    ClusterIntervals,
    Interval,
    group_sums,
    mean,
)
from mismatch_probe.stats.ratios import Levels, drop_nulls
from mismatch_probe.stats.tails import perplexity_from_sums
from mismatch_probe.stats.types import Floats, Ints

_LN2 = math.log(2)
EXTREMES = {"share_beyond_ln2": _LN2, "share_outside_band": math.log(1.25)}
"""Size of a token's log-ratio, nats, from which it counts as extreme, by name."""


def weight_intervals(log_weights: Floats, group: Ints, intervals: ClusterIntervals) -> dict[str, Interval]:
    """``ess``, ``perplexity_ess``, ``chi_square`` and ``second_moment`` of weights, and ``ess_bias`` without ends.

    Chi-square is 1 / ESS - 1, and its interval that of the ESS seen through it, so that the two never disagree.
    ``second_moment``, the mean of w^2, is null beyond float64.

    Args:
        log_weights: nats, (n,). NaN = null and left out.
        group: prompt group of each, 0..G-1, (n,).
        intervals: over prompt groups.
    """
    return intervals_of_weights(*weight_sums(log_weights, group, intervals.n_groups), intervals)


def weight_sums(log_weights: Floats, group: Ints, n_groups: int) -> tuple[Floats, float]:
    """Count, sum w, sum w^2 and sum w log w of each prompt group, (G, 4), w relative to the largest, and its log.

    Args:
        log_weights: nats, (n,). NaN = null and left out.
        group: prompt group of each, 0..G-1, (n,).
        n_groups: G.
    """
    known, group = drop_nulls(log_weights, group)
    peak = float(known.max()) if len(known) else 0.0
    weights = np.exp(known - peak)
    logs = np.where(weights > 0, known - peak, 0.0)
    return group_sums([weights, np.square(weights), weights * logs], group, n_groups), peak


def intervals_of_weights(sums: Floats, peak: float, intervals: ClusterIntervals) -> dict[str, Interval]:
    """``weight_intervals`` from ``weight_sums``."""
    ess = intervals.interval(sums, ess_from_sums, LOG_MINUS_LOG)
    return {
        "ess": ess,
        "ess_bias": Interval(intervals.bootstrap_bias(sums, ess_from_sums)),
        "perplexity_ess": intervals.interval(
            sums, lambda s: perplexity_from_sums(s[..., 0], s[..., 1], s[..., 3]), LOG_MINUS_LOG
        ),
        "chi_square": _chi_square(ess),
        "second_moment": _times(intervals.interval(sums, lambda s: s[..., 2] / s[..., 0], LOG), 2 * peak),
    }


def token_intervals(log_weights: Floats, levels: Levels, intervals: ClusterIntervals) -> dict[str, Interval]:
    """``share_beyond_ln2``, ``share_outside_band``, ``predicted_ess`` and ``half_ess_length`` of token log-ratios.

    A token is extreme when its ratio leaves [1/2, 2] (|x| > ln 2) or the band [0.8, 1.25]. The last two are the
    two-line law, see ``predicted_sequence_ess`` and ``length_at_half_ess``.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null and left out.
        levels: which sequence and group each token belongs to.
        intervals: over prompt groups.
    """
    known, group = drop_nulls(log_weights, levels.group)
    size = np.abs(known)
    extreme = group_sums([(size > limit).astype(np.float64) for limit in EXTREMES.values()], group, intervals.n_groups)
    return intervals_of_tokens(extreme, _law_sums(log_weights, levels, intervals.n_groups), intervals)


def intervals_of_tokens(extreme: Floats, sums: Floats, intervals: ClusterIntervals) -> dict[str, Interval]:
    """``token_intervals`` from sums over prompt groups.

    Args:
        extreme: count of tokens, and of those beyond each of EXTREMES, (G, 3).
        sums: count, sum and sum of squares of the log-ratios about their mean, and sequences that have any, (G, 4).
        intervals: over prompt groups.
    """
    out = {name: intervals.interval(extreme[:, [0, 1 + at]], mean, LOG) for at, name in enumerate(EXTREMES)}
    out["predicted_ess"] = intervals.interval(sums, _law, LOG_MINUS_LOG)
    length = intervals.interval(sums, _half_length, LOG)
    if math.isinf(length.value):
        length = Interval(length.value, reason="infinite, since the log-ratio does not vary")
    return out | {"half_ess_length": length}


def covariance_interval(one: Floats, two: Floats, group: Ints, intervals: ClusterIntervals) -> Interval:
    """Covariance of two values of a token, over the tokens that have both; nats^2 for log-ratios.

    Args:
        one: (n,). NaN = null.
        two: (n,). NaN = null.
        group: prompt group of each token, (n,).
        intervals: over prompt groups.
    """
    both = ~np.isnan(one) & ~np.isnan(two)
    a, b = one[both], two[both]
    if len(a):
        # About their means, so that no sum has to cancel against another.
        a, b = a - a.mean(), b - b.mean()
    return covariance_of(group_sums([a, b, a * b], group[both], intervals.n_groups), intervals)


def covariance_of(sums: Floats, intervals: ClusterIntervals) -> Interval:
    """``covariance_interval`` from count, sums and sum of products about the means, (G, 4)."""
    return intervals.interval(sums, lambda s: s[..., 3] / s[..., 0] - s[..., 1] / s[..., 0] * (s[..., 2] / s[..., 0]))


def predicted_sequence_ess(log_weights: Floats, levels: Levels) -> float:
    """Sequence ESS if the log-ratios of tokens were independent normals: exp(-T s^2), T the mean length.

    A measured ESS below it says that log-ratios of a sequence pull the same way or that their right tail is heavy
    (Pareto k tells which); above it, that their left tail is heavy: tokens that hardly weigh at all.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null.
        levels: which sequence each token belongs to.

    Returns:
        A share in (0, 1], or NaN without tokens.
    """
    with np.errstate(invalid="ignore"):
        return float(_law(_law_sums(log_weights, levels, levels.n_groups).sum(axis=0)))


def length_at_half_ess(log_weights: Floats) -> float:
    """Response length at which this log-ratio alone would bring the sequence ESS to 1/2: ln 2 / s^2, in tokens.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null.

    Returns:
        Tokens; infinite where the log-ratio does not vary, NaN without tokens.
    """
    each = np.arange(len(log_weights), dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(_half_length(_law_sums(log_weights, Levels(each, each), len(each)).sum(axis=0)))


def _law_sums(log_weights: Floats, levels: Levels, n_groups: int) -> Floats:
    """Count, sum and sum of squares of the log-ratios about their mean, and sequences that have any, (G, 4)."""
    known, group = drop_nulls(log_weights, levels.group)
    about = known - known.mean() if len(known) else known
    present = np.unique(levels.sequence[~np.isnan(log_weights)])
    sequences = np.bincount(levels.group_of_sequence[present], minlength=n_groups).astype(np.float64)
    return np.concatenate([group_sums([about, np.square(about)], group, n_groups), sequences[:, None]], axis=1)


def _variance(sums: Floats) -> Floats:
    return np.asarray(np.maximum(sums[..., 2] / sums[..., 0] - np.square(sums[..., 1] / sums[..., 0]), 0.0))


def _law(sums: Floats) -> Floats:
    return np.asarray(np.exp(-sums[..., 0] / sums[..., 3] * _variance(sums)))


def _half_length(sums: Floats) -> Floats:
    return np.asarray(_LN2 / _variance(sums))


def _chi_square(ess: Interval) -> Interval:
    def seen(share: float) -> float:
        return 1 / share - 1 if share else math.inf

    return replace(
        ess,
        value=seen(ess.value),
        low=seen(ess.high),
        high=seen(ess.low),
        share_below=lambda x: 1 - ess.share_below(1 / (1 + x)),
    )


def _times(interval: Interval, log_factor: float) -> Interval:
    """The interval of e^log_factor times the quantity, null where that is beyond float64."""

    def scaled(x: float) -> float:
        if not x > 0:
            return x
        log_x = math.log(x) + log_factor
        return math.exp(log_x) if log_x < 709 else math.inf

    if math.isinf(scaled(interval.value)):
        return Interval(math.nan, reason="beyond float64")
    return Interval(
        scaled(interval.value), scaled(interval.low), scaled(interval.high), interval.reason, interval.method
    )
