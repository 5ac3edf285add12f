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
from mismatch_probe.stats.health import weight_health
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import Levels, Split, split
from mismatch_probe.stats.running import RunningSummary
from mismatch_probe.stats.stream import RunningBias, RunningComoment, RunningLargest, RunningWeights, Runs
from mismatch_probe.stats.summary import (
    BiasVectors,
    bias_values,
    groups_of,
    put_law,
    put_weights,
    sequence_kl,
    summarise,
)
from mismatch_probe.stats.terms import VOCABULARY, StepTokens, statistic_of, terms
from mismatch_probe.stats.weights import (
    covariance_of,
    intervals_of_tokens,
    intervals_of_weights,
    token_intervals,
    weight_intervals,
    weight_sums,
)
from tests.properties import covers

_VALUES = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=60)
_CHUNK = st.integers(1, 9)


def chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


@covers(RunningLargest, Runs)
@given(_VALUES, _CHUNK, st.integers(1, 20))
def test_the_largest_are_kept(values: list[float], size: int, count: int) -> None:
    array = np.array(values)
    running = RunningLargest(count)
    for part in chunks(len(array), size):
        running.add(array[part])
    assert np.sort(running.values())[-count:].tolist() == np.sort(array)[-count:].tolist()
    assert len(running.values()) <= max(2 * count, size) + count


def runs_of(group: np.ndarray) -> Runs:
    return Runs(np.arange(len(group)))


@covers(RunningComoment, covariance_of)
@given(_VALUES, _CHUNK, st.integers(0, 99))
def test_covariance_of_chunks(values: list[float], size: int, seed: int) -> None:
    x = np.array(values)
    y = x + np.random.default_rng(seed).normal(size=len(x))
    group = np.arange(len(x)) % 3
    running = RunningComoment(3)
    for part in chunks(len(x), size):
        running.add(x[part], y[part], runs_of(group[part]), group[part])
    expected = float(((x - x.mean()) * (y - y.mean())).mean())
    found = covariance_of(running.sums, ClusterIntervals(3)).value
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12 * float(np.abs(x).max() ** 2 + 1))
    assert running.sums[:, 0].tolist() == np.bincount(group, minlength=3).tolist()


def test_a_large_mean_takes_nothing_from_the_variance() -> None:
    x = 1e6 + np.random.default_rng(0).normal(size=10_000)
    group = np.zeros(100, dtype=np.int64)
    running = RunningComoment(1)
    for part in chunks(len(x), 100):
        running.add(x[part], x[part], runs_of(group), group)
    sums = running.sums.sum(axis=0)
    assert sums[3] / sums[0] - (sums[1] / sums[0]) ** 2 == pytest.approx(float(x.var()), rel=1e-9)
    assert not RunningComoment(1).sums.any()


@covers(RunningWeights, weight_sums, intervals_of_weights)
@given(_VALUES, _CHUNK)
def test_weights_of_any_size_in_chunks(values: list[float], size: int) -> None:
    """Peaks that come late, early, thousands of nats apart: every number is that of all weights at once."""
    x = np.array(values)
    running = RunningWeights(3, len(x))
    group = np.arange(len(x)) % 3
    for part in chunks(len(x), size):
        running.add(x[part], runs_of(group[part]), group[part])
    sums, peak = running.sums
    assert float(ess_from_sums(sums.sum(axis=0))) == pytest.approx(ess(x), rel=1e-9)
    assert sums[:, 0].tolist() == np.bincount(group, minlength=3).tolist()
    intervals = ClusterIntervals(3)
    whole = weight_intervals(x, group, intervals)
    for name, found in intervals_of_weights(sums, peak, intervals).items():
        assert found.value == pytest.approx(whole[name].value, rel=1e-8, abs=1e-9, nan_ok=True), name
    for name, value in running.health().items():
        assert value == pytest.approx(weight_health(x)[name], rel=1e-8, abs=1e-9, nan_ok=True), name


@covers(intervals_of_tokens)
@given(_VALUES, _CHUNK)
def test_the_law_and_the_extremes_of_chunks(values: list[float], size: int) -> None:
    x = np.array(values) / 1e3
    group = np.arange(len(x)) % 3
    running = RunningWeights(3, len(x))
    for part in chunks(len(x), size):
        running.add(x[part], runs_of(group[part]), group[part])
    levels, intervals = Levels(np.arange(len(x)), group), ClusterIntervals(3)
    sequences = np.bincount(group, minlength=3).astype(np.float64)
    found = intervals_of_tokens(running.extremes, running.law_sums(sequences), intervals)
    for name, whole in token_intervals(x, levels, intervals).items():
        assert found[name].value == pytest.approx(whole.value, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_equal_weights_are_exactly_equal() -> None:
    running, group = RunningWeights(2, 1000), np.arange(100) % 2
    for _ in range(10):
        running.add(np.full(100, -1e4), runs_of(group), group)
    sums, peak = running.sums
    found, health = intervals_of_weights(sums, peak, ClusterIntervals(2)), running.health()
    assert found["ess"].value == found["perplexity_ess"].value == 1
    assert found["chi_square"].value == 0
    assert health["max_weight_share"] == 1 / 1000 and math.isnan(health["pareto_k"])
    assert running.extremes.sum(axis=0).tolist() == [1000, 1000, 1000]
    assert not running.law_sums(np.ones(2))[:, 2].any()


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


@covers(RunningSummary, RunningBias, bias_values, groups_of, put_law, put_weights, sequence_kl, terms, statistic_of)
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
    # The running weight by place is not taken from these sums.
    assert set(found) == set(whole.intervals) - {"full_kl_trainer_stale"}
    assert set(whole.values) == set(values)
    for name, value in (values | with_ends(found)).items():
        expected = (whole.values | with_ends(whole.intervals)).get(name, math.nan)
        # A rounding can move the ends of what lives on the scale log(-log x) far: at 1 it is infinite.
        if not (name.startswith(("ess", "perplexity_ess", "chi_square", "predicted_ess")) and "_ci_" in name):
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
