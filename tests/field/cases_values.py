"""Field reports of log-probs that no distribution gives, or that were not logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.field.base import base
from tests.field.case import Build, Case, Variant

Row = dict[str, Any]


def changed(change: Callable[[Row, int], None], steps: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Build:
    """R0 with its rows changed; the change is told which row of the step it is."""

    def build(path: Path) -> object:
        run = base()
        for step in steps:
            for at, row in enumerate(run.rows[step]):
                change(row, at)
        return run.write(path)

    return build


def filled(every: int, masked: bool = False) -> Callable[[Row, int], None]:
    """The filler +1.0 at the last token of every so many rows, and at masked ones before it where asked."""

    def change(row: Row, at: int) -> None:
        if at % every == 0 and len(row["response_ids"]) > 1:
            row["sampler_logprobs"][-1] = 1.0
            if masked:
                row["sampler_logprobs"][0] = 1.0
                row["loss_mask"][0] = False

    return change


def coarse(denominator: int, every: int) -> Callable[[Row, int], None]:
    """Log-probs on a grid, one of them above 0 in every so many rows."""

    def change(row: Row, at: int) -> None:
        row["sampler_logprobs"] = [round(x * denominator) / denominator for x in row["sampler_logprobs"]]
        if at % every == 0:
            best = int(np.argmax(row["sampler_logprobs"]))
            row["sampler_logprobs"][best] = (1 + at % 3) / denominator

    return change


def lost(row: Row, at: int) -> None:
    """No log-probs at all."""
    del row["sampler_logprobs"]


def nulls(every: int) -> Callable[[Row, int], None]:
    """The most probable token of every so many rows has no log-prob."""

    def change(row: Row, at: int) -> None:
        if at % every == 0:
            row["sampler_logprobs"][int(np.argmax(row["sampler_logprobs"]))] = None

    return change


CASES = (
    Case(
        14,
        "masked tokens are stored as +1.0, and the mask has a hole",
        "yaof20/Flash-RL#19",
        "MP505",
        Variant("+1.0 at the last token of every row", changed(filled(1))),
        Variant("masked tokens hold it too", changed(filled(1, masked=True))),
        Variant("at the last token of 4 rows of one step", changed(filled(8), (2,))),
    ),
    Case(
        41,
        "null where the token is nearly certain",
        "huggingface/trl#6166",
        "MP501",
        Variant("one token of every row", changed(nulls(1))),
        Variant("one token of every row, one step", changed(nulls(1), (3,))),
        Variant("one token of one row", changed(nulls(32), (2,))),
    ),
    Case(
        44,
        "positive log-probs from bfloat16 differences",
        "AI-Hypercomputer/maxtext#5231",
        "MP504",
        Variant("a grid of 1/32, one above 0 in every fourth row", changed(coarse(32, 4))),
        Variant("a grid of 1/8, in every row", changed(coarse(8, 1))),
        Variant("a grid of 1/128, in every eighth row", changed(coarse(128, 8))),
    ),
    Case(
        49,
        "log-probs are not in the dump",
        "PrimeIntellect-ai/prime-rl#2281",
        "MP605",
        Variant("one step of five has none", changed(lost, (2,))),
        Variant("four steps have none", changed(lost, (0, 1, 2, 3))),
        Variant("the last step has none", changed(lost, (4,))),
    ),
)
