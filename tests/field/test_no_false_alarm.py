"""Two hundred healthy runs: no error, and at most 2 % of them a warning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_probe.diagnosis.diagnose import diagnose
from mismatch_probe.diagnosis.finding import Severity
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.scanning import scan
from mismatch_probe.run import Ragged
from tests.field.base import NAMES, FieldRun, base, log_softmax
from tests.field.in_memory import evidence_of

SEEDS = range(20)
SMALL: dict[str, Any] = {"steps": 3, "groups": 6, "members": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "as R0": {},
    "noise of bfloat16": {"noise": 0.03},
    "no noise": {"noise": 0.0},
    "lag 1, labelled": {"version": lambda step: max(0, step - 1)},
    "never synchronised, labelled": {"version": lambda step: 0, "size": 0.004},
    "one to three tokens": {"longest": 3, "groups": 12},
    "long": {"longest": 60, "groups": 4},
    "one response a prompt": {"members": 1, "groups": 16},
    "many responses a prompt": {"members": 8, "groups": 3},
    "filtered by reward": {"filtered": True},
}


@dataclass
class Scored:
    logprob: np.ndarray
    entropy: np.ndarray


class Models:
    """Scores with models that are in memory; ``body`` is a version."""

    def __init__(self, run: FieldRun) -> None:
        self._models = run.models

    @torch.no_grad()
    def score(
        self, body: Path, prompt: Ragged, response: Ragged, wanted: np.ndarray, temperatures: Sequence[float]
    ) -> Scored:
        rows = [np.concatenate([prompt[row], response[row]]) for row in range(len(prompt))]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, whole in enumerate(rows):
            ids[row, : len(whole)] = whole
        found = self._models[int(body.name)](torch.from_numpy(ids)).logits[:, :, :NAMES].numpy()
        spans = [found[row, len(prompt[row]) - 1 : len(rows[row]) - 1] for row in range(len(rows))]
        table, own = np.concatenate(spans)[wanted], response.values[wanted]
        by_temperature = [log_softmax(table / temperature) for temperature in temperatures]
        place = np.arange(len(own))
        return Scored(
            np.array([each[place, own] for each in by_temperature]),
            np.array([-(np.exp(each) * each).sum(axis=1) for each in by_temperature]),
        )


def healthy(variant: str, seed: int) -> FieldRun:
    how = {**SMALL, **VARIANTS[variant]}
    filtered = how.pop("filtered", False)
    run = base(seed=1000 + seed, **how)
    if filtered:
        run.toml["filtered"] = "rows without a reward"
        for step, rows in run.rows.items():
            run.rows[step] = [row for row in rows if row["reward"] or row["sequence_id"].endswith("-0")]
    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_healthy_run_has_no_error_and_hardly_a_warning(variant: str) -> None:
    warned = []
    for seed in SEEDS:
        run = healthy(variant, seed)
        evidence = evidence_of(run, versions=tuple(range(len(run.models))))
        candidates = [Candidate(f"version {v}", v, Path(str(v))) for v in range(len(run.models))]
        fits = np.ones(len(evidence.sequences), dtype=bool)
        found = scan(evidence, candidates, evidence.tokens.claimed, fits, Models(run))
        told = diagnose(replace(evidence, scan=found)).findings
        errors = [f"{variant}, seed {seed}: {one.code} {one.summary}" for one in told if one.severity is Severity.ERROR]
        assert not errors
        warned += [f"seed {seed}: {one.code} {one.summary}" for one in told if one.severity is Severity.WARNING]
    # Two per cent of all two hundred would be four; no kind of run may use them up alone.
    assert len(warned) <= 1, "\n".join(warned)
