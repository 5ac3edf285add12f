from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from mismatch_probe.stats.intervals import ClusterIntervals, group_sums, mean
from mismatch_probe.stats.mass import CHANCE, StepMass, at_least, mass_sentence


def masses(log_ratios: list[np.ndarray]) -> list[StepMass]:
    """One step each: (groups, tokens) of D."""
    out = []
    for step, values in enumerate(log_ratios):
        groups = len(values)
        sums = group_sums([np.exp(values).ravel()], np.repeat(np.arange(groups), values.shape[1]), groups)
        interval = ClusterIntervals(groups).interval(sums, mean)
        out.append(StepMass(step, interval.value, interval.low, interval.high))
    return out


def normal(rng: np.random.Generator, steps: int, spread: float = 0.05) -> list[np.ndarray]:
    return [rng.normal(-(spread**2) / 2, spread, size=(16, 100)) for _ in range(steps)]


@pytest.mark.parametrize(("count", "trials", "p"), [(0, 5, 0.05), (2, 17, 0.05), (9, 9, 0.1), (30, 2000, 0.05)])
def test_the_binomial_tail_agrees_with_scipy(count: int, trials: int, p: float) -> None:
    assert at_least(count, trials, p) == pytest.approx(scipy.stats.binom.sf(count - 1, trials, p), rel=1e-9)


def test_healthy_runs_are_silent_at_the_stated_rate() -> None:
    rng = np.random.default_rng(0)
    said = sum(bool(mass_sentence(masses(normal(rng, 20, 0.3)), 0.95)) for _ in range(200))
    assert said / 200 <= 3 * CHANCE


def test_top_p_leaves_a_mean_weight_of_the_mass_it_kept() -> None:
    """Renormalised over 0.9 of the mass: mu = pi_s / 0.9 on what is sampled."""
    cut = [values + math.log(0.9) for values in normal(np.random.default_rng(1), 4)]
    said = mass_sentence(masses(cut), 0.95)
    assert said.startswith("Mass audit fails at 4 of 4 steps judged: the mean of e^D is 0.8985") and "top-p" in said


def test_log_probs_of_a_flatter_distribution_than_sampled_raise_it() -> None:
    raised = [values + 0.1 for values in normal(np.random.default_rng(2), 3)]
    assert "above 1: the logged log-probs are lower" in mass_sentence(masses(raised), 0.95)


def test_a_difference_too_small_to_matter_is_not_said() -> None:
    exact = [StepMass(step, 1.0005, 1.0004, 1.0006) for step in range(10)]
    assert mass_sentence(exact, 0.95) == ""


def test_one_step_of_many_is_chance_and_one_of_one_is_not() -> None:
    fine, odd = StepMass(0, 1.0, 0.9, 1.1), StepMass(7, 0.9, 0.85, 0.95)
    assert mass_sentence([fine] * 19 + [odd], 0.95) == ""
    assert mass_sentence([StepMass(7, 0.9, 0.85, 0.95)], 0.999) != ""
    assert "not judged" in mass_sentence([StepMass(0, math.nan, math.nan, math.nan)], 0.95)
