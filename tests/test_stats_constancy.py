"""Is the discrepancy constant? Against high precision, brute force and planted runs; its answers by simulation."""

from __future__ import annotations

import decimal
import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.stats.constancy import (
    BINS,
    RESOLVED,
    StepDisplacement,
    constancy,
    displacement,
    log_odds,
    rivals,
    step_displacement,
)
from mismatch_probe.stats.ranks import rank_trend


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def sampled_run(seed: int, steps: int, change: float, tokens: int = 3000) -> tuple[list[StepDisplacement], list[float]]:
    """Policies that sharpen threefold, so that entropy falls; ``change`` is that of the log of the errors' variance.

    Returns the steps' sums and their k3.
    """
    rng = np.random.default_rng(seed)
    found, k3 = [], []
    for step in range(steps):
        share = step / (steps - 1)
        trainer = log_softmax((1 + 2 * share) * 1.5 * rng.normal(size=(tokens, 24)))
        engine = log_softmax(trainer + 0.05 * math.exp(change * share / 2) * rng.normal(size=trainer.shape))
        token = (engine + rng.gumbel(size=engine.shape)).argmax(axis=1)
        at = np.arange(tokens)
        mu, pi = engine[at, token], trainer[at, token]
        entropy = -(np.exp(trainer) * trainer).sum(axis=1)
        found.append(step_displacement(step, mu, pi, entropy, at % 16, 16))
        k3.append(float((np.expm1(pi - mu) - (pi - mu)).mean()))
    return found, k3


def planted_sums(
    rng: np.random.Generator, steps: int = 10, groups: int = 8, change: float = 0.0, scatter: float = 0.0
) -> list[StepDisplacement]:
    """Sums drawn from the model: tokens move to likelier bins; groups, and with ``scatter`` steps, have own scales."""
    found = []
    for step in range(steps):
        share = step / (steps - 1)
        rate = 60 * np.exp(-3 * np.abs(np.linspace(0, 1, BINS) - 0.2 - 0.6 * share))
        counts = rng.poisson(rate, size=(groups, BINS)).astype(np.float64)
        log_scale = change * share + scatter * rng.normal() + 0.3 * rng.normal(size=(groups, 1))
        squares = np.exp(log_scale + np.linspace(-6, -5, BINS)) * rng.chisquare(np.maximum(counts, 1))
        found.append(StepDisplacement(step, counts, np.where(counts > 0, squares, 0.0), 0))
    return found


@pytest.mark.parametrize("log_p", [-1e4, -800.0, -30.0, -1.0, -math.log(2), -0.3, -1e-3, -1e-9, -1e-17])
def test_log_odds_to_the_last_digits_at_both_ends(log_p: float) -> None:
    with decimal.localcontext(prec=60):
        exact = decimal.Decimal(log_p)
        truth = float(exact - (1 - exact.exp()).ln()) if log_p > -1000 else log_p
    assert log_odds(np.array([log_p]))[0] == pytest.approx(truth, rel=1e-14)


def test_log_odds_of_certainty_and_of_nothing() -> None:
    assert log_odds(np.array([0.0]))[0] == math.inf and math.isnan(log_odds(np.array([math.nan]))[0])


def test_tokens_whose_probability_counts_as_one_are_left_out_on_either_side_and_counted() -> None:
    sure, unsure = math.log1p(-RESOLVED / 2), math.log(0.3)
    mu, pi = np.array([unsure, sure, unsure, 0.0, np.nan]), np.array([math.log(0.4), unsure, sure, 0.0, unsure])
    eps = displacement(mu, pi)
    assert eps[0] == pytest.approx(scipy.special.logit(0.4) - scipy.special.logit(0.3))
    assert np.isnan(eps[1:]).all()
    step = step_displacement(0, mu, pi, np.zeros(5), np.zeros(5, dtype=np.int64), 1)
    assert (step.counts.sum(), step.saturated) == (1, 3)
    assert np.nanmax(step.rms) == pytest.approx(eps[0])


def test_rivals_are_the_perplexity_of_the_other_tokens() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(7), size=20)
    entropy = -(p * np.log(p)).sum(axis=1)
    others = p[:, 1:] / p[:, 1:].sum(axis=1, keepdims=True)
    assert rivals(np.log(p[:, 0]), entropy) == pytest.approx(np.exp(-(others * np.log(others)).sum(axis=1)))


def test_while_entropy_falls_raw_k3_falls_and_the_discrepancy_is_found_constant() -> None:
    steps, k3 = sampled_run(seed=3, steps=12, change=0.0, tokens=6000)
    assert k3[-1] < 0.6 * k3[0]
    found = constancy(steps)
    assert found.answer == "constant" and found.low < 0 < found.high and found.tokens > 50_000
    assert found.sentence.startswith("Is the discrepancy constant? Constant: ") and "0.8 to 1.25" in found.sentence


def test_a_discrepancy_that_grows_by_five_per_cent_a_step_is_found_changing() -> None:
    steps, _ = sampled_run(seed=4, steps=20, change=2 * 19 * math.log(1.05))
    found = constancy(steps)
    assert found.answer == "changing" and found.per_step == pytest.approx(1.05**2 - 1, abs=0.025)
    # Within bins some of the rivals' effect is left: the policies sharpen threefold here.
    assert found.estimate + 1 == pytest.approx(1.05**38, rel=0.12)


