"""More checkpoints than are tried finely at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.field.base import base, codes, find

STEPS = 16


@pytest.mark.parametrize(
    ("really", "code", "steps"),
    [
        (lambda step: step, None, ()),
        (lambda step: min(step, 3), "MP202", tuple(range(4, STEPS))),
        (lambda step: max(0, step - 4), "MP201", tuple(range(4, STEPS))),
        (lambda step: 1 if step == 8 else step, "MP202", (8,)),
    ],
    ids=["healthy", "lost at step 4", "four too high", "one step"],
)
def test_versions_far_from_the_label_are_found(
    really: Callable[[int], int], code: str | None, steps: tuple[int, ...], tmp_path: Path
) -> None:
    run = base(steps=STEPS, version=really, groups=4)
    for step in range(4 if code == "MP201" else 0, STEPS):
        for row in run.rows[step]:
            row["sampler_version"] = step
    diagnosis = find(run.write(tmp_path / "run"))
    assert codes(diagnosis) == ([] if code is None else [code])
    told = [finding for finding in diagnosis.findings if finding.severity > 0]
    assert [finding.steps for finding in told] == ([] if code is None else [steps])
