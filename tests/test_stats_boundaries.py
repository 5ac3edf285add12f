"""Where an answer turns: limits that the statistics state, on either side."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_probe.stats import breakdown, mass, positions
from mismatch_probe.stats.breakdown import Rule, StepEss, verdict
from mismatch_probe.stats.clipping import sign_skew
from mismatch_probe.stats.corrections import ppo_clips
from mismatch_probe.stats.fresh import StepFresh, fresh_sentence
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.levels import StepDiscrepancy, discrepancy_sentence
from mismatch_probe.stats.mass import StepMass, mass_sentence
from mismatch_probe.stats.positions import audit_places, full_kl
from mismatch_probe.stats.ratios import Levels, Split
from mismatch_probe.stats.tails import pareto_k


def test_the_stated_limits_are_those_in_use() -> None:
    assert (breakdown.DEFAULT_THRESHOLD, breakdown.DEFAULT_LASTING) == (0.5, 3)
    assert (mass.SMALLEST, mass.CHANCE) == (2e-3, 0.01)
    assert (positions.MIN_EFFECTIVE_SEQUENCES, positions.NEARLY_EQUAL, positions.WIDEST_MASS) == (20.0, 0.9, 0.2)


@pytest.mark.parametrize(
    ("value", "n", "said"),
    [
        (0.049, 100.0, "below 0.050 (5/n)"),
        (0.051, 100.0, "0.051 [0.010, 0.100]"),
        (0.3, 11.0, "below 0.455 (5/n)"),
        (0.3, 10.0, "0.300 [0.010, 0.100] (of only 10 units)"),
        (0.46, 11.0, "0.460 [0.010, 0.100] at"),
    ],
)
def test_an_ess_of_few_units_is_said_to_be_that(value: float, n: float, said: str) -> None:
    assert said in verdict([StepEss(0, value, 0.01, 0.1, n=n), StepEss(1, 0.9, 0.8, 1.0)], Rule(threshold=0.005))


def test_a_lonely_step_and_one_within_the_noise_are_said_so() -> None:
    bad = StepEss(4, 0.2, 0.1, 0.3)
    assert "(the only step judged)" in verdict([bad], Rule()) and "no 3 judged" in verdict([bad, bad], Rule())
    noise, lonely = StepEss(0, 0.9, 0.8, 1.0, within_floor=True), StepEss(1, 0.9, math.nan, math.nan)
    rule = Rule(ratio="discrepancy")
    assert "within the probe's noise floor" in verdict([noise, lonely], rule)
    assert "one prompt group" in verdict([lonely], rule)


def test_a_discrepancy_partly_within_the_noise_is_counted_and_small_numbers_keep_digits() -> None:
    steps = [StepDiscrepancy(0, 0.0009, 1e-7, 0.1), StepDiscrepancy(1, 0.001, 2e-7)]
    told = discrepancy_sentence(steps)
    assert told.startswith("Engine numerics: rms D 9.0e-04 at step 0, 0.0010 at step 1; largest")
    assert told.endswith("Within the probe's noise floor at 1 of 2 steps, so no finding there.")
    assert "noise floor" not in discrepancy_sentence(steps[1:])
    assert "rms D 0.0000 at step 0" in discrepancy_sentence([StepDiscrepancy(0, 0.0, 0.0)])


def test_the_mass_audit_turns_at_one_and_at_its_smallest_miss() -> None:
    def told(value: float, half: float) -> bool:
        return mass_sentence([StepMass(0, value, value - half, value + half)] * 3, 0.95) != ""

    assert told(0.99, 0.009) and not told(0.99, 0.011) and told(1.01, 0.009) and not told(1.01, 0.011)
    assert told(0.9975, 0.001) and not told(0.9985, 0.001)
    worst = [StepMass(0, 1.02, 1.01, 1.03), StepMass(1, 0.9, 0.89, 0.91), StepMass(2, 1.05, 1.04, 1.06)]
    assert "0.9000 [0.8900, 0.9100] at step 1, below 1" in mass_sentence(worst, 0.95)


def test_the_step_where_full_and_prefix_kl_are_farthest_apart_may_be_below() -> None:
    def step(at: int, ratio: float) -> StepFresh:
        return StepFresh(at, 0.1, 0.05, 0.2, 0.1, ratio, ratio / 2, ratio * 2)

    assert "Farthest apart at step 1 " in fresh_sentence([step(0, 2.0), step(1, 0.1), step(2, 1.5)], 0.95)
    assert "Farthest apart at step 0 " in fresh_sentence([step(0, 20.0), step(1, 0.1), step(2, 1.5)], 0.95)
    assert "Farthest" not in fresh_sentence([step(0, 1.5), step(1, 0.0001)], 0.95)
    assert "Farthest apart at step 0 " in fresh_sentence([step(0, 0.0), step(1, 9.0)], 0.95)


def test_ties_are_null_from_the_first_quartile_of_the_tail_on() -> None:
    """100 weights have a tail of 20; its first quartile is the fifth."""
    values = np.concatenate([np.linspace(-1, -0.1, 79), [0.0], np.linspace(0.1, 2, 20)])
    for tied, null in ((4, False), (5, True), (12, True)):
        x = values.copy()
        x[80 : 80 + tied] = 0.0
        assert math.isnan(pareto_k(x)) == null, tied


def test_a_ratio_on_the_edge_of_the_clip_is_not_clipped() -> None:
    edge = np.array([math.log1p(0.2), math.log1p(-0.2), math.log1p(0.2) + 1e-12, math.log1p(-0.2) - 1e-12])
    a = np.array([1.0, -1.0, 1.0, -1.0])
    assert ppo_clips(edge, a, 0.2).tolist() == [False, False, True, True]
    levels = Levels(np.arange(4), np.arange(4))
    found = sign_skew(Split(0 * edge, edge, edge), a, levels, ClusterIntervals(4), 0.2)
    assert (found["clip_share_positive"].value, found["clip_share_negative"].value) == (0.5, 0.5)


def audited(shift: float, spread: float, sequences: int = 64) -> tuple[float, str]:
    """Sequences of two tokens whose first has log-ratios of this mean and spread, in groups of two."""
    first = shift + spread * np.tile([1.0, -1.0], sequences // 2)
    levels = Levels(np.repeat(np.arange(sequences), 2), np.arange(sequences) // 2)
    x = np.stack([first, np.zeros(sequences)], axis=1).ravel()
    return full_kl(audit_places(x, np.ones(2 * sequences), levels, ClusterIntervals(sequences // 2)))


def test_full_kl_needs_twenty_effective_sequences_and_a_mean_near_one() -> None:
    assert audited(0.0, 0.0, 20) == (pytest.approx(1.0), "")
    assert "at place 0 of the responses the running weight has 18 eff" in audited(0.0, 0.0, 18)[1]
    # Every group has the same mean, so its interval is a point, and only the distance from 1 is asked.
    assert audited(0.019, 0.0)[1] == "" and "not surely 1" in audited(0.021, 0.0)[1]
    assert audited(-0.02, 0.0)[1] == "" and "at place 1 " in audited(-0.021, 0.0)[1]


def test_full_kl_of_a_place_is_that_of_the_sequences_alive_there() -> None:
    lengths = np.array([2] * 30 + [1] * 30)
    levels = Levels(np.repeat(np.arange(60), lengths), np.arange(60) // 2)
    kl = np.random.default_rng(0).random(90)
    places = audit_places(np.zeros(90), kl, levels, ClusterIntervals(30))
    assert places.full_kl == pytest.approx([np.append(kl[:60:2], kl[60:]).mean(), kl[1:60:2].mean()])
    kl[5] = math.nan
    kl[60:] = math.nan
    kl[0:60:2] = math.nan
    assert "null at some places" in full_kl(audit_places(np.zeros(90), kl, levels, ClusterIntervals(30)))[1]
