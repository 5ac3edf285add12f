"""The native layout in JSONL; plain parser: orjson on each line."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow.parquet as pq

from benchmarks.readers import native
from benchmarks.readers.nemo_rl import parse

__all__ = ["parse", "write"]


def write(run_dir: Path, tokens: int) -> list[Path]:
    """The Parquet step's rows as lines."""
    (source,) = native.write(run_dir, tokens)
    file = source.with_suffix(".jsonl")
    with file.open("wb") as stream:
        for row in pq.read_table(source).to_pylist():
            stream.write(orjson.dumps(row) + b"\n")
    source.unlink()
    return [file]
