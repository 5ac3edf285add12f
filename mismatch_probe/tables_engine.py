"""Columns of what the engine gives when it is asked again."""

from __future__ import annotations

import pyarrow as pa

from mismatch_probe.columns import Column

_PARTS = (
    ("prefill", "log pi_s - engine_logprob: engine against trainer"),
    ("decode", "engine_logprob - log mu as logged: decode against prefill inside the engine"),
)

TOKENS_ENGINE = (
    Column("engine_logprob", pa.float64(), "prompt log-prob of --engine at the sampler's weights (prefill)", "nats"),
    *(Column(f"discrepancy_{part}", pa.float64(), f"{what}; the two add up to D", "nats") for part, what in _PARTS),
    Column("engine_top_ids", pa.list_(pa.int32()), "the engine's most probable tokens, by rank (--engine-top-k)"),
    Column("engine_top_logprobs", pa.list_(pa.float64()), "their log-probs", "nats"),
)

STEPS_ENGINE = (
    Column("tokens_with_engine", pa.int64(), "counted tokens that the engine scored again"),
    Column(
        "sampler_from_engine",
        pa.int64(),
        "counted tokens whose log mu is the engine's own prefill, since none was logged: D and d are approximate",
    ),
    *(
        column
        for part, what in _PARTS
        for column in (
            Column(f"discrepancy_{part}_mean", pa.float64(), f"mean of {what}", "nats", True),
            Column(f"discrepancy_{part}_rms", pa.float64(), "its root mean square", "nats", True),
            Column(
                f"discrepancy_{part}_share",
                pa.float64(),
                "its share of the mean square of D: mean of part times D over mean of D^2; the two add up to 1",
                "1",
                True,
            ),
        )
    ),
)
