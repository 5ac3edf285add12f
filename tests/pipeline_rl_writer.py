"""PipelineRL's streams written from the fields that its writer emits, for damage, size and odd cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.reader_cases import Case


def text(case: Case, index: int, version: int, **changes: Any) -> dict[str, Any]:
    """One text of the actor stream."""
    return {
        "text": "question answer",
        "n_predicted": 6,
        "reward": case.reward,
        "logprobs": [value for value, mask in zip(case.sampler, case.mask, strict=True) if mask],
        "ref_logprobs": [],
        "input_ids": case.prompt + case.response,
        "labels": [-100] * len(case.prompt)
        + [token if mask else -100 for token, mask in zip(case.response, case.mask, strict=True)],
        "group_id": f"maker_{case.group}",
        "finished": case.finish_reason == "stop",
        "prompt_tokens": len(case.prompt),
        "output_tokens": sum(case.mask),
        "visual_features": None,
        "metadata": {"model_version": version, "rollout_index": index, "step_index": 0},
        **changes,
    }


def batch(texts: list[dict[str, Any]], advantage: float = 0.5, padding: int = 0) -> dict[str, Any]:
    """A packed batch; ``padding`` filler tokens make its length divisible."""
    rows: dict[str, list[Any]] = {key: [] for key in ("input_ids", "labels", "rewards", "advantages", "old_logprobs")}
    bounds = [0]
    for entry in texts:
        n = len(entry["input_ids"])
        rows["input_ids"] += entry["input_ids"]
        rows["labels"] += entry["labels"]
        rows["rewards"] += [entry["reward"]] * n
        rows["advantages"] += [advantage] * n
        rows["old_logprobs"] += [0.0] * (n - len(entry["logprobs"])) + entry["logprobs"]
        bounds.append(bounds[-1] + n)
    if padding:
        for key, filler in (("input_ids", 2), ("labels", -100), ("rewards", 0.0), ("advantages", 0.0)):
            rows[key] += [filler] * padding
        rows["old_logprobs"] += [0.0] * padding
        bounds.append(bounds[-1] + padding)
    return {
        **{key: [value] for key, value in rows.items()},
        "attention_mask": [[1] * bounds[-1]],
        "ref_logprobs": [rows["old_logprobs"]],
        "model_version": min((entry["metadata"]["model_version"] for entry in texts), default=0),
        "sentinel": False,
        "padding": padding,
        "is_packed": True,
        "seq_boundaries": bounds,
    }


def write_lines(file: Path, lines: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))
    return file


def write_actor(out: Path, lines: list[Any]) -> Path:
    return write_lines(out / "streams" / "actor" / "0" / "0" / "0.jsonl", lines)


def write_training(out: Path, lines: list[Any], partition: int = 0) -> Path:
    return write_lines(out / "streams" / "training_data" / "0" / str(partition) / "0.jsonl", lines)


def write_config(out: Path, samples: int, **more: Any) -> None:
    (out / "conf").mkdir(parents=True, exist_ok=True)
    config = {"finetune": {"train_batch_size": 1, "gradient_accumulation_passes": samples}, **more}
    (out / "conf" / "exp_config.yaml").write_text(yaml.safe_dump(config))
