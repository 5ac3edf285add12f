"""The health of importance weights beyond their ESS: tails, giants, and what length alone would do."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.stats.ratios import Levels, group_log_means, sequence_sums
from mismatch_probe.stats.tails import chi_square, max_weight_share, pareto_k, perplexity_ess, second_moment
from mismatch_probe.stats.types import Floats


def level_log_weights(log_weights: Floats, levels: Levels) -> dict[str, Floats]:
    """Log-weights of the units at each level: tokens (n,), sequences (S,), prompt groups (G,); nats, NaN = null."""
    sequence = sequence_sums(log_weights, levels)
    return {"token": log_weights, "sequence": sequence, "prompt": group_log_means(sequence, levels)}


def weight_health(ratio: str, log_weights: Floats, levels: Levels) -> dict[str, float]:
    """Pareto k, perplexity ESS, largest share, chi-square and second moment at each level, and the shares of extreme
    tokens, by column name.

    A token is extreme when its ratio leaves [1/2, 2] (|x| > ln 2) or the band [0.8, 1.25].

    Args:
        ratio: name in the columns: lag, discrepancy or total.
        log_weights: of the tokens, nats, (n,). NaN = null.
        levels: which sequence and group each token belongs to.
    """
    values: dict[str, float] = {}
    for level, units in level_log_weights(log_weights, levels).items():
        values |= {f"{name}_{ratio}_{level}": value for name, value in unit_health(units).items()}
    known = np.abs(log_weights[~np.isnan(log_weights)])
    if len(known):
        values[f"share_beyond_ln2_{ratio}"] = float((known > math.log(2)).mean())
        values[f"share_outside_band_{ratio}"] = float((known > math.log(1.25)).mean())
    return values


def unit_health(log_weights: Floats) -> dict[str, float]:
    """Tail and giants of the weights of units, nats, (n,), NaN = null."""
    return {
        "pareto_k": pareto_k(log_weights),
        "perplexity_ess": perplexity_ess(log_weights),
        "max_weight_share": max_weight_share(log_weights),
        "chi_square": chi_square(log_weights),
        "second_moment": second_moment(log_weights),
    }


def predicted_sequence_ess(log_weights: Floats, levels: Levels) -> float:
    """Sequence ESS if the log-ratios of tokens were independent normals: exp(-T s^2), T the mean length.

    A measured ESS below it says that log-ratios of a sequence pull the same way or that their right tail is heavy
    (Pareto k tells which); above it, that their left tail is heavy: tokens that hardly weigh at all.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null.
        levels: which sequence each token belongs to.

    Returns:
        A share in (0, 1], or NaN without tokens.
    """
    known = log_weights[~np.isnan(log_weights)]
    present = len(np.unique(levels.sequence[~np.isnan(log_weights)]))
    return two_line_law(len(known) / present, float(known.var())) if present else math.nan


def two_line_law(length: float, variance: float) -> float:
    """exp(-T s^2) from the mean length T, tokens, and the variance of a token's log-ratio, nats^2."""
    return math.exp(-length * variance)


def length_at_half_ess(log_weights: Floats) -> float:
    """Response length at which this log-ratio alone would bring the sequence ESS to 1/2: ln 2 / s^2, in tokens.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null.

    Returns:
        Tokens; infinite where the log-ratio does not vary, NaN without tokens.
    """
    known = log_weights[~np.isnan(log_weights)]
    return half_length(float(known.var())) if len(known) else math.nan


def half_length(variance: float) -> float:
    """ln 2 / s^2, tokens, from the variance of a token's log-ratio, nats^2; infinite at 0."""
    return math.log(2) / variance if variance else math.inf
