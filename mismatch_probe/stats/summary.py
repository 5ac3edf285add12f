"""One step's tokens -> its row of numbers, each with an interval over prompt groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.stats.bias import MeanBias, cosine, discrepancy_bias_sums, mean_bias
from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.health import level_log_weights, weight_health
from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    LOG_MINUS_LOG,
    ClusterIntervals,
    Interval,
    group_sums,
    interval_reasons,
    mean,
)
from mismatch_probe.stats.positions import Places, audit_places, full_kl_interval
from mismatch_probe.stats.ratios import Levels, drop_nulls, sequence_sums
from mismatch_probe.stats.terms import PARTS, RATIOS, VOCABULARY, StepTokens, statistic_of, terms
from mismatch_probe.stats.types import Floats, Ints
from mismatch_probe.stats.weights import covariance_interval, token_intervals, weight_intervals, weight_sums


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
    weights, health = _weights(tokens, intervals)
    found |= weights
    values.update(health)
    biases, vectors = _bias(tokens, previous)
    values.update(biases)
    places = audit_places(tokens.split.log_ratio, tokens.kl_trainer_stale, tokens.levels, intervals)
    if len(tokens.token_id) and not tokens.split.lag.any() and not tokens.total_variation.any():
        # The same weights on both sides: the KL is zero on any prefix, seen or not.
        full = Interval(0.0, 0.0, 0.0)
    else:
        full = full_kl_interval(places, intervals)
    found["full_kl_trainer_stale"] = full
    found["discrepancy_lag_covariance"] = covariance_interval(
        tokens.split.discrepancy, tokens.split.lag, tokens.levels.group, intervals
    )
    refusal = [full.reason] if math.isnan(full.value) else []
    return Summary(values, found, vectors, places, [*refusal, *interval_reasons(found)])


def _moments(tokens: StepTokens, intervals: ClusterIntervals) -> dict[str, Interval]:
    """Means over tokens: signed, absolute and squared parts, KL estimates, mass audit, exact vocabulary sums."""
    out = {}
    for source in (*PARTS, *VOCABULARY):
        known, group = drop_nulls(tokens.of(source), tokens.levels.group)
        for name, values in terms(source, known).items():
            sums = group_sums([values], group, intervals.n_groups)
            out[name] = intervals.interval(sums, *statistic_of(name))
    whole = {source: sequence_sums(tokens.of(source), tokens.levels) for source in SEQUENCE_KL}
    return {**out, **sequence_kl(whole, tokens.levels.group_of_sequence, intervals)}


SEQUENCE_KL = {
    "discrepancy": ("discrepancy_sequence_kl", -1.0, IDENTITY),
    "log_ratio": ("log_ratio_sequence_kl", -1.0, IDENTITY),
    "kl_stale_trainer": ("prefix_kl_sequence_stale_trainer", 1.0, LOG),
}
"""Columns that are the mean over responses of a sum over their tokens, by what is summed; its sign and scale."""


def sequence_kl(sums: Mapping[str, Floats], group: Ints, intervals: ClusterIntervals) -> dict[str, Interval]:
    """KL of whole responses by the chain rule: sums over a response of what its tokens or prefixes contribute.

    Args:
        sums: of each sequence, (S,), NaN = null, by SEQUENCE_KL's keys.
        group: prompt group of each sequence, (S,).
        intervals: over prompt groups.
    """
    out = {}
    for source, (name, sign, scale) in SEQUENCE_KL.items():
        known, of = drop_nulls(sign * sums[source], group)
        out[name] = intervals.interval(group_sums([known], of, intervals.n_groups), mean, scale)
    return out


def judged_ess(log_weights: Floats, levels: Levels, level: str, intervals: ClusterIntervals) -> Interval:
    """ESS of one ratio at one level, as in the steps table, with its interval; NaN = null.

    Args:
        log_weights: of tokens, nats, (n,). NaN = null.
        levels: how tokens add up.
        level: token, sequence or prompt.
        intervals: over the prompt groups.
    """
    values = level_log_weights(log_weights, levels)[level]
    sums, _ = weight_sums(values, groups_of(levels)[level], levels.n_groups)
    return intervals.interval(sums, ess_from_sums, LOG_MINUS_LOG)


def groups_of(levels: Levels) -> dict[str, Ints]:
    """Prompt group of each token, sequence and prompt group."""
    groups = np.arange(levels.n_groups, dtype=np.int64)
    return {"token": levels.group, "sequence": levels.group_of_sequence, "prompt": groups}


def _weights(tokens: StepTokens, intervals: ClusterIntervals) -> tuple[dict[str, Interval], dict[str, float]]:
    """The lag, discrepancy and total weights at token, sequence and prompt level, and the two-line law."""
    levels, group_of = tokens.levels, groups_of(tokens.levels)
    found: dict[str, Interval] = {}
    values: dict[str, float] = {}
    for ratio, part in RATIOS.items():
        log_weights = tokens.of(part)
        for level, units in level_log_weights(log_weights, levels).items():
            here = weight_intervals(units, group_of[level], intervals)
            put_weights(ratio, level, here, weight_health(units), found, values)
        put_law(ratio, token_intervals(log_weights, levels, intervals), found)
    return found, values


def put_weights(
    ratio: str,
    level: str,
    here: dict[str, Interval],
    health: dict[str, float],
    found: dict[str, Interval],
    values: dict[str, float],
) -> None:
    """Name what one ratio's weights at one level gave as the columns are named."""
    values[f"ess_{ratio}_{level}_bias"] = here.pop("ess_bias").value
    found |= {f"{name}_{ratio}_{level}": interval for name, interval in here.items()}
    values |= {f"{name}_{ratio}_{level}": value for name, value in health.items()}


