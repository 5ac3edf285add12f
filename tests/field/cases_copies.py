"""A trainer's column that is the sampler's."""

from __future__ import annotations

from pathlib import Path

from tests.field.base import base
from tests.field.case import Build, Case, Variant


def copied(steps: tuple[int, ...] = (0, 1, 2, 3, 4), lag: int = 0, members: int = 4) -> Build:
    """``trainer_logprobs`` are the sampler's at some steps."""

    def build(path: Path) -> object:
        run = base(version=lambda step: max(0, step - lag), members=members)
        for step in steps:
            for row in run.rows[step]:
                row["trainer_logprobs"] = row["sampler_logprobs"]
        return run.write(path)

    return build


CASES = (
    Case(
        29,
        "the trainer's column is a copy",
        "radixark/miles#1829",
        "MP706",
        Variant("every token", copied()),
        Variant("every token, sampled two versions ago", copied(lag=2)),
        Variant("one step of one response a prompt", copied((3,), members=1)),
    ),
)
