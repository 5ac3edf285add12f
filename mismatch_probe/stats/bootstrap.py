"""Cluster bootstrap: prompt groups are resampled, never tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.types import Floats, Ints

Statistic = Callable[[Floats], Floats]
_REPLICATES_OF_MANY = 500
"""Resamples used where thousands of means are judged at once."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval; NaN = null. ``reason`` says why ends are null."""

    value: float
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    share_below: Callable[[float], float] = lambda _: math.nan


class ClusterBootstrap:
    """Percentile intervals for statistics that are functions of sums over prompt groups.

    All responses to one prompt share it and all tokens of a response share their history, so the prompt group is the
    unit that was drawn independently. One set of resampled group counts serves every statistic of a step.
    Source: Efron and Tibshirani (1993), chapters 8 and 13.

    Args:
        n_groups: prompt groups, G.
        seed: the same seed gives the same intervals.
        resamples: bootstrap replicates, B.
        confidence: coverage aimed at.
    """

    def __init__(self, n_groups: int, seed: int = 0, resamples: int = 2000, confidence: float = 0.95) -> None:
        self.n_groups, self.confidence = n_groups, confidence
        generator = np.random.default_rng(seed)
        shares = np.full(n_groups, 1.0 / max(1, n_groups))
        self._counts: Floats = (
            generator.multinomial(n_groups, shares, size=resamples).astype(np.float64)
            if n_groups
            else np.zeros((resamples, 0))
        )  # (B, G)

    def interval(self, sums: Floats, statistic: Statistic) -> Interval:
        """Value and interval of ``statistic``.

        Args:
            sums: sums of each group, (G, K); a group without data is a row of zeros.
            statistic: (..., K) -> (...), on sums over groups.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = float(statistic(sums.sum(axis=0)))
            filled = int((sums[:, 0] != 0).sum())
            if math.isinf(value):
                return Interval(value, reason="beyond float64: log-ratios of hundreds of nats")
            if math.isnan(value) or filled < 2:
                reason = "no data" if math.isnan(value) else "one prompt group has no interval"
                return Interval(value, reason=reason)
            replicates = statistic(self._counts @ sums)
        replicates = np.sort(replicates[np.isfinite(replicates)])
        if not len(replicates):
            return Interval(value, reason="no finite resample")
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(replicates, [tail, 1 - tail])

        def share_below(threshold: float) -> float:
            return float(np.searchsorted(replicates, threshold)) / len(replicates)

        return Interval(value, float(low), float(high), share_below=share_below)

    def mean_intervals(self, counts: Floats, sums: Floats) -> tuple[Floats, Floats]:
        """Ends of the intervals of many means at once.

        Args:
            counts: rows of each group, (G,).
            sums: sums of each group and column, (G, K).

        Returns:
            Lower and upper ends, (K,) each.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            used = self._counts[:_REPLICATES_OF_MANY]
            replicates = (used @ sums) / (used @ counts)[:, None]
        # A resample that holds none of the groups with data has no mean.
        replicates = replicates[np.isfinite(replicates).all(axis=1)]
        tail = (1 - self.confidence) / 2
        if not len(replicates):
            return np.full(sums.shape[1], np.nan), np.full(sums.shape[1], np.nan)
        low, high = np.quantile(replicates, [tail, 1 - tail], axis=0)
        return low, high


def group_sums(columns: list[Floats], group: Ints, n_groups: int) -> Floats:
    """Sums over each group of a count of rows and of each column, (G, 1 + len(columns))."""
    counted = [np.ones(len(group)), *columns]
    return np.stack([np.bincount(group, weights=column, minlength=n_groups) for column in counted], axis=1)


def mean(sums: Floats) -> Floats:
    """Mean of a column, from (count, sum)."""
    return sums[..., 1] / sums[..., 0]


def root_mean(sums: Floats) -> Floats:
    """Root mean square, from (count, sum of squares)."""
    return np.sqrt(mean(sums))
