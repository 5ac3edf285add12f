"""Which steps are approximate, and for which quantities."""

from __future__ import annotations

import pandas as pd

_WITHOUT_MU = ("ess_lag_", "lag_", "prefix_kl_")
"""Columns that do not hold log mu: exact where only log mu is approximate."""


def approximate(steps: pd.DataFrame, column: str = "discrepancy_mean") -> pd.Series:
    """True at steps where a column of the steps table is approximate, (steps,).

    Weights of a neighbouring version stand in (--nearest), or the engine's prefill for log mu (--engine).
    """
    nearest: pd.Series = steps["nearest_gap_max"] > 0
    return nearest if column.startswith(_WITHOUT_MU) else nearest | (steps["sampler_from_engine"] > 0)
