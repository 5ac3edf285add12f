from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polgrad.diagnostics import logprob_mismatch

from mismatch_probe.stats.bias import discrepancy_bias_sums
from mismatch_probe.stats.kl import k_terms
from mismatch_probe.stats.ratios import Levels, group_log_means, sequence_sums, split
from tests.planted import log_softmax

logprob = st.floats(-60, 0, allow_nan=False)


@given(st.lists(st.tuples(logprob, logprob, logprob), min_size=1, max_size=30))
def test_the_parts_add_up_to_the_last_bit(values: list[tuple[float, float, float]]) -> None:
    mu, stale, trainer = np.array(values).T
    parts = split(mu, stale, trainer)
    assert (parts.discrepancy + parts.lag == parts.log_ratio).all()
    assert np.abs(parts.log_ratio - (trainer - mu)).max() <= 4 * np.spacing(60.0)


def test_without_stale_trainer_only_the_total_is_known() -> None:
    parts = split(np.array([-1.0]), np.array([math.nan]), np.array([-0.5]))
    assert parts.log_ratio[0] == 0.5
    assert math.isnan(parts.discrepancy[0]) and math.isnan(parts.lag[0])


def test_sequence_sums_are_null_where_a_token_is_null() -> None:
    levels = Levels(np.array([0, 0, 1, 2, 2]), np.array([0, 0, 1, 1]))
    sums = sequence_sums(np.array([1.0, 2.0, 3.0, math.nan, 1.0]), levels)
    assert sums[:2].tolist() == [3.0, 3.0]
    assert np.isnan(sums[2]) and np.isnan(sums[3])  # a null token; no counted token


def test_group_means_are_means_of_sequence_weights() -> None:
    levels = Levels(np.zeros(0, dtype=np.int64), np.array([0, 0, 1]))
    means = group_log_means(np.log([1.0, 3.0, 5.0]), levels)
    assert np.exp(means).tolist() == pytest.approx([2.0, 5.0])


def test_k_estimators_agree_with_polgrad() -> None:
    rng = np.random.default_rng(3)
    mu = rng.normal(-1, 0.3, size=(1, 500))
    pi = mu + rng.normal(0, 0.1, size=mu.shape)
    oracle = logprob_mismatch(torch.from_numpy(pi), torch.from_numpy(mu), torch.ones(mu.shape, dtype=torch.bool))
    terms = k_terms((pi - mu)[0])
    for name in ("k1", "k2", "k3"):
        assert terms[name].mean() == pytest.approx(getattr(oracle, f"kl_{name}"))


def test_k3_minus_k1_is_the_error_of_the_mass_audit() -> None:
    x = np.random.default_rng(4).normal(0.1, 0.5, size=1000)
    terms = k_terms(x)
    assert terms["k3"].mean() - terms["k1"].mean() == pytest.approx(np.exp(x).mean() - 1)


def test_k_estimators_recover_a_planted_kl() -> None:
    rng = np.random.default_rng(5)
    mu, p = log_softmax(rng.normal(size=8)), log_softmax(rng.normal(size=8))
    truth = float(np.exp(mu) @ (mu - p))
    drawn = rng.choice(8, p=np.exp(mu), size=400_000)
    terms = k_terms((p - mu)[drawn])
    assert terms["k1"].mean() == pytest.approx(truth, rel=0.01)
    assert terms["k3"].mean() == pytest.approx(truth, rel=0.01)


def test_tokens_without_an_id_are_in_no_place_of_the_bias_vector() -> None:
    values, half = np.log([0.5, 0.25, 2.0]), np.array([0, 1, 1])
    sums, tokens = discrepancy_bias_sums(values, np.array([3, -1, 0]), half, 4)
    assert sums.tolist() == [[0, 0, 0, 0.5], [-1.0, 0, 0, 0]] and tokens.tolist() == [1, 1]
    sums, tokens = discrepancy_bias_sums(values, np.full(3, -1), half, 0)
    assert sums.shape == (2, 0) and not tokens.any()
