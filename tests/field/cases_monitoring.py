"""Field reports of metrics that mislead: empty masks, pooled ESS, products over long responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.field.base import EOS, base, make_rows, rescore
from tests.field.case import Build, Case, Variant


def masked_rows(every: int, keep: int = 0) -> Build:
    """The loss mask is all zeros in one row of so many; ``keep`` rows of each step stay at least."""

    def build(path: Path) -> object:
        run = base()
        for rows in run.rows.values():
            for row in rows[keep::every]:
                row["loss_mask"] = [False] * len(row["response_ids"])
        return run.write(path)

    return build


def masked_steps(*steps: int) -> Build:
    """The loss mask is all zeros at these steps."""

    def build(path: Path) -> object:
        run = base()
        for step in steps:
            for row in run.rows[step]:
                row["loss_mask"] = [False] * len(row["response_ids"])
        return run.write(path)

    return build


def lagging(size: float) -> Build:
    """Honest labels, a sampler that stays at version 0, updates of a size."""

    def build(path: Path) -> object:
        return base(version=lambda step: 0, size=size).write(path)

    return build


def constant(d: float, longest: int) -> Build:
    """Every log-ratio is the same, and no model ever ends a response."""

    def build(path: Path) -> object:
        run = base(steps=2, groups=1, members=1, longest=1)
        run.toml["max_response_length"] = longest
        rng = np.random.default_rng(4)
        with torch.no_grad():
            for model in run.models:
                model.lm_head.weight[EOS] = 0.0
                model.lm_head.weight[EOS, 0] = -15.0
        for step in run.rows:
            run.rows[step] = make_rows(run.models[step], step, step, rng, groups=4, members=2, longest=longest)
        for row in run:
            row["sampler_logprobs"] = (rescore(run.models[row["sampler_version"]], row) - d).tolist()
        return run.write(path)

    return build


CASES = (
    Case(
        51,
        "rows without a counted token",
        "verl-project/verl#7772",
        "MP701",
        Variant("one row in two", masked_rows(2)),
        Variant("all rows of a step but one", masked_rows(1, keep=1)),
        Variant("one row in 32", masked_rows(32)),
        least=0,
    ),
    Case(
        52,
        "ESS averaged over micro-batches",
        "radixark/miles#3230",
        "MP702",
        Variant("four versions of lag, updates three times as large as in R0", lagging(0.006)),
        Variant("four versions of lag, updates five times as large", lagging(0.01)),
        Variant("four versions of lag, updates twice as large", lagging(0.004)),
        least=0,
    ),
    Case(
        53,
        "a ratio of e^1.2 from 100 healthy tokens",
        "huggingface/trl#5814",
        "MP703",
        Variant("d = .012 at 100 tokens", constant(0.012, 100)),
        Variant("d = .03 at 100 tokens", constant(0.03, 100)),
        Variant("d = .012 at 95 tokens", constant(0.012, 95)),
        least=0,
    ),
    Case(
        54,
        "nothing is unmasked",
        "NovaSky-AI/SkyRL#911",
        "MP704",
        Variant("one step", masked_steps(2)),
        Variant("every step", masked_steps(0, 1, 2, 3, 4)),
        Variant("the first step", masked_steps(0)),
    ),
)
