"""tinker-cookbook: one iteration of a capture in JSONL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson

LENGTH, GROUP = 2000, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One iteration of ``tokens`` response tokens in responses of LENGTH, GROUP a prompt."""
    rng = np.random.default_rng(0)
    file = run_dir / "capture" / "sample.jsonl"
    file.parent.mkdir()
    with file.open("w") as stream:
        for at in range(-(-tokens // LENGTH)):
            sample = {
                "tokens": rng.integers(0, 150_000, size=LENGTH).tolist(),
                "logprobs": (-rng.exponential(0.5, size=LENGTH)).astype(np.float32).astype(float).tolist(),
                "stop_reason": "stop",
            }
            record = {
                "kind": "sample",
                "scope": {"run_id": "run", "iteration": 1, "group_idx": at // GROUP, "split": "train"},
                "num_samples": 1,
                "sampling_session_id": "session",
                "seq_id": at,
                "model_path": "tinker://run/sampler_weights/000001",
                "prompt_tokens": np.random.default_rng(at // GROUP).integers(0, 150_000, size=200).tolist(),
                "samples": [sample],
                "status": "ok",
            }
            stream.write(json.dumps(record) + "\n")
    return [file]


def parse(files: list[Path]) -> None:
    """What reading costs at least: every line through orjson."""
    for file in files:
        with file.open("rb") as stream:
            for line in stream:
                orjson.loads(line)
