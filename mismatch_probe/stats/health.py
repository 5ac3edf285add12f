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
        values[f"pareto_k_{ratio}_{level}"] = pareto_k(units)
        values[f"perplexity_ess_{ratio}_{level}"] = perplexity_ess(units)
        values[f"max_weight_share_{ratio}_{level}"] = max_weight_share(units)
        values[f"chi_square_{ratio}_{level}"] = chi_square(units)
        values[f"second_moment_{ratio}_{level}"] = second_moment(units)
    known = np.abs(log_weights[~np.isnan(log_weights)])
    if len(known):
        values[f"share_beyond_ln2_{ratio}"] = float((known > math.log(2)).mean())
        values[f"share_outside_band_{ratio}"] = float((known > math.log(1.25)).mean())
    return values


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
    return math.exp(-len(known) / present * float(known.var())) if present else math.nan


def length_at_half_ess(log_weights: Floats) -> float:
    """Response length at which this log-ratio alone would bring the sequence ESS to 1/2: ln 2 / s^2, in tokens.

    Args:
        log_weights: of the tokens, nats, (n,). NaN = null.

    Returns:
        Tokens; infinite where the log-ratio does not vary, NaN without tokens.
    """
    known = log_weights[~np.isnan(log_weights)]
    if not len(known):
        return math.nan
    variance = float(known.var())
    return math.log(2) / variance if variance else math.inf
