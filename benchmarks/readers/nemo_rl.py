"""NeMo-RL's ``train_data_step1.jsonl``; plain parser: orjson on each line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson

LENGTH = 1000


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one step of responses of LENGTH tokens after prompts of 100."""
    rng = np.random.default_rng(0)
    file = run_dir / "train_data_step1.jsonl"
    prompt, n = 100, 100 + LENGTH
    with file.open("w") as stream:
        for idx in range(tokens // LENGTH):
            generation = np.where(np.arange(n) < prompt, 0.0, rng.normal(-1, 0.2, n)).astype(np.float32)
            sample = {
                "content": [["question", "answer"]],
                "rewards": [1.0],
                "input_lengths": [n],
                "token_ids": [rng.integers(0, 150_000, n).tolist()],
                "token_loss_mask": [[0] * prompt + [1] * LENGTH],
                "sample_loss_mask": [1.0],
                "advantages": [[0.5] * n],
                "generation_logprobs": [generation.tolist()],
                "prev_logprobs": [(generation + rng.normal(0, 0.01, n).astype(np.float32)).tolist()],
            }
            stream.write(json.dumps({**sample, "idx": idx}) + "\n")
    return [file]


def parse(files: list[Path]) -> None:
    """What any reader must at least do."""
    for file in files:
        for line in file.read_bytes().splitlines():
            orjson.loads(line)
