"""Intervals over prompt groups: against scipy, against planted truth, and their coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from mismatch_probe.stats import intervals as intervals_module
from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    LOG_MINUS_LOG,
    METHODS,
    ClusterIntervals,
    group_sums,
    mean,
    root_mean,
)
from mismatch_probe.stats.student import t_cdf, t_quantile


@pytest.mark.parametrize("df", [1, 2, 5, 31, 400, 20_000])
def test_students_t_agrees_with_scipy(df: int) -> None:
    for x in (-30.0, -2.0, -0.1, 0.0, 0.7, 3.5, 100.0):
        assert t_cdf(x, df) == pytest.approx(scipy.stats.t.cdf(x, df), abs=1e-10)
    for p in (0.005, 0.025, 0.4, 0.5, 0.9, 0.975):
        assert t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-8, abs=1e-9)
    assert (t_cdf(-math.inf, df), t_cdf(math.inf, df)) == (0.0, 1.0)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.random.default_rng(6).normal(size=30)
    ours = ClusterIntervals(30).interval(group_sums([values], np.arange(30), 30), mean)
    theirs = scipy.stats.t.interval(0.95, 29, loc=values.mean(), scale=scipy.stats.sem(values))
    assert (ours.low, ours.high) == pytest.approx(theirs, rel=1e-9)
    assert ours.share_below(theirs[0]) == pytest.approx(0.025) and ours.share_below(theirs[1]) == pytest.approx(0.975)
    low, high = ClusterIntervals(30).mean_intervals(np.ones(30), values[:, None])
    assert (low[0], high[0]) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(("method", "theirs"), [("percentile", "percentile"), ("bca", "BCa")])
def test_the_bootstraps_agree_with_scipy_when_every_unit_is_its_own_group(method: str, theirs: str) -> None:
    values = np.random.default_rng(6).exponential(size=80)
    sums = group_sums([values], np.arange(80), 80)
    ours = ClusterIntervals(80, seed=1, resamples=20_000, method=method).interval(sums, mean)
    oracle = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method=theirs, rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours.method == method
    assert (ours.low, ours.high) == pytest.approx((oracle.low, oracle.high), abs=0.01)
    assert ours.share_below(ours.high) == pytest.approx(0.975, abs=0.002)


def test_bca_falls_back_to_percentile_with_few_groups() -> None:
    sums = group_sums([np.random.default_rng(1).exponential(size=9)], np.arange(9), 9)
    few = ClusterIntervals(9, method="bca").interval(sums, mean)
    plain = ClusterIntervals(9, method="percentile").interval(sums, mean)
    assert few.method == "percentile" and (few.low, few.high) == (plain.low, plain.high)


def test_intervals_are_deterministic_by_seed() -> None:
    sums = group_sums([np.arange(24.0) ** 2], np.arange(24) % 12, 12)
    for method in METHODS:
        one, two, other = (ClusterIntervals(12, seed=s, method=method).interval(sums, mean) for s in (5, 5, 6))
        assert (one.low, one.high) == (two.low, two.high)
        assert ((one.low, one.high) == (other.low, other.high)) == (method == "jackknife")
    with pytest.raises(ValueError, match="none of jackknife, bca, percentile"):
        ClusterIntervals(4, method="guess")


@pytest.mark.parametrize("method", METHODS)
def test_one_group_has_no_interval(method: str) -> None:
    sums = group_sums([np.arange(5.0)], np.zeros(5, dtype=np.int64), 3)
    interval = ClusterIntervals(3, method=method).interval(sums, mean)
    assert interval.value == 2.0 and math.isnan(interval.low)
    assert interval.reason == "one prompt group has no interval"
    assert math.isnan(ClusterIntervals(3).bootstrap_bias(sums, mean))
    low, high = ClusterIntervals(3).mean_intervals(np.array([5.0, 0, 0]), sums[:, 1:])
    assert np.isnan(low).all() and np.isnan(high).all()


@pytest.mark.parametrize("method", METHODS)
def test_equal_groups_have_an_interval_of_no_width(method: str) -> None:
    sums = group_sums([np.ones(20), np.ones(20)], np.arange(20) % 5, 5)
    interval = ClusterIntervals(5, method=method).interval(sums, ess_from_sums, LOG_MINUS_LOG)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)
    assert (interval.share_below(0.5), interval.share_below(1.1)) == (0.0, 1.0)


def test_a_group_without_data_changes_nothing() -> None:
    values = np.random.default_rng(2).exponential(size=12)
    tight = ClusterIntervals(6).interval(group_sums([values], np.arange(12) % 6, 6), mean, LOG)
    loose = ClusterIntervals(9).interval(group_sums([values], np.arange(12) % 6, 9), mean, LOG)
    assert (tight.low, tight.high) == (loose.low, loose.high)


def test_a_zero_has_no_logarithm_and_still_an_interval() -> None:
    """All of a non-negative sum in one group: without it the statistic is 0."""
    interval = ClusterIntervals(4).interval(group_sums([np.array([1.0, 0, 0, 0])], np.arange(4), 4), mean, LOG)
    assert interval.value == 0.25 and interval.low < 0.25 < interval.high and math.isfinite(interval.high)


def test_the_small_sample_bias_of_ess_is_measured() -> None:
    """Of few log-normal weights the ESS is too high on average; the bootstrap sees a good part of that."""
    rng = np.random.default_rng(3)
    truth, found, said = math.exp(-1.0), [], []
    for trial in range(200):
        weights = np.exp(rng.normal(size=24))
        sums = group_sums([weights, weights**2], np.arange(24), 24)
        found.append(float(ess_from_sums(sums.sum(axis=0))) - truth)
        said.append(ClusterIntervals(24, seed=trial, resamples=300).bootstrap_bias(sums, ess_from_sums))
    assert np.mean(found) > 0.05 and np.mean(said) > 0.03
    assert 0.25 < np.mean(said) / np.mean(found) < 1.2


def simulated(groups: int, rng: np.random.Generator, spread: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(groups x 8, 20) correlated normal log-ratios: part of the variance is the group's, part the sequence's."""
    variance = spread**2
    values = rng.normal(size=(groups, 8, 20)) * math.sqrt(variance * (1 - share))
    values += rng.normal(size=(groups, 1, 1)) * math.sqrt(variance * share / 2)
    values += rng.normal(size=(groups, 8, 1)) * math.sqrt(variance * share / 2)
    return values.ravel(), np.repeat(np.arange(groups), 160)


