"""Properties of what is said of importance weights, at any scale, order, masking and sharding."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mismatch_probe.stats import tails
from mismatch_probe.stats.ess import ess, ess_from_sums
from mismatch_probe.stats.health import level_log_weights, weight_health
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.kl import k_terms
from mismatch_probe.stats.ratios import Levels, Split, drop_nulls, group_log_means, sequence_sums, split
from mismatch_probe.stats.weights import (
    covariance_interval,
    length_at_half_ess,
    predicted_sequence_ess,
    token_intervals,
    weight_intervals,
)
from tests.properties import SCALES, SEEDS, Case, covers, same

SHARES = (ess, tails.perplexity_ess, tails.max_weight_share)
OF_WEIGHTS = (*SHARES, tails.chi_square, tails.second_moment, tails.pareto_k)
FEW = settings(max_examples=40, deadline=None)


@covers(*OF_WEIGHTS, weight_health, length_at_half_ess)
@FEW
@given(SEEDS, SCALES)
def test_order_and_masked_rows_change_no_number_of_weights(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x = scale * rng.normal(size=60)
    moved = rng.permutation(np.append(x, [math.nan] * 5))
    for function in (*OF_WEIGHTS, length_at_half_ess):
        assert same(function(x), function(moved), rel=1e-7), function.__name__
    assert weight_health(x) == {"pareto_k": tails.pareto_k(x), "max_weight_share": tails.max_weight_share(x)}


@covers(*OF_WEIGHTS)
@FEW
@given(SEEDS, SCALES, st.sampled_from([-1e4, -3.0, 0.5, 1e4]))
def test_shares_are_shares_and_blind_to_a_common_factor(seed: int, scale: float, shift: float) -> None:
    x = scale * np.random.default_rng(seed).normal(size=40)
    for function in SHARES:
        assert 0 < function(x) <= 1
        assert same(function(x + shift), function(x), rel=1e-6), function.__name__
    assert tails.max_weight_share(x) >= 1 / 40 * (1 - 1e-12)
    chi = tails.chi_square(x)
    assert 0 <= chi <= 39 + 1e-9 and same(1 / (1 + chi), ess(x))
    assert same(tails.chi_square(x + shift), chi, rel=1e-5, absolute=1e-6)
    second, scaled = tails.second_moment(x), tails.second_moment(x + shift)
    # At +-10^4 nats a number, or null where it has no float64.
    if math.isfinite(second) and math.isfinite(scaled):
        assert same(scaled, second * math.exp(2 * shift), rel=1e-6)
    assert math.isnan(second) or second >= 0
    k = tails.pareto_k(x)
    assert math.isnan(k) or k == math.inf or same(tails.pareto_k(x + shift), k, rel=1e-3, absolute=1e-3) or scale < 0.1


@covers(*OF_WEIGHTS, length_at_half_ess, weight_health)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 30))
def test_nothing_is_null_and_equal_weights_are_perfect(n: int) -> None:
    for empty in (np.zeros(0), np.full(n, math.nan)):
        assert all(math.isnan(function(empty)) for function in (*OF_WEIGHTS, length_at_half_ess))
        assert all(math.isnan(value) for value in weight_health(empty).values())
    if n:
        equal = np.full(n, -7.25)
        assert (ess(equal), tails.perplexity_ess(equal), tails.chi_square(equal)) == (1.0, 1.0, 0.0)
        assert math.isnan(tails.pareto_k(equal)) and length_at_half_ess(equal) == math.inf


@covers(tails.pareto_k)
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(25, 400))
def test_pareto_k_is_null_below_25_weights_and_not_from_there_on(seed: int, n: int) -> None:
    x = np.random.default_rng(seed).normal(size=n)
    assert math.isfinite(tails.pareto_k(x)) and math.isnan(tails.pareto_k(x[:24]))


@covers(tails.pareto_k_limit)
@given(st.integers(0, 10**9))
@example(1)
@example(2)
@example(2154)
@example(2155)
def test_the_limit_of_pareto_k_rises_to_seven_tenths(n: int) -> None:
    limit = tails.pareto_k_limit(n)
    if n < 2:
        assert math.isnan(limit)
    else:
        assert limit == min(0.7, 1 - 1 / math.log10(n)) and limit <= tails.pareto_k_limit(n + 1)


@covers(ess_from_sums, tails.perplexity_from_sums)
@FEW
@given(SEEDS, st.floats(1e-3, 1e3), st.integers(1, 5))
@example(2, 1.0, 1)
def test_sums_over_shards_and_a_common_factor_give_the_same(seed: int, factor: float, shards: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=30) if seed % 2 else 1 + 1e-9 * rng.normal(size=30)
    parts = np.array_split(factor * weights, shards)
    sums = sum(np.array([len(w), w.sum(), np.square(w).sum()]) for w in parts)
    assert same(ess_from_sums(sums), ess(np.log(weights))) and 0 < float(ess_from_sums(sums)) <= 1
    entropies = sum(float((w * np.log(w)).sum()) for w in parts)
    perplexity = float(tails.perplexity_from_sums(np.array(30.0), sums[1], np.array(entropies)))
    assert same(perplexity, tails.perplexity_ess(np.log(weights))) and 0 < perplexity <= 1


@covers(weight_intervals, token_intervals, covariance_interval)
@FEW
@given(SEEDS, SCALES)
def test_intervals_of_weights_are_blind_to_order_names_and_masked_rows(seed: int, scale: float) -> None:
    case = Case(seed, scale)
    other = case.values()
    order, names = case.order(), case.renamed()
    group = np.append(names[case.group[order]], case.groups)
    sequence = np.append(case.sequence[order], len(case.group_of_sequence))
    x, y = np.append(case.x[order], math.nan), np.append(other[order], 5.0)
    levels = Levels(sequence, np.append(names[case.group_of_sequence], case.groups))
    few, more = ClusterIntervals(case.groups), ClusterIntervals(case.groups + 1)
    pairs = [
        (weight_intervals(case.x, case.group, few), weight_intervals(x, group, more)),
        (token_intervals(case.x, case.levels, few), token_intervals(x, levels, more)),
        (
            {"covariance": covariance_interval(case.x, other, case.group, few)},
            {"covariance": covariance_interval(x, y, group, more)},
        ),
    ]
    for one, two in pairs:
        for name in set(one) - {"ess_bias"}:
            assert same(one[name].value, two[name].value, rel=1e-6), name
            assert math.isfinite(one[name].value) or one[name].reason, name
            assert name not in ("ess", "perplexity_ess") or np.isnan(case.x).all() or 0 < one[name].value <= 1
            for end in ("low", "high"):
                a, b = getattr(one[name], end), getattr(two[name], end)
                assert (
                    math.isnan(a) == math.isnan(b)
                    or "nothing that can be measured" in one[name].reason + two[name].reason
                )
            assert not one[name].high < one[name].low


@covers(weight_intervals, token_intervals, covariance_interval)
@FEW
@given(SEEDS)
def test_intervals_of_weights_follow_their_scale(seed: int) -> None:
    case = Case(seed, 0.5)
    intervals = ClusterIntervals(case.groups)
    one, two = (weight_intervals(case.x + shift, case.group, intervals) for shift in (0.0, 1.5))
    for name in ("ess", "perplexity_ess", "chi_square"):
        assert same([one[name].value, one[name].low, one[name].high], [two[name].value, two[name].low, two[name].high])
        assert name == "chi_square" or not one[name].value > 1
    factor = math.exp(3.0)
    assert same(one["second_moment"].value * factor, two["second_moment"].value)
    assert same(one["second_moment"].high * factor, two["second_moment"].high)
    law, wide = (token_intervals(by * case.x, case.levels, intervals) for by in (1.0, 2.0))
    assert same(law["half_ess_length"].value, 4 * wide["half_ess_length"].value)
    assert same(law["predicted_ess"].value ** 4, wide["predicted_ess"].value)
    assert law["share_beyond_ln2"].value <= law["share_outside_band"].value <= wide["share_outside_band"].value
    y = case.values()
    base = covariance_interval(case.x, y, case.group, intervals)
    moved = covariance_interval(-3.0 * case.x + 2.0, y - 5.0, case.group, intervals)
    assert same(-3.0 * base.value, moved.value) and same(-3.0 * base.low, moved.high, rel=1e-6)


@covers(predicted_sequence_ess, length_at_half_ess)
@FEW
@given(SEEDS, SCALES)
def test_the_two_line_law_is_one_law(seed: int, scale: float) -> None:
    case = Case(seed, scale)
    law, length = predicted_sequence_ess(case.x, case.levels), length_at_half_ess(case.x)
    known = ~np.isnan(case.x)
    if not known.any():
        assert math.isnan(law) and math.isnan(length)
        return
    assert 0 <= law <= 1 and length > 0
    mean_length = known.sum() / len(np.unique(case.sequence[known]))
    assert law == pytest.approx(2 ** (-mean_length / length), rel=1e-6, abs=1e-300)
    assert same(length_at_half_ess(case.x + 0.25), length, rel=1e-5) or scale < 1e-3


@covers(level_log_weights, sequence_sums, group_log_means, Levels)
@FEW
@given(SEEDS, SCALES)
def test_levels_add_up_whatever_the_order_of_tokens(seed: int, scale: float) -> None:
    case = Case(seed, scale)
    found = level_log_weights(case.x, case.levels)
    for s in range(case.levels.n_sequences):
        assert same(found["sequence"][s], case.x[case.sequence == s].sum(), rel=1e-9, absolute=1e-9)
    for g in range(case.groups):
        sums = found["sequence"][case.group_of_sequence == g]
        sums = sums[~np.isnan(sums)]
        peak = sums.max(initial=-math.inf)
        truth = peak + math.log(np.mean(np.exp(sums - peak))) if len(sums) else math.nan
        assert same(found["prompt"][g], truth)
    order = case.order()
    moved = level_log_weights(case.x[order], Levels(case.sequence[order], case.group_of_sequence))
    assert same(moved["sequence"], found["sequence"]) and same(moved["prompt"], found["prompt"])
    # A sequence without a counted token is null and changes no prompt.
    longer = Levels(case.sequence, np.append(case.group_of_sequence, 0))
    assert math.isnan(sequence_sums(case.x, longer)[-1])
    assert same(level_log_weights(case.x, longer)["prompt"], found["prompt"])
    assert longer.n_groups == case.groups and longer.n_sequences == case.levels.n_sequences + 1
    assert (longer.group == case.group).all() and Levels(case.sequence[:0], case.sequence[:0]).n_groups == 0


@covers(drop_nulls)
@FEW
@given(SEEDS)
def test_dropping_nulls_keeps_the_others_in_order(seed: int) -> None:
    case = Case(seed, nulls=0.5)
    values, group = drop_nulls(np.append(case.x, [math.inf, math.nan]), np.append(case.group, [7, 8]))
    assert values.tolist() == [*(v for v in case.x.tolist() if not math.isnan(v)), math.inf]
    assert group.tolist() == [*case.group[~np.isnan(case.x)].tolist(), 7]


@covers(split, Split)
@FEW
@given(SEEDS, SCALES)
def test_the_split_adds_up_and_knows_what_is_null(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.3)
    sampler, stale, trainer = case.values(), case.values(), case.values()
    parts = split(sampler, stale, trainer)
    whole = ~np.isnan(sampler + stale + trainer)
    assert (parts.discrepancy + parts.lag == parts.log_ratio)[whole].all()
    assert (np.isnan(parts.log_ratio) == np.isnan(sampler + trainer)).all()
    assert (np.isnan(parts.discrepancy) == np.isnan(sampler + stale)).all()
    assert (np.isnan(parts.lag) == np.isnan(stale + trainer)).all()
    assert same(parts.log_ratio, trainer - sampler, absolute=1e-9)


@covers(k_terms)
@FEW
@given(SEEDS, SCALES)
def test_kl_terms_keep_their_signs_and_orders(seed: int, scale: float) -> None:
    x = scale * np.random.default_rng(seed).uniform(-1, 1, size=50)
    with np.errstate(over="ignore"):
        terms, turned = k_terms(np.append(x, math.nan)), k_terms(-x)
    assert all(np.isnan(values[-1]) for values in terms.values())
    assert (terms["k1"][:-1] == -x).all() and (terms["k2"][:-1] == turned["k2"]).all()
    assert (terms["k2"][:-1] >= 0).all() and (terms["k3"][:-1] >= -1e-15).all()
    near = np.abs(x) < 1e-2
    assert np.allclose(terms["k3"][:-1][near], terms["k2"][:-1][near], rtol=1e-2, atol=1e-15)
