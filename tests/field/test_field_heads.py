from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.field.base import codes, find

SAMPLES = Path(__file__).resolve().parents[2] / "sample_data"


def test_the_recorded_fault_of_an_engine(tmp_path: Path) -> None:
    run = shutil.copytree(SAMPLES / "broken_sync_run", tmp_path / "run")
    diagnosis = find(run)
    assert codes(diagnosis) == ["MP203"]
    first = diagnosis.findings[0]
    assert first.steps == (10, 20, 30, 40)
    assert "body of version 20 with the output head of version 0" in first.summary
    assert diagnosis.left is not None
    assert diagnosis.left < 0.01


@pytest.mark.parametrize("name", ["stale_run", "synced_run"])
def test_healthy_recordings_raise_nothing(name: str, tmp_path: Path) -> None:
    run = shutil.copytree(SAMPLES / name, tmp_path / "run")
    assert codes(find(run)) == []
