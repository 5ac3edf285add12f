"""Sums over chunks against the same sums over everything at once."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.columns import with_ends
from mismatch_probe.stats.ess import ess, ess_from_sums
from mismatch_probe.stats.health import unit_health
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import Levels, Split, split
from mismatch_probe.stats.running import RunningSummary
from mismatch_probe.stats.stream import RunningComoment, RunningLargest, RunningWeights, Runs
from mismatch_probe.stats.summary import BiasVectors, summarise
from mismatch_probe.stats.terms import VOCABULARY, StepTokens

_VALUES = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=60)
_CHUNK = st.integers(1, 9)


def chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


@given(_VALUES, _CHUNK, st.integers(1, 20))
def test_the_largest_are_kept(values: list[float], size: int, count: int) -> None:
    array = np.array(values)
    running = RunningLargest(count)
    for part in chunks(len(array), size):
        running.add(array[part])
    assert np.sort(running.values())[-count:].tolist() == np.sort(array)[-count:].tolist()
    assert len(running.values()) <= max(2 * count, size) + count


@given(_VALUES, _CHUNK, st.integers(0, 99))
def test_covariance_of_chunks(values: list[float], size: int, seed: int) -> None:
    x = np.array(values)
    y = x + np.random.default_rng(seed).normal(size=len(x))
    running = RunningComoment()
    for part in chunks(len(x), size):
        running.add(x[part], y[part])
    expected = float(((x - x.mean()) * (y - y.mean())).mean())
    assert running.value() == pytest.approx(expected, rel=1e-9, abs=1e-12 * float(np.abs(x).max() ** 2 + 1))


def test_a_large_mean_takes_nothing_from_the_variance() -> None:
    x = 1e6 + np.random.default_rng(0).normal(size=10_000)
    running = RunningComoment()
    for part in chunks(len(x), 100):
        running.add(x[part], x[part])
    assert running.value() == pytest.approx(float(x.var()), rel=1e-9)
    assert math.isnan(RunningComoment().value())


@given(_VALUES, _CHUNK)
def test_weights_of_any_size_in_chunks(values: list[float], size: int) -> None:
    """Peaks that come late, early, thousands of nats apart: every number is that of all weights at once."""
    x = np.array(values)
    running = RunningWeights(3, len(x))
    group = np.arange(len(x)) % 3
    for part in chunks(len(x), size):
        running.add(x[part], Runs(np.arange(len(x))[part]), group[part])
    assert float(ess_from_sums(running.sums.sum(axis=0))) == pytest.approx(ess(x), rel=1e-9)
    assert running.sums[:, 0].tolist() == np.bincount(group, minlength=3).tolist()
    expected = unit_health(x)
    for name, value in running.health().items():
        assert value == pytest.approx(expected[name], rel=1e-8, abs=1e-9, nan_ok=True), name


def test_equal_weights_are_exactly_equal() -> None:
    running = RunningWeights(2, 1000)
    for _ in range(10):
        running.add(np.full(100, -1e4), Runs(np.arange(100)), np.arange(100) % 2)
    found = running.health()
    assert float(ess_from_sums(running.sums.sum(axis=0))) == found["perplexity_ess"] == 1
    assert found["chi_square"] == 0 and found["max_weight_share"] == 1 / 1000 and math.isnan(found["pareto_k"])
    assert running.variance == 0 and running.extremes() == {"share_beyond_ln2": 1, "share_outside_band": 1}


def made(seed: int, size: int, nulls: str, scale: float) -> StepTokens:
    """A step of eight sequences in four groups, one of each without tokens; the tokens of some are interleaved."""
    rng = np.random.default_rng(seed)
    sequence = rng.choice([0, 1, 2, 3, 4, 6], size=size)
    sequence = np.sort(sequence) if seed % 2 else sequence
    group = np.array([0, 0, 2, 2, 1, 1, 0, 3])
    sampler, stale, trainer = (rng.normal(-1, scale, size) for _ in range(3))
    for name, column in (("sampler", sampler), ("stale", stale), ("trainer", trainer)):
        if name in nulls:
            column[rng.random(size) < 0.3] = np.nan
    exact = {name: np.abs(rng.normal(0, 0.1, size)) + trainer * 0 + stale * 0 for name in VOCABULARY}
    return StepTokens(
        split=split(sampler, stale, trainer),
        levels=Levels(sequence, group),
        half=group[sequence] % 2,
        token_id=rng.integers(-1, 50, size),
        **exact,
        bias_lag_sums=None,
        bias_lag_tokens=np.zeros(2, dtype=np.int64),
    )


def cut(tokens: StepTokens, part: slice) -> StepTokens:
    """The tokens of one chunk."""
    arrays = {
        f.name: getattr(tokens, f.name)[part] for f in fields(tokens) if f.name in ("half", "token_id", *VOCABULARY)
    }
    values = (getattr(tokens.split, f.name)[part] for f in fields(Split))
    levels = Levels(tokens.levels.sequence[part], tokens.levels.group_of_sequence)
    return replace(tokens, split=Split(*values), levels=levels, **arrays)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1000),
    st.integers(1, 300),
    st.integers(1, 80),
    st.sampled_from(["", "sampler", "stale", "sampler trainer"]),
    st.sampled_from([1e-3, 0.3, 3.0, 1e3]),
)
def test_chunks_give_what_the_whole_gives(seed: int, size: int, length: int, nulls: str, scale: float) -> None:
    tokens = made(seed, size, nulls, scale)
    intervals = ClusterIntervals(4, resamples=50)
    running = RunningSummary(tokens.levels.group_of_sequence, size)
    for part in chunks(size, length):
        running.add(cut(tokens, part))
    before = np.random.default_rng(1).normal(size=50)
    with np.errstate(all="ignore"):
        values, found, vector = running.found(intervals, before)
        whole = summarise(tokens, intervals, BiasVectors(discrepancy=before))
    assert set(found) == set(whole.intervals)
    assert set(whole.values) - set(values) <= {"full_kl_trainer_stale"}
    for name, value in (values | with_ends(found)).items():
        expected = (whole.values | with_ends(whole.intervals)).get(name, math.nan)
        if not (name.startswith("ess") and "_ci_" in name):  # a rounding can move those far: log(-log 1) is infinite
            assert value == pytest.approx(expected, rel=1e-7, abs=1e-9, nan_ok=True), name
    assert (vector is None) == (whole.bias.discrepancy is None)
    for name, interval in found.items():
        assert interval.reason == whole.intervals[name].reason, name


def test_what_is_forgotten_is_null() -> None:
    tokens = made(3, 200, "", 0.3)
    running = RunningSummary(tokens.levels.group_of_sequence, 200)
    running.add(tokens)
    running.forget("discrepancy", "lag", *VOCABULARY)
    null = np.full(200, np.nan)
    rest = replace(tokens, split=Split(null, null, tokens.split.log_ratio), **dict.fromkeys(VOCABULARY, null))
    intervals = ClusterIntervals(4, resamples=50)
    whole = summarise(rest, intervals, BiasVectors())
    values, found, vector = running.found(intervals, None)
    for name, value in (values | with_ends(found)).items():
        expected = (whole.values | with_ends(whole.intervals)).get(name, math.nan)
        assert value == pytest.approx(expected, rel=1e-9, nan_ok=True), name
    assert vector is None and running.known("lag") == 0 and running.known("log_ratio") == 200


def test_the_same_weights_are_known_by_their_zeros() -> None:
    zero, tokens = np.zeros(60), made(1, 60, "", 0.3)
    same = replace(tokens, split=replace(tokens.split, lag=zero), total_variation=zero)
    for part, answer in ((same, True), (tokens, False), (replace(same, total_variation=zero * np.nan), False)):
        running = RunningSummary(tokens.levels.group_of_sequence, 60)
        running.add(part)
        assert running.is_zero() is answer
    assert not RunningSummary(tokens.levels.group_of_sequence, 60).is_zero()
