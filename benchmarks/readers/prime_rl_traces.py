"""A step of prime-rl's traces.jsonl: one Episode a line, two turns and a tool's answer in each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

PROMPT, TURN, TOOL = 100, 480, 40


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one step of ``tokens`` response tokens; returns its files."""
    rng = np.random.default_rng(0)
    file = run_dir / "rollouts" / "step_1" / "train" / "effective" / "traces.jsonl"
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        for idx in range(tokens // (2 * TURN + TOOL)):
            nodes = []
            for place, (count, sampled) in enumerate(((PROMPT, False), (TURN, True), (TOOL, False), (TURN, True))):
                node = {
                    "message": {"role": "assistant" if sampled else "user", "content": "word " * count},
                    "sampled": sampled, "timestamp": 0.0, "token_ids": rng.integers(0, 150_000, count).tolist(),
                    "mask": [sampled] * count, "is_content": [True] * count,
                    "logprobs": rng.normal(-1, 0.3, count if sampled else 0).tolist(),
                }  # fmt: skip
                more = {"parent": place - 1} if place else {}
                nodes.append(node | more | ({"advantages": [0.5] * count} if sampled else {}))
            trace = {"version": 1, "id": f"t{idx}", "task": {"type": "Task", "data": {}}, "nodes": nodes, "calls": []}
            policy = {"start": 0, "end": 0}
            episode = {
                "id": f"e{idx}", "task": {"type": "Task", "data": {}}, "group": {"id": f"g{idx // 8}"},
                "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 1, "policy": policy}},
                "ok": True, "traces": [trace | {"rewards": {"correct": {"score": 1.0, "weight": 1.0}}, "ok": True}],
            }  # fmt: skip
            stream.write(orjson.dumps(episode) + b"\n")
    return [file]


def parse(files: list[Path]) -> None:
    """The fastest plain parser: orjson, line by line."""
    for file in files:
        for line in file.read_bytes().splitlines():
            orjson.loads(line)
