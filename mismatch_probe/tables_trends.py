"""Columns of the trends table."""

from __future__ import annotations

import pyarrow as pa

from mismatch_probe.tables import Column

_F, _I, _S = pa.float64(), pa.int64(), pa.string()

TRENDS = (
    Column("name", _S, "question: discrepancy_constancy, lag_growth or lag_feedback"),
    Column(
        "answer",
        _S,
        "constant, changing; linear, quadratic; amplifying, damped; or undecided; null = not answered, see reason",
    ),
    Column(
        "estimate",
        _F,
        "constancy: relative change of mean eps^2 from first to last step; growth: exponent of E[L^2] in the version "
        "lag; feedback: growth of log bias_lag_tv to the next step for one unit of log bias_lag_tv",
        "1",
    ),
    Column("ci_low", _F, "lower end of its interval", "1"),
    Column("ci_high", _F, "upper end of its interval", "1"),
    Column("margin", _F, "relative change over the run that counts as none (--constancy-margin)", "1"),
    Column("per_step", _F, "constancy: relative change of mean eps^2 a step", "1"),
    Column("steps", _I, "steps used; approximate ones (nearest_gap_max above 0) are not"),
    Column("tokens", _I, "tokens used"),
    Column("excluded", _I, "constancy: tokens left out since mu or pi_s counts as 1, 1 - p below 1e-4"),
    Column("reason", _S, "why it is not answered"),
    Column("sentence", _S, "the answer in words"),
)
