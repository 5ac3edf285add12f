"""The three questions about a whole run, end to end: from a run directory to the table and the printed sentences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from mismatch_probe.stats.constancy import constancy, step_displacement
from mismatch_probe.stats.growth import lag_growth, step_lag
from tests.conftest import SAMPLE
from tests.planted import Planted, plant

NAMES = ["discrepancy_constancy", "lag_growth", "lag_feedback"]


def trends(folder: Path) -> dict[str, dict]:
    rows = pq.read_table(folder / "trends.parquet").to_pylist()
    assert [row["name"] for row in rows] == NAMES
    return {row["name"]: row for row in rows}


def decomposed(run: Path, folder: Path, *options: str) -> dict[str, dict]:
    assert main(["decompose", str(run), "-o", str(folder), "-q", *options]) == 0
    return trends(folder)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Ten steps of a sampler that is up to four updates behind."""
    return plant(tmp_path_factory.mktemp("long") / "run", steps=10, sampler_version=lambda step: max(0, step - 4))


@pytest.fixture(scope="module")
def long_trends(long_run: Planted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return decomposed(long_run.path, tmp_path_factory.mktemp("trends") / "a")


def test_the_table_holds_what_the_planted_tables_give(long_run: Planted, long_trends: dict[str, dict]) -> None:
    """From the tables that were planted, without the scorer."""
    displacements, lags = [], []
    for step, rows in long_run.rows.items():
        version = rows[0]["sampler_version"]
        prefix = np.array([t for row in rows for t in (row["prompt_ids"][-1], *row["response_ids"][:-1])])
        token = np.array([t for row in rows for t in row["response_ids"]])
        group = np.array([int(row["group_id"].split("-")[1]) for row in rows for _ in row["response_ids"]])
        stale, now = long_run.trainer[version], long_run.trainer[step]
        entropy = -(np.exp(stale) * stale).sum(axis=1)[prefix]
        mu, pi_s = long_run.mu[version][prefix, token], stale[prefix, token]
        displacements.append(step_displacement(step, mu, pi_s, entropy, group, 6))
        behind = np.full(len(token), step - version)
        lags.append(step_lag(step, now[prefix, token] - pi_s, behind, group, 6))
    for truth in (constancy(displacements), lag_growth(lags)):
        row = long_trends[truth.name]
        assert (row["answer"], row["tokens"], row["steps"]) == (truth.answer, truth.tokens, truth.steps)
        assert row["excluded"] == truth.excluded and row["sentence"] == truth.sentence
        found = [row[name] for name in ("estimate", "ci_low", "ci_high")]
        assert found == pytest.approx([truth.estimate, truth.low, truth.high], rel=1e-4)


def test_random_updates_are_no_steady_drift_and_feed_on_nothing(long_trends: dict[str, dict]) -> None:
    growth, loop = long_trends["lag_growth"], long_trends["lag_feedback"]
    assert growth["steps"] == 9 and growth["ci_low"] < 1 < growth["ci_high"]
    assert loop["steps"] == 9 and loop["answer"] != "amplifying"


def test_sample_runs_own_answers(stale_analysis: Path) -> None:
    found = trends(stale_analysis)
    assert [found[name]["answer"] for name in NAMES] == ["undecided", "quadratic", "undecided"]
    assert found["discrepancy_constancy"]["ci_low"] < 0 < found["discrepancy_constancy"]["ci_high"]
    assert found["lag_growth"]["estimate"] == pytest.approx(2.04, abs=0.02) and found["lag_growth"]["steps"] == 16


def test_the_sentences_stand_after_the_verdict_in_every_format(stale_analysis: Path, capsys) -> None:
    sentences = [row["sentence"] for row in trends(stale_analysis).values()]
    assert main(["ess-report", "-o", str(stale_analysis)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    places = [flat.index("Engine numerics:"), *(flat.index(sentence) for sentence in sentences)]
    assert places == sorted(places)
    assert main(["ess-report", "-o", str(stale_analysis), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [trend["sentence"] for trend in report["trends"]] == sentences
    assert report["trends"][1]["answer"] == "quadratic" and report["trends"][1]["margin"] is None
    assert main(["ess-report", "-o", str(stale_analysis), "--format", "markdown"]) == 0
    page = capsys.readouterr().out
    assert all(f"- {sentence}" in page for sentence in sentences)


def test_broken_sync_run_is_changing_and_says_how(tmp_path: Path, capsys) -> None:
    found = decomposed(SAMPLE / "broken_sync_run", tmp_path / "a")
    assert found["discrepancy_constancy"]["answer"] == "changing"
    assert "It rises from step to step" in " ".join(capsys.readouterr().out.split())
    assert found["lag_growth"]["answer"] is None and "0 different version lags" in found["lag_growth"]["reason"]
    assert found["lag_feedback"]["answer"] is None and found["lag_feedback"]["estimate"] is None


def test_the_margin_is_an_option_and_is_recorded(long_run: Planted, tmp_path: Path) -> None:
    wide = decomposed(long_run.path, tmp_path / "a", "--constancy-margin", "9")["discrepancy_constancy"]
    assert (wide["margin"], wide["answer"]) == (9.0, "constant")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["options"]["constancy_margin"] == 9.0
    assert main(["decompose", str(long_run.path), "-o", str(tmp_path / "b"), "--constancy-margin", "0"]) == 2


def test_sampled_groups_and_steps_do(long_run: Planted, long_trends: dict[str, dict], tmp_path: Path) -> None:
    part = decomposed(long_run.path, tmp_path / "a", "--limit", "12", "--steps", "0:10:2")
    assert part["discrepancy_constancy"]["steps"] == 5
    assert part["discrepancy_constancy"]["tokens"] < long_trends["discrepancy_constancy"]["tokens"] / 2
    assert "1 exact steps in a row" in part["lag_feedback"]["reason"]


def test_approximate_steps_are_left_out(long_run: Planted, tmp_path: Path) -> None:
    run = shutil.copytree(long_run.path, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_000009")
    found = decomposed(run, tmp_path / "a", "--nearest")
    # Step 9 was scored at version 8.
    assert found["discrepancy_constancy"]["steps"] == 9 and found["lag_growth"]["steps"] == 8


def test_without_a_split_nothing_is_answered(long_run: Planted, tmp_path: Path) -> None:
    run = shutil.copytree(long_run.path, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_000000")
    found = decomposed(run, tmp_path / "a", "--steps", "0:5")
    assert all(row["answer"] is None and row["reason"] and row["estimate"] is None for row in found.values())


def test_the_same_run_gives_the_same_bytes(long_run: Planted, tmp_path: Path) -> None:
    for name in ("a", "b"):
        decomposed(long_run.path, tmp_path / name)
    first, second = ((tmp_path / name / "trends.parquet").read_bytes() for name in ("a", "b"))
    assert first == second
