from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.intervals import LOG_MINUS_LOG, ClusterIntervals, Interval
from mismatch_probe.stats.stopping import SAFETY, look_confidence, look_sizes, why_stop
from tests.properties import covers


def test_looks_double_and_end_with_all_groups() -> None:
    assert look_sizes(100) == (8, 16, 32, 64, 100)
    assert look_sizes(8) == (8,)
    assert look_sizes(64, first=16) == (16, 32, 64)
    assert look_sizes(0) == ()
    with pytest.raises(ValueError, match="sees nothing"):
        look_sizes(8, 0)


@covers(look_sizes)
@given(st.integers(1, 5000), st.integers(1, 100))
def test_looks_grow_and_the_last_is_the_step(groups: int, first: int) -> None:
    sizes = look_sizes(groups, first)
    assert sizes[-1] == groups
    assert all(a < b for a, b in pairwise(sizes))


@covers(look_confidence, why_stop)
@given(st.floats(0.5, 0.999), st.integers(1, 30), st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.floats(0.01, 0.99))
def test_more_looks_ask_for_more_and_a_decided_interval_does_not_hold_the_threshold(
    confidence: float, looks: int, low: float, width: float, threshold: float
) -> None:
    assert confidence <= look_confidence(confidence, looks) <= look_confidence(confidence, looks + 1) < 1
    why = why_stop(Interval(low, low, low + width), threshold, 0.1)
    assert (why == "decided") == (not low <= threshold <= low + width)
    assert why != "narrow enough" or width <= 0.2


def test_the_permitted_error_is_shared_by_the_looks() -> None:
    assert look_confidence(0.95, 1) == 0.95
    assert 1 - look_confidence(0.95, 4) == pytest.approx(0.05 / (4 * SAFETY))


@pytest.mark.parametrize(
    ("low", "high", "why"),
    [
        (0.6, 0.9, "decided"),
        (0.1, 0.4, "decided"),
        (0.45, 0.55, ""),
        (0.49, 0.52, "narrow enough"),
        (math.nan, math.nan, ""),
        (0.5, 0.9, ""),
    ],
)
def test_a_look_is_the_last_where_the_interval_is_on_one_side_or_narrow(low: float, high: float, why: str) -> None:
    assert why_stop(Interval((low + high) / 2, low, high), 0.5, 0.02) == why


@pytest.mark.parametrize(("spread", "seed"), [(0.5, 1), (0.83, 2), (1.2, 3)])
def test_where_sampling_stops_the_interval_holds_the_full_answer(spread: float, seed: int) -> None:
    """Responses of a group share 30 % of their variance; true ESS .78, .50 and .24, 128 groups of 8."""
    rng, trials, held, groups = np.random.default_rng(seed), 200, 0, 128
    for _ in range(trials):
        shared = rng.normal(size=(groups, 1)) * math.sqrt(0.3)
        weights = np.exp(spread * (shared + rng.normal(size=(groups, 8)) * math.sqrt(0.7)))
        sums = np.stack([np.full(groups, 8.0), weights.sum(axis=1), (weights**2).sum(axis=1)], axis=1)
        order, sizes = rng.permutation(groups), look_sizes(groups)
        confidence = look_confidence(0.95, len(sizes))
        for size in sizes:
            made = ClusterIntervals(size, confidence=confidence)
            interval = made.interval(sums[order[:size]], ess_from_sums, LOG_MINUS_LOG)
            if why_stop(interval, 0.5, 0.02):
                break
        held += interval.low <= ess_from_sums(sums.sum(axis=0)) <= interval.high
    assert held >= 0.92 * trials
