"""A step of prime-rl's token export, one packed sequence a line, with every key that the exporter writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

PROMPT, RESPONSE = 100, 1000
_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one step of ``tokens`` response tokens; returns its files."""
    rng = np.random.default_rng(0)
    folder = run_dir / "token_exports" / "step_1"
    folder.mkdir(parents=True)
    n = PROMPT + RESPONSE
    with (folder / "rank_0.jsonl").open("wb") as stream:
        for idx in range(tokens // RESPONSE):
            sampler, trainer = (rng.normal(-1, 0.3, n).astype(np.float32).astype(float).tolist() for _ in range(2))
            mask = [False] * PROMPT + [True] * RESPONSE
            line = {
                "schema_version": 1, "step": 1, "rank": 0, "micro_step": idx, "micro_sequence_idx": 0,
                "export_sequence_idx": idx, "env_name": "math", "token_ids": rng.integers(0, 150_000, n).tolist(),
                "position_ids": list(range(n)), "loss_mask": mask, "advantages": [0.5] * n,
                "inference_logprobs": sampler, "trainer_logprobs": trainer,
            }  # fmt: skip
            names = ("entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta")
            line |= dict.fromkeys(names, trainer)
            line |= dict.fromkeys(("is_masked", "is_masked_high", "is_masked_low"), [False] * n)
            line |= dict.fromkeys(_WEIGHTS, [None] * n)
            stream.write(orjson.dumps(line) + b"\n")
    (folder / "STABLE").touch()
    return [folder / "rank_0.jsonl"]


def parse(files: list[Path]) -> None:
    """The fastest plain parser: orjson, line by line."""
    for file in files:
        for line in file.read_bytes().splitlines():
            orjson.loads(line)
