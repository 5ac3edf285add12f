"""Student's t distribution: the reference for a mean whose spread is itself estimated from few groups."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def t_cdf(x: float, df: int) -> float:
    """P(T <= x) with ``df`` degrees of freedom.

    With x = sqrt(df) tan(angle) the density becomes a power of the cosine, which Gauss-Legendre integrates to rounding.
    """
    if math.isinf(x):
        return 0.0 if x < 0 else 1.0
    angle = math.atan(x / math.sqrt(df))
    log_constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(math.pi) / 2
    # The power is as narrow as 1 / sqrt(df): panels of a few such widths each.
    panels = 1 + int(abs(angle) * math.sqrt(df) / 4)
    width = angle / panels
    nodes = width * (np.arange(panels)[:, None] + (_NODES + 1) / 2)
    powers = np.exp((df - 1) * np.log(np.cos(nodes)) + log_constant)
    return min(max(0.5 + width / 2 * float((powers @ _WEIGHTS).sum()), 0.0), 1.0)


@lru_cache(4096)  # a step's hundreds of intervals ask for the same one
def t_quantile(p: float, df: int) -> float:
    """The x with P(T <= x) = p, for p in (0, 1), by bisection on the angle of ``t_cdf``."""
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_cdf(math.sqrt(df) * math.tan(middle), df) < p:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)
