"""Writes slime's dumps as its code does: rollout files, train files of format 2, and one a rank of format 1."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from tests.reader_cases import Case

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def sample(case: Case, at: int, step: int, **changes: object) -> dict:
    """``Sample.to_dict()``: the engine numbers its first weights 1; one version an engine call, empty calls too."""
    turns = [number + 1 for number in dict.fromkeys(case.version)] or [step + 1]
    return {
        "group_index": case.group,
        "index": 100 + at,
        "rollout_id": None,
        "prompt": case.name,
        "tokens": case.prompt + case.response,
        "multimodal_inputs": None,
        "response": "text",
        "response_length": len(case.response),
        "label": None,
        "reward": case.reward,
        "loss_mask": None if all(case.mask) else case.mask,
        "weight_versions": [str(number) for number in turns],
        "rollout_log_probs": case.sampler,
        "rollout_top_p_token_ids": None,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": STATUS[case.finish_reason],
        "metadata": {},
        "spec_info": {"spec_verify_ct": 0},
        **changes,
    }


def write_rollout(path: Path, samples: list[dict], step: int, name: str | None = None) -> Path:
    """``{"rollout_id", "samples"}``."""
    file = path / "rollout_data" / (name or f"{step}.pt")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": step, "samples": samples}, file)
    return file


def train_sample(case: Case, at: int) -> dict:
    """One entry of format 2's ``samples``; per-token values are tensors."""
    n = len(case.response)
    return {
        "data_parallel_rank": at % 2,
        "sample_index": 100 + at,
        "rollout_position": at,
        "tokens": torch.tensor(case.prompt + case.response, dtype=torch.long),
        "response_lengths": n,
        "rewards": case.reward - 0.5,
        "truncated": int(case.finish_reason == "length"),
        "loss_masks": torch.tensor(case.mask, dtype=torch.int),
        "rollout_ids": at,
        "total_lengths": len(case.prompt) + n,
        "rollout_log_probs": torch.tensor(case.sampler, dtype=torch.float32),
        "log_probs": torch.tensor(case.trainer, dtype=torch.float32),
        "advantages": torch.full((n,), case.advantage),
        "returns": torch.full((n,), case.advantage),
    }


def write_train_2(path: Path, rows: list[dict], step: int, steps: int = 1, **changes: object) -> Path:
    """Format 2: samples in rollout order, and how each of two data-parallel ranks had them in ``steps`` steps."""
    file = path / "train_data" / f"{step}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    shards = []
    for rank in range(2):
        partition = [row["rollout_position"] for row in rows if row["data_parallel_rank"] == rank]
        shards.append(
            {
                "rank": rank,
                "data_parallel_rank": rank,
                "sample_indices": [row["sample_index"] for row in rows if row["data_parallel_rank"] == rank],
                "partition": partition,
                "micro_batch_indices": [[at] for at in range(len(partition))],
                "num_microbatches": [len(part) for part in np.array_split(range(len(partition)), steps)],
                "global_batch_sizes": [2] * steps,
            }
        )
    raw = [row["rewards"] + 0.5 for row in rows]
    payload = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": rows, "dp_shards": shards}
    torch.save({**payload, "raw_reward": raw, **changes}, file)
    return file


def zigzag(values: list[float], total: int, rank: int, ranks: int) -> torch.Tensor:
    """A context-parallel rank's part of an array over the response, written out token by token."""
    chunk, first = (total + 2 * ranks - 1) // (2 * ranks), total - len(values) - 1
    held = [
        values[place - first]
        for piece in (rank, 2 * ranks - rank - 1)
        for place in range(piece * chunk, (piece + 1) * chunk)
        if first <= place < total - 1
    ]
    return torch.tensor(held, dtype=torch.float32)


def write_train_1(path: Path, cases: list[Case], step: int, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> None:
    """Format 1: every rank writes its columns; the last pipeline stage's have log-probs. Ranks: tp, cp, dp, pp."""
    folder = path / "train_data"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(tp * cp * dp * pp):
        c, d, p = rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp)
        rows = list(range(len(cases)))[d::dp]
        columns: dict = OrderedDict(
            tokens=[torch.tensor(cases[at].prompt + cases[at].response, dtype=torch.long) for at in rows],
            response_lengths=[len(cases[at].response) for at in rows],
            loss_masks=[torch.tensor(cases[at].mask, dtype=torch.int) for at in rows],
            rewards=[cases[at].reward - 0.5 for at in rows],
            truncated=[int(cases[at].finish_reason == "length") for at in rows],
            sample_indices=[100 + at for at in rows],
            raw_reward=[case.reward for case in cases],
            total_lengths=[len(cases[at].prompt) + len(cases[at].response) for at in rows],
        )
        arrays = {"rollout_log_probs": [cases[at].sampler for at in rows]}
        if p == pp - 1:
            arrays["log_probs"] = [cases[at].trainer for at in rows]
            arrays["advantages"] = [[cases[at].advantage] * len(cases[at].response) for at in rows]
        for name, cells in arrays.items():
            columns[name] = [
                torch.tensor(cell, dtype=torch.float32) if cp == 1 else zigzag(cell, total, c, cp)
                for cell, total in zip(cells, columns["total_lengths"], strict=True)
            ]
        torch.save({"rollout_id": step, "rank": rank, "rollout_data": dict(columns)}, folder / f"{step}_{rank}.pt")
