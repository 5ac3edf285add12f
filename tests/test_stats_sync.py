from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.sync import Interval, LagEss, ReplayedStep, ess_by_lag, longest_interval, replay
from tests.properties import covers


def stale(values: list[float], reach: float = 0.0) -> list[LagEss]:
    """A run that is never resynchronised: at step k the lag is k."""
    return [LagEss(k, k, value, value - reach, value + reach) for k, value in enumerate(values)]


def test_the_longest_interval_is_where_the_ess_first_falls_below() -> None:
    found = longest_interval(stale([1.0, 0.9, 0.7, 0.55, 0.4, 0.6], reach=0.1), 0.5)
    assert found is not None
    # Lags 0 to 3 hold, so every fourth update; with the lower ends lags 0 to 2, with the upper ones 0 to 3.
    assert (found.updates, found.low, found.high, found.longest_seen) == (4, 3, None, 6)
    assert longest_interval(stale([1.0, 0.3]), 0.5) is not None
    assert longest_interval([], 0.5) is None


def test_a_run_that_never_falls_below_says_only_what_it_saw() -> None:
    found = longest_interval(stale([1.0, 0.9, 0.8]), 0.5)
    assert found is not None
    assert (found.updates, found.low, found.high, found.longest_seen) == (None, None, None, 3)


def test_an_ess_below_at_lag_0_allows_no_interval() -> None:
    found = longest_interval([LagEss(0, 0, 0.2)], 0.5)
    assert found is not None
    assert found.updates == 0


def test_unknown_ends_fall_back_on_the_estimate() -> None:
    found = longest_interval([LagEss(0, 0, 1.0), LagEss(1, 1, 0.4)], 0.5)
    assert found is not None
    assert (found.updates, found.low, found.high) == (1, 1, 1)


def test_steps_of_one_lag_count_by_their_median() -> None:
    steps = [LagEss(k, 1, value, value, value) for k, value in enumerate((0.9, 0.6, 0.1))]
    assert ess_by_lag(steps)[1].ess == 0.6


def test_the_replay_starts_the_lag_anew_after_each_resync() -> None:
    found = replay(stale([1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01]), 0.5)
    # Lag 3 is the first below 1/2: resync after step 3, then after 3 more updates, and again.
    assert [step.lag for step in found] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [step.step for step in found if step.resync] == [3, 7]
    assert [step.ess for step in found] == [1.0, 0.8, 0.6, 0.4, 1.0, 0.8, 0.6, 0.4, 1.0]
    assert [step.recorded_lag for step in found] == list(range(9))


def test_strided_steps_count_updates_not_steps() -> None:
    found = replay([LagEss(0, 0, 1.0), LagEss(10, 10, 0.3), LagEss(20, 20, 0.1)], 0.5)
    # After step 10 the sampler holds version 11, so at step 20 it is 9 behind: judged as at lag 10, the next seen.
    assert [(step.lag, step.resync) for step in found] == [(0, False), (10, True), (9, True)]
    assert found[2].ess == 0.3


def test_a_synchronous_run_is_left_alone() -> None:
    assert not any(step.resync for step in replay([LagEss(k, 0, 1.0) for k in range(5)], 0.5))


@covers(replay, ReplayedStep, LagEss)
@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40), st.floats(0.05, 0.95))
def test_a_replay_never_adds_lag_and_resyncs_only_below_the_threshold(values: list[float], threshold: float) -> None:
    found = replay(stale([1.0, *values]), threshold)
    for step in found:
        assert 0 <= step.lag <= step.recorded_lag
        assert not step.resync or step.ess < threshold
    first = next((step.step for step in found if step.resync), None)
    below = [k for k, value in enumerate([1.0, *values]) if value < threshold]
    assert first == (below[0] if below else None)


@covers(longest_interval, ess_by_lag, Interval)
@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20))
def test_the_interval_does_not_depend_on_the_order_of_steps(values: list[float]) -> None:
    steps = stale(values)
    assert longest_interval(steps, 0.5) == longest_interval(steps[::-1], 0.5)


@pytest.mark.parametrize("value", [0.4, 0.5, 0.6])
def test_at_the_threshold_the_ess_still_holds(value: float) -> None:
    found = longest_interval([LagEss(0, 0, 1.0), LagEss(1, 1, value)], 0.5)
    assert found is not None
    assert (found.updates is None) == (value >= 0.5)
    assert not math.isnan(found.longest_seen)
