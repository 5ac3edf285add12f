"""Every field report: the right cause is named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.case import Case, Variant, judge
from tests.field.page import cases

# peft warns of what transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(case, variant, id=f"{case.number}-{case.code}-{case.title}-{name}")
        for case in cases()
        for name, variant in case.variants()
    ],
)
def test_the_right_cause_comes_first(case: Case, variant: Variant, tmp_path: Path) -> None:
    judge(case, variant, tmp_path / "run")
