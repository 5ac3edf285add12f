"""How the lag grows with the version lag: planted walks and drifts, and what cannot be told."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.growth import StepLag, lag_growth, step_lag


def moving(rng: np.random.Generator, drift: float, walk: float, steps: int = 10, ages: int = 1) -> list[StepLag]:
    """Tokens of 12 groups: each update moves a token's log-prob by its own drift and by a new random amount.

    Step k holds tokens of version lags k + 1 to k + ``ages``.
    """
    found = []
    for step in range(steps):
        group = np.repeat(np.arange(12), 30)
        age = step + 1 + rng.integers(0, ages, size=360)
        scale = np.exp(0.2 * rng.normal(size=12))[group]
        lag = scale * (drift * age * rng.normal(size=360) + walk * np.sqrt(age) * rng.normal(size=360))
        found.append(step_lag(step, lag, age, group, 12))
    return found


@pytest.mark.parametrize(("ages", "steps"), [(1, 10), (4, 10), (8, 4)])
def test_a_walk_is_linear_and_a_drift_quadratic(ages: int, steps: int) -> None:
    rng = np.random.default_rng(1)
    walk = lag_growth(moving(rng, 0.0, 0.1, steps, ages))
    drift = lag_growth(moving(rng, 0.1, 0.0, steps, ages))
    assert (walk.answer, drift.answer) == ("linear", "quadratic")
    assert walk.low <= 1 <= walk.high < 2 and 1 < drift.low <= 2 <= drift.high
    assert walk.tokens == 360 * steps and f"over lags 1 to {steps + ages - 1}" in walk.sentence


def test_half_walk_half_drift_is_undecided_and_a_third_power_neither() -> None:
    rng = np.random.default_rng(2)
    mixed = lag_growth(moving(rng, 0.1, 0.25, steps=12))
    assert mixed.answer == "undecided" and 1 < mixed.estimate < 2
    cubic = []
    for step in moving(rng, 0.1, 0.0):
        cubic.append(StepLag(step.step, step.versions, step.counts, step.squares * step.versions))
    found = lag_growth(cubic)
    assert found.answer == "undecided" and found.low > 2 and "it is neither" in found.sentence


def test_intervals_cover_the_exponent_when_steps_have_their_own_size() -> None:
    rng = np.random.default_rng(3)
    hits, answers = 0, Counter[str]()
    for _ in range(100):
        steps = [
            StepLag(s.step, s.versions, s.counts, s.squares * math.exp(0.3 * rng.normal()))
            for s in moving(rng, 0.0, 0.1, steps=12)
        ]
        found = lag_growth(steps)
        hits += found.low <= 1 <= found.high
        answers[found.answer] += 1
    assert hits / 100 >= 0.88 and answers["linear"] >= 80 and answers["quadratic"] == 0


def test_exact_powers_give_the_exact_exponent() -> None:
    versions = np.array([1, 2, 5, 9])
    counts = np.full((3, 4), 7.0)
    steps = [StepLag(k, versions, counts, counts * versions**1.5 * (1 + 0.1 * k)) for k in range(3)]
    found = lag_growth(steps)
    assert found.estimate == pytest.approx(1.5, abs=1e-9) and found.low <= 1.5 <= found.high


def test_tokens_without_lag_with_a_newer_sampler_or_null_are_left_out() -> None:
    lag, age = np.array([0.0, 1.0, np.nan, 2.0, 3.0]), np.array([0, -1, 2, 2, 4])
    step = step_lag(0, lag, age, np.array([0, 0, 0, 0, 1]), 2)
    assert step.versions.tolist() == [2, 4]
    assert step.counts.tolist() == [[1, 0], [0, 1]] and step.squares.tolist() == [[4, 0], [0, 9]]


@given(seed=st.integers(0, 2**32 - 1))
def test_order_and_names_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, two = [], []
    for step in range(3):
        lag, age, group = rng.normal(size=30), rng.integers(0, 6, size=30), rng.integers(0, 5, size=30)
        one.append(step_lag(step, lag, age, group, 5))
        order, names = rng.permutation(30), rng.permutation(6)
        two.append(step_lag(step, lag[order], age[order], names[group[order]], 6))
    first, second = lag_growth(one), lag_growth(two[::-1])
    assert (first.answer, first.reason, first.tokens) == (second.answer, second.reason, second.tokens)
    for name in ("estimate", "low", "high"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-6, abs=1e-8, nan_ok=True)


def test_lags_of_ten_thousand_nats_stay_finite() -> None:
    rng = np.random.default_rng(4)
    age = np.tile(np.arange(1, 6), 20)
    lag = np.where(rng.random(100) < 0.1, 1e4, rng.normal(size=100)) * age
    found = lag_growth([step_lag(k, lag, age, np.arange(100) // 20, 5) for k in range(4)])
    assert math.isfinite(found.estimate) and math.isfinite(found.low) and math.isfinite(found.high)


def test_what_cannot_be_answered_is_null_with_the_reason() -> None:
    two = moving(np.random.default_rng(5), 0.1, 0.1, steps=2)
    found = lag_growth(two)
    assert found.answer == "" and math.isnan(found.estimate) and "2 different version lags" in found.reason
    assert "0 different version lags" in lag_growth([]).sentence
    still = [StepLag(k, np.array([1, 2, 3]), np.ones((2, 3)), np.zeros((2, 3))) for k in range(3)]
    assert lag_growth(still).reason == "L is 0 at every token"
