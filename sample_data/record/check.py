"""Recompute what a recorded run shows, with transformers in float32: ``python check.py RUN_DIR ... [--fault]``.

Per step k, with D = log pi_s - log mu and L = log pi - log pi_s, where mu is the engine, pi_s the float32 network at
the recorded sampler version and pi the float32 network at version k:

    mean |D|, |L|, |d|     over response tokens; d = D + L
    cut                    responses that ran into the length limit
    ESS                    (sum w)^2 / (n sum w^2) of w = exp(L): over tokens; over sequences, L summed over the
                           response; over prompts, the mean weight of a prompt's sequences
    trainer error          largest difference between the logged trainer log-probabilities and the recomputed ones,
                           which come from batches of another size

``--fault`` adds the mean |log-probability difference| between the engine and networks put together from two versions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from model import load_model, response_logprobs
from store import checkpoint

Rows = list[dict]
Scores = Callable[[int, int], np.ndarray]
BATCH = 8


def ess(log_weights: np.ndarray) -> float:
    """Kish's effective sample size over n; the shift by the maximum cancels."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


@torch.no_grad()
def score(folder: Path, rows: Rows, body: int, head: int) -> np.ndarray:
    """Log-probabilities of all response tokens, end to end, under a version's body and a version's output head."""
    model = load_model(checkpoint(folder, body))
    if head != body:
        model.lm_head.weight = load_model(checkpoint(folder, head)).lm_head.weight
    parts = []
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        values, mask = response_logprobs(model, [r["prompt_ids"] for r in batch], [r["response_ids"] for r in batch])
        parts.append(values[mask].double().numpy())
    return np.concatenate(parts)


def flat(rows: Rows, column: str) -> np.ndarray:
    """A per-token column of all rows, end to end."""
    return np.concatenate([np.asarray(row[column], dtype=np.float64) for row in rows])


def sampler_versions(rows: Rows) -> np.ndarray:
    """The version of each token, whichever way the row writes it."""
    per_row = [np.broadcast_to(row["sampler_version"], len(row["response_ids"])) for row in rows]
    return np.concatenate(per_row)


def mixed(versions: np.ndarray, scored: Callable[[int], np.ndarray]) -> np.ndarray:
    """Each token's log-probability under its own version."""
    values = np.empty(len(versions))
    for version in np.unique(versions):
        chosen = versions == version
        values[chosen] = scored(int(version))[chosen]
    return values


def step_numbers(step: int, rows: Rows, scores: Scores) -> dict[str, float]:
    """One line of the table."""
    engine = flat(rows, "sampler_logprobs")
    trainer = scores(step, step)
    stale = mixed(sampler_versions(rows), lambda version: scores(version, version))
    lag = trainer - stale
    starts = np.cumsum([0, *(len(row["response_ids"]) for row in rows)])[:-1]
    sequence_lag = np.add.reduceat(lag, starts)
    groups = np.unique([row["group_id"] for row in rows], return_inverse=True)[1]
    # Equal group sizes: a sum of weights is the mean up to a constant, which the ESS does not see.
    prompt_weights = np.bincount(groups, np.exp(sequence_lag - sequence_lag.max()))
    return {
        "reward": float(np.mean([row["reward"] for row in rows])),
        "tokens": len(trainer),
        "cut": sum(row["finish_reason"] == "length" for row in rows),
        "mean |D|": float(np.abs(stale - engine).mean()),
        "mean |L|": float(np.abs(lag).mean()),
        "mean |d|": float(np.abs(trainer - engine).mean()),
        "ESS token": ess(lag),
        "ESS sequence": ess(sequence_lag),
        "ESS prompt": ess(np.log(prompt_weights)),
        "trainer error": float(np.abs(trainer - flat(rows, "trainer_logprobs")).max()),
    }


def fault_numbers(step: int, rows: Rows, scores: Scores) -> dict[str, float]:
    """Mean |log-probability difference| between the engine and networks put together from step's version and 0."""
    engine = flat(rows, "sampler_logprobs")
    pairs = {"new body, new head": (step, step), "new body, old head": (step, 0)}
    pairs |= {"old body, new head": (0, step), "old body, old head": (0, 0)}
    return {name: float(np.abs(scores(*pair) - engine).mean()) for name, pair in pairs.items()}


def check(folder: Path, fault: bool) -> None:
    """Print a run's table, as Markdown."""
    print(f"\n### {folder.name}\n")
    for path in sorted(folder.glob("rollouts/step_*.parquet")):
        step = int(re.sub(r"\D", "", path.stem))
        rows: Rows = pq.read_table(path).to_pylist()
        scores = cache(lambda body, head, rows=rows: score(folder, rows, body, head))
        numbers = step_numbers(step, rows, scores) | (fault_numbers(step, rows, scores) if fault else {})
        if step == 0:
            # A bar would end a Markdown cell.
            names = [name.replace("|", "\\|") for name in numbers]
            print("| step | " + " | ".join(names) + " |\n" + "|---:" * (len(names) + 1) + "|")
        print(f"| {step} | " + " | ".join(_shown(*item) for item in numbers.items()) + " |", flush=True)


def _shown(name: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if name == "trainer error":
        return f"{value:.1e}"
    return f"{value:.3f}" if name == "reward" or name.startswith("ESS") else f"{value:.4f}"


def main() -> None:
    """Read the command line and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--fault", action="store_true")
    options = parser.parse_args()
    for folder in options.run:
        check(folder, options.fault)


if __name__ == "__main__":
    main()
