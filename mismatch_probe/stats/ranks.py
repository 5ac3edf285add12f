"""Does a short series rise or fall, whatever its shape? Kendall's rank test against time (Mann 1945)."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.stats.types import Floats

_EXACT = 60
"""Longest series whose orders are counted; beyond it their number is as good as normal."""


def rank_trend(values: Floats) -> tuple[float, float]:
    """Kendall's tau of a series with its order, -1 to 1, and the two-sided p-value.

    Under the null all orders of the values are equally likely. Ties count as neither up nor down, which makes p larger.

    Args:
        values: in order of time, at least 2, (n,).
    """
    n = len(values)
    ups = float(np.sign(values[None, :] - values[:, None])[np.triu_indices(n, 1)].sum())
    pairs = n * (n - 1) / 2
    if n > _EXACT:
        spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
        return ups / pairs, math.erfc(max(abs(ups) - 1, 0.0) / spread / math.sqrt(2))
    # Orders of m values by their number of inversions: the m-th value can add 0 to m - 1 of them.
    share = np.ones(1)
    for m in range(2, n + 1):
        share = np.convolve(share, np.full(m, 1 / m))
    inversions = np.arange(len(share))
    return ups / pairs, min(1.0, float(share[np.abs(pairs - 2 * inversions) >= abs(ups) - 1e-9].sum()))