def test_a_hump_and_an_early_jump_are_no_line_but_changes() -> None:
    rng = np.random.default_rng(5)
    flat, high = planted_sums(rng, steps=21), planted_sums(rng, steps=21, change=0.0)

    def raised(step: StepDisplacement, by: float) -> StepDisplacement:
        return StepDisplacement(step.step, step.counts, step.squares * by, 0)

    hump = constancy([raised(s, math.exp(1.5 * (1 - abs(s.step - 10) / 10))) for s in flat])
    assert hump.answer == "changing" and hump.low < 0 < hump.high and "In mid-run it is" in hump.sentence
    assert float(hump.sentence.split("In mid-run it is ")[1].split()[0]) > 2
    jump = constancy([raised(high[k], by) for k, by in enumerate((1, 20, 30, 60, 100))])
    assert jump.answer == "changing" and "It rises from step to step" in jump.sentence


def test_how_often_each_answer_is_wrong() -> None:
    """No change: 'changing' in at most 10 % of runs. A change of just the margin: 'constant' in at most 5 %."""
    rng = np.random.default_rng(7)
    still = Counter(constancy(planted_sums(rng)).answer for _ in range(60))
    uneven = Counter(constancy(planted_sums(rng, scatter=0.2)).answer for _ in range(60))
    edge = Counter(constancy(planted_sums(rng, groups=32, change=math.log(1.25))).answer for _ in range(20))
    assert still["changing"] <= 6 and uneven["changing"] <= 6 and edge["constant"] <= 1
    # Steps that scatter by more than the margin are never called constant.
    assert uneven["constant"] == 0


def test_how_often_the_right_answer_is_given() -> None:
    rng = np.random.default_rng(8)
    still = Counter(constancy(planted_sums(rng, steps=16, groups=48)).answer for _ in range(12))
    drift = Counter(constancy(planted_sums(rng, change=9 * 2 * math.log(1.05))).answer for _ in range(40))
    assert still["constant"] >= 10 and drift["changing"] >= 36


def test_the_margin_decides() -> None:
    steps = planted_sums(np.random.default_rng(9), groups=32, change=0.3)
    answers = [constancy(steps, margin).answer for margin in (0.1, 3.0)]
    assert answers == ["changing", "constant"]


@given(seed=st.integers(0, 2**32 - 1))
def test_order_of_rows_names_of_groups_masked_rows_and_order_of_steps_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, two = [], []
    for step in range(4):
        mu, pi = -rng.exponential(size=40), -rng.exponential(size=40)
        group, entropy = rng.integers(0, 4, size=40), rng.uniform(0, 2, size=40)
        one.append(step_displacement(step, mu, pi, entropy, group, 4))
        order, names = rng.permutation(40), rng.permutation(5)
        masked = np.append(pi[order], np.nan)
        shuffled = [np.append(values[order], -1.0) for values in (mu, entropy)]
        two.append(step_displacement(step, shuffled[0], masked, shuffled[1], names[np.append(group[order], 4)], 5))
    first, second = constancy(one), constancy(two[::-1])
    assert (first.answer, first.tokens) == (second.answer, second.tokens)
    for name in ("estimate", "low", "high"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-5, abs=1e-7, nan_ok=True)


def test_extreme_log_probs_give_finite_numbers_or_null() -> None:
    rng = np.random.default_rng(1)
    steps = []
    for step in range(6):
        pi = np.where(rng.random(60) < 0.1, -1e4, -rng.exponential(size=60))
        steps.append(step_displacement(step, -rng.exponential(size=60), pi, np.ones(60), np.arange(60) % 6, 6))
    found = constancy(steps)
    assert found.answer and math.isfinite(found.estimate) and found.low <= found.estimate <= found.high


def test_what_cannot_be_answered_is_null_with_the_reason() -> None:
    steps = planted_sums(np.random.default_rng(2), steps=4)
    assert constancy(steps).answer
    few = constancy(steps[:3])
    assert few.answer == "" and math.isnan(few.estimate) and "3 exact steps have a discrepancy" in few.reason
    assert "0 exact steps" in constancy([]).sentence
    same = constancy([StepDisplacement(s.step, s.counts, np.zeros_like(s.squares), 0) for s in steps])
    assert same.answer == "" and "eps is 0 at every token" in same.reason


@pytest.mark.parametrize("n", [2, 5, 12, 40])
def test_the_rank_test_is_kendalls(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n) + 0.05 * np.arange(n)
    theirs = scipy.stats.kendalltau(np.arange(n), values, method="exact")
    assert rank_trend(values) == pytest.approx((theirs.statistic, theirs.pvalue), rel=1e-9)


def test_the_rank_test_of_a_long_series_is_near_scipys() -> None:
    values = np.random.default_rng(1).normal(size=90) + 0.006 * np.arange(90)
    theirs = scipy.stats.kendalltau(np.arange(90), values, method="exact")
    assert rank_trend(values) == pytest.approx((theirs.statistic, theirs.pvalue), rel=0.02)
