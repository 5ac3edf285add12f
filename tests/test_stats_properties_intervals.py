"""Properties of intervals, slopes, ranks and tail probabilities: order, names, scale, and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    LOG_MINUS_LOG,
    METHODS,
    ClusterIntervals,
    Interval,
    Scale,
    group_sums,
    interval_reasons,
    mean,
    root_mean,
)
from mismatch_probe.stats.log_slopes import Slope, log_slopes
from mismatch_probe.stats.mass import at_least
from mismatch_probe.stats.ranks import rank_trend
from mismatch_probe.stats.student import t_cdf, t_quantile
from tests.properties import SCALES, SEEDS, Case, covers, same

FEW = settings(max_examples=30, deadline=None)


def ends(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


@covers(ClusterIntervals, Interval)
@FEW
@given(SEEDS, st.sampled_from(METHODS))
def test_an_interval_is_ordered_and_follows_scale_and_origin(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    values, group = rng.normal(size=60), np.arange(60) % 12
    intervals = ClusterIntervals(12, resamples=200, method=method)
    one = intervals.interval(group_sums([values], group, 12), mean)
    two = intervals.interval(group_sums([3 * values + 2], group, 12), mean)
    turned = intervals.interval(group_sums([-values], group, 12), mean)
    assert one.low <= one.high and same([3 * e + 2 for e in ends(one)], ends(two))
    assert same(turned.value, -one.value)
    assert method != "jackknife" or same([turned.low, turned.high], [-one.high, -one.low])
    shares = [one.share_below(x) for x in np.linspace(-1, 1, 9)]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    wide = ClusterIntervals(12, resamples=200, method=method, confidence=0.99)
    more = wide.interval(group_sums([values], group, 12), mean)
    assert more.low <= one.low and one.high <= more.high


@covers(ClusterIntervals)
@FEW
@given(SEEDS, SCALES)
def test_many_means_at_once_are_the_means_one_by_one(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.0)
    sums = group_sums([case.x, case.values()], case.group, case.groups + 1)
    intervals = ClusterIntervals(case.groups + 1)
    low, high = intervals.mean_intervals(sums[:, 0], sums[:, 1:])
    for column in (1, 2):
        one = intervals.interval(sums[:, [0, column]], mean, IDENTITY)
        at = column - 1
        tolerance = 1e-9 * scale
        assert same(one.high - one.low, high[at] - low[at], rel=1e-6, absolute=tolerance)
        assert same(one.value, (low[at] + high[at]) / 2, rel=1e-6, absolute=tolerance)


@covers(ClusterIntervals)
@FEW
@given(SEEDS)
def test_the_bootstrap_knows_its_seed_and_no_bias_of_a_mean(seed: int) -> None:
    case = Case(seed, nulls=0.0)
    sums = group_sums([case.x], case.group, case.groups)
    one, two = (ClusterIntervals(case.groups, seed=seed, resamples=50).bootstrap_bias(sums, mean) for _ in "ab")
    assert one == two
    equal = np.repeat(case.x[:1], case.n)
    assert ClusterIntervals(case.groups).bootstrap_bias(group_sums([equal], case.group, case.groups), mean) == (
        pytest.approx(0.0, abs=1e-12)
    )


@covers(Scale)
@FEW
@given(st.floats(1e-6, 1 - 1e-9), st.floats(1e-6, 1 - 1e-9))
def test_a_scale_is_monotone_and_goes_back(a: float, b: float) -> None:
    for scale in (IDENTITY, LOG, LOG_MINUS_LOG):
        x, y = (float(scale.forward(np.array(v))) for v in (a, b))
        assert scale.back(x) == pytest.approx(a, rel=1e-6)
        assert (x - y) * (a - b) * (1 if scale.increasing else -1) >= 0
        assert a >= scale.least


@covers(Scale, ClusterIntervals)
@FEW
@given(SEEDS, st.integers(1, 4))
def test_what_cannot_be_negative_has_no_negative_end(seed: int, filled: int) -> None:
    values = np.zeros(8)
    values[:filled] = np.random.default_rng(seed).exponential(size=filled)
    interval = ClusterIntervals(8).interval(group_sums([values], np.arange(8), 8), mean, LOG)
    assert 0 <= interval.low <= interval.value <= interval.high


@covers(group_sums, mean, root_mean)
@FEW
@given(SEEDS, SCALES, st.integers(1, 4))
def test_sums_of_shards_add_up_to_the_sums_of_all(seed: int, scale: float, shards: int) -> None:
    case = Case(seed, scale, nulls=0.0)
    order, size = case.order(), case.groups + 1
    parts = [group_sums([case.x[p], np.square(case.x[p])], case.group[p], size) for p in np.array_split(order, shards)]
    whole = group_sums([case.x, np.square(case.x)], case.group, size)
    assert same(sum(parts), whole, absolute=1e-9 * max(1.0, scale))
    assert whole[:, 0].sum() == case.n and not whole[-1].any()
    assert same(mean(whole.sum(axis=0)[:2]), case.x.mean(), absolute=1e-9 * max(1.0, scale))
    assert same(root_mean(whole.sum(axis=0)[[0, 2]]), math.sqrt(np.square(case.x).mean()))


@covers(interval_reasons)
@FEW
@given(st.lists(st.tuples(st.sampled_from([0.5, math.nan, math.inf]), st.sampled_from(["", "a", "b"])), max_size=6))
def test_every_value_without_an_interval_has_its_reason_told_once(drawn: list[tuple[float, str]]) -> None:
    found = {f"column_{at}": Interval(value, reason=reason) for at, (value, reason) in enumerate(drawn)}
    told = interval_reasons(found)
    assert len(told) == len(set(told)) and interval_reasons(dict(reversed(found.items()))) == told
    for name, interval in found.items():
        if math.isinf(interval.value):
            assert any(name in line and line.endswith(f": {interval.reason}") for line in told)
        elif interval.reason and not math.isnan(interval.value):
            assert f"no interval: {interval.reason}" in told


@covers(t_cdf, t_quantile)
@FEW
@given(st.floats(-40, 40), st.integers(1, 3000), st.floats(0.001, 0.999))
@example(0.0, 1, 0.5)
@example(-40.0, 3000, 0.999)
def test_students_t_is_a_symmetric_distribution_and_its_quantile_the_way_back(x: float, df: int, p: float) -> None:
    assert t_cdf(x, df) + t_cdf(-x, df) == pytest.approx(1.0, abs=1e-12)
    assert t_cdf(x, df) == pytest.approx(scipy.stats.t.cdf(x, df), abs=1e-10)
    assert 0 <= t_cdf(x, df) <= t_cdf(x + 0.5, df) + 1e-12 and t_cdf(x, df) <= 1
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-9)


@covers(at_least)
@FEW
@given(st.integers(1, 60), st.floats(0.001, 0.999), st.integers(0, 60))
@example(30, 0.5, 0)
def test_the_binomial_tail_falls_from_one_to_zero(trials: int, p: float, count: int) -> None:
    value = at_least(count, trials, p)
    assert value == pytest.approx(scipy.stats.binom.sf(count - 1, trials, p), abs=1e-10)
    assert at_least(count + 1, trials, p) <= value <= 1
    assert count or value == pytest.approx(1.0)


@covers(rank_trend)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=6))
@example([1, 1])
@example([0, 1])
@example([3, 2, 1, 0])
def test_the_rank_test_counts_the_orders_that_are_as_extreme(values: list[int]) -> None:
    series = np.array(values, dtype=float)
    tau, chance = rank_trend(series)
    assert rank_trend(-series) == (pytest.approx(-tau), pytest.approx(chance))
    assert rank_trend(np.exp(series)) == (tau, chance)
    n = len(values)
    pairs = n * (n - 1) / 2
    ups = abs(tau) * pairs
    scores = [
        sum(np.sign(b - a) for a, b in itertools.combinations(order, 2)) for order in itertools.permutations(range(n))
    ]
    assert chance == pytest.approx(np.mean([abs(score) >= ups - 1e-9 for score in scores]))


@covers(rank_trend)
@settings(max_examples=10, deadline=None)
@given(SEEDS, st.sampled_from([61, 75, 150]), st.sampled_from([-0.01, 0.0, 0.005]))
def test_the_rank_test_of_a_long_series_is_scipys(seed: int, n: int, slope: float) -> None:
    """Normal approximation with a continuity correction, against the exact count."""
    values = np.random.default_rng(seed).normal(size=n) + slope * np.arange(n)
    theirs = scipy.stats.kendalltau(np.arange(n), values, method="exact")
    tau, chance = rank_trend(values)
    assert tau == pytest.approx(theirs.statistic)
    assert chance == pytest.approx(theirs.pvalue, abs=3e-3) and 0 <= chance <= 1


@covers(log_slopes, Slope)
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.floats(0.1, 10), st.floats(0.5, 3))
def test_slopes_follow_the_covariates_scale_and_no_common_factor(seed: int, factor: float, stretch: float) -> None:
    rng = np.random.default_rng(seed)
    rows = 24
    kind, cluster = np.arange(rows) % 2, np.arange(rows) // 2
    counts, covariate = rng.integers(1, 9, size=rows).astype(float), rng.normal(size=(rows, 1))
    sums = counts * np.exp(0.5 * covariate[:, 0] + kind) * rng.exponential(size=rows)
    (base,) = log_slopes(counts, sums, kind, covariate, [(cluster, 3)])
    order = rng.permutation(rows)
    (moved,) = log_slopes(counts[order], sums[order], kind[order], covariate[order], [(11 - cluster[order], 3)])
    (scaled,) = log_slopes(counts, factor * sums, kind, covariate, [(cluster, 3)])
    (stretched,) = log_slopes(counts, sums, kind, stretch * covariate, [(cluster, 3)])
    for other in (moved, scaled, stretched.times(stretch)):
        assert same(base.value, other.value, rel=1e-5, absolute=1e-7)
        assert same(base.reach(0.95), other.reach(0.95), rel=1e-4) and base.errors[0][1] == 12 - 3
    assert base.reach(0.9) < base.reach(0.99) and base.times(-1.0).reach(0.9) == base.reach(0.9)
    assert Slope(1.0, ()).reach(0.9) == math.inf
