"""``prescribe``: corrections rated, resyncs replayed, one recommendation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.stats.corrections import CORRECTIONS
from tests.conftest import SAMPLE
from tests.field.cases_scans import frozen


@pytest.fixture(scope="module")
def synced_analysis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synced") / "analysis"
    assert main(["decompose", str(SAMPLE / "synced_run"), "-o", str(folder), "-q"]) == 0
    return folder


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert main(["prescribe", "-o", str(folder), "--format", "json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_stale_run_is_resynchronised_before_it_breaks_down(
    stale_analysis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(stale_analysis, capsys)
    main(["ess-report", "-o", str(stale_analysis), "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert found["resyncs"][0] <= report["first_breakdown_step"]
    assert found["advice"].startswith("Resynchronise the sampler: every 6 updates")
    assert found["interval"] == {"updates": 6, "low": 2, "high": 8, "longest_seen": 17}
    assert max(step["lag"] for step in found["replayed"]) == 6
    assert found["refused"] == []


def test_the_synced_run_needs_no_correction(synced_analysis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(synced_analysis, capsys)
    assert found["advice"] == "No correction is needed."
    assert found["resyncs"] == []


def test_a_bias_beyond_the_tolerance_gets_the_correction_that_leaves_least(
    synced_analysis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(synced_analysis, capsys, "--tolerance", "0.01")
    rated = {effect["name"]: effect["worst"] for effect in found["effects"] if effect["name"] != "none"}
    assert found["advice"] == f"Use {min(rated, key=rated.__getitem__)}."


def test_each_correction_is_rated_as_the_tables_have_it(
    stale_analysis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    effects = {effect["name"]: effect for effect in asked(stale_analysis, capsys)["effects"]}
    steps = pd.read_parquet(stale_analysis / "steps.parquet")
    assert set(effects) == set(CORRECTIONS)
    for name, effect in effects.items():
        size, cosine = steps[f"gradient_{name}_relative_size"], steps[f"gradient_{name}_cosine"]
        known = size.notna()
        # The law of cosines, on a target of length 1.
        bias = np.hypot(size[known] * cosine[known] - 1, size[known] * np.sqrt(1 - cosine[known] ** 2))
        assert effect["bias"] == pytest.approx(float(bias.median()), rel=1e-9)
        assert effect["worst"] == pytest.approx(float(bias.max()), rel=1e-9)
        assert effect["steps"] == int(known.sum())
    tokens = [pd.read_parquet(path) for path in sorted((stale_analysis / "tokens").glob("*/*.parquet"))]
    beyond = [float((frame["log_ratio"] > np.log(2)).mean()) for frame in tokens]
    assert effects["token_tis"]["cut"] == pytest.approx(float(np.median(beyond)))
    capped = [np.exp(np.minimum(frame["log_ratio"], np.log(2))) for frame in tokens]
    assert effects["token_tis"]["variance"] == pytest.approx(
        float(np.median([w.var(ddof=0) / w.mean() ** 2 for w in capped]))
    )
    assert effects["none"]["variance"] == effects["none"]["cut"] == 0


def test_a_logging_or_weights_fault_is_to_be_mended_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen()(tmp_path / "run")
    assert main(["decompose", str(tmp_path / "run"), "-q"]) == 0
    capsys.readouterr()
    assert main(["prescribe", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Mend MP202 first. No correction is recommended")


def test_text_and_markdown_say_the_same_in_80_columns(stale_analysis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prescribe", "-o", str(stale_analysis)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert main(["prescribe", "-o", str(stale_analysis), "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    for name in CORRECTIONS:
        assert name in text
        assert f"| {name} |" in markdown
    assert "| token_tis | 3.5% |" in markdown


def test_without_lag_and_gradient_nothing_is_recommended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SAMPLE / "stale_run"
    assert (
        main(["decompose", str(run), "-q", "-o", str(tmp_path), "--steps", "0", "--no-gradient", "--no-diagnose"]) == 0
    )
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    assert steps["ess_lag_sequence"].notna().all()
    capsys.readouterr()
    assert main(["prescribe", "-o", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("No correction is needed.")
    assert "no diagnosis was made" in out
