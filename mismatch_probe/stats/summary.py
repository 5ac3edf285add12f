"""One step's tokens -> its row of numbers, each with an interval over prompt groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.stats.bias import (
    MeanBias,
    cosine,
    discrepancy_bias_sums,
    mean_bias,
    sampled_total_variation,
)
from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.health import length_at_half_ess, level_log_weights, predicted_sequence_ess, weight_health
from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    LOG_MINUS_LOG,
    ClusterIntervals,
    Interval,
    Scale,
    Statistic,
    group_sums,
    mean,
    root_mean,
)
from mismatch_probe.stats.kl import k_terms
from mismatch_probe.stats.positions import Places, audit_places, full_kl
from mismatch_probe.stats.ratios import Levels, Split, drop_nulls, sequence_sums
from mismatch_probe.stats.types import Floats, Ints


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The counted tokens of one step; arrays (n,), nats, NaN = null.

    ``half`` is 0 or 1, by prompt group. ``bias_lag_sums`` (2, V) and ``bias_lag_tokens`` (2,) are the exact lag bias
    summed over each half, None when it was not computed.
    """

    split: Split
    levels: Levels
    half: Ints
    token_id: Ints
    kl_stale_trainer: Floats
    kl_trainer_stale: Floats
    total_variation: Floats
    same_top: Floats
    entropy_stale: Floats
    entropy_trainer: Floats
    bias_lag_sums: Floats | None
    bias_lag_tokens: Ints


@dataclass(frozen=True, eq=False)
class BiasVectors:
    """Mean bias vectors of a step, (V,), kept for the cosine at the next step; None = null."""

    lag: Floats | None = None
    discrepancy: Floats | None = None


@dataclass(frozen=True, eq=False)
class Summary:
    """``values`` by name, NaN = null; ``intervals`` by name; ``reasons`` says why something is null."""

    values: dict[str, float]
    intervals: dict[str, Interval]
    bias: BiasVectors
    places: Places
    reasons: list[str] = field(default_factory=list)


