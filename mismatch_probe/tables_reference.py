"""Columns of the steps table on whose error the discrepancy is."""

from __future__ import annotations

import pyarrow as pa

from mismatch_probe.columns import Column


def _share(name: str, definition: str) -> Column:
    return Column(name, pa.float64(), definition, "1", True)


REFERENCE = (
    Column("reference_dtype", pa.string(), "dtype of the reference r = log pi_s (--reference); null = not asked for"),
    Column("reference_sequences", pa.int64(), "responses scored in it"),
    Column("reference_tokens", pa.int64(), "tokens of theirs whose log mu, log pi_s and r are known"),
    Column("error_engine_rms", pa.float64(), "rms of the engine's error e_e = log mu - r", "nats", True),
    Column("error_trainer_rms", pa.float64(), "rms of the trainer's e_t = log pi_s - r; D = e_t - e_e", "nats", True),
    Column("error_covariance", pa.float64(), "mean of e_e e_t, about zero", "nats^2", True),
    _share("error_correlation", "error_covariance over both rms"),
    _share("error_share_engine", "mean e_e^2 over mean D^2"),
    _share("error_share_trainer", "mean e_t^2 over mean D^2"),
    _share("error_share_covariance", "-2 mean e_e e_t over mean D^2; the three shares add up to 1"),
)
