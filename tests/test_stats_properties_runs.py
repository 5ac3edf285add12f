"""Properties of what is said of a whole run: order of steps, scale, masked rows, seeds, words for every case."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.breakdown import Breakdown, Rule, Status, StepEss, find_breakdown, verdict
from mismatch_probe.stats.change import Change, Changes, find_changes
from mismatch_probe.stats.constancy import (
    RESOLVED,
    StepDisplacement,
    constancy,
    displacement,
    factor,
    log_odds,
    rivals,
    step_displacement,
)
from mismatch_probe.stats.feedback import StepBias, feedback
from mismatch_probe.stats.growth import StepLag, lag_growth, step_lag
from mismatch_probe.stats.levels import StepDiscrepancy, discrepancy_sentence
from mismatch_probe.stats.mass import StepMass, mass_sentence
from mismatch_probe.stats.trend import Trend
from tests.properties import SCALES, SEEDS, Case, covers, same

FEW = settings(max_examples=30, deadline=None)
SHARE = st.one_of(st.just(math.nan), st.floats(0.01, 1.0))


@st.composite
def judged(draw: st.DrawFn) -> list[StepEss]:
    steps = []
    for step in range(draw(st.integers(1, 8))):
        low, value, high = sorted(draw(st.tuples(*[st.floats(0.01, 1.0)] * 3)))
        null, lonely = draw(st.sampled_from([(False, False)] * 4 + [(True, True), (False, True)]))
        steps.append(
            StepEss(
                step,
                math.nan if null else value,
                math.nan if lonely else low,
                math.nan if lonely else high,
                n=draw(st.sampled_from([math.inf, 8.0, 100.0])),
                approximate=draw(st.booleans()) and draw(st.booleans()),
                within_floor=draw(st.sampled_from([False] * 5 + [True])),
            )
        )
    return steps


@covers(Status, StepEss, find_breakdown, Breakdown, Rule)
@FEW
@given(judged(), st.floats(0.2, 0.8), st.integers(1, 4))
def test_breakdown_is_what_the_whole_intervals_say(steps: list[StepEss], threshold: float, lasting: int) -> None:
    found = find_breakdown(steps, Rule(threshold=threshold, lasting=lasting))
    statuses = [step.status(threshold) for step in steps]
    for step, status in zip(steps, statuses, strict=True):
        assert (status is Status.UNJUDGED) == (
            math.isnan(step.value) or (not step.approximate and (math.isnan(step.low) or step.within_floor))
        )
        if status is Status.OK:
            assert step.low >= threshold
        if status is Status.BREAKDOWN:
            assert step.high < threshold
        if status is Status.WARNING:
            assert step.low < threshold <= step.high
    broken = [step for step, status in zip(steps, statuses, strict=True) if status is Status.BREAKDOWN]
    assert found.steps == len(broken) and found.first is (broken[0] if broken else None)
    row = [s for s in statuses if s not in (Status.UNJUDGED, Status.APPROXIMATE)]
    runs = [at for at in range(len(row)) if row[at : at + lasting] == [Status.BREAKDOWN] * lasting]
    assert (found.lasting is not None) == bool(runs)
    # A step that cannot be judged, anywhere, changes nothing.
    for at in range(len(steps) + 1):
        more = [*steps[:at], StepEss(99, math.nan, math.nan, math.nan), *steps[at:]]
        again = find_breakdown(more, Rule(threshold=threshold, lasting=lasting))
        assert (again.first, again.lasting, again.steps) == (found.first, found.lasting, found.steps)


@covers(verdict, Rule)
@FEW
@given(judged(), st.sampled_from(["lag", "discrepancy", "total"]), st.sampled_from(["token", "sequence", "prompt"]))
def test_the_verdict_has_words_for_every_run(steps: list[StepEss], ratio: str, level: str) -> None:
    rule = Rule(level, 0.5, ratio)
    told = verdict(steps, rule)
    assert told.endswith(".") and rule.quantity in told and "nan" not in told
    found = find_breakdown(steps, rule)
    if found.first is not None:
        assert f"breaks down at step {(found.lasting or found.first).step}" in told
    elif any(step.status(0.5) is Status.WARNING for step in steps):
        assert "not ruled out" in told
    else:
        assert "holds" in told or "No verdict" in told or "Could not be judged" in told


@covers(find_changes, Change, Changes)
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from([0.0, 15.0, 1e4]))
def test_changes_do_not_depend_on_sign_nulls_or_the_unit_of_time(seed: int, jump: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=16)
    values[8:] += jump
    one = find_changes(np.arange(16), values)
    turned = find_changes(np.arange(16), -values)
    slower = find_changes(7 * np.arange(16) + 3, values)
    masked = find_changes(np.arange(18), np.concatenate([values, [math.nan, math.inf]]))
    assert one.steps == 16 and one.reason == "" and math.isfinite(one.largest_score)
    for other in (turned, slower, masked):
        assert len(other.changes) == len(one.changes) and same(other.largest_score, one.largest_score, rel=1e-6)
    for change, mirrored in zip(one.changes, turned.changes, strict=True):
        assert change.score > 1 and change.after_step == change.before_step + 1
        assert same([change.before, change.after], [-mirrored.before, -mirrored.after], rel=1e-6)
    assert find_changes(np.arange(16), values) == one


@covers(log_odds)
@FEW
@given(st.floats(-1e4, -1e-12))
def test_log_odds_turn_with_the_other_outcome(log_p: float) -> None:
    value = float(log_odds(np.array([log_p]))[0])
    assert math.isfinite(value) and (value > 0) == (log_p > -math.log(2))
    if -15 < log_p < -1e-6:  # below, 1 - p is rounded by more than is asked here
        other = math.log(-math.expm1(log_p))
        assert float(log_odds(np.array([other]))[0]) == pytest.approx(-value, rel=1e-6, abs=1e-9)


@covers(displacement)
@FEW
@given(SEEDS, SCALES)
def test_displacement_is_a_difference_of_log_odds_or_null(seed: int, scale: float) -> None:
    case = Case(seed, max(scale, 1e-3))
    sampler, stale = -np.abs(case.x), -np.abs(case.values())
    eps = displacement(sampler, stale)
    assert same(eps, -displacement(stale, sampler))
    nearest = math.log1p(-RESOLVED)
    resolved = (sampler <= nearest) & (stale <= nearest)
    assert (np.isfinite(eps) == resolved).all()
    assert same(eps[resolved], log_odds(stale[resolved]) - log_odds(sampler[resolved]))
    assert (displacement(sampler, sampler)[sampler <= nearest] == 0).all()


@covers(rivals)
@FEW
@given(SEEDS, st.integers(3, 12), st.floats(0.1, 3))
def test_rivals_are_between_one_and_all_the_others(seed: int, size: int, spread: float) -> None:
    p = np.random.default_rng(seed).dirichlet(np.full(size, 1 / spread)) * (1 - 1e-9) + 1e-9 / size
    entropy = np.full(size, -(p * np.log(p)).sum())
    found = rivals(np.log(p), entropy)
    rest = np.array([np.delete(p, a) / np.delete(p, a).sum() for a in range(size)])
    truth = np.exp(-(rest * np.log(rest)).sum(axis=1))
    clear = p < 0.99
    assert np.allclose(found[clear], truth[clear], rtol=1e-4) and (found >= 1).all()
    assert np.isnan(rivals(np.array([math.nan]), np.array([1.0]))).all()


@covers(step_displacement, StepDisplacement)
@FEW
@given(SEEDS, st.integers(1, 4))
def test_sums_of_eps_do_not_depend_on_sharding_or_masked_rows(seed: int, shards: int) -> None:
    case = Case(seed, 3.0)
    parts = [-np.abs(case.x), -np.abs(case.values()), np.abs(case.values()), case.group]
    whole = step_displacement(0, *parts, case.groups)
    order = case.order()
    found = [step_displacement(0, *(p[at] for p in parts), case.groups) for at in np.array_split(order, shards)]
    assert same(sum(f.counts for f in found), whole.counts) and same(sum(f.squares for f in found), whole.squares)
    assert sum(f.saturated for f in found) == whole.saturated
    eps = displacement(parts[0], parts[1])
    assert whole.counts.sum() == np.isfinite(eps).sum() and same(whole.squares.sum(), np.nansum(np.square(eps)))
    there = whole.counts.sum(axis=0) > 0
    assert same(np.square(whole.rms[there]) @ whole.counts.sum(axis=0)[there], whole.squares.sum())
    assert np.isnan(whole.rms[~there]).all()


@covers(constancy, Trend)
@settings(max_examples=10, deadline=None)
@given(SEEDS, st.floats(0.01, 100))
def test_constancy_is_blind_to_the_order_of_steps_and_a_common_factor(seed: int, by: float) -> None:
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(5):
        mu, pi = -rng.exponential(size=(2, 60)) - 0.01
        steps.append(step_displacement(step, mu, pi, rng.uniform(0, 2, size=60), np.arange(60) % 6, 6))
    base = constancy(steps)
    for other in (constancy(steps[::-1]), constancy([replace(s, squares=by * s.squares) for s in steps])):
        assert (other.answer, other.tokens, other.steps) == (base.answer, base.tokens, base.steps)
        assert same([base.estimate, base.low, base.high], [other.estimate, other.low, other.high], 1e-4, 1e-6)
    assert base.low <= base.estimate <= base.high and base.sentence.endswith(".")
    assert (1 + base.per_step) ** 4 == pytest.approx(1 + base.estimate, rel=1e-6)


@covers(factor)
@FEW
@given(st.floats(-1e4, 1e4))
def test_a_factor_is_three_digits_of_the_exponential(log_factor: float) -> None:
    assert float(factor(log_factor)) == pytest.approx(math.exp(min(log_factor, 700.0)), rel=6e-3)


@covers(feedback, StepBias)
@settings(max_examples=4, deadline=None)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_feedback_is_blind_to_order_and_unit_and_knows_its_seed(seed: int, unit: float) -> None:
    rng = np.random.default_rng(seed)
    z = np.cumsum(rng.normal(scale=0.2, size=10))
    steps = [StepBias(k, math.exp(value), float(k + 1), 5) for k, value in enumerate(z)]
    base = feedback(steps, seed=3)
    assert feedback(steps[::-1], seed=3) == base and base.tokens == 50
    moved = feedback([replace(s, total_variation=unit * s.total_variation) for s in steps], seed=3)
    assert same(base.estimate, moved.estimate, 1e-6, 1e-9) and base.low <= base.high
    with_null = feedback([*steps, StepBias(11, math.nan, 1.0, 9)], seed=3)
    assert (with_null.estimate, with_null.tokens) == (base.estimate, 50)


@covers(step_lag, StepLag)
@FEW
@given(SEEDS, SCALES, st.integers(1, 4))
def test_sums_of_lags_do_not_depend_on_sharding_or_masked_rows(seed: int, scale: float, shards: int) -> None:
    case = Case(seed, scale)
    age = case.rng.integers(-1, 4, size=case.n)
    whole = step_lag(5, case.x, age, case.group, case.groups)
    parts = [
        step_lag(5, case.x[at], age[at], case.group[at], case.groups) for at in np.array_split(case.order(), shards)
    ]
    used = (age > 0) & ~np.isnan(case.x)
    assert whole.counts.sum() == used.sum() and whole.versions.tolist() == sorted(set(age[used].tolist()))
    for column, version in enumerate(whole.versions):
        here = [(p, p.versions.tolist().index(version)) for p in parts if version in p.versions]
        assert same(sum(p.counts[:, at] for p, at in here), whole.counts[:, column])
        assert same(sum(p.squares[:, at] for p, at in here), whole.squares[:, column])
        assert same(whole.squares[:, column].sum(), np.square(case.x[used & (age == version)]).sum())


@covers(lag_growth, Trend)
@settings(max_examples=10, deadline=None)
@given(SEEDS, st.floats(0.01, 100))
def test_the_exponent_is_blind_to_order_and_unit(seed: int, unit: float) -> None:
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(1, 7):
        lag = rng.normal(size=40) * step
        steps.append(step_lag(step, lag, np.full(40, step), np.arange(40) % 5, 5))
    base = lag_growth(steps)
    for other in (lag_growth(steps[::-1]), lag_growth([replace(s, squares=unit * s.squares) for s in steps])):
        assert other.answer == base.answer and same(
            [base.estimate, base.low, base.high], [other.estimate, other.low, other.high], 1e-5, 1e-7
        )
    assert base.low <= base.estimate <= base.high and base.answer in ("linear", "quadratic", "undecided")


@covers(StepDiscrepancy, discrepancy_sentence)
@FEW
@given(st.lists(st.tuples(SHARE, st.floats(1e-6, 0.1), st.sampled_from([math.nan, 0.05, 2.0])), min_size=1, max_size=6))
def test_the_discrepancy_has_one_sentence_for_every_run(drawn: list[tuple[float, float, float]]) -> None:
    steps = [StepDiscrepancy(at, rms, k3, floor) for at, (rms, k3, floor) in enumerate(drawn)]
    told = discrepancy_sentence(steps)
    known = [step for step in steps if not math.isnan(step.rms)]
    assert told.endswith((".", "it.")) and "nan" not in told and ("null throughout" in told) == (not known)
    # Nothing is concluded from steps within the noise.
    if known and all(step.within for step in known):
        assert "fault" not in told and f"at {len(known)} of {len(known)} steps" in told
    worse = [replace(step, k3=0.2, floor=math.nan) for step in steps]
    assert not known or "above 0.003" in discrepancy_sentence(worse)


@covers(StepMass, mass_sentence)
@FEW
@given(st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(0.0, 0.2)), min_size=1, max_size=8), SEEDS)
def test_the_mass_audit_is_blind_to_order_and_silent_within_the_noise(
    drawn: list[tuple[float, float]], seed: int
) -> None:
    steps = [StepMass(at, value, value - half, value + half) for at, (value, half) in enumerate(drawn)]
    told = mass_sentence(steps, 0.95)
    order = np.random.default_rng(seed).permutation(len(steps))
    assert mass_sentence([steps[at] for at in order], 0.95)[:30] == told[:30]
    assert mass_sentence([replace(step, within_floor=True) for step in steps], 0.95) == ""
    broken = [s for s in steps if (s.high < 1 or s.low > 1) and abs(s.value - 1) > 2e-3]
    assert [s for s in steps if s.violates] == broken
    if told:
        worst = max(broken, key=lambda s: abs(s.value - 1))
        assert f"at {len(broken)} of {len(steps)} steps" in told and f"{worst.value:.4f}" in told
        assert ("below 1" in told) == (worst.value < 1)
