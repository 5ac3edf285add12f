"""How heavy the right tail of importance weights is, and so how far their averages can be trusted."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.types import Floats

LARGEST_LOG = math.log(np.finfo(np.float64).max)
"""Nats beyond which a weight is none in float64."""
MIN_WEIGHTS = 25
"""Fewest weights that leave five in the tail."""


def pareto_k(log_weights: Floats) -> float:
    """Shape k of a generalised Pareto distribution fitted to the largest weights (PSIS).

    Below 0.5 the weights have a finite variance; from ``pareto_k_limit(n)``, at most 0.7, averages with them are not
    reliable at this n; at 1 even their mean is infinite.
    The tail holds a fifth of the weights, and 3 sqrt(n) of them from n = 226 on. The fit is Zhang and Stephens'
    posterior mean, drawn towards 0.5 with the weight of ten observations.
    Source: Zhang and Stephens (2009), Technometrics 51; Vehtari et al. (2024), "Pareto smoothed importance sampling",
    JMLR 25.

    Args:
        log_weights: nats, (n,). NaN entries are null and left out.

    Returns:
        k, or NaN where there are fewer than 25 weights or the tail's weights tie; infinite
        where one weight dwarfs the others beyond float64.
    """
    known = log_weights[~np.isnan(log_weights)]
    cut = len(known) - tail_length(len(known)) - 1
    return math.nan if cut < 0 else tail_shape(np.partition(known, cut)[cut:], len(known))


def tail_length(n: int) -> int:
    """How many of n weights are fitted."""
    return math.floor(3 * math.sqrt(n)) if n > 225 else n // 5


def tail_shape(largest: Floats, n: int) -> float:
    """``pareto_k`` from the largest of n log-weights alone, in any order: ``tail_length(n) + 1`` of them, or more."""
    if n < MIN_WEIGHTS:
        return math.nan
    tail = tail_length(n)
    known = np.sort(largest)[-tail - 1 :]
    weights = np.exp(known - known[-1])
    excess = weights[1:] - weights[0]
    quartile = math.floor(tail / 4 + 0.5) - 1
    if excess[quartile] <= np.finfo(float).tiny:
        # Ties with the cut-off leave no scale to fit. Without ties the largest dwarfs the rest beyond float64.
        return math.nan if known[quartile + 1] == known[0] else math.inf
    return _shape(excess)


def pareto_k_limit(n: int) -> float:
    """The k from which averages over n weights are unreliable: min(1 - 1/log10 n, 0.7). Source: Vehtari et al."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 1 else math.nan


def perplexity_ess(log_weights: Floats) -> float:
    """Entropy-based effective sample size as a share of n: exp(H(w / sum w)) / n, in (0, 1].

    Far above Kish's where a few giants stand before many equal weights.
    Source: Martino, Elvira and Louzada (2017), "Effective sample size for importance sampling based on discrepancy
    measures", Signal Processing 131.

    Args:
        log_weights: nats, (n,). NaN entries are null and left out.

    Returns:
        The share, or NaN when nothing is left.
    """
    known = log_weights[~np.isnan(log_weights)]
    if not len(known):
        return math.nan
    logs = known - known.max()
    weights = np.exp(logs)
    entropies = weights * np.where(weights > 0, logs, 0.0)
    return float(perplexity_from_sums(np.array(float(len(weights))), weights.sum(), entropies.sum()))


def perplexity_from_sums(count: Floats, weights: Floats, entropies: Floats) -> Floats:
    """Perplexity ESS from count, sum w and sum w log w; the weights may carry any common factor.

    With S = sum w, H - log n = log(S / n) - (sum w log w) / S, which is exactly 0 for equal weights.
    """
    return np.minimum(np.exp(np.log(weights / count) - entropies / weights), 1.0)


def max_weight_share(log_weights: Floats) -> float:
    """The largest weight over the sum of all, in [1/n, 1]; NaN when there is none."""
    share = _shares(log_weights)
    return float(share.max()) if len(share) else math.nan


def chi_square(log_weights: Floats) -> float:
    """Chi-square divergence of the weights from a constant: mean w^2 / (mean w)^2 - 1 = 1 / ESS - 1; NaN without any.

    The variance of the weights over their squared mean; 1 where the ESS is 1/2.
    """
    size = ess(log_weights)
    return 1 / size - 1


def second_moment(log_weights: Floats) -> float:
    """Mean of w^2: 1 + chi-square where the mean weight is 1. NaN without any, and where it is beyond float64."""
    known = log_weights[~np.isnan(log_weights)]
    if not len(known):
        return math.nan
    peak = float(known.max())
    log_mean = 2 * peak + math.log(float(np.square(np.exp(known - peak)).mean()))
    return math.exp(log_mean) if log_mean < LARGEST_LOG else math.nan


def _shares(log_weights: Floats) -> Floats:
    known = log_weights[~np.isnan(log_weights)]
    weights = np.exp(known - known.max()) if len(known) else known
    return weights / weights.sum() if len(weights) else weights


def _shape(excess: Floats) -> float:
    """Posterior mean of the shape, from ascending excesses over the cut-off."""
    n = len(excess)
    grid = 30 + math.isqrt(n)
    quartile = excess[math.floor(n / 4 + 0.5) - 1]
    points = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    theta = 1 / excess[-1] + points / (3 * quartile)
    shape = np.log1p(-theta[:, None] * excess).mean(axis=1)
    profile = n * (np.log(-theta / shape) - shape - 1)
    posterior = np.exp(profile - profile.max())
    # Points of no weight can be infinite; what they carry is below the rounding of the rest.
    posterior[posterior < 10 * np.finfo(float).eps * posterior.sum()] = 0.0
    mean = float((posterior * theta).sum() / posterior.sum())
    fitted = float(np.log1p(-mean * excess).mean())
    return (n * fitted + 10 * 0.5) / (n + 10)
