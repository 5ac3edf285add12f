from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polgrad.diagnostics import importance_ess

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.ratios import Levels, sequence_sums


def test_equal_weights_give_exactly_one() -> None:
    assert ess(np.zeros(7)) == 1.0
    assert ess(np.full(1000, -3.7)) == 1.0


def test_two_weights_in_closed_form() -> None:
    assert ess(np.log([3.0, 1.0])) == pytest.approx(16 / 20, abs=1e-15)


def test_half_is_where_chi_square_is_one() -> None:
    log_weights = np.log(np.array([0.0 + 1e-300, 2.0]))
    weights = np.exp(log_weights)
    assert np.mean(weights**2) - 1 == pytest.approx(1.0)
    assert ess(log_weights) == pytest.approx(0.5)


def test_lognormal_weights_give_exp_minus_variance() -> None:
    sigma = 0.4
    log_weights = np.random.default_rng(0).normal(scale=sigma, size=400_000)
    assert ess(log_weights) == pytest.approx(math.exp(-(sigma**2)), rel=5e-3)


def test_agrees_with_polgrad_at_token_and_sequence_level() -> None:
    rng = np.random.default_rng(1)
    log_weights, mask = rng.normal(scale=0.4, size=(40, 12)), rng.random((40, 12)) < 0.7
    mask[:, 0] = True
    new = torch.from_numpy(log_weights)
    for level in ("token", "sequence"):
        oracle = importance_ess(new, torch.zeros_like(new), torch.from_numpy(mask), level=level)
        if level == "token":
            ours = ess(log_weights[mask])
        else:
            levels = Levels(np.nonzero(mask)[0], np.arange(40) // 4)
            ours = ess(sequence_sums(log_weights[mask], levels))
        assert ours == pytest.approx(oracle.ess_ratio, abs=1e-9)


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=50), st.floats(-500, 500))
def test_always_in_the_unit_interval_and_blind_to_a_common_factor(values: list[float], shift: float) -> None:
    log_weights = np.array(values)
    value = ess(log_weights)
    assert 0 < value <= 1
    assert ess(log_weights + shift) == pytest.approx(value, rel=1e-9)


def test_pooling_is_not_averaging_over_micro_batches() -> None:
    # Megatron-LM#5420: each micro-batch has ESS 1, the pooled batch has 0.9.
    assert ess(np.log(np.array([1.0, 1, 1, 1, 2, 2, 2, 2]))) == pytest.approx(0.9)


def test_nulls_are_left_out_and_nothing_is_null() -> None:
    assert ess(np.array([0.0, math.nan, 0.0])) == 1.0
    assert math.isnan(ess(np.array([math.nan])))
    assert math.isnan(ess(np.zeros(0)))
