"""Properties of what streams, and of the judged ESS: the same numbers by another way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.positions import Place, audit, audit_places
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.summary import judged_ess
from mismatch_probe.stats.tails import pareto_k, tail_length, tail_shape
from mismatch_probe.stats.weights import weight_intervals
from tests.properties import SCALES, SEEDS, covers


def step(seed: int, scale: float) -> tuple[np.ndarray, Levels]:
    """Log-ratios of ten responses of one to nine tokens to four prompts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, size=10)
    sequence = np.repeat(np.arange(10), lengths)
    return scale * rng.normal(size=len(sequence)), Levels(sequence, np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3]))


@covers(judged_ess)
@given(SEEDS, SCALES, st.sampled_from(["token", "sequence"]))
def test_the_judged_ess_is_that_of_the_table(seed: int, scale: float, level: str) -> None:
    log_ratio, levels = step(seed, scale)
    intervals = ClusterIntervals(4)
    found = judged_ess(log_ratio, levels, level, intervals)
    sums = np.bincount(levels.sequence, weights=log_ratio)
    units, group = (log_ratio, levels.group) if level == "token" else (sums, levels.group_of_sequence)
    whole = weight_intervals(units, group, intervals)["ess"]
    assert (found.value, found.low, found.high) == pytest.approx((whole.value, whole.low, whole.high), nan_ok=True)


@covers(tail_length, tail_shape)
@given(SEEDS, st.integers(1, 400), st.sampled_from([0.1, 1.0, 10.0]))
def test_the_largest_weights_give_the_tail_of_all(seed: int, n: int, scale: float) -> None:
    log_weights = scale * np.random.default_rng(seed).normal(size=n)
    kept = tail_length(n) + 1
    largest = np.sort(log_weights)[-kept:]
    assert tail_shape(largest, n) == pytest.approx(pareto_k(log_weights), nan_ok=True)
    assert 0 <= tail_length(n) <= n


@covers(audit, Place)
@given(SEEDS, st.sampled_from([0.01, 0.3, 3.0]))
def test_places_one_by_one_are_those_of_the_tokens(seed: int, scale: float) -> None:
    log_ratio, levels = step(seed, scale)
    kl = np.abs(np.random.default_rng(seed).normal(size=len(log_ratio)))
    intervals = ClusterIntervals(4)
    counts = np.bincount(levels.sequence)
    starts = np.cumsum(counts) - counts
    places = []
    for place in range(int(counts.max())):
        row = np.flatnonzero(counts > place)
        places.append(Place(row, log_ratio[starts[row] + place], kl[starts[row] + place]))
    found = audit(places, levels.group_of_sequence, intervals)
    whole = audit_places(log_ratio, kl, levels, intervals)
    for name in ("alive", "mean_weight", "effective", "weighted_kl", "sums"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), err_msg=name)
    # Summed over groups and places, the sums are those of the places.
    np.testing.assert_allclose(found.sums[:, 1].sum() / 10, found.weighted_kl.sum())
    np.testing.assert_allclose(found.sums[:, 2].sum() / 10, found.alive_mass.sum())
