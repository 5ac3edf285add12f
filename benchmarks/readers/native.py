"""The native layout in Parquet; plain parser: pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH = 1000


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one step of responses of LENGTH tokens after prompts of 100."""
    rng = np.random.default_rng(0)
    rows = tokens // LENGTH
    table = pa.table(
        {
            "sequence_id": [f"s{row}" for row in range(rows)],
            "group_id": [f"g{row // 8}" for row in range(rows)],
            "prompt_ids": [rng.integers(0, 150_000, 100) for _ in range(rows)],
            "response_ids": [rng.integers(0, 150_000, LENGTH) for _ in range(rows)],
            "sampler_logprobs": [rng.normal(-1, 0.2, LENGTH).astype(np.float32) for _ in range(rows)],
            "trainer_logprobs": [rng.normal(-1, 0.2, LENGTH).astype(np.float32) for _ in range(rows)],
            "loss_mask": [np.ones(LENGTH, dtype=bool) for _ in range(rows)],
            "sampler_version": [0] * rows,
            "advantages": [0.5] * rows,
        }
    )
    file = run_dir / "rollouts" / "step_000001.parquet"
    file.parent.mkdir()
    pq.write_table(table, file, compression="zstd")
    return [file]


def parse(files: list[Path]) -> None:
    """What any reader must at least do."""
    for file in files:
        pq.read_table(file)
