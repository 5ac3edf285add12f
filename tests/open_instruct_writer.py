"""Traces as open-instruct writes them, from its documented fields; the fixture beside the tests is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.reader_cases import Case

RUN = "grpo__1__1700000000"


def record(case: Case, step: int, sample: int, **changes: Any) -> dict[str, Any]:
    """One line; an empty response is an EOS with the log-prob NaN."""
    called = any(who == "tool" for who, _ in case.turns)
    return {
        "step": step,
        "sample_idx": sample,
        "prompt_idx": case.group,
        "prompt_tokens": case.prompt,
        "response_tokens": case.response or [2],
        "reward": case.reward,
        "advantage": case.advantage,
        "finish_reason": case.finish_reason,
        "dataset": "math",
        "ground_truth": [1, 2],
        "request_info": {"num_calls": int(called), "tool_calleds": called, "tool_outputs": "", "rollout_state": {}},
        "logprobs": case.sampler or [float("nan")],
        **changes,
    }


def lines(cases: list[Case], step: int, **changes: Any) -> bytes:
    """One step's block."""
    return b"".join(json.dumps(record(case, step, n, **changes)).encode() + b"\n" for n, case in enumerate(cases))


def write(folder: Path, data: bytes, shard: int = 0, run: str = RUN, suffix: str = "") -> Path:
    """Append to a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run}_rollouts_{shard:06d}.jsonl{suffix}"
    with file.open("ab") as stream:
        stream.write(data)
    return file
