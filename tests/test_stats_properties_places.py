"""Properties of KL by place, of gradients and of a whole step: order, names, masked sequences, extremes."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.fresh import StepFresh, fresh_kl, fresh_sentence
from mismatch_probe.stats.gradient import GradientBias, TokenGradients
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.positions import Places, audit_places, full_kl, full_kl_interval
from mismatch_probe.stats.ratios import Levels, split
from mismatch_probe.stats.summary import BiasVectors, StepTokens, Summary, summarise
from tests.properties import SCALES, SEEDS, Case, covers, same
from tests.test_stats_gradient import drawn, found_by

FEW = settings(max_examples=30, deadline=None)


@covers(fresh_kl)
@FEW
@given(SEEDS)
def test_fresh_kl_is_a_mean_and_a_ratio_of_means(seed: int) -> None:
    case, other = Case(seed), Case(seed + 1, nulls=0.3)
    there, back = np.abs(case.x), np.abs(case.values())
    prefix, group = np.abs(other.x), other.group % case.groups
    found = fresh_kl(there, back, case.levels, prefix, group, ClusterIntervals(case.groups))
    name = "full_kl_fresh_{}".format
    assert same(found[name("trainer_stale")].value, np.nanmean(there) if (~np.isnan(there)).any() else math.nan)
    assert same(found[name("stale_trainer")].value, np.nanmean(back) if (~np.isnan(back)).any() else math.nan)
    both = [
        g
        for g in range(case.groups)
        if (~np.isnan(there[case.group == g])).any() and (~np.isnan(prefix[group == g])).any()
    ]
    if both:
        ratio = np.nanmean(there[np.isin(case.group, both)]) / np.nanmean(prefix[np.isin(group, both)])
        assert same(found[name("ratio")].value, ratio)
    scaled = fresh_kl(2 * there, back, case.levels, 4 * prefix, group, ClusterIntervals(case.groups))
    assert same(scaled[name("ratio")].value, found[name("ratio")].value / 2)
    assert all(not interval.low < 0 for interval in found.values())


@covers(StepFresh, fresh_sentence)
@FEW
@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 3.0), st.sampled_from([0.0, 0.5, math.nan])), max_size=5))
def test_fresh_kl_has_words_for_every_run(rows: list[tuple[float, float, float]]) -> None:
    steps = [
        StepFresh(at, full, full * (1 - w), full * (1 + w), 0.1, ratio, ratio * (1 - w), ratio * (1 + w))
        for at, (full, ratio, w) in enumerate(rows)
    ]
    told = fresh_sentence(steps, 0.95)
    assert "nan" not in told and bool(told) == bool(steps)
    judged = [s for s in steps if not math.isnan(s.ratio_low)]
    above, below = sum(s.ratio_low > 1 for s in judged), sum(s.ratio_high < 1 for s in judged)
    assert not steps or f"too small at {above} and too large at {below} of {len(judged)} steps" in told
    null = StepFresh(9, *[math.nan] * 7)
    assert fresh_sentence([*steps, null], 0.95) == told


@covers(TokenGradients, GradientBias)
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.floats(0.1, 10))
def test_gradients_compare_the_same_in_any_unit_of_advantage(seed: int, unit: float) -> None:
    tokens = drawn(5, 4, np.random.default_rng(seed))
    one, two = found_by(tokens), found_by(replace(tokens, advantage=-unit * tokens.advantage))
    # PPO's clip and the skew look at the sign of A; the others do not.
    for name in one.intervals:
        if "ppo" not in name:
            assert same(one.intervals[name].value, two.intervals[name].value, rel=1e-6, absolute=1e-9), name
    assert one.values["gradient_target_ess"] == two.values["gradient_target_ess"]


def places_of(case: Case, kl: np.ndarray) -> Places:
    return audit_places(case.x, kl, case.levels, ClusterIntervals(case.groups))


@covers(audit_places, Places, full_kl, full_kl_interval)
@FEW
@given(SEEDS, st.sampled_from([0.0, 0.01, 0.3, 3.0, 100.0]))
def test_places_are_products_up_to_there_and_refuse_what_is_not_known(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.03)
    kl = np.abs(case.rng.normal(size=case.n))
    places = places_of(case, kl)
    whole = [s for s in range(case.levels.n_sequences) if not np.isnan(case.x[case.sequence == s]).any()]
    for t in range(len(places.alive)):
        weights, alive, divergence = [], [], []
        for s in whole:
            x = case.x[case.sequence == s]
            weights.append(math.exp(x[:t].sum()))
            alive.append(len(x) > t)
            divergence.append(kl[case.sequence == s][t] if len(x) > t else 0.0)
        w, a, k = np.array(weights), np.array(alive), np.array(divergence)
        assert places.alive[t] == a.sum() and same(places.mean_weight[t], w.mean())
        assert same(places.alive_mass[t], (w * a).mean()) and same(places.weighted_kl[t], (w * k).mean())
        assert same(places.prefix_kl[t], k.sum() / a.sum())
        assert same(places.effective[t], w.sum() ** 2 / np.square(w).sum(), rel=1e-6)
        assert places.missing_mass[t] == (1 - places.mean_weight[t] if places.mean_weight_high[t] < 1 else 0)
        assert places.identifiable[t] <= places.tame[t] and math.isnan(places.full_kl[t]) != places.identifiable[t]
    assert same(places.sums[:, 1].sum(), len(whole) * places.weighted_kl.sum())
    value, reason = full_kl(places)
    interval = full_kl_interval(places, ClusterIntervals(case.groups))
    assert same(interval.value, value) and math.isnan(value) == bool(reason)
    masked = audit_places(
        np.append(case.x, math.nan),
        np.append(kl, 5.0),
        Levels(np.append(case.sequence, case.levels.n_sequences), np.append(case.group_of_sequence, 0)),
        ClusterIntervals(case.groups),
    )
    for field in fields(Places):
        assert same(getattr(masked, field.name), getattr(places, field.name)), field.name


def step_tokens(case: Case, sequences: np.ndarray, names: np.ndarray, masked: int) -> StepTokens:
    """The case's responses in an order, groups renamed, with ``masked`` sequences that have no counted token."""
    rng = np.random.default_rng(case.n)
    order = np.concatenate([np.flatnonzero(case.sequence == s) for s in sequences])
    lengths = np.bincount(case.sequence)[sequences]
    group = np.append(names[case.group_of_sequence[sequences]], np.zeros(masked, dtype=np.int64))
    mu, stale, trainer = (case.scale * rng.normal(size=case.n)[order] for _ in range(3))
    exact = [np.abs(rng.normal(size=case.n))[order] for _ in range(6)]
    return StepTokens(
        split(mu, stale, trainer),
        Levels(np.repeat(np.arange(len(sequences)), lengths), group),
        (case.group % 2)[order],
        rng.integers(0, 5, size=case.n)[order],
        *exact,
        bias_lag_sums=None,
        bias_lag_tokens=np.zeros(2, dtype=np.int64),
    )


