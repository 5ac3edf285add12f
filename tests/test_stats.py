from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from polgrad.diagnostics import logprob_mismatch

from mismatch_probe.stats.bias import cosine, discrepancy_bias_sums, mean_bias, sampled_total_variation
from mismatch_probe.stats.bootstrap import ClusterBootstrap, group_sums, mean
from mismatch_probe.stats.breakdown import Status, StepEss, first_breakdown, verdict
from mismatch_probe.stats.ess import ess_from_sums
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


def test_bootstrap_agrees_with_scipy_when_every_unit_is_its_own_group() -> None:
    values = np.random.default_rng(6).normal(size=80)
    ours = ClusterBootstrap(80, seed=1, resamples=20_000).interval(group_sums([values], np.arange(80), 80), mean)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_bootstrap_is_deterministic_by_seed() -> None:
    sums = group_sums([np.arange(12.0)], np.arange(12) % 4, 4)
    one, two, other = (ClusterBootstrap(4, seed=seed).interval(sums, mean) for seed in (5, 5, 6))
    assert (one.low, one.high) == (two.low, two.high)
    assert (one.low, one.high) != (other.low, other.high)


def test_one_group_has_no_interval() -> None:
    interval = ClusterBootstrap(1).interval(group_sums([np.arange(5.0)], np.zeros(5, dtype=np.int64), 1), mean)
    assert interval.value == 2.0
    assert math.isnan(interval.low)
    assert interval.reason == "one prompt group has no interval"


def test_intervals_cover_with_correlated_tokens() -> None:
    """Tokens that share their group's offset: resampling groups covers, resampling tokens would not."""
    rng = np.random.default_rng(7)
    covered = naive = 0
    group = np.repeat(np.arange(40), 25)
    for trial in range(300):
        values = rng.normal(size=40)[group] + rng.normal(size=len(group))
        interval = ClusterBootstrap(40, seed=trial, resamples=500).interval(group_sums([values], group, 40), mean)
        covered += interval.low <= 0 <= interval.high
        naive += abs(values.mean()) <= 1.96 * values.std() / math.sqrt(len(values))
    assert 0.90 <= covered / 300 <= 0.98
    assert naive / 300 < 0.6


def test_ess_interval_of_constant_weights_is_one() -> None:
    sums = group_sums([np.ones(20), np.ones(20)], np.arange(20) % 5, 5)
    interval = ClusterBootstrap(5).interval(sums, ess_from_sums)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)
    assert interval.share_below(0.5) == 0.0


def test_discrepancy_bias_recovers_mu_minus_pi_s() -> None:
    rng = np.random.default_rng(8)
    mu = log_softmax(rng.normal(size=6))
    pi_s = log_softmax(mu + 0.3 * rng.normal(size=6))
    drawn = rng.choice(6, p=np.exp(mu), size=300_000)
    sums, counts = discrepancy_bias_sums((pi_s - mu)[drawn], drawn, np.arange(len(drawn)) % 2, 6)
    estimate = mean_bias(sums, counts)
    truth = np.exp(mu) - np.exp(pi_s)
    assert estimate.vector == pytest.approx(truth, abs=2e-3)
    assert estimate.split_half_cosine > 0.99
    assert sampled_total_variation((pi_s - mu)[drawn]).mean() == pytest.approx(np.abs(truth).sum() / 2, rel=0.01)


def test_noise_of_the_mean_bias_is_its_standard_error() -> None:
    rng = np.random.default_rng(9)
    truth = np.array([0.3, -0.2, -0.1])
    estimates = []
    for _ in range(400):
        vectors = truth + rng.normal(size=(100, 3))
        sums = np.stack([vectors[::2].sum(0), vectors[1::2].sum(0)])
        estimates.append(mean_bias(sums, np.array([50, 50])))
    error = math.sqrt(np.mean([np.sum((e.vector - truth) ** 2) for e in estimates]))
    assert math.sqrt(np.mean([e.noise**2 for e in estimates])) == pytest.approx(error, rel=0.1)


def test_cosine_of_a_zero_vector_is_null() -> None:
    assert math.isnan(cosine(np.zeros(3), np.ones(3)))
    assert cosine(np.array([1.0, 0.0]), np.array([-2.0, 0.0])) == -1.0


def steps(*rows: tuple[int, float, float, float]) -> list[StepEss]:
    return [StepEss(*row) for row in rows]


def test_status_of_a_step() -> None:
    assert StepEss(0, 0.9, 0.8, 1.0).status(0.5) is Status.OK
    assert StepEss(0, 0.55, 0.45, 0.7).status(0.5) is Status.BORDERLINE
    assert StepEss(0, 0.49, 0.3, 0.6).status(0.5) is Status.BREAKDOWN
    assert StepEss(0, math.nan, math.nan, math.nan).status(0.5) is Status.UNJUDGED


def test_verdict_names_the_first_breakdown() -> None:
    told = steps((0, 0.9, 0.8, 1.0), (1, 0.45, 0.4, 0.6), (2, 0.3, 0.2, 0.4))
    assert first_breakdown(told, 0.5) == told[1]
    assert verdict(told, "sequence", 0.5) == (
        "Importance weighting breaks down at step 1: the sequence ESS of the lag falls to 0.450 [0.400, 0.600], below "
        "0.5 (its interval still reaches above it); 2 of 3 steps judged are below."
    )


def test_verdict_of_a_healthy_and_of_an_unjudged_run() -> None:
    null = (2, math.nan, math.nan, math.nan)
    assert verdict(steps((0, 0.9, 0.8, 1.0), (1, 0.52, 0.45, 0.6), null), "token", 0.5) == (
        "Importance weighting holds: the token ESS of the lag stays at or above 0.5 at all 2 steps judged (lowest "
        "0.520 [0.450, 0.600] at step 1). At 1 step the interval reaches below it. 1 of 3 steps could not be judged."
    )
    assert "could not be judged" in verdict(steps(null), "token", 0.5)
