from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.field.base import codes, find
from tests.field.case import Case, Variant, judge
from tests.field.cases_values import CASES, changed


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(case, variant, id=f"{case.number}-{case.code}-{name}")
        for case in CASES
        for name, variant in case.variants()
    ],
)
def test_the_right_cause_comes_first(case: Case, variant: Variant, tmp_path: Path) -> None:
    judge(case, variant, tmp_path / "run")


def test_a_filler_that_the_mask_hides_raises_nothing(tmp_path: Path) -> None:
    def hidden(row: dict[str, Any], at: int) -> None:
        row["sampler_logprobs"][0] = 1.0
        row["loss_mask"][0] = False

    changed(hidden)(tmp_path / "run")
    assert codes(find(tmp_path / "run")) == []
