"""Columns of the steps table on the full KL from fresh responses of the trainer."""

from __future__ import annotations

import pyarrow as pa

from mismatch_probe.columns import Column


def _nats(name: str, definition: str, interval: bool = True) -> Column:
    return Column(name, pa.float64(), definition, "nats", interval)


FRESH = (
    Column("full_kl_fresh_sequences", pa.int64(), "fresh responses drawn from pi (--fresh-rollouts); null = none"),
    Column("full_kl_fresh_tokens", pa.int64(), "their tokens"),
    _nats("full_kl_fresh_trainer_stale", "full KL: mean of KL(pi || pi_s) over the trainer's own prefixes"),
    _nats("full_kl_fresh_stale_trainer", "mean of KL(pi_s || pi) over the trainer's own prefixes"),
    _nats("full_kl_fresh_sequence_trainer_stale", "KL(pi || pi_s) of whole responses: mean over them of its sum"),
    _nats("full_kl_fresh_prefix_trainer_stale", "mean of KL(pi || pi_s) over recorded prefixes of the same prompts"),
    Column(
        "full_kl_fresh_ratio",
        pa.float64(),
        "full_kl_fresh_trainer_stale over full_kl_fresh_prefix_trainer_stale, prompts paired",
        "1",
        True,
    ),
    _nats("full_kl_fresh_gap_rms", "rms of log pi as sampled less as scored: the sampling's own error", False),
)
