from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.base import codes, find
from tests.field.case import Case, Variant, judge
from tests.field.cases_files import CASES, given

# peft warns of what transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(
    ("case", "variant"),
    [pytest.param(case, variant, id=f"{case.code}-{name}") for case in CASES for name, variant in case.variants()],
)
def test_the_right_cause_comes_first(case: Case, variant: Variant, tmp_path: Path) -> None:
    judge(case, variant, tmp_path / "run")


def test_equal_checkpoints_of_both_sides_raise_nothing(tmp_path: Path) -> None:
    given(lambda models, version: models[version])(tmp_path / "run")
    assert codes(find(tmp_path / "run"), least=0) == ["MP301"]
