from __future__ import annotations

import math

import numpy as np
import pytest
from arviz_stats.base import array_stats
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.tails import (
    chi_square,
    max_weight_share,
    pareto_k,
    pareto_k_limit,
    perplexity_ess,
    second_moment,
)


@pytest.mark.parametrize("n", [25, 100, 225, 226, 1000, 20_000])
@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_pareto_k_agrees_with_arviz(n: int, scale: float) -> None:
    log_weights = np.random.default_rng(n).normal(scale=scale, size=n)
    _, oracle = array_stats.psislw(-log_weights, r_eff=1.0)
    assert pareto_k(log_weights) == pytest.approx(float(oracle), abs=1e-9)


@pytest.mark.parametrize("shape", [0.3, 0.7, 1.0])
def test_pareto_k_recovers_a_planted_tail(shape: float) -> None:
    uniform = np.random.default_rng(0).random(200_000)
    assert pareto_k(-shape * np.log(uniform)) == pytest.approx(
        shape, abs=0.12
    )  # two standard errors of 1,341 tail weights


def test_pareto_k_refuses_what_has_no_tail() -> None:
    assert math.isnan(pareto_k(np.zeros(500)))
    assert math.isnan(pareto_k(np.random.default_rng(0).normal(size=24)))


def test_the_limit_depends_on_the_sample() -> None:
    assert pareto_k_limit(10_000) == 0.7
    assert pareto_k_limit(100) == pytest.approx(0.5)


def test_perplexity_and_share_of_known_weights() -> None:
    weights = np.array([0.5, 0.25, 0.25])
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert perplexity_ess(np.log(weights)) == pytest.approx(math.exp(entropy) / 3)
    assert max_weight_share(np.log(weights) + 100) == pytest.approx(0.5)
    assert perplexity_ess(np.zeros(9)) == 1.0 and max_weight_share(np.zeros(4)) == 0.25
    assert math.isnan(perplexity_ess(np.zeros(0))) and math.isnan(max_weight_share(np.array([math.nan])))


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=60))
def test_the_order_of_the_three(values: list[float]) -> None:
    log_weights = np.array(values)
    n = len(log_weights)
    assert 1 / max_weight_share(log_weights) / n <= ess(log_weights) * (1 + 1e-9)
    assert ess(log_weights) <= perplexity_ess(log_weights) * (1 + 1e-9)


def test_one_weight_beyond_all_others_is_an_infinite_tail() -> None:
    assert pareto_k(np.random.default_rng(0).normal(scale=1000, size=128)) == math.inf


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40))
def test_chi_square_is_one_over_ess_minus_one(values: list[float]) -> None:
    log_weights = np.array([*values, math.nan])
    assert 1 / (1 + chi_square(log_weights)) == pytest.approx(ess(log_weights), rel=1e-9)


def test_chi_square_and_second_moment_of_log_normal_weights() -> None:
    """Mean 1: E w^2 = e^(s^2), so chi-square is e^(s^2) - 1."""
    log_weights = np.random.default_rng(8).normal(-0.125, 0.5, size=400_000)
    assert chi_square(log_weights) == pytest.approx(math.expm1(0.25), rel=0.02)
    assert second_moment(log_weights) == pytest.approx(math.exp(0.25), rel=0.02)
    assert second_moment(log_weights + 3) == pytest.approx(second_moment(log_weights) * math.exp(6))


def test_second_moments_beyond_float64_are_null_and_equal_weights_have_none() -> None:
    assert math.isnan(second_moment(np.array([0.0, 400.0]))) and second_moment(np.array([-1e4, 0.0])) == 0.5
    assert chi_square(np.full(7, -1e4)) == 0 and math.isnan(chi_square(np.array([math.nan])))
    assert math.isnan(second_moment(np.zeros(0)))
