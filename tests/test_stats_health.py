from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.health import length_at_half_ess, level_log_weights, predicted_sequence_ess, weight_health
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.tails import pareto_k


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


def test_health_names_every_level_and_counts_extremes() -> None:
    levels = Levels(np.arange(100), np.arange(100) // 2)
    x = np.random.default_rng(3).normal(0, 0.1, size=100)
    x[:3], x[3:10], x[10] = 1.0, -0.5, math.nan
    found = weight_health("lag", x, levels)
    assert found["share_beyond_ln2_lag"] == 3 / 99
    band = np.abs(x[~np.isnan(x)]) > math.log(1.25)
    assert found["share_outside_band_lag"] == band.mean() >= 10 / 99
    assert found["pareto_k_lag_token"] == pareto_k(x)
    assert {f"max_weight_share_lag_{level}" for level in ("token", "sequence", "prompt")} <= set(found)
    nothing = weight_health("lag", np.full(100, math.nan), levels)
    assert all(math.isnan(value) for value in nothing.values()) and "share_beyond_ln2_lag" not in nothing
