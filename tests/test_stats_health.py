from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.health import level_log_weights, weight_health
from mismatch_probe.stats.intervals import IDENTITY, ClusterIntervals, Interval, Scale, Statistic
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.tails import chi_square, max_weight_share, pareto_k, perplexity_ess, second_moment
from mismatch_probe.stats.weights import (
    covariance_interval,
    length_at_half_ess,
    predicted_sequence_ess,
    token_intervals,
    weight_intervals,
)


def sequences(n: int, length: int) -> Levels:
    return Levels(np.repeat(np.arange(n), length), np.arange(n) // 4)


def test_the_two_line_law_holds_for_independent_normals() -> None:
    x = np.random.default_rng(0).normal(-0.0005, 0.045, size=4000 * 200)
    levels = sequences(4000, 200)
    measured = ess(level_log_weights(x, levels)["sequence"])
    assert predicted_sequence_ess(x, levels) == pytest.approx(math.exp(-200 * 0.045**2), rel=0.01)
    assert measured == pytest.approx(predicted_sequence_ess(x, levels), rel=0.05)


def test_correlated_tokens_fall_below_the_law() -> None:
    rng = np.random.default_rng(1)
    levels = sequences(2000, 50)
    x = np.repeat(rng.normal(0, 0.02, size=2000), 50) + rng.normal(0, 0.04, size=100_000)
    assert ess(level_log_weights(x, levels)["sequence"]) < 0.6 * predicted_sequence_ess(x, levels)


def test_the_length_at_half() -> None:
    sigma = 0.045
    x = np.random.default_rng(2).normal(0, sigma, size=400_000)
    assert length_at_half_ess(x) == pytest.approx(math.log(2) / sigma**2, rel=0.01)
    assert length_at_half_ess(np.zeros(5)) == math.inf and math.isnan(length_at_half_ess(np.zeros(0)))


def test_extreme_tokens_are_counted() -> None:
    levels = Levels(np.arange(100), np.arange(100) // 2)
    x = np.random.default_rng(3).normal(0, 0.1, size=100)
    x[:3], x[3:10], x[10] = 1.0, -0.5, math.nan
    found = token_intervals(x, levels, ClusterIntervals(50))
    assert found["share_beyond_ln2"].value == 3 / 99
    band = np.abs(x[~np.isnan(x)]) > math.log(1.25)
    assert found["share_outside_band"].value == band.mean() >= 10 / 99
    assert weight_health(x) == {"pareto_k": pareto_k(x), "max_weight_share": max_weight_share(x)}
    nothing = token_intervals(np.full(100, math.nan), levels, ClusterIntervals(50))
    assert all(math.isnan(interval.value) and interval.reason == "no data" for interval in nothing.values())
    assert all(math.isnan(value) for value in weight_health(np.full(100, math.nan)).values())


def test_intervals_stand_around_what_the_plain_functions_give() -> None:
    levels = sequences(64, 20)
    x = np.random.default_rng(5).normal(0.3, 0.4, size=64 * 20)
    x[7] = math.nan
    intervals = ClusterIntervals(16)
    found = weight_intervals(x, levels.group, intervals)
    plain = {"ess": ess, "perplexity_ess": perplexity_ess, "chi_square": chi_square, "second_moment": second_moment}
    for name, function in plain.items():
        interval = found[name]
        assert interval.value == pytest.approx(function(x), rel=1e-12), name
        assert interval.low < interval.value < interval.high, name
    law = token_intervals(x, levels, intervals)
    assert law["predicted_ess"].value == pytest.approx(predicted_sequence_ess(x, levels), rel=1e-12)
    assert law["half_ess_length"].value == pytest.approx(length_at_half_ess(x), rel=1e-12)
    assert law["half_ess_length"].low < math.log(2) / 0.4**2 < law["half_ess_length"].high
    # Chi-square is above 1 where the ESS is below 1/2, for the ends and for the confidence as well.
    assert found["chi_square"].high == pytest.approx(1 / found["ess"].low - 1)
    for share in (0.5, found["ess"].value, 0.95):
        below = found["chi_square"].share_below(1 / share - 1)
        assert below == pytest.approx(1 - found["ess"].share_below(share))


def test_the_second_moment_beyond_float64_is_null_with_the_reason() -> None:
    found = weight_intervals(np.array([400.0, 0.0, 1.0, 2.0]), np.arange(4), ClusterIntervals(4))["second_moment"]
    assert math.isnan(found.value) and found.reason == "beyond float64"
    top = weight_intervals(np.array([354.6, 0.0, 1.0, 2.0]), np.arange(4), ClusterIntervals(4))["second_moment"]
    assert math.isfinite(top.value) and top.high == math.inf and top.low >= 0


def test_covariance_is_numpys_and_covers_a_planted_one() -> None:
    rng = np.random.default_rng(6)
    covered = 0
    for _ in range(100):
        one = rng.normal(5, 1, size=400)
        two = -0.5 * one + rng.normal(size=400)
        interval = covariance_interval(one, two, np.arange(400) % 20, ClusterIntervals(20))
        covered += interval.low <= -0.5 <= interval.high
    assert interval.value == pytest.approx(np.cov(one, two, bias=True)[0, 1])
    assert covered >= 88
    one[3], two[5] = math.nan, math.nan
    some = covariance_interval(one, two, np.arange(400) % 20, ClusterIntervals(20))
    keep = ~np.isnan(one) & ~np.isnan(two)
    assert some.value == pytest.approx(np.cov(one[keep], two[keep], bias=True)[0, 1])


def test_a_log_ratio_that_does_not_vary_has_an_infinite_length() -> None:
    found = token_intervals(np.zeros(8), sequences(4, 2), ClusterIntervals(1))["half_ess_length"]
    assert found.value == math.inf and "does not vary" in found.reason and math.isnan(found.low)


class LeftOut(ClusterIntervals):
    """Keeps what every statistic is without each group."""

    def interval(self, sums: np.ndarray, statistic: Statistic, scale: Scale = IDENTITY) -> Interval:
        self.each = statistic(sums.sum(axis=0) - sums)
        return super().interval(sums, statistic, scale)


def test_without_a_group_a_moment_is_that_of_the_others() -> None:
    """Moments are summed about the mean of all; about that of the rest they must be right as well."""
    rng = np.random.default_rng(7)
    levels = sequences(24, 5)
    x = rng.normal(size=120) + levels.group
    y = rng.normal(size=120) - 2.0 * levels.group
    kept = LeftOut(6)
    covariance_interval(x, y, levels.group, kept)
    rest = [levels.group != g for g in range(6)]
    assert kept.each == pytest.approx([np.cov(x[r], y[r], bias=True)[0, 1] for r in rest])
    token_intervals(0.1 * x, levels, kept)
    assert kept.each == pytest.approx([math.log(2) / (0.1 * x[r]).var() for r in rest])
