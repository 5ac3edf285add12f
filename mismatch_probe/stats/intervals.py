"""Intervals over prompt groups, never over tokens.

All responses to one prompt share it and all tokens of a response share their history, so the prompt group is the unit
that was drawn independently. Every statistic here is a function of sums over groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.student import t_cdf, t_quantile
from mismatch_probe.stats.types import Floats, Ints

Statistic = Callable[[Floats], Floats]
METHODS = ("jackknife", "bca", "percentile")
DEFAULT_METHOD = "jackknife"
MIN_GROUPS_BCA = 10
"""Fewest prompt groups for which the acceleration of BCa is more than noise; below it the interval is percentile."""
_NORMAL = NormalDist()
_TINY = 1e-15
_ENTRIES = 1 << 22
"""Counts of groups in resamples that are drawn and multiplied at once."""
_MANY = 4096


@dataclass(frozen=True)
class Scale:
    """A monotone map onto a line where the statistic's error is closer to symmetric, and the way back.

    ``least``: the smallest value that the statistic can have.
    """

    forward: Statistic
    back: Callable[[float], float]
    increasing: bool = True
    least: float = -math.inf


IDENTITY = Scale(lambda v: v, lambda x: x)
LOG = Scale(np.log, lambda x: math.exp(min(x, 709.0)), least=0.0)
LOG_MINUS_LOG = Scale(
    lambda v: np.log(np.maximum(-np.log(v), _TINY)), lambda x: math.exp(-math.exp(min(x, 700.0))), False
)
"""For shares in (0, 1] such as ESS: -log ESS is the variance of log-normal weights, whose log is near symmetric."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval; NaN = null. ``reason`` says why ends are null, ``method`` how they were found.

    ``share_below(x)``: confidence, 0 to 1, that the quantity is below x, by the same method.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    method: str = ""
    share_below: Callable[[float], float] = lambda _: math.nan