CASES = {
    "mean": (0.1, lambda x: [x], mean, IDENTITY, lambda v: 0.0),
    "rms": (0.1, lambda x: [x**2], root_mean, LOG, lambda v: math.sqrt(v)),
    "k3": (0.1, lambda x: [np.expm1(x) - x], mean, LOG, lambda v: math.exp(v / 2) - 1),
    "token ESS": (0.5, lambda x: [np.exp(x), np.exp(2 * x)], ess_from_sums, LOG_MINUS_LOG, lambda v: math.exp(-v)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [12, 32])
def test_95_percent_intervals_cover_92_to_98_percent_of_planted_truths(name: str, groups: int) -> None:
    spread, columns, statistic, scale, truth = CASES[name]
    rng = np.random.default_rng(17)
    wanted, covered, trials = truth(spread**2), 0, 1000
    for _ in range(trials):
        values, group = simulated(groups, rng, spread, 0.1)
        interval = ClusterIntervals(groups).interval(group_sums(columns(values), group, groups), statistic, scale)
        covered += interval.low <= wanted <= interval.high
    assert 0.92 <= covered / trials <= 0.98, covered / trials


def test_tokens_taken_for_independent_would_not_cover() -> None:
    rng = np.random.default_rng(7)
    naive = 0
    for _ in range(300):
        values, _ = simulated(32, rng, 0.1, 0.1)
        naive += abs(values.mean()) <= 1.96 * values.std() / math.sqrt(len(values))
    assert naive / 300 < 0.7


@pytest.mark.parametrize("entries", [1 << 22, 40, 1])
def test_resamples_drawn_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    values = np.random.default_rng(0).normal(size=(12, 3))
    sums = np.stack([np.full(12, 3.0), values.sum(axis=1)], axis=1)
    whole = ClusterIntervals(12, resamples=200, method="percentile").interval(sums, mean)
    monkeypatch.setattr(intervals_module, "_ENTRIES", entries)
    parts = ClusterIntervals(12, resamples=200, method="percentile").interval(sums, mean)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


def test_resamples_of_many_groups_follow_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn one by one: each resample has G groups, each group is in it once on average, with variance 1 - 1/G."""
    drawn = np.concatenate(ClusterIntervals(5000, resamples=50)._counts)
    assert drawn.shape == (50, 5000) and (drawn.sum(axis=1, dtype=np.int64) == 5000).all()
    assert drawn.astype(float).var() == pytest.approx(1 - 1 / 5000, rel=0.02)
    values = np.random.default_rng(1).normal(size=5000)
    sums = np.stack([np.ones(5000), values], axis=1)
    ends = []
    for many in (4096, 1 << 20):
        monkeypatch.setattr(intervals_module, "_MANY", many)
        found = ClusterIntervals(5000, resamples=1000, method="percentile").interval(sums, mean)
        ends.append((found.low, found.high))
    assert ends[0] == pytest.approx(ends[1], abs=0.15 * (ends[1][1] - ends[1][0]))
    assert ends[0] == pytest.approx(values.mean() + np.array([-1.96, 1.96]) / math.sqrt(5000), abs=0.003)
