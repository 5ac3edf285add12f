"""open-instruct's traces, parsed line by line with orjson."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson

RESPONSE, PROMPT, GROUP = 1000, 200, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens."""
    rng = np.random.default_rng(0)
    file = run_dir / "run_rollouts_000000.jsonl"
    with file.open("w") as stream:
        for row in range(max(GROUP, tokens // RESPONSE)):
            record = {
                "step": 0,
                "sample_idx": row,
                "prompt_idx": row // GROUP,
                "prompt_tokens": rng.integers(0, 150_000, size=PROMPT).tolist(),
                "response_tokens": rng.integers(0, 150_000, size=RESPONSE).tolist(),
                "reward": 1.0,
                "advantage": 0.5,
                "finish_reason": "stop",
                "dataset": "math",
                "ground_truth": [1],
                "request_info": {"num_calls": 0, "tool_calleds": False},
                "logprobs": (-rng.exponential(size=RESPONSE)).tolist(),
            }
            stream.write(json.dumps(record) + "\n")
    return [file]


def parse(files: list[Path]) -> None:
    """Every line of every file."""
    for file in files:
        for line in file.read_bytes().splitlines():
            orjson.loads(line)
