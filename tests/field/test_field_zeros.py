from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.case import Case, Variant, judge
from tests.field.cases_zeros import CASES


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
