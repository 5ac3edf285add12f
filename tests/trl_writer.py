"""TRL's completions table written from its documented columns, for damage, size and odd cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from tests.reader_cases import Case


def row(case: Case, step: int, **changes: Any) -> dict[str, Any]:
    """One row, columns in TRL's order: the table, rewards, extra columns, advantage."""
    return {
        "step": step,
        "prompt": "question",
        "completion": "answer",
        "accuracy_reward": case.reward,
        "completion_ids": case.response,
        "prompt_ids": case.prompt,
        "sampler_logprobs": case.sampler,
        "sampler_version": step - 1,
        "tool_mask": case.mask,
        **changes,
        "advantage": changes.get("advantage", case.advantage),
    }


def write_table(out: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    """As TRL does: a data frame, to Parquet."""
    file = out / "completions" / f"completions_{step:05d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(file)
    return file
