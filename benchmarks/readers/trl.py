"""TRL: one completions table with token ids and log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

LENGTH, GROUP = 2000, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens in responses of LENGTH, GROUP a prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for at in range(-(-tokens // LENGTH)):
        prompt = np.random.default_rng(at // GROUP).integers(0, 150_000, size=200)
        rows.append(
            {
                "step": 1,
                "prompt": "word " * 200,
                "completion": "word " * LENGTH,
                "accuracy_reward": 1.0,
                "completion_ids": rng.integers(0, 150_000, size=LENGTH),
                "prompt_ids": prompt,
                "sampler_logprobs": -rng.exponential(0.5, size=LENGTH),
                "sampler_version": 0,
                "advantage": 0.5,
            }
        )
    file = run_dir / "completions" / "completions_00001.parquet"
    file.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(file)
    return [file]


def parse(files: list[Path]) -> None:
    """What reading costs at least: the table through pyarrow, its columns as they are in memory."""
    for file in files:
        pq.read_table(file)