def summarise(tokens: StepTokens, intervals: ClusterIntervals, previous: BiasVectors) -> Summary:
    """Every number of ``steps.parquet`` that follows from the tokens alone.

    Args:
        tokens: the step's counted tokens.
        intervals: over the step's prompt groups.
        previous: bias vectors of the step before, for the cosines.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinite sums are refused below, with a reason
        return _summarise(tokens, intervals, previous)


def _summarise(tokens: StepTokens, intervals: ClusterIntervals, previous: BiasVectors) -> Summary:
    found, values = _moments(tokens, intervals), {}
    for name, (interval, bias) in _ess(tokens, intervals).items():
        found[name], values[f"{name}_bias"] = interval, bias
    biases, vectors = _bias(tokens, previous)
    values.update(biases)
    values.update(_health(tokens))
    places = audit_places(tokens.split.log_ratio, tokens.kl_trainer_stale, tokens.levels, intervals)
    if len(tokens.token_id) and not tokens.split.lag.any() and not tokens.total_variation.any():
        # The same weights on both sides: the KL is zero on any prefix, seen or not.
        values["full_kl_trainer_stale"], refusal = 0.0, ""
    else:
        values["full_kl_trainer_stale"], refusal = full_kl(places)
    known = ~np.isnan(tokens.split.discrepancy) & ~np.isnan(tokens.split.lag)
    if known.any():
        values["discrepancy_lag_covariance"] = float(
            np.cov(tokens.split.discrepancy[known], tokens.split.lag[known], bias=True)[0, 1]
        )
    reasons = sorted({f"no interval: {i.reason}" for i in found.values() if i.reason and math.isfinite(i.value)})
    beyond = sorted(name for name, interval in found.items() if math.isinf(interval.value))
    if beyond:
        reasons.append(f"{', '.join(beyond)}: {found[beyond[0]].reason}")
    return Summary(values, found, vectors, places, [*([refusal] if refusal else []), *reasons])


def _moments(tokens: StepTokens, intervals: ClusterIntervals) -> dict[str, Interval]:
    """Means over tokens: signed, absolute and squared parts, KL estimates, mass audit, exact vocabulary sums."""
    parts = {"discrepancy": tokens.split.discrepancy, "lag": tokens.split.lag, "log_ratio": tokens.split.log_ratio}
    terms: dict[str, tuple[Floats, Statistic, Scale]] = {}
    for name, values in parts.items():
        terms[f"{name}_mean"] = (values, mean, IDENTITY)
        terms[f"{name}_mean_abs"] = (np.abs(values), mean, LOG)
        terms[f"{name}_rms"] = (np.square(values), root_mean, LOG)
    for name in ("discrepancy", "log_ratio"):
        for estimator, estimate in k_terms(parts[name]).items():
            terms[f"{name}_{estimator}"] = (estimate, mean, IDENTITY if estimator == "k1" else LOG)
    for name, values in parts.items():
        terms[f"{name}_mean_weight"] = (np.exp(values), mean, IDENTITY)
    terms["bias_discrepancy_tv"] = (sampled_total_variation(tokens.split.discrepancy), mean, LOG)
    terms["bias_lag_tv"] = (tokens.total_variation, mean, LOG)
    terms["prefix_kl_stale_trainer"] = (tokens.kl_stale_trainer, mean, LOG)
    terms["prefix_kl_trainer_stale"] = (tokens.kl_trainer_stale, mean, LOG)
    terms["top1_agreement"] = (tokens.same_top, mean, IDENTITY)
    terms["entropy_stale"] = (tokens.entropy_stale, mean, LOG)
    terms["entropy_trainer"] = (tokens.entropy_trainer, mean, LOG)
    out = {}
    for name, (values, statistic, scale) in terms.items():
        known, group = drop_nulls(values, tokens.levels.group)
        out[name] = intervals.interval(group_sums([known], group, intervals.n_groups), statistic, scale)
    return {**out, **_sequence_kl(tokens, intervals)}


def _sequence_kl(tokens: StepTokens, intervals: ClusterIntervals) -> dict[str, Interval]:
    """KL of whole responses by the chain rule: sums over a response of what its tokens or prefixes contribute."""
    sums = {
        "discrepancy_sequence_kl": (-tokens.split.discrepancy, IDENTITY),
        "log_ratio_sequence_kl": (-tokens.split.log_ratio, IDENTITY),
        "prefix_kl_sequence_stale_trainer": (tokens.kl_stale_trainer, LOG),
    }
    out = {}
    for name, (values, scale) in sums.items():
        known, group = drop_nulls(sequence_sums(values, tokens.levels), tokens.levels.group_of_sequence)
        out[name] = intervals.interval(group_sums([known], group, intervals.n_groups), mean, scale)
    return out


def _ess(tokens: StepTokens, intervals: ClusterIntervals) -> dict[str, tuple[Interval, float]]:
    """ESS of the lag, discrepancy and total ratio at token, sequence and prompt level, and its small-sample bias."""
    out = {}
    for ratio, log_weights in _ratios(tokens).items():
        for level, values in level_log_weights(log_weights, tokens.levels).items():
            sums = _ess_sums(values, tokens.levels, level)
            interval = intervals.interval(sums, ess_from_sums, LOG_MINUS_LOG)
            out[f"ess_{ratio}_{level}"] = interval, intervals.bootstrap_bias(sums, ess_from_sums)
    return out


def ess_interval(log_weights: Floats, levels: Levels, level: str, intervals: ClusterIntervals) -> Interval:
    """ESS of one ratio at one level, as in the steps table, with its interval; NaN = null.

    Args:
        log_weights: of tokens, nats, (n,). NaN = null.
        levels: how tokens add up.
        level: token, sequence or prompt.
        intervals: over the prompt groups.
    """
    values = level_log_weights(log_weights, levels)[level]
    return intervals.interval(_ess_sums(values, levels, level), ess_from_sums, LOG_MINUS_LOG)


def _ess_sums(values: Floats, levels: Levels, level: str) -> Floats:
    """Count, sum w and sum w^2 of each prompt group, (G, 3), up to a common factor of w."""
    groups = np.arange(levels.n_groups, dtype=np.int64)
    group_of = {"token": levels.group, "sequence": levels.group_of_sequence, "prompt": groups}
    known, group = drop_nulls(values, group_of[level])
    weights = np.exp(known - known.max()) if len(known) else known
    return group_sums([weights, np.square(weights)], group, levels.n_groups)


def _ratios(tokens: StepTokens) -> dict[str, Floats]:
    return {"lag": tokens.split.lag, "discrepancy": tokens.split.discrepancy, "total": tokens.split.log_ratio}


def _health(tokens: StepTokens) -> dict[str, float]:
    """Tails and giants of the weights at each level, and the two-line law."""
    values: dict[str, float] = {}
    for ratio, log_weights in _ratios(tokens).items():
        values.update(weight_health(ratio, log_weights, tokens.levels))
        values[f"predicted_ess_{ratio}_sequence"] = predicted_sequence_ess(log_weights, tokens.levels)
    values["discrepancy_half_ess_length"] = length_at_half_ess(tokens.split.discrepancy)
    return values


def _bias(tokens: StepTokens, previous: BiasVectors) -> tuple[dict[str, float], BiasVectors]:
    """The mean bias vectors: exact for the lag, from the sampled tokens for the discrepancy."""
    values: dict[str, float] = {}
    vectors: dict[str, Floats | None] = {"lag": None, "discrepancy": None}
    estimates: dict[str, MeanBias] = {}
    vocab_size = int(tokens.token_id.max(initial=-1)) + 1
    if tokens.bias_lag_sums is not None and tokens.bias_lag_tokens.any():
        vocab_size = tokens.bias_lag_sums.shape[1]
        estimates["lag"] = mean_bias(tokens.bias_lag_sums, tokens.bias_lag_tokens)
    sums, counts = discrepancy_bias_sums(tokens.split.discrepancy, tokens.token_id, tokens.half, vocab_size)
    if counts.any():
        estimates["discrepancy"] = mean_bias(sums, counts)
    for part, before in (("lag", previous.lag), ("discrepancy", previous.discrepancy)):
        estimate = estimates.get(part)
        if estimate is None:
            continue
        vectors[part] = estimate.vector
        values[f"bias_{part}_norm"] = estimate.norm
        values[f"bias_{part}_noise"] = estimate.noise
        values[f"bias_{part}_split_half_cosine"] = estimate.split_half_cosine
        if before is not None:
            values[f"bias_{part}_cosine_previous"] = cosine(*_same_length(estimate.vector, before))
    return values, BiasVectors(vectors["lag"], vectors["discrepancy"])


def _same_length(one: Floats, two: Floats) -> tuple[Floats, Floats]:
    """Without a checkpoint the vocabulary is known only as far as it was sampled: ids that were not have no bias."""
    size = max(len(one), len(two))
    return np.pad(one, (0, size - len(one))), np.pad(two, (0, size - len(two)))