def put_law(ratio: str, law: dict[str, Interval], found: dict[str, Interval]) -> None:
    """Name what one ratio's tokens gave as the columns are named."""
    found |= {f"share_{name}_{ratio}": law[f"share_{name}"] for name in ("beyond_ln2", "outside_band")}
    found[f"predicted_ess_{ratio}_sequence"] = law["predicted_ess"]
    if ratio == "discrepancy":
        found["discrepancy_half_ess_length"] = law["half_ess_length"]


def _bias(tokens: StepTokens, previous: BiasVectors) -> tuple[dict[str, float], BiasVectors]:
    """The mean bias vectors: exact for the lag, from the sampled tokens for the discrepancy."""
    lag = discrepancy = None
    vocab_size = int(tokens.token_id.max(initial=-1)) + 1
    if tokens.bias_lag_sums is not None and tokens.bias_lag_tokens.any():
        vocab_size = tokens.bias_lag_sums.shape[1]
        lag = mean_bias(tokens.bias_lag_sums, tokens.bias_lag_tokens)
    sums, counts = discrepancy_bias_sums(tokens.split.discrepancy, tokens.token_id, tokens.half, vocab_size)
    if counts.any():
        discrepancy = mean_bias(sums, counts)
    values = bias_values("lag", lag, previous.lag) | bias_values("discrepancy", discrepancy, previous.discrepancy)
    return values, BiasVectors(*(None if found is None else found.vector for found in (lag, discrepancy)))


def bias_values(part: str, found: MeanBias | None, before: Floats | None) -> dict[str, float]:
    """Columns of a mean bias vector, and of its cosine with that of the step before; none where it is not known."""
    if found is None:
        return {}
    values = {
        f"bias_{part}_norm": found.norm,
        f"bias_{part}_noise": found.noise,
        f"bias_{part}_split_half_cosine": found.split_half_cosine,
    }
    if before is not None:
        values[f"bias_{part}_cosine_previous"] = cosine(*_same_length(found.vector, before))
    return values


def _same_length(one: Floats, two: Floats) -> tuple[Floats, Floats]:
    """Without a checkpoint the vocabulary is known only as far as it was sampled: ids that were not have no bias."""
    size = max(len(one), len(two))
    return np.pad(one, (0, size - len(one))), np.pad(two, (0, size - len(two)))
