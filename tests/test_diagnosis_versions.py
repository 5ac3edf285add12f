"""Statistics of the version checks on planted truth, without networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.diagnosis.origins import label_stands_still
from mismatch_probe.diagnosis.paths import find_paths
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.scanning import Budget, carry

NOISE, LAG = 0.01, 0.06


def planted(state: np.ndarray, readings: int, seed: int = 0, lag: float = LAG) -> np.ndarray:
    """D of each token under each reading: noise under the true one, noise and lag under the others."""
    rng = np.random.default_rng(seed)
    difference = NOISE * rng.normal(size=(1, len(state))) + lag * rng.normal(size=(readings, len(state)))
    difference[state, np.arange(len(state))] = NOISE * rng.normal(size=len(state))
    return difference


def test_whole_sequences_and_changes_inside_them_are_found() -> None:
    sequence = np.repeat(np.arange(20), 24)
    state = np.where(sequence % 3 == 0, 2, 0)
    inside = (sequence % 3 == 1) & (np.arange(len(sequence)) % 24 >= 11)
    state[inside] = 1
    found = find_paths(planted(state, 4), sequence)
    assert (found.state == state).mean() > 0.95
    assert (found.held_out == state).mean() > 0.9


def test_right_labels_gain_nothing_on_tokens_held_out() -> None:
    """Versions as close as the noise: paths leave the label by chance, and pay for it on tokens not seen."""
    sequence = np.repeat(np.arange(60), 3)
    before, after = [], []
    for seed in range(40):
        difference = planted(np.zeros(len(sequence), dtype=np.int64), 6, seed, lag=NOISE)
        found = find_paths(difference, sequence)
        moved = found.held_out != 0
        before.append(np.abs(difference[0])[moved])
        after.append(np.abs(difference[found.held_out, np.arange(len(sequence))])[moved])
    assert len(np.concatenate(before)) > 100
    assert np.concatenate(after).mean() > np.concatenate(before).mean()


def test_unknown_tokens_have_no_state() -> None:
    difference = planted(np.zeros(48, dtype=np.int64), 3)
    difference[:, :5] = np.nan
    found = find_paths(difference, np.repeat([0, 1], 24))
    assert (found.state[:5] == -1).all()
    assert (found.state[5:] == 0).all()


def versions(number: int) -> list[Candidate]:
    return [Candidate(f"version {v}", v, Path(f"v{v}")) for v in range(number)]


def test_a_frozen_version_is_carried_to_every_step() -> None:
    named = {step: {step} for step in range(20)}
    found = carry(versions(20), named, {5: {5, 0}, 15: {15, 0}}, {5: {0}, 15: {0}})
    assert found[10] >= {0, 9, 10, 11}
    assert len(found[10]) < 10


def test_an_offset_is_carried_to_every_step() -> None:
    named = {step: {step} for step in range(20)}
    found = carry(versions(20), named, {5: {5, 2}, 15: {15, 12}}, {5: {2}, 15: {12}})
    assert 7 in found[10]


def test_a_healthy_run_tries_the_named_version_and_its_neighbours() -> None:
    named = {step: {step} for step in range(20)}
    found = carry(versions(20), named, {5: {4, 5, 6}, 15: {14, 15, 16}}, {5: set(), 15: set()})
    assert found[10] == {9, 10, 11}


def test_steps_that_name_nothing_try_what_did_well_anywhere() -> None:
    found = carry(versions(20), {3: {3}, 4: set()}, {3: {3, 7}}, {3: {7}})
    assert found[4] == {3, 7}


def test_a_label_stands_still_only_where_the_found_versions_move() -> None:
    assert label_stands_still(np.zeros(4, dtype=np.int64), np.array([1, 2, 3, 4]))
    assert not label_stands_still(np.zeros(4, dtype=np.int64), np.array([2, 2, 2, 2]))
    assert not label_stands_still(np.array([1, 2, 3, 4]), np.array([2, 3, 4, 5]))
    assert not label_stands_still(np.zeros(2, dtype=np.int64), np.array([1, 2]))


@pytest.mark.parametrize("tokens", [50_000, 1_000_000, 50_000_000])
def test_the_budget_of_a_long_run_is_a_fifth_of_what_decompose_scores(tokens: int) -> None:
    steps, candidates = 50, 51
    budget = Budget.for_run(tokens, steps, candidates)
    scored = 6 * candidates * budget.coarse + steps * 4 * budget.fine
    assert scored <= max(0.6 * 0.2 * 2 * tokens, 6 * candidates * 64 + steps * 4 * 128)