@covers(summarise, StepTokens, Summary, BiasVectors)
@settings(max_examples=12, deadline=None)
@given(SEEDS, SCALES)
def test_a_step_is_blind_to_order_names_and_masked_sequences_and_says_why_it_is_null(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.0)
    intervals = ClusterIntervals(case.groups, resamples=20)
    sequences = np.arange(case.levels.n_sequences)
    plain = step_tokens(case, sequences, np.arange(case.groups), 0)
    one = summarise(plain, intervals, BiasVectors())
    moved = step_tokens(case, case.rng.permutation(sequences), case.renamed(), 2)
    two = summarise(moved, intervals, BiasVectors())
    for name, interval in one.intervals.items():
        other = two.intervals[name]
        assert same(interval.value, other.value, rel=1e-6, absolute=1e-9), name
        assert not interval.high < interval.low, name
        if not math.isfinite(interval.value) or math.isnan(interval.low):
            assert interval.reason, name
        if name.startswith(("ess_", "perplexity_ess", "predicted_ess")) and math.isfinite(interval.value):
            assert 0 <= interval.value <= 1, name
    for name, value in one.values.items():
        if not name.endswith("_bias"):
            assert same(value, two.values[name], rel=1e-6, absolute=1e-9), name
    again = summarise(plain, intervals, BiasVectors(discrepancy=one.bias.discrepancy))
    assert again.intervals["discrepancy_rms"].low == one.intervals["discrepancy_rms"].low or scale == 0
    if one.values["bias_discrepancy_norm"] > 0:
        assert again.values["bias_discrepancy_cosine_previous"] == pytest.approx(1.0)
    else:
        assert scale in (0.0, 100.0, 1e4) and math.isnan(again.values["bias_discrepancy_cosine_previous"])
    # A Pareto k is infinite where one weight dwarfs the others beyond float64.
    assert not [name for name, value in one.values.items() if math.isinf(value) and not name.startswith("pareto_k")]