class ClusterIntervals:
    """Intervals of a step's statistics, by one of METHODS.

    ``jackknife``: leave out one group at a time, Student's t on the statistic's scale, bias corrected.
    ``bca`` and ``percentile``: bootstrap of groups; ``bca`` is ``percentile`` below MIN_GROUPS_BCA groups.
    The default covers best with the 8 to 64 groups that a step has (docs/benchmarks.md has the simulation).
    Sources: Tukey (1958); Miller (1974), "The jackknife, a review"; Efron and Tibshirani (1993), chapters 11 to 14.

    Args:
        n_groups: prompt groups, G.
        seed: of the bootstrap; the same seed gives the same intervals.
        resamples: bootstrap replicates, B.
        confidence: coverage aimed at.
        method: one of METHODS.

    Raises:
        ValueError: an unknown method.
    """

    def __init__(
        self,
        n_groups: int,
        seed: int = 0,
        resamples: int = 2000,
        confidence: float = 0.95,
        method: str = DEFAULT_METHOD,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"interval method {method!r} is none of {', '.join(METHODS)}")
        self.n_groups, self.confidence, self.method = n_groups, confidence, method
        self._seed, self._resamples = seed, resamples

    @cached_property
    def _counts(self) -> list[npt.NDArray[np.integer]]:
        """How often each group is in each resample, (B, G) in all, some resamples at a time."""
        generator = np.random.default_rng(self._seed)
        groups, kind = self.n_groups, np.min_scalar_type(self.n_groups)
        at_once = max(1, _ENTRIES // max(1, groups))

        def drawn(rows: int) -> npt.NDArray[np.integer]:
            if groups <= _MANY:
                return generator.multinomial(groups, np.full(groups, 1.0 / max(1, groups)), size=rows)
            # The same law; of many groups it is ten times as quick to draw each.
            cells = generator.integers(groups, size=(rows, groups)) + groups * np.arange(rows)[:, None]
            return np.bincount(cells.ravel(), minlength=rows * groups).reshape(rows, groups)

        starts = range(0, self._resamples, at_once)
        return [drawn(min(at_once, self._resamples - start)).astype(kind) for start in starts]

    def _replicates(self, sums: Floats, statistic: Statistic) -> Floats:
        """Finite values of the statistic over the resamples."""
        replicates = statistic(np.concatenate([counts.astype(np.float64) @ sums for counts in self._counts]))
        return replicates[np.isfinite(replicates)]

    def interval(self, sums: Floats, statistic: Statistic, scale: Scale = IDENTITY) -> Interval:
        """Value and interval of ``statistic``.

        Args:
            sums: sums of each group, (G, K), the first column counting its rows; a group without data is zeros.
            statistic: (..., K) -> (...), on sums over groups.
            scale: where the jackknife is done; the bootstrap needs none.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = float(statistic(sums.sum(axis=0)))
            filled = sums[sums[:, 0] != 0]
            if math.isinf(value):
                return Interval(value, reason="beyond float64: log-ratios of hundreds of nats")
            if math.isnan(value) or len(filled) < 2:
                reason = "no data" if math.isnan(value) else "one prompt group has no interval"
                return Interval(value, reason=reason)
            without_one = statistic(sums.sum(axis=0) - filled)
            if bool((without_one == value).all()):
                return Interval(value, value, value, method=self.method, share_below=lambda x: float(value < x))
            if self.method == "jackknife":
                return self._jackknife(value, without_one, scale)
            return self._bootstrap(value, sums, statistic, without_one)

    def bootstrap_bias(self, sums: Floats, statistic: Statistic) -> float:
        """Mean of the statistic over resamples minus its value: how far a batch of this size is off, NaN if unknown."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if (sums[:, 0] != 0).sum() < 2:
                return math.nan
            replicates = self._replicates(sums, statistic)
            return float(replicates.mean() - statistic(sums.sum(axis=0))) if len(replicates) else math.nan

    def mean_intervals(self, counts: Floats, sums: Floats) -> tuple[Floats, Floats]:
        """Jackknife intervals of many means at once.

        Args:
            counts: rows of each group, (G,).
            sums: sums of each group and column, (G, K).

        Returns:
            Lower and upper ends, (K,) each; NaN with fewer than two groups that have rows.
        """
        filled = counts > 0
        groups = int(filled.sum())
        if groups < 2:
            return np.full(sums.shape[1], np.nan), np.full(sums.shape[1], np.nan)
        mean = sums.sum(axis=0) / counts.sum()
        without_one = (sums.sum(axis=0) - sums[filled]) / (counts.sum() - counts[filled])[:, None]
        error = np.sqrt((groups - 1) / groups * np.square(without_one - without_one.mean(axis=0)).sum(axis=0))
        reach = t_quantile((1 + self.confidence) / 2, groups - 1) * error
        return mean - reach, mean + reach

    def _jackknife(self, value: float, without_one: Floats, scale: Scale) -> Interval:
        least = scale.least
        at, each = float(scale.forward(np.array(value))), scale.forward(without_one)
        if not (math.isfinite(at) and bool(np.isfinite(each).all())):
            # A zero has no logarithm: then the plain scale, kept on its side of zero.
            scale, at, each = IDENTITY, value, without_one
        groups = len(each)
        centre = groups * at - (groups - 1) * float(each.mean())
        error = math.sqrt((groups - 1) / groups * float(np.square(each - each.mean()).sum()))
        if not (math.isfinite(centre) and error > 0):
            return Interval(value, reason="leaving out one group changes nothing that can be measured")
        reach = t_quantile((1 + self.confidence) / 2, groups - 1) * error
        low, high = sorted((scale.back(centre - reach), scale.back(centre + reach)))

        def share_below(threshold: float) -> float:
            with np.errstate(divide="ignore", invalid="ignore"):
                score = (float(scale.forward(np.array(threshold))) - centre) / error
            share = t_cdf(score, groups - 1)
            return share if scale.increasing else 1 - share

        return Interval(value, max(low, least), high, method="jackknife", share_below=share_below)

    def _bootstrap(self, value: float, sums: Floats, statistic: Statistic, without_one: Floats) -> Interval:
        replicates = np.sort(self._replicates(sums, statistic))
        if not len(replicates):
            return Interval(value, reason="no finite resample")
        bias = acceleration = 0.0
        method = "percentile"
        below = float(np.searchsorted(replicates, value)) / len(replicates)
        if self.method == "bca" and len(without_one) >= MIN_GROUPS_BCA and 0 < below < 1:
            method, bias = "bca", _NORMAL.inv_cdf(below)
            deviation = without_one.mean() - without_one
            acceleration = float((deviation**3).sum() / (6 * np.square(deviation).sum() ** 1.5))
        tail = (1 - self.confidence) / 2
        ends = [_adjusted(p, bias, acceleration) for p in (tail, 1 - tail)]
        low, high = np.quantile(replicates, ends)

        def share_below(threshold: float) -> float:
            share = float(np.searchsorted(replicates, threshold)) / len(replicates)
            return _unadjusted(share, bias, acceleration) if 0 < share < 1 else share

        return Interval(value, float(low), float(high), method=method, share_below=share_below)


def _adjusted(p: float, bias: float, acceleration: float) -> float:
    """The bootstrap's own level at which BCa reads its p-quantile."""
    z = bias + _NORMAL.inv_cdf(p)
    return _NORMAL.cdf(bias + z / (1 - acceleration * z))


def _unadjusted(share: float, bias: float, acceleration: float) -> float:
    """The way back: the BCa level of a share of resamples."""
    z = _NORMAL.inv_cdf(share) - bias
    return _NORMAL.cdf(z / (1 + acceleration * z) - bias)


def interval_reasons(found: Mapping[str, Interval]) -> list[str]:
    """Why some intervals have no ends, by name; a null value is another matter than a null interval."""
    reasons = {f"no interval: {i.reason}" for i in found.values() if i.reason and math.isfinite(i.value)}
    infinite: dict[str, list[str]] = {}
    for name, interval in sorted(found.items()):
        if math.isinf(interval.value):
            infinite.setdefault(interval.reason, []).append(name)
    return [*sorted(reasons), *(f"{', '.join(names)}: {reason}" for reason, names in infinite.items())]


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
