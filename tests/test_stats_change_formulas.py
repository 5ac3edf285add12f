"""The parts of the search for changes against least squares and differences spelled out, at unequal spacing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats import change
from mismatch_probe.stats.change import MIN_SIDE, WINDOW, find_changes

AT = np.cumsum([0.0, 1, 3, 1, 2, 5, 1, 1, 4, 2, 1, 3, 1, 1, 2, 6, 1, 2, 1, 1, 3])
N = len(AT)


def design(places: list[int], last: int) -> np.ndarray:
    """Level, slope, jump; time from the middle of the gap."""
    middle = (AT[last] + AT[last + 1]) / 2
    return np.array([[1.0, AT[p] - middle, float(p > last)] for p in places])


def test_the_search_has_the_sizes_that_it_states() -> None:
    assert (MIN_SIDE, WINDOW, change.MIN_STEPS, change.DEFAULT_RATE) == (3, 8, 8, 0.01)


def test_noise_levels_are_those_of_differences() -> None:
    y = np.random.default_rng(0).normal(size=N)
    second = []
    for k in range(1, N - 1):
        share = (AT[k] - AT[k - 1]) / (AT[k + 1] - AT[k - 1])
        line = y[k - 1] + share * (y[k + 1] - y[k - 1])
        second.append((y[k] - line) / math.sqrt(1 + share**2 + (1 - share) ** 2))
    steps = np.diff(AT)
    slope = np.median([(y[k + 1] - y[k]) / steps[k] for k in range(N - 1)])
    first = [(y[k + 1] - y[k] - slope * steps[k]) / math.sqrt(2) for k in range(N - 1)]

    def trimmed(errors: list[float]) -> float:
        smallest = sorted(e * e for e in errors)[: math.ceil(2 * len(errors) / 3)]
        return math.sqrt(sum(smallest) / len(smallest))

    noise, wander = change._levels_of_noise(AT, y[None])
    assert (noise[0], wander[0]) == pytest.approx((trimmed(second), trimmed(first)), rel=1e-12)


def test_scores_are_jumps_over_their_own_errors() -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(size=N)
    y[11:] += 4.0
    spacing = tuple(np.diff(AT).tolist())
    lasting, sudden = change._scores(change._contrasts(spacing), y[None], np.array([0.5]), np.array([2.0]))
    assert lasting.shape == (1, N - 2 * MIN_SIDE + 1)
    for gap in range(lasting.shape[1]):
        last = gap + MIN_SIDE - 1
        half = min(WINDOW, last + 1, N - 1 - last)
        window = list(range(last + 1 - half, last + 1 + half))
        jumps = []
        for left_out in (None, last, last + 1):
            places = [p for p in window if p != left_out]
            x = design(places, last)
            fit = np.linalg.lstsq(x, y[places], rcond=None)[0]
            jumps.append(fit[2] / math.sqrt(np.linalg.inv(x.T @ x)[2, 2]))
        x = design(window, last)
        # The difference across the gap less the fitted slope, as weights of the values.
        weights = np.zeros(N)
        weights[window] = -(AT[last + 1] - AT[last]) * (np.linalg.inv(x.T @ x) @ x.T)[1]
        weights[last + 1] += 1
        weights[last] -= 1
        step = weights @ y / math.sqrt(weights @ weights)
        agree = len({math.copysign(1, j) for j in (*jumps, step)}) == 1
        assert lasting[0, gap] == pytest.approx(min(abs(j) for j in jumps) / 0.5 if agree else 0.0, abs=1e-9)
        assert sudden[0, gap] == pytest.approx(abs(step) / 2.0 if agree else 0.0, abs=1e-9)


def test_both_ends_of_a_change_are_those_of_the_fitted_lines() -> None:
    rng = np.random.default_rng(2)
    y = 3.0 + 0.25 * AT + 1e-3 * rng.normal(size=N)
    y[10:] -= 7.0
    found = find_changes(AT.astype(np.int64), y)
    only = max(found.changes, key=lambda c: c.score)
    assert (only.before_step, only.after_step) == (AT[9], AT[10])
    assert only.before == pytest.approx(3 + 0.25 * AT[9], abs=5e-3)
    assert only.after == pytest.approx(3 + 0.25 * AT[10] - 7, abs=5e-3)
    assert only.score == found.largest_score > 1


@pytest.mark.parametrize("last", [2, 5, 9, 17])
def test_ends_are_fitted_in_the_window_alone(last: int) -> None:
    y = np.random.default_rng(5).normal(size=N)
    half = min(WINDOW, last + 1, N - 1 - last)
    window = list(range(last + 1 - half, last + 1 + half))
    fit = np.linalg.lstsq(design(window, last), y[window], rcond=None)[0]
    assert change._ends(AT, y, last) == pytest.approx(tuple(design([last, last + 1], last) @ fit))


def test_a_smaller_change_after_a_larger_one_is_found_as_well() -> None:
    values = np.random.default_rng(3).normal(size=45)
    values[15:] += 30
    values[32:] += 12
    assert [c.before_step for c in find_changes(np.arange(45), values).changes if c.score > 1.5] == [14, 31]


def test_thresholds_are_quantiles_of_simulated_scores_at_these_steps() -> None:
    spacing = tuple(np.diff(AT[:10]).tolist())
    rng = np.random.default_rng(3)
    series = rng.normal(size=(4000, 10))
    scores = change._scores(change._contrasts(spacing), series, *change._levels_of_noise(AT[:10], series))
    for test in (0, 1):
        above = (scores[test].max(axis=1) > change._threshold(spacing, 0.1, test)).mean()
        assert above == pytest.approx(0.1, abs=0.02)


def test_eight_steps_are_enough_and_a_rate_of_one_is_none() -> None:
    steps, values = np.arange(8), np.random.default_rng(4).normal(size=8)
    assert find_changes(steps, values).reason == "" and find_changes(steps[:7], values[:7]).reason != ""
    with pytest.raises(ValueError, match="not between"):
        find_changes(steps, values, 1.0)
    # One value off a line is noise enough for some differences, not for most.
    line = 5.0 * np.arange(20)
    line[4] += 1.0
    assert "no noise level" in find_changes(np.arange(20), line).reason
