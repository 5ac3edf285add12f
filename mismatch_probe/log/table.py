"""Rows -> an Arrow table that holds every value as it was given."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.log.arrays import Array, Row
from mismatch_probe.readers.step_files import SET_ASIDE, WORLD_SIZE, WRITTEN, StepName

TOKENS_A_GROUP = 262_144
_NAMES = ("sequence_id", "group_id", "finish_reason")


def to_table(rows: list[Row], name: StepName) -> pa.Table:
    """Columns of the native row; those that no row has are left out.

    Ids are int32 where they fit. Log-probs and advantages are float32 where that keeps each value exactly, as it does
    for what was float32, bfloat16 or float16; else float64.
    """
    columns = {
        "sequence_id": _sequence_ids(rows, name),
        "group_id": _strings(rows, "group_id"),
        "prompt_ids": _lists(rows, "prompt_ids", _integers),
        "response_ids": _lists(rows, "response_ids", _integers),
        "sampler_logprobs": _lists(rows, "sampler_logprobs", _floats),
        "loss_mask": _lists(rows, "loss_mask", lambda values: values.astype(bool)),
        "sampler_version": _lists_or_values(rows, "sampler_version", _integers, int),
        "trainer_logprobs": _lists(rows, "trainer_logprobs", _floats),
        "advantages": _lists_or_values(rows, "advantages", _floats, float),
        "reward": pa.array([_number(row["reward"]) for row in rows], pa.float64()),
        "finish_reason": _strings(rows, "finish_reason"),
    }
    optional = {"sampler_logprobs", "loss_mask", "sampler_version", "trainer_logprobs", "advantages", "reward"}
    optional.add("finish_reason")
    kept = {k: v for k, v in columns.items() if k not in optional or v.null_count < len(v)}
    return pa.table(kept)


def warm_up() -> None:
    """Let pyarrow import now what it imports on first use: late, that costs a training step, or fails at exit."""
    pq.write_table(pa.table({"ids": pa.array([[1]])}), pa.BufferOutputStream(), compression="zstd")


def write_rows(
    rows: list[Row], set_aside: list[tuple[str | None, str]], name: StepName, world_size: int | None, path: Path
) -> None:
    """Write rows as Parquet: zstd, row groups of about TOKENS_A_GROUP response tokens.

    The footer keeps the time, the number of ranks, and the rows that were set aside, each with its reason.
    """
    said = {WRITTEN: f"{time.time():.6f}"}
    if set_aside:
        said[SET_ASIDE] = json.dumps(set_aside)
    if world_size:
        said[WORLD_SIZE] = str(world_size)
    table = to_table(rows, name).replace_schema_metadata(said)
    tokens = sum(len(row["response_ids"]) for row in rows) or 1
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        row_group_size=max(1, TOKENS_A_GROUP * table.num_rows // tokens),
        use_dictionary=[name for name in _NAMES if name in table.column_names],
        write_statistics=False,
    )


def _sequence_ids(rows: list[Row], name: StepName) -> pa.Array:
    """The given ids; a row without one is numbered within its file, whose place in the step makes it unique."""
    rank = "" if name.rank is None else f"rank{name.rank}-"
    part = "" if name.part == 1 else f"part{name.part}-"
    prefix = f"step{name.step}-{rank}{part}"
    given = [row["sequence_id"] for row in rows]
    return pa.array([f"{prefix}{at}" if one is None else str(one) for at, one in enumerate(given)], pa.string())


def _strings(rows: list[Row], key: str) -> pa.Array:
    return pa.array([None if row[key] is None else str(row[key]) for row in rows], pa.string())


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _lists_or_values(rows: list[Row], key: str, convert: Any, scalar: type[int] | type[float]) -> pa.Array:
    if any(np.ndim(row[key]) for row in rows):
        spread = [{**row, key: _spread(row[key], len(row["response_ids"]))} for row in rows]
        return _lists(spread, key, convert)
    values = [None if row[key] is None else scalar(row[key]) for row in rows]
    return pa.array(values, pa.int64() if scalar is int else pa.float64())


def _spread(value: Any, length: int) -> Any:
    return value if value is None or np.ndim(value) else np.full(length, value)


def _lists(rows: list[Row], key: str, convert: Any) -> pa.Array:
    present = [np.asarray(row[key]) for row in rows if row[key] is not None]
    values = convert(np.concatenate(present)) if present else np.zeros(0, dtype=np.float32)
    lengths = [0 if row[key] is None else len(row[key]) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    absent = pa.array([row[key] is None for row in rows], pa.bool_())
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), mask=absent)


def _integers(values: Array) -> Array:
    values = values.astype(np.int64)
    narrow = not len(values) or values.max() < 2**31
    return values.astype(np.int32) if narrow else values


def _floats(values: Array) -> Array:
    values = np.asarray(values, dtype=np.float64 if values.dtype.kind != "f" else values.dtype)
    if values.dtype.itemsize <= 4:
        return values.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if bool(((narrow == values) | np.isnan(values)).all()) else values
