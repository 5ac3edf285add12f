from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.base import base, codes, find, rescore
from tests.field.case import Case, Variant, judge
from tests.field.cases_copies import CASES


@pytest.mark.parametrize(
    ("case", "variant"),
    [pytest.param(case, variant, id=f"{case.code}-{name}") for case in CASES for name, variant in case.variants()],
)
def test_the_right_cause_comes_first(case: Case, variant: Variant, tmp_path: Path) -> None:
    judge(case, variant, tmp_path / "run")


def test_a_recomputed_column_is_no_copy(tmp_path: Path) -> None:
    run = base()
    for step, rows in run.rows.items():
        for row in rows:
            row["trainer_logprobs"] = rescore(run.models[step], row).tolist()
    assert codes(find(run.write(tmp_path / "run"))) == []
