"""The full KL from fresh responses, on chains whose full KL has a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats.fresh import StepFresh, fresh_kl, fresh_sentence
from mismatch_probe.stats.intervals import ClusterIntervals, Interval
from mismatch_probe.stats.positions import audit_places, full_kl
from mismatch_probe.stats.ratios import Levels
from tests.test_stats_positions import two_states

GROUPS = 32


def bad_share(p: float, length: int) -> float:
    """Share of prefixes in the bad state of a chain that enters it with p a token and stays."""
    return float(np.mean([1 - (1 - p) ** t for t in range(length)]))


def compare(fresh: np.ndarray, recorded: np.ndarray, groups: int = GROUPS) -> dict[str, Interval]:
    """KL at each prefix, (sequences, places), of fresh and recorded responses."""
    levels = Levels(np.repeat(np.arange(len(fresh)), fresh.shape[1]), np.arange(len(fresh)) % groups)
    group = np.repeat(np.arange(len(recorded)) % groups, recorded.shape[1])
    return fresh_kl(fresh.ravel(), 2 * fresh.ravel(), levels, recorded.ravel(), group, ClusterIntervals(groups))


@pytest.mark.parametrize("trainer", [1e-2, 2e-3])
def test_the_two_state_chain_has_its_full_kl_inside_the_interval(trainer: float) -> None:
    """T = 200, sampler 1e-4 a token: KL is 1 at every prefix in the bad state and 0 elsewhere."""
    length, sampler = 200, 1e-4
    truth = bad_share(trainer, length)
    assert truth > 15 * bad_share(sampler, length)
    covered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        _, fresh = two_states(rng, 256, length, sampler=trainer, trainer=trainer)
        _, recorded = two_states(rng, 256, length, sampler=sampler, trainer=trainer)
        found = compare(fresh, recorded)["full_kl_fresh_trainer_stale"]
        covered += found.low <= truth <= found.high
    assert covered >= 33  # of 40 at 95 %


def test_what_the_sampler_never_visits_is_seen() -> None:
    """The re-weighted estimate has nothing to weight there: it is refused, and by itself it would say 0."""
    trainer, length, sampler = 2e-3, 200, 1e-9
    truth, covered = bad_share(trainer, length), 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        log_ratio, recorded = two_states(rng, 256, length, sampler, trainer)
        _, fresh = two_states(rng, 256, length, trainer, trainer)
        levels = Levels(np.repeat(np.arange(256), length), np.arange(256) % GROUPS)
        places = audit_places(log_ratio.ravel(), recorded.ravel(), levels, ClusterIntervals(GROUPS))
        assert math.isnan(full_kl(places)[0]) and places.weighted_kl.sum() == 0
        found = compare(fresh, recorded)
        full = found["full_kl_fresh_trainer_stale"]
        covered += full.low <= truth <= full.high
        assert full.low > 0.05
        assert found["full_kl_fresh_prefix_trainer_stale"].value == 0
        assert math.isinf(found["full_kl_fresh_ratio"].value) and found["full_kl_fresh_ratio"].reason
    assert covered >= 15  # of 20 at 95 %


def test_the_directions_and_the_whole_responses() -> None:
    rng = np.random.default_rng(1)
    fresh, recorded = rng.random((64, 10)), 0.5 * rng.random((64, 10))
    found = compare(fresh, recorded)
    mean = fresh.mean()
    assert found["full_kl_fresh_trainer_stale"].value == pytest.approx(mean)
    assert found["full_kl_fresh_stale_trainer"].value == pytest.approx(2 * mean)
    assert found["full_kl_fresh_sequence_trainer_stale"].value == pytest.approx(10 * mean)
    ratio = found["full_kl_fresh_ratio"]
    assert ratio.value == pytest.approx(mean / recorded.mean())
    assert ratio.low < 2.0 < ratio.high


def test_pairing_prompts_narrows_the_ratio() -> None:
    """A prompt that is hard for both sides moves both, and hardly their ratio."""
    rng = np.random.default_rng(2)
    hard = rng.lognormal(sigma=1.0, size=GROUPS)[np.arange(128) % GROUPS, None]
    fresh, recorded = 1.5 * hard * rng.random((128, 20)), hard * rng.random((128, 20))
    found = compare(fresh, recorded)
    ratio, full = found["full_kl_fresh_ratio"], found["full_kl_fresh_trainer_stale"]
    assert ratio.low < 1.5 < ratio.high
    assert math.log(ratio.high / ratio.low) < 0.4 * math.log(full.high / full.low)


def test_only_prompts_of_both_sides_are_in_the_ratio() -> None:
    rng = np.random.default_rng(3)
    fresh = rng.random((8, 5))
    levels = Levels(np.repeat(np.arange(8), 5), np.arange(8) % 4)
    recorded_group = np.array([0, 0, 1, 1, 2, 2, 9, 9])
    recorded = np.where(recorded_group == 9, 100.0, 0.5)
    found = fresh_kl(fresh.ravel(), fresh.ravel(), levels, recorded, recorded_group, ClusterIntervals(10))
    expected = fresh[np.arange(8) % 4 < 3].mean() / 0.5
    assert found["full_kl_fresh_ratio"].value == pytest.approx(expected)


def test_nulls_are_left_out() -> None:
    fresh = np.array([[1.0, np.nan], [2.0, 3.0], [2.0, 2.0]])
    found = compare(fresh, np.ones((3, 1)), groups=3)
    assert found["full_kl_fresh_trainer_stale"].value == 2.5 - 0.5
    assert found["full_kl_fresh_sequence_trainer_stale"].value == 4.5
    assert math.isnan(compare(fresh * np.nan, np.ones((3, 1)), groups=3)["full_kl_fresh_trainer_stale"].value)


def step(number: int, full: float, ratio: float, low: float, high: float) -> StepFresh:
    return StepFresh(number, full, 0.9 * full, 1.1 * full, full / ratio, ratio, low, high)


def test_the_sentence_says_where_prefix_kl_is_blind() -> None:
    nan = math.nan
    assert fresh_sentence([StepFresh(0, nan, nan, nan, nan, nan, nan, nan)], 0.95) == ""
    steps = [step(0, 0.1, 1.0, 0.9, 1.1), step(3, 0.6, 6.0, 4.0, 9.0), step(5, 0.2, 0.5, 0.3, 0.8)]
    text = fresh_sentence(steps, 0.95)
    assert "step 5 KL(pi || pi_s) 0.2 [0.18, 0.22] nats a token, 0.50 [0.30, 0.80] times prefix KL 0.4." in text
    assert "Farthest apart at step 3" in text
    assert "too small at 1 and too large at 1 of 3 steps judged (95% intervals of the ratio)" in text
    alone = fresh_sentence([StepFresh(2, 0.0, nan, nan, 0.0, nan, nan, nan)], 0.95)
    assert alone == "Full KL on fresh responses of the trainer: step 2 KL(pi || pi_s) 0 nats a token."
