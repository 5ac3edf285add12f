"""Does the lag feed on itself? Planted series, the interval's coverage near b = 0, and what cannot be told."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from mismatch_probe.stats.feedback import StepBias, feedback


def series(rng: np.random.Generator, n: int, b: float, noise: float, start: float = 0.0) -> list[StepBias]:
    """z moves by b z plus noise a step."""
    z = [start]
    for _ in range(n - 1):
        z.append(z[-1] * (1 + b) + noise * rng.normal())
    return [StepBias(k, math.exp(value), 1.0, 10) for k, value in enumerate(z)]


def test_planted_loops_are_found_and_so_are_their_opposites() -> None:
    rng = np.random.default_rng(1)
    loop = feedback(series(rng, 40, 0.1, 0.1, start=0.5))
    assert loop.answer == "amplifying" and loop.low < 0.1 < loop.high
    level = feedback(series(rng, 40, -1.0, 0.1))
    assert level.answer == "damped" and level.low < -1 < level.high
    assert "the larger, the faster it grows" in loop.sentence and "comes a smaller one" in level.sentence
    assert (loop.steps, loop.tokens) == (40, 400)


@pytest.mark.parametrize(("n", "b"), [(10, 0.0), (17, 0.0), (17, -0.5), (40, 0.05)])
def test_the_interval_covers_where_least_squares_does_not(n: int, b: float) -> None:
    rng = np.random.default_rng(2)
    hits, answers = 0, Counter[str]()
    for _ in range(60):
        found = feedback(series(rng, n, b, 0.2, start=0.5))
        hits += found.low <= b <= found.high
        answers[found.answer] += 1
    assert hits >= 52
    if b <= 0:
        assert answers["amplifying"] <= 4


def test_growth_that_the_version_lag_explains_is_no_feedback() -> None:
    """The bias follows the age of the weights, with noise: its growth is largest while it is small."""
    rng = np.random.default_rng(3)
    steps = [StepBias(k, k * math.exp(0.1 * rng.normal()), float(k), 1) for k in range(1, 25)]
    blind = feedback([StepBias(s.step, s.total_variation, 1.0, 1) for s in steps])
    seeing = feedback(steps)
    assert (blind.answer, seeing.answer) == ("damped", "undecided")


def test_the_longest_stretch_of_consecutive_steps_counts() -> None:
    rng = np.random.default_rng(4)
    steps = series(rng, 12, -0.5, 0.2)
    around = [
        StepBias(-9, 1.0, 1.0, 10),
        StepBias(12, 0.0, 0.0, 10),
        StepBias(13, 1.0, 1.0, 10),
        StepBias(14, math.nan, 1.0, 10),
    ]
    found = feedback([*around, *steps[::-1]])
    assert found == feedback(steps) and found.steps == 12


def test_the_same_seed_gives_the_same_interval_and_confidence_widens_it() -> None:
    steps = series(np.random.default_rng(5), 20, -0.5, 0.2)
    found = feedback(steps, seed=3)
    assert found == feedback(steps, seed=3) and found.estimate == feedback(steps, seed=4).estimate
    wide = feedback(steps, seed=3, confidence=0.99)
    assert wide.low < found.low < found.high < wide.high


def test_least_squares_is_numpys() -> None:
    steps = series(np.random.default_rng(6), 15, -0.4, 0.3)
    z = np.log([s.total_variation for s in steps])
    assert feedback(steps).estimate == pytest.approx(np.polyfit(z[:-1], np.diff(z), 1)[0], rel=1e-9)


def test_extreme_biases_stay_in_bounds() -> None:
    rng = np.random.default_rng(7)
    steps = [StepBias(k, float(10.0 ** rng.uniform(-300, 0)), float(k % 3), 1) for k in range(12)]
    found = feedback(steps)
    assert found.answer and math.isfinite(found.estimate) and not math.isnan(found.low)


def test_what_cannot_be_answered_is_null_with_the_reason() -> None:
    steps = series(np.random.default_rng(8), 8, -0.5, 0.2)
    assert feedback(steps).answer
    found = feedback(steps[:7])
    assert found.answer == "" and "7 exact steps in a row have a lag, 8 are needed" in found.reason
    assert "0 exact steps" in feedback([]).sentence
    same = feedback([StepBias(k, 0.1, 1.0, 1) for k in range(9)])
    assert same.answer == "" and "the same at every step" in same.reason
    every_other = [StepBias(2 * s.step, s.total_variation, 1.0, 1) for s in steps]
    assert feedback(every_other).answer == ""
