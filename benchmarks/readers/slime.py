"""slime's rollout file and train file (format 2) of one rollout; plain parser: torch.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH, PROMPT = 1000, 100


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one rollout of responses of LENGTH tokens after prompts of PROMPT, eight a prompt."""
    rng = np.random.default_rng(0)
    made = [_sample(rng, index) for index in range(tokens // LENGTH)]
    trained = [_trained(rng, sample) for sample in made]
    rows = list(range(len(made)))
    shard = {"partition": rows, "micro_batch_indices": [[row] for row in rows], "num_microbatches": [len(rows)]}
    train = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": trained, "dp_shards": [shard]}
    files = []
    for folder, payload in (("rollout_data", {"rollout_id": 0, "samples": made}), ("train_data", train)):
        (run_dir / folder).mkdir()
        files.append(run_dir / folder / "0.pt")
        torch.save(payload, files[-1])
    return files


def _sample(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {
        "group_index": index // 8,
        "index": index,
        "prompt": "question",
        "tokens": rng.integers(0, 150_000, PROMPT + LENGTH).tolist(),
        "response": "answer",
        "response_length": LENGTH,
        "reward": 1.0,
        "loss_mask": [1] * LENGTH,
        "weight_versions": ["1"],
        "rollout_log_probs": rng.normal(-1, 0.2, LENGTH).astype(np.float32).tolist(),
        "remove_sample": False,
        "status": "completed",
    }


def _trained(rng: np.random.Generator, sample: dict[str, Any]) -> dict[str, Any]:
    sampler = torch.tensor(sample["rollout_log_probs"], dtype=torch.float32)
    return {
        "data_parallel_rank": 0,
        "sample_index": sample["index"],
        "rollout_position": sample["index"],
        "tokens": torch.tensor(sample["tokens"]),
        "response_lengths": LENGTH,
        "loss_masks": torch.ones(LENGTH, dtype=torch.int),
        "rollout_log_probs": sampler,
        "log_probs": sampler + torch.tensor(rng.normal(0, 0.01, LENGTH), dtype=torch.float32),
        "advantages": torch.ones(LENGTH),
    }


def parse(files: list[Path]) -> None:
    """What any reader must at least do."""
    for file in files:
        torch.load(file, weights_only=False)
