"""Means over buckets of tokens with intervals by prompt groups, and how much of a value its tokens share by kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.student import t_quantile


@dataclass(frozen=True, eq=False)
class Means:
    """One entry a bucket, (L,): tokens, mean, and its interval; NaN where a bucket holds fewer than two groups."""

    tokens: Ints
    mean: Floats
    low: Floats
    high: Floats


def bucket_means(values: Floats, level: Ints, group: Ints, levels: int, confidence: float = 0.95) -> Means:
    """Mean of the values in each bucket, with a jackknife over the prompt groups that it holds.

    Args:
        values: (n,), none of them NaN.
        level: bucket of each, 0 to ``levels`` - 1, -1 for none, (n,).
        group: prompt group of each, numbered from 0 with gaps or without, (n,).
        levels: L.
        confidence: of the interval.
    """
    kept = level >= 0
    groups = int(group[kept].max()) + 1 if kept.any() else 0
    cell = group[kept] * levels + level[kept]
    counts = np.bincount(cell, minlength=groups * levels).reshape(groups, levels)
    sums = np.bincount(cell, weights=values[kept], minlength=groups * levels).reshape(groups, levels)
    tokens = counts.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(axis=0) / tokens
        without = (sums.sum(axis=0) - sums) / (tokens - counts)
    low, high = np.full(levels, np.nan), np.full(levels, np.nan)
    for at in range(levels):
        there = counts[:, at] > 0
        held = int(there.sum())
        if held < 2:
            continue
        each = without[there, at]
        error = np.sqrt((held - 1) / held * np.square(each - each.mean()).sum())
        reach = t_quantile(round((1 + confidence) / 2, 9), held - 1) * error
        low[at], high[at] = mean[at] - reach, mean[at] + reach
    return Means(tokens.astype(np.int64), mean, low, high)


def mean_of(values: Floats, group: Ints, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of the values (n,) and the ends of its interval by prompt groups; NaN where there are none, or one group."""
    found = bucket_means(values, np.zeros(len(values), dtype=np.int64), group, 1, confidence)
    return float(found.mean[0]), float(found.low[0]), float(found.high[0])


def difference(values: Floats, there: Bools, group: Ints, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of the values where ``there`` minus that elsewhere, and its interval by prompt groups; NaN if unknown."""
    groups = int(group.max()) + 1 if len(group) else 0
    cell = group * 2 + there
    counts = np.bincount(cell, minlength=2 * groups).reshape(groups, 2).astype(np.float64)
    sums = np.bincount(cell, weights=values, minlength=2 * groups).reshape(groups, 2)
    if not len(counts) or not (counts.sum(axis=0) > 0).all():
        return float("nan"), float("nan"), float("nan")
    mean = sums.sum(axis=0) / counts.sum(axis=0)
    found = float(mean[1] - mean[0])
    # Linear in the groups (a group may be all there is of one side, so that it cannot be left out).
    each = (sums - counts * mean) / counts.sum(axis=0)
    push = each[:, 1] - each[:, 0]
    sides = (counts > 0).sum(axis=0)
    if sides.min() < 2:
        return found, float("nan"), float("nan")
    held = int((counts.sum(axis=1) > 0).sum())
    error = np.sqrt(held / (held - 1) * np.square(push).sum())
    reach = t_quantile(round((1 + confidence) / 2, 9), int(sides.min()) - 1) * error
    return found, float(found - reach), float(found + reach)


def intraclass(values: Floats, kind: Ints) -> float:
    """Share of the variance of the values (n,) that lies between kinds (n,), by one-way analysis of variance.

    About 0 where kinds do not matter (below 0 by chance); NaN where there is one kind, or no kind has two values.
    """
    _, number = np.unique(kind, return_inverse=True)
    counts = np.bincount(number).astype(np.float64)
    n, k = len(values), len(counts)
    if k < 2 or n <= k:
        return float("nan")
    means = np.bincount(number, weights=values) / counts
    within = float(np.square(values - means[number]).sum()) / (n - k)
    between = float((counts * np.square(means - values.mean())).sum()) / (k - 1)
    usual = (n - float(np.square(counts).sum()) / n) / (k - 1)
    total = (between - within) / usual + within
    return float((between - within) / usual / total) if total > 0 else float("nan")
