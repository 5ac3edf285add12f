"""KL estimates from the log-ratios of sampled tokens."""

from __future__ import annotations

import numpy as np

from mismatch_probe.stats.types import Floats


def k_terms(log_ratios: Floats) -> dict[str, Floats]:
    """Terms whose means estimate KL(mu || p), tokens drawn from mu and x = log p - log mu; nats, (n,).

    k1 = -x is unbiased and may be negative; k2 = x^2 / 2 is biased in second order, with the least noise;
    k3 = e^x - 1 - x is never negative and unbiased where the mean of e^x is 1 (p has no mass outside mu's support).
    mean k3 - mean k1 = mean e^x - 1, the error of the mass audit.
    Source: Schulman (2020), "Approximating KL divergence".

    Args:
        log_ratios: x, nats, (n,).
    """
    return {"k1": -log_ratios, "k2": np.square(log_ratios) / 2, "k3": np.expm1(log_ratios) - log_ratios}
