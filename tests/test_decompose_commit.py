"""An analysis is replaced whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_probe.errors import OutputError
from tests.decompose_cases import analysis, contents, decompose
from tests.planted import Planted

FILES = ("steps.parquet", "sequences.parquet", "places.parquet", "trends.parquet", "rejected.parquet", "run.json")


@pytest.mark.parametrize("fails_at", range(1, 16))
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_commit_that_is_cut_short_is_undone(run: Planted, kind, fails_at: int, monkeypatch) -> None:
    from mismatch_probe.folder import Staging

    folder = run.path / "out"
    for name in ("tokens/step=1", "plots"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("old")
    for name in FILES:
        (folder / name).write_text("old")
    before = contents(folder)
    calls = 0
    replace = os.replace

    def cut(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise kind(28, "No space left on device") if kind is OSError else kind
        replace(source, target)

    def new_analysis() -> None:
        with Staging(folder, overwrite=True) as staging:
            (staging.path / "tokens").mkdir()
            for name in FILES:
                (staging.path / name).write_text("new")
            monkeypatch.setattr("os.replace", cut)
            staging.commit()

    with pytest.raises(OutputError if kind is OSError else kind):
        new_analysis()
    assert contents(folder) == before
    monkeypatch.setattr("os.replace", replace)


@pytest.mark.parametrize("fails_from", [3, 9, 12])
def test_what_a_kill_left_aside_is_put_back(run: Planted, fails_from: int, monkeypatch) -> None:
    """From one rename on nothing works any more, the undoing included: the next command finds the earlier analysis."""
    from mismatch_probe.folder import Staging

    assert decompose(run, "--steps", "1") == 0
    before = contents(analysis(run))
    calls = 0
    replace = os.replace

    def dead(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails_from:
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr("os.replace", dead)
    assert decompose(run, "--steps", "2", "--overwrite", "--no-cache") == 2
    monkeypatch.setattr("os.replace", replace)
    with Staging(analysis(run), overwrite=True):
        pass
    assert contents(analysis(run)) == before


def test_two_commands_do_not_write_to_one_folder(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    from mismatch_probe.folder import Staging

    with Staging(run.path / "out", overwrite=False):
        assert decompose(run, "-o", str(run.path / "out")) == 2
        assert "another decompose is writing here" in capsys.readouterr().err
    assert decompose(run, "-o", str(run.path / "out")) == 0


# Holds the command in the middle of its scoring: the run is so short that a
# signal sent to it as it is can come after its end.
HELD = """
import sys, time
from mismatch_probe.entry import main
from mismatch_probe.scoring.cache import ScoreCache

put = ScoreCache.put

def held(*arguments):
    put(*arguments)
    time.sleep(60)

ScoreCache.put = held
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_tidily(run: Planted, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, "decompose", str(run.path), "-o", str(run.path / "out"), "--max-tokens", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not any((run.path / "out" / "scores").rglob("*.npz")):
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 130 and "interrupted; earlier results are as they were" in error
    assert [path.name for path in (run.path / "out").iterdir()] == ["scores"]  # what is finished is kept
