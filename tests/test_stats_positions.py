from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.positions import Places, audit_places, full_kl
from mismatch_probe.stats.ratios import Levels


def two_states(rng: np.random.Generator, n: int, length: int, sampler: float, trainer: float):
    """A chain that enters an absorbing bad state with another probability under each policy.

    In the good state a token says whether the chain moves on; its prefix KL is that of the two Bernoulli laws. In the
    bad state sampler and trainer agree on the tokens, and the KL at each prefix is 1 by construction.
    """
    bad = np.cumsum(rng.random((n, length)) < sampler, axis=1) > 0
    before = np.concatenate([np.zeros((n, 1), dtype=bool), bad[:, :-1]], axis=1)
    entered = bad & ~before
    # A little lognormal noise of mean 1, as numerics add: weights of real runs are never two values only.
    noise = rng.normal(-0.0002, 0.02, size=bad.shape)
    log_ratio = noise + np.where(
        before, 0.0, np.where(entered, math.log(trainer / sampler), math.log((1 - trainer) / (1 - sampler)))
    )
    return log_ratio, before.astype(float)


def audited(log_ratio: np.ndarray, kl: np.ndarray, groups: int) -> Places:
    n, length = log_ratio.shape
    levels = Levels(np.repeat(np.arange(n), length), np.arange(n) % groups)
    return audit_places(log_ratio.ravel(), kl.ravel(), levels, ClusterIntervals(groups, resamples=500))


def test_reweighting_recovers_the_full_kl_where_prefix_kl_is_blind() -> None:
    """The trainer enters the bad state often, the sampler seldom: prefix KL sees a fraction of the full KL."""
    sampler, trainer, length = 0.05, 0.1, 20
    truth = np.mean([1 - (1 - trainer) ** t for t in range(length)])
    seen = np.mean([1 - (1 - sampler) ** t for t in range(length)])
    places = audited(*two_states(np.random.default_rng(0), 20_000, length, sampler, trainer), groups=500)
    value, reason = full_kl(places)
    assert reason == ""
    assert value == pytest.approx(truth, rel=0.1)
    assert float(np.mean(places.prefix_kl)) == pytest.approx(seen, rel=0.15)
    assert truth > 1.4 * seen


def test_a_region_never_visited_is_seen_by_the_mass_and_not_by_ess() -> None:
    """The sampler never enters the bad state: ESS is perfect, the mass that is missing is the trainer's there."""
    trainer, length = 2e-3, 200
    log_ratio, kl = two_states(np.random.default_rng(1), 256, length, 1e-9, trainer)
    assert not kl.any()
    places = audited(log_ratio, kl, groups=32)
    assert ess(log_ratio.sum(axis=1)) > 0.9
    missing = 1 - (1 - trainer) ** (length - 1)
    assert places.missing_mass[-1] == pytest.approx(missing, abs=0.03)
    value, reason = full_kl(places)
    assert math.isnan(value)
    assert reason.startswith("full KL not identifiable: at place") and "not surely 1" in reason
    assert not places.identifiable[5:].any() and np.isnan(places.full_kl[5:]).all()


def test_on_policy_the_two_are_one() -> None:
    kl = np.random.default_rng(2).random((60, 7))
    places = audited(np.zeros((60, 7)), kl, groups=12)
    value, reason = full_kl(places)
    assert reason == "" and value == pytest.approx(kl.mean())
    assert (places.mean_weight == 1).all() and (places.missing_mass == 0).all() and places.identifiable.all()


def test_the_weight_of_an_ended_sequence_is_carried_on() -> None:
    log_ratio = np.array([0.1, 0.2, 0.3, 0.4, -0.5])  # a sequence of two tokens and one of three
    levels = Levels(np.array([0, 0, 1, 1, 1]), np.array([0, 1]))
    places = audit_places(log_ratio, np.ones(5), levels, ClusterIntervals(2, resamples=50))
    assert places.alive.tolist() == [2, 2, 1]
    assert places.mean_weight == pytest.approx(
        [1.0, (math.exp(0.1) + math.exp(0.3)) / 2, (math.exp(0.3) + math.exp(0.7)) / 2]
    )
    assert places.alive_mass[2] == pytest.approx(math.exp(0.7) / 2)


def test_sequences_with_a_null_are_left_out_whole() -> None:
    log_ratio = np.array([0.1, math.nan, 0.3, 0.4])
    levels = Levels(np.array([0, 0, 1, 1]), np.array([0, 1]))
    places = audit_places(log_ratio, np.ones(4), levels, ClusterIntervals(2, resamples=50))
    assert places.alive.tolist() == [1, 1]
    nothing = audit_places(np.full(4, math.nan), np.ones(4), levels, ClusterIntervals(2, resamples=50))
    assert math.isnan(full_kl(nothing)[0]) and "no sequence" in full_kl(nothing)[1]


def test_few_effective_sequences_are_not_enough() -> None:
    log_ratio = np.random.default_rng(3).normal(-2, 2.0, size=(200, 5))
    value, reason = full_kl(audited(log_ratio, np.ones((200, 5)), groups=25))
    assert math.isnan(value) and "effective sequences and Pareto k" in reason


def test_nearly_equal_weights_are_tame_whatever_their_tail() -> None:
    """Weights of 1 +- 0.002 with a heavy tail: Pareto k has no scale, and re-weighting does next to nothing."""
    rng = np.random.default_rng(4)
    log_ratio = 1e-3 * rng.standard_t(2, size=(128, 6))
    kl = rng.random((128, 6))
    places = audited(log_ratio, kl, groups=16)
    value, reason = full_kl(places)
    assert reason == "" and value == pytest.approx(kl.mean(), rel=0.01)


def test_a_mean_that_is_not_known_is_no_mass_of_one() -> None:
    """A wide interval holds 1 because little is known."""
    rng = np.random.default_rng(5)
    log_ratio = rng.normal(-0.02, 0.2, size=(400, 12))
    value, reason = full_kl(audited(log_ratio, np.ones((400, 12)), groups=8))
    assert math.isnan(value) and "not surely 1" in reason


def test_prefix_kl_misses_what_full_kl_sees() -> None:
    """A bad state entered at 1e-2 a token by the trainer, 1e-4 by the sampler: .046 against .58 nats over 200 tokens.

    In closed form: K is 1 in the bad state and the KL of the two Bernoulli laws before it.
    """
    trainer, sampler, length, n = 1e-2, 1e-4, 200, 20_000
    before = trainer * math.log(trainer / sampler) + (1 - trainer) * math.log((1 - trainer) / (1 - sampler))

    def exact(rate: float) -> float:
        bad = 1 - (1 - rate) ** np.arange(length)
        return float((bad + (1 - bad) * before).mean())

    assert (exact(sampler), exact(trainer)) == (pytest.approx(0.046, abs=5e-4), pytest.approx(0.58, abs=5e-3))
    rng = np.random.default_rng(3)
    bad = np.cumsum(rng.random((n, length)) < sampler, axis=1) > 0
    there = np.concatenate([np.zeros((n, 1), dtype=bool), bad[:, :-1]], axis=1)
    moved = np.where(bad & ~there, math.log(trainer / sampler), math.log((1 - trainer) / (1 - sampler)))
    places = audited(np.where(there, 0.0, moved), np.where(there, 1.0, before), groups=n // 8)
    assert float(places.prefix_kl.mean()) == pytest.approx(exact(sampler), rel=0.02)
    assert places.weighted_kl.sum() / places.alive_mass.sum() == pytest.approx(exact(trainer), rel=0.03)
    assert abs(places.mean_weight - 1).max() < 0.05
