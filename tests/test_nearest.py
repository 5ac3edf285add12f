"""Runs that keep every n-th checkpoint: exact where possible, approximate only on request, never silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from mismatch_probe.folder import open_analysis
from mismatch_probe.inspection import inspect_run
from mismatch_probe.readers import open_run
from tests.planted import Planted, plant


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Eight steps, the sampler two updates behind, checkpoints 0, 3, 4 and 6 kept."""
    planted = plant(tmp_path_factory.mktemp("sparse"), steps=8, sampler_version=lambda step: max(0, step - 2))
    for version in (1, 2, 5, 7, 8):
        shutil.rmtree(planted.path / "checkpoints" / f"step_{version:06d}")
    return planted


@pytest.fixture(scope="module")
def approximate(sparse: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("approximate")
    assert main(["decompose", str(sparse.path), "-o", str(out / "a"), "--nearest", "-q"]) == 0
    return out / "a"


def tokens(folder: Path, step: int):
    return pq.read_table(folder / "tokens" / f"step={step}" / "part-0.parquet").to_pandas()


def test_inspect_shows_each_log_probs_source(sparse: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    # step: (sampler version, trainer version) is (0,0) (0,1) (0,2) (1,3) (2,4) (3,5) (4,6) (5,7)
    found = inspect_run(open_run(sparse.path))
    kinds = [{name: next(iter(shares)) for name, shares in step.sources.items()} for step in found.steps]
    assert [kind["sampler"] for kind in kinds] == ["logged"] * 8
    assert [kind["stale_trainer"] for kind in kinds] == ["rescored"] * 3 + ["nearest"] * 2 + ["rescored"] * 2 + [
        "nearest"
    ]
    assert [kind["trainer"] for kind in kinds] == [
        *("rescored", "nearest", "nearest", "rescored", "rescored", "nearest", "rescored", "nearest")
    ]
    assert found.steps[4].nearest == {"sampler 2": 3} and found.steps[7].nearest == {"sampler 5": 4, "trainer 7": 6}
    assert main(["inspect", str(sparse.path)]) == 0
    out = capsys.readouterr().out
    assert "nearest" in out and "--nearest" in out and max(map(len, out.splitlines())) <= 80


def test_without_the_option_nothing_is_approximate(sparse: Planted, tmp_path: Path) -> None:
    assert main(["decompose", str(sparse.path), "-o", str(tmp_path / "a"), "-q"]) == 0
    steps = open_analysis(sparse.path, tmp_path / "a").steps
    assert (steps["nearest_gap_max"] == 0).all()
    assert steps["lag_rms"].notna().tolist() == [True, False, False, False, False, False, True, False]
    assert (steps["status"] != "approximate").all()


def test_the_nearest_checkpoint_is_scored_and_marked(sparse: Planted, approximate: Path) -> None:
    steps = open_analysis(sparse.path, approximate).steps
    # Step 4: pi exact, pi_s of version 2 at checkpoint 3. Step 5: pi of version 5 at 4 (the older of 4 and 6).
    assert steps["nearest_gap_max"].tolist() == [0, 0, 1, 1, 1, 1, 0, 1]
    table = tokens(approximate, 4)
    assert set(table["stale_trainer_logprob_source"]) == {"nearest"} and set(table["trainer_logprob_source"]) == {
        "rescored"
    }
    prefix = table["position"].to_numpy() > 0
    ids = table["token_id"].to_numpy()
    wanted = sparse.trainer[3][ids[:-1], ids[1:]][prefix[1:]]
    np.testing.assert_allclose(table["stale_trainer_logprob"].to_numpy()[1:][prefix[1:]], wanted, atol=1e-6)
    assert any("sampler version 2 scored at version 3" in reason for reason in steps["reasons"][4])


def test_versions_with_one_checkpoint_between_them_have_no_lag(sparse: Planted, approximate: Path) -> None:
    """Step 1: pi of version 1 is nearest to 0, which is the sampler's: a lag of exactly zero would be a lie."""
    steps = open_analysis(sparse.path, approximate).steps
    assert np.isnan(steps["lag_rms"][1]) and steps["discrepancy_rms"].notna()[1]
    assert any("trainer version 1 stays missing: its nearest checkpoint, 0" in reason for reason in steps["reasons"][1])
    assert tokens(approximate, 1)["trainer_logprob_source"].isna().all()


def test_no_verdict_rests_on_an_approximate_step(sparse: Planted, approximate: Path, capsys) -> None:
    steps = open_analysis(sparse.path, approximate).steps
    assert steps["status"].tolist()[2:8] == ["approximate"] * 4 + [steps["status"][6], "approximate"]
    assert main(["ess-report", str(sparse.path), "-o", str(approximate), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [step["status"] for step in report["steps"]] == steps["status"].tolist()
    assert "6 of 8 steps could not be judged" in report["verdict"]
    exact = steps["discrepancy_rms"][steps["nearest_gap_max"] == 0]
    assert (
        f"rms D {exact.iloc[0]:.4f}" in report["numerics"]
        and f"{steps['discrepancy_rms'][3]:.4f}" not in report["numerics"]
    )
    assert main(["ess-report", str(sparse.path), "-o", str(approximate)]) == 0
    out = capsys.readouterr().out
    assert "4*" in out and "5 of 8 steps are approximate" in " ".join(out.split())
    assert main(["gate", str(sparse.path), "-o", str(approximate), "--min-ess", "0.0001"]) == 0
    assert "2 steps judged, 6 null or approximate" in " ".join(capsys.readouterr().out.split())


def test_figures_say_which_steps_are_approximate(sparse: Planted, approximate: Path) -> None:
    assert main(["plot", str(sparse.path), "-o", str(approximate), "--only", "ess", "--format", "svg"]) == 0
    assert "approximate: nearest checkpoint" in (approximate / "plots" / "ess.svg").read_text()


def test_tables_of_an_older_version_are_one_clear_line(
    sparse: Planted, approximate: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(approximate, tmp_path / "a")
    table = pq.read_table(tmp_path / "a" / "steps.parquet")
    pq.write_table(table.drop_columns(["nearest_gap_max"]), tmp_path / "a" / "steps.parquet")
    assert main(["gate", str(sparse.path), "-o", str(tmp_path / "a")]) == 2
    assert "no column nearest_gap_max" in capsys.readouterr().err
