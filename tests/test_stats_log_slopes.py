"""Slopes of a logarithm of means: against closed forms, refits and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize

from mismatch_probe.stats.log_slopes import MANY_CLUSTERS, log_slopes
from mismatch_probe.stats.student import t_quantile


def rows(rng: np.random.Generator, clusters: int, slope: float = 0.4) -> tuple[np.ndarray, ...]:
    """Two kinds in every cluster, each with its own level; the cluster has its own x and its own scale."""
    x = np.repeat(rng.uniform(-1, 1, clusters), 2)
    kind = np.tile([0, 1], clusters)
    counts = rng.integers(1, 30, 2 * clusters).astype(np.float64)
    scale = np.exp(3.0 * kind + slope * x + np.repeat(0.4 * rng.normal(size=clusters), 2))
    return counts, scale * rng.chisquare(counts), kind, x[:, None], np.repeat(np.arange(clusters), 2)


def test_of_two_levels_the_slope_is_the_log_of_their_ratio() -> None:
    counts, sums = np.array([3.0, 5.0, 4.0, 2.0]), np.array([1.0, 2.0, 30.0, 7.0])
    (slope,) = log_slopes(counts, sums, np.zeros(4, dtype=np.int64), np.array([[0.0], [0], [1], [1]]), [])
    assert slope.value == pytest.approx(math.log((37 / 6) / (3 / 8)), rel=1e-12)
    assert slope.reach(0.95) == math.inf and slope.times(-2).value == -2 * slope.value


def test_the_fit_is_the_one_that_a_general_minimiser_finds() -> None:
    counts, sums, kind, x, _ = rows(np.random.default_rng(1), 40)
    covariates = np.concatenate([x, np.square(x)], axis=1)

    def loss(at: np.ndarray) -> float:
        eta = at[kind] + covariates @ at[2:]
        return float(counts @ eta + sums @ np.exp(-eta))

    best = scipy.optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-7}).x
    found = log_slopes(counts, sums, kind, covariates, [])
    assert [slope.value for slope in found] == pytest.approx(best[2:], abs=1e-5)


def test_the_error_is_that_of_leaving_out_one_cluster_at_a_time() -> None:
    counts, sums, kind, x, cluster = rows(np.random.default_rng(2), 60)
    (slope,) = log_slopes(counts, sums, kind, x, [(cluster, 3)])
    refits = []
    for left in range(60):
        kept = cluster != left
        refits.append(log_slopes(counts[kept], sums[kept], kind[kept], x[kept], [])[0].value)
    spread = math.sqrt(59 / 60 * float(np.square(np.array(refits) - slope.value).sum()))
    ((error, df),) = slope.errors
    assert df == 57 and error == pytest.approx(spread, rel=0.05)
    assert slope.reach(0.9) == pytest.approx(t_quantile(0.95, 57) * error)


def test_with_very_many_clusters_the_short_cut_gives_the_same() -> None:
    counts, sums, kind, x, cluster = rows(np.random.default_rng(3), MANY_CLUSTERS + 1)
    (many,) = log_slopes(counts, sums, kind, x, [(cluster, 3)])
    # The same clusters but for two that are one: just few enough for the full form.
    (few,) = log_slopes(counts, sums, kind, x, [(np.maximum(cluster, 1), 3)])
    assert many.errors[0][0] == pytest.approx(few.errors[0][0], rel=0.01)


def test_the_widest_clustering_counts_and_one_without_freedom_does_not() -> None:
    counts, sums, kind, x, cluster = rows(np.random.default_rng(4), 30)
    (slope,) = log_slopes(counts, sums, kind, x, [(cluster, 3), (cluster // 10, 2), (cluster // 15, 2)])
    assert [df for _, df in slope.errors] == [27, 1]
    assert slope.reach(0.95) == max(t_quantile(0.975, df) * error for error, df in slope.errors)


def test_covariates_that_cannot_be_told_apart_give_no_slopes() -> None:
    counts, sums, kind, x, cluster = rows(np.random.default_rng(5), 10)
    assert log_slopes(counts, sums, kind, np.ones_like(x), [(cluster, 3)]) == []


def test_intervals_cover() -> None:
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(200):
        counts, sums, kind, x, cluster = rows(rng, 25)
        (slope,) = log_slopes(counts, sums, kind, x, [(cluster, 3)])
        hits += abs(slope.value - 0.4) <= slope.reach(0.95)
    assert 0.91 <= hits / 200 <= 0.99


def test_the_error_is_the_jackknife_of_refits() -> None:
    """Six clusters, so that n - 1 and n + 1 are far apart; noise so small that the first order is all there is."""
    rng = np.random.default_rng(8)
    cluster = np.repeat(np.arange(6), 4)
    x = rng.normal(size=(24, 1))
    counts = rng.integers(5, 50, size=24).astype(np.float64)
    kind = np.zeros(24, dtype=np.int64)
    sums = counts * np.exp(0.4 * x[:, 0] + 1e-3 * rng.normal(size=24))
    (slope,) = log_slopes(counts, sums, kind, x, [(cluster, 2)])
    refits = []
    for left_out in range(6):
        kept = cluster != left_out
        (one,) = log_slopes(counts[kept], sums[kept], kind[kept], x[kept], [])
        refits.append(one.value)
    ((error, df),) = slope.errors
    assert df == 4
    assert error == pytest.approx(np.sqrt(5 / 6 * np.square(np.array(refits) - slope.value).sum()), rel=0.02)
