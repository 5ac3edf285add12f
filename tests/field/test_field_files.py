from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.base import codes, find
from tests.field.cases_files import given

# peft warns of what transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_equal_checkpoints_of_both_sides_raise_nothing(tmp_path: Path) -> None:
    given(lambda models, version: models[version])(tmp_path / "run")
    assert codes(find(tmp_path / "run"), least=0) == ["MP301"]
