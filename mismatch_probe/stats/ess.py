"""Effective sample size of importance weights."""

from __future__ import annotations

import numpy as np

from mismatch_probe.stats.types import Floats


def ess(log_weights: Floats) -> float:
    """Kish's effective sample size as a share of n: (sum w)^2 / (n sum w^2), in (0, 1].

    Raw weights, never clipped or self-normalised first; 1 exactly when all weights are equal. 1/2 is where the
    weights' chi-square divergence from a constant is 1 and the variance of a weighted mean has doubled.
    Source: Kish (1965); Kong (1992), "A note on importance sampling using standardized weights".

    Args:
        log_weights: nats, (n,). NaN entries are null and left out.

    Returns:
        The share, or NaN when nothing is left.
    """
    known = log_weights[~np.isnan(log_weights)]
    if not len(known):
        return float("nan")
    weights = np.exp(known - known.max())
    return float(ess_from_sums(np.array([len(weights), weights.sum(), np.square(weights).sum()])))


def ess_from_sums(sums: Floats) -> Floats:
    """ESS from (count, sum w, sum w^2) in the last axis; the weights may carry any common factor."""
    return np.minimum(np.square(sums[..., 1]) / (sums[..., 0] * sums[..., 2]), 1.0)
