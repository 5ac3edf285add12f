from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.field.base import codes, find
from tests.field.cases_values import changed


def test_a_filler_that_the_mask_hides_raises_nothing(tmp_path: Path) -> None:
    def hidden(row: dict[str, Any], at: int) -> None:
        row["sampler_logprobs"][0] = 1.0
        row["loss_mask"][0] = False

    changed(hidden)(tmp_path / "run")
    assert codes(find(tmp_path / "run")) == []
