"""A run directory on disk: settings, one rollout file a step, one folder a version."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from engine import LOGPROBS_MODE
from task import EOS, MAX_RESPONSE_LENGTH, PAD, VOCAB_SIZE, save_tokenizer

CHECKPOINTS = "checkpoints/step_{version:06d}"


@dataclass(frozen=True)
class Row:
    """One sequence. ``sampler_version`` is one integer, or one for each response token."""

    sequence_id: str
    group_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]
    loss_mask: list[bool]
    sampler_version: int | list[int]
    trainer_logprobs: list[float]
    advantages: float
    reward: float
    finish_reason: str


def start_run(folder: Path, name: str) -> None:
    """Make an empty run directory with its ``run.toml`` and tokenizer; what was recorded there before is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rollouts").mkdir(parents=True)
    save_tokenizer(folder / "tokenizer")
    settings = {
        "name": f'"{name}"',
        "model": '"Qwen3 architecture, 2 layers, hidden 64, 63,936 parameters, tied embeddings"',
        "temperature": "1.0",
        "top_p": "1.0",
        "top_k": "-1",
        "logprobs_mode": f'"{LOGPROBS_MODE}"',
        "trainer_dtype": '"float32"',
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "max_response_length": MAX_RESPONSE_LENGTH,
        "checkpoints": f'"{CHECKPOINTS}"',
    }
    (folder / "run.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))


def checkpoint(folder: Path, version: int) -> Path:
    """Where a run keeps a version's weights."""
    return folder / CHECKPOINTS.format(version=version)


def write_step(folder: Path, step: int, rows: Sequence[Row]) -> None:
    """Write one step's rollouts."""
    for row in rows:
        assert len(row.response_ids) == len(row.sampler_logprobs) == len(row.trainer_logprobs), row.sequence_id
    per_token = isinstance(rows[0].sampler_version, list)
    schema = pa.schema(
        {
            "sequence_id": pa.string(),
            "group_id": pa.string(),
            "prompt_ids": pa.list_(pa.int32()),
            "response_ids": pa.list_(pa.int32()),
            "sampler_logprobs": pa.list_(pa.float32()),
            "loss_mask": pa.list_(pa.bool_()),
            "sampler_version": pa.list_(pa.int32()) if per_token else pa.int64(),
            "trainer_logprobs": pa.list_(pa.float32()),
            "advantages": pa.float32(),
            "reward": pa.float32(),
            "finish_reason": pa.string(),
        }
    )
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    pq.write_table(table, folder / f"rollouts/step_{step:06d}.parquet", compression="zstd")
