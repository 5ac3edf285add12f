"""Killed at any moment: the tables are whole, the next command goes on, and the bytes are those of one that was not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import InputError
from mismatch_probe.folder import STAGING, open_analysis
from tests.decompose_cases import tables
from tests.planted import Planted

_SLOW = """
import os, sys, time
from pathlib import Path
from mismatch_probe.executors import local
from mismatch_probe.scoring.score import UnitScorer
score, replace = UnitScorer.score, os.replace
def slow(self, unit):
    time.sleep(0.03)
    return score(self, unit)
def slow_rename(source, target):
    replace(source, target)
    if ".staging" in str(source):
        time.sleep(0.02)
UnitScorer.score, os.replace = slow, slow_rename
from mismatch_probe.entry import main
Path(sys.argv[1]).touch()
sys.exit(main(sys.argv[2:]))
"""
"""decompose, slowed down so that a kill finds it between units and between renames."""


@pytest.fixture
def run(planted: Planted, tmp_path: Path) -> Path:
    shutil.copytree(planted.path, tmp_path / "run", ignore=shutil.ignore_patterns("mismatch_probe"))
    return tmp_path / "run"


def is_whole(folder: Path) -> bool:
    """An analysis that can be read and holds every step, or none at all."""
    try:
        found = open_analysis(folder, folder)
    except InputError as error:
        return "no analysis here" in str(error) and not (folder / "run.json").exists()
    return list(found.steps["step"]) == found.record["steps"] and len(found.tokens(["lag"])) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_again_and_again_it_ends_with_the_same_bytes(run: Path, tmp_path: Path, seed: int) -> None:
    assert main(["decompose", str(run), "-q", "-o", str(tmp_path / "whole"), "--max-tokens", "3"]) == 0
    folder, started = tmp_path / "cut", tmp_path / "started"
    chance = random.Random(seed)
    command = ["decompose", str(run), "-q", "-o", str(folder), "--max-tokens", "3", "--overwrite"]
    for kill in (True, True, True, True, False):
        started.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", _SLOW, str(started), *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not started.exists() and process.poll() is None:
            time.sleep(0.01)
        if kill:
            time.sleep(chance.uniform(0.05, 1.5))
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert is_whole(folder)
    assert process.wait() == 0
    assert tables(folder) == tables(tmp_path / "whole")
    assert not (folder / STAGING).exists()


@pytest.mark.parametrize("state", ["leaving", "earlier"])
def test_reports_heal_what_a_kill_left_between_two_renames(run: Path, state: str) -> None:
    """Killed while the old parts are set aside, and while new ones come in."""
    assert main(["decompose", str(run), "-q", "--steps", "0,1"]) == 0
    folder = run / "mismatch_probe"
    before = tables(folder)
    aside = folder / STAGING / state
    aside.mkdir(parents=True)
    parts = [path.name for path in folder.iterdir() if path.name not in (STAGING, "scores")]
    for name in parts if state == "earlier" else parts[:2]:
        os.replace(folder / name, aside / name)
    if state == "earlier":
        (folder / "tokens").mkdir()
        (folder / "steps.parquet").write_text("new")
    assert main(["ess-report", str(run)]) == 0
    shutil.rmtree(folder / STAGING)
    assert tables(folder) == before


def test_a_first_analysis_that_was_cut_off_is_none(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "mismatch_probe"
    (folder / STAGING / "earlier").mkdir(parents=True)
    (folder / "tokens").mkdir()
    (folder / "steps.parquet").write_text("new")
    assert main(["ess-report", str(run)]) == 2
    assert "no analysis here" in capsys.readouterr().err and not (folder / "tokens").exists()
