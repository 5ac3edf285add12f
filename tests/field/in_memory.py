"""The evidence of a run that was never written: for many seeds at once, and for what a statistic finds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence, Sequences, Tokens
from mismatch_probe.run import Settings
from tests.field.base import FieldRun, log_softmax, logits


def objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def evidence_of(run: FieldRun, **changed: Any) -> Evidence:
    """What gather and decompose make of a run, without scans; ``changed`` replaces fields of the evidence."""
    rows = [(step, row) for step, rows in run.rows.items() for row in rows]
    stale, trainer, entropy = [], [], []
    for step, row in rows:
        ids = np.arange(len(row["response_ids"])), np.minimum(row["response_ids"], 31)
        table = log_softmax(logits(run.models[row["sampler_version"]], row["prompt_ids"], row["response_ids"]))
        stale.append(table[ids])
        entropy.append(-(np.exp(table) * table).sum(axis=1))
        current = logits(run.models[step], row["prompt_ids"], row["response_ids"])
        trainer.append(log_softmax(current)[ids])
    return planted_evidence(
        [row for _, row in rows],
        [step for step, _ in rows],
        np.concatenate(stale),
        np.concatenate(trainer),
        np.concatenate(entropy),
        Settings(**{key: value for key, value in run.toml.items() if key != "eos_token_id"}),
        **changed,
    )


def planted_evidence(
    rows: list[dict[str, Any]],
    steps: list[int],
    stale: np.ndarray,
    trainer: np.ndarray,
    entropy: np.ndarray,
    settings: Settings | None = None,
    **changed: Any,
) -> Evidence:
    """Evidence of rows in the native form with given rescored log-probs, (tokens,)."""
    lengths = np.array([len(row["response_ids"]) for row in rows])
    sequence = np.repeat(np.arange(len(rows)), lengths)
    names = [f"{step}:{row['group_id']}" for step, row in zip(steps, rows, strict=True)]
    _, group = np.unique(names, return_inverse=True)
    _, prompt = np.unique([str(row["prompt_ids"]) for row in rows], return_inverse=True)
    versions = np.repeat([row["sampler_version"] for row in rows], lengths)

    def flat(key: str, absent: Any) -> np.ndarray:
        return np.concatenate([row[key] if key in row else [absent] * len(row["response_ids"]) for row in rows])

    tokens = Tokens(
        sequence=sequence,
        position=np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths),
        token_id=flat("response_ids", 0).astype(np.int64),
        counted=flat("loss_mask", True).astype(bool),
        sampler=flat("sampler_logprobs", np.nan).astype(np.float64),
        stale=stale,
        trainer=trainer,
        trainer_logged=flat("trainer_logprobs", np.nan).astype(np.float64),
        entropy=entropy,
        claimed=versions,
        trainer_version=np.repeat(steps, lengths),
    )
    sequences = Sequences(
        step=np.array(steps),
        sequence_id=objects([row["sequence_id"] for row in rows]),
        group=group,
        prompt=prompt,
        prompt_ids=tuple(np.array(row["prompt_ids"]) for row in rows),
        first=np.concatenate([[0], np.cumsum(lengths)]),
        file=objects(["memory"] * len(rows)),
        row=np.arange(1, len(rows) + 1),
        reward=np.array([row.get("reward", np.nan) for row in rows]),
        finish_reason=objects([row.get("finish_reason") for row in rows]),
    )
    content: dict[str, Any] = {
        "settings": settings or Settings(),
        "sequences": sequences,
        "tokens": tokens,
        "usable": tokens.counted & ~np.isnan(tokens.sampler) & ~np.isnan(stale),
        **changed,
    }
    return Evidence(**content)
