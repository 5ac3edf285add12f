"""Properties of one step's numbers: order of rows, names of groups, masked sequences, extremes, and what adds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.attribution import Attribution, attribute, attribution_sentence
from mismatch_probe.stats.bias import MeanBias, cosine, discrepancy_bias_sums, mean_bias, sampled_total_variation
from mismatch_probe.stats.clipping import sign_skew
from mismatch_probe.stats.corrections import TARGETS, Bounds, correction_weights, ppo_clips, target_log_weights
from mismatch_probe.stats.floor import floor_top, noise_floor, within_floor
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import split
from tests.properties import SCALES, SEEDS, Case, covers, same

FEW = settings(max_examples=30, deadline=None)


@covers(attribute, Attribution, attribution_sentence)
@FEW
@given(SEEDS, SCALES)
def test_whose_error_is_blind_to_order_and_names(seed: int, scale: float) -> None:
    case = Case(seed, scale)
    parts = [case.values(), case.values(), case.values()]
    one = attribute(*parts, case.sequence, case.group, ClusterIntervals(case.groups))
    order, names = case.order(), case.renamed()
    masked = [np.append(part[order], math.nan) for part in parts]
    sequence = np.append(case.sequence[order], 999)
    two = attribute(*masked, sequence, np.append(names[case.group[order]], 0), ClusterIntervals(case.groups))
    assert (one.tokens, one.sequences) == (two.tokens, two.sequences)
    for name, interval in one.intervals.items():
        assert same(interval.value, two.intervals[name].value, rel=1e-6), name
    if one.tokens:
        values = {name: interval.value for name, interval in one.intervals.items()} | {"reference_tokens": one.tokens}
        null = dict.fromkeys(values, math.nan) | {"reference_tokens": 0}
        told = attribution_sentence([values, null], "float32")
        assert told == attribution_sentence([null, values, values], "float32").replace(
            f"({2 * one.tokens:,} tokens)", f"({one.tokens:,} tokens)"
        )
        assert told.startswith("Whose error") and "nan" not in told and "-0%" not in told


@covers(mean_bias, MeanBias, discrepancy_bias_sums, cosine)
@FEW
@given(SEEDS, st.integers(1, 4))
def test_mean_bias_adds_up_over_shards_and_halves(seed: int, shards: int) -> None:
    case = Case(seed, 0.5)
    token, half = case.rng.integers(0, 6, size=case.n), case.group % 2
    sums, counts = discrepancy_bias_sums(case.x, token, half, 6)
    parts = [discrepancy_bias_sums(case.x[a], token[a], half[a], 6) for a in np.array_split(case.order(), shards)]
    assert same(sum(p[0] for p in parts), sums) and (sum(p[1] for p in parts) == counts).all()
    known = ~np.isnan(case.x)
    assert same(sums.sum(axis=1), [(1 - np.exp(case.x[known & (half == h)])).sum() for h in (0, 1)])
    found = mean_bias(sums, counts)
    if not known.any():
        assert np.isnan(found.vector).all() and math.isnan(found.norm)
        return
    assert same(found.vector, sums.sum(axis=0) / known.sum()) and same(found.norm, np.sqrt(found.vector @ found.vector))
    swapped = mean_bias(sums[::-1], counts[::-1])
    assert same(
        [swapped.norm, swapped.noise, swapped.split_half_cosine], [found.norm, found.noise, found.split_half_cosine]
    )
    if counts.all():
        halves = sums / counts[:, None]
        share = counts[0] / counts.sum()
        assert same(found.noise**2, share * (1 - share) * np.square(halves[0] - halves[1]).sum())
        assert math.isnan(found.split_half_cosine) or same(found.split_half_cosine, cosine(*halves))


@covers(cosine)
@FEW
@given(SEEDS, st.floats(1e-3, 1e3))
def test_a_cosine_knows_no_length(seed: int, by: float) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, 7))
    assert same(cosine(by * a, b), cosine(b, a)) and same(cosine(a, -by * a), -1.0)
    assert abs(cosine(a, b)) <= 1 + 1e-12 and math.isnan(cosine(a, 0 * b))


@covers(sampled_total_variation)
@FEW
@given(SEEDS, st.integers(2, 9))
def test_sampled_total_variation_is_unbiased(seed: int, size: int) -> None:
    mu, pi = np.random.default_rng(seed).dirichlet(np.ones(size), size=2) + 1e-9
    terms = sampled_total_variation(np.log(pi / mu))
    assert mu @ terms == pytest.approx(0.5 * np.abs(mu - pi).sum(), abs=1e-7) and (terms >= 0).all()


@covers(sign_skew, ppo_clips)
@FEW
@given(SEEDS, st.floats(0.05, 0.5))
def test_clipping_is_that_of_the_definition_token_by_token(seed: int, clip: float) -> None:
    case = Case(seed, 0.8)
    parts, advantage = split(case.values(), case.values(), case.values()), case.values()
    advantage[case.rng.random(case.n) < 0.2] = 0.0
    found = sign_skew(parts, advantage, case.levels, ClusterIntervals(case.groups), clip)
    rows: dict[str, list[float]] = {name: [] for name in found}
    for lag, d, a in zip(parts.lag, parts.log_ratio, advantage, strict=True):
        r, outside = math.exp(lag), not 1 - clip <= math.exp(lag) <= 1 + clip
        if math.isnan(lag) or math.isnan(a) or a == 0:
            continue
        rows["clip_share_positive" if a > 0 else "clip_share_negative"].append(outside)
        if math.isnan(d):
            continue
        flat = [(x > 1 + clip and a > 0) or (x < 1 - clip and a < 0) for x in (r, math.exp(d))]
        assert ppo_clips(np.array([lag, d]), np.array([a, a]), clip).tolist() == flat
        rows["clip_flips"].append(flat[0] != flat[1])
        if outside:
            rows["clip_skew"].append(math.copysign(1, a) * d)
    for name, values in rows.items():
        assert same(found[name].value, np.mean(values) if values else math.nan), name
        assert name == "clip_skew" or not found[name].low < 0, name
    assert not ppo_clips(np.array([math.nan]), np.ones(1), clip).any()


@covers(correction_weights, Bounds)
@FEW
@given(SEEDS, SCALES)
def test_corrections_stay_in_their_bounds_and_are_one_on_policy(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.0)
    assert Bounds() == Bounds(2.0, (0.5, 5.0), (0.99, 1.01), 0.2)
    bounds, a = Bounds(cap=1.7, mask=(0.4, 3.0), geometric=(0.9, 1.1), clip=0.3), case.values()
    d, lag = case.x, case.values()
    found = correction_weights(d, lag, a, case.levels, bounds)
    with np.errstate(over="ignore"):
        ratio, growth = np.exp(d + lag), np.exp(lag)
    assert (found["none"] == 1).all() and same(found["token_tis"], np.minimum(ratio, 1.7))
    assert same(found["token_mask"], np.where((ratio >= 0.4) & (ratio <= 3.0), ratio, 0.0))
    assert set(found["geometric_mask"]) <= {0.0, 1.0}
    assert same(found["ppo_clip"], np.where(ppo_clips(lag, a, 0.3), 0.0, growth))
    for s in range(case.levels.n_sequences):
        here = case.sequence == s
        total = float((d + lag)[here].sum())
        assert same(found["sequence_is"][here], math.exp(total) if total < 709 else math.inf, rel=1e-7)
        assert (found["geometric_mask"][here] == (0.9 <= math.exp(min(total / here.sum(), 700)) <= 1.1)).all()
    still = correction_weights(0 * d, 0 * d, a, case.levels, bounds)
    assert all((weights == 1).all() for weights in still.values())


@covers(target_log_weights)
@FEW
@given(SEEDS, st.sampled_from(TARGETS))
def test_target_weights_add_up_and_stay_in_their_response(seed: int, target: str) -> None:
    case = Case(seed, nulls=0.0)
    y = case.values()
    one, two = (target_log_weights(v, case.levels, target) for v in (case.x, y))
    assert same(target_log_weights(case.x + y, case.levels, target), one + two)
    for s in range(case.levels.n_sequences):
        x = case.x[case.sequence == s]
        truth = {"token": x, "per-decision": np.cumsum(x), "sequence": np.full(len(x), x.sum())}[target]
        assert same(one[case.sequence == s], truth)


@covers(noise_floor, floor_top, within_floor)
@FEW
@given(SEEDS, SCALES)
def test_the_floor_is_an_rms_that_no_largest_term_falls_below(seed: int, scale: float) -> None:
    case = Case(seed, scale, nulls=0.0)
    floor = noise_floor(case.x, case.group, ClusterIntervals(case.groups))
    moved = noise_floor(-case.x[::-1], case.group[::-1], ClusterIntervals(case.groups))
    assert same(floor.value, math.sqrt(np.square(case.x).mean())) and same(floor.value, moved.value)
    largest = np.abs(case.x).max()
    top = floor_top(np.array([floor.high, math.nan, math.nan]), np.array([largest, largest, math.nan]))
    assert top[0] <= largest and top[1] == largest and math.isnan(top[2])
    assert within_floor(top[:1], top[:1]).all() and not within_floor(np.array([math.nan]), top[:1]).any()
    assert not within_floor(np.nextafter(top[:1], math.inf), top[:1]).any()
