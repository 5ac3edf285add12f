"""``decompose --reference``: engine's and trainer's errors, against planted networks whose log-probs are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import UsageError
from mismatch_probe.folder import open_analysis
from mismatch_probe.reference import reference_options
from mismatch_probe.scoring.network import ScoringOptions
from tests.planted import Planted, plant, write_rows

ERRORS = ("error_engine_rms", "error_trainer_rms", "error_covariance", "error_correlation")


def decomposed(path: Path, *options: str) -> pd.DataFrame:
    assert main(["decompose", str(path), "--overwrite", "--quiet", *options]) == 0
    return open_analysis(path, None).steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant(tmp_path_factory.mktemp("run"), groups=8, noise=0.02, sampler_version=lambda step: max(0, step - 1))


def truth(run: Planted, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(e_e, e_t) of every token of a step, by the planted tables and the scores that were written."""
    tokens = pd.read_parquet(run.path / "mismatch_probe" / "tokens" / f"step={step}" / "part-0.parquet")
    exact = []
    for row in run.rows[step]:
        before = [row["prompt_ids"][-1], *row["response_ids"][:-1]]
        exact.append(run.trainer[row["sampler_version"]][before, row["response_ids"]])
    r = np.concatenate(exact)
    return tokens["sampler_logprob"].to_numpy() - r, tokens["stale_trainer_logprob"].to_numpy() - r


@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_both_errors_are_those_of_the_planted_tables(run: Planted, reference: str) -> None:
    """Scored in bfloat16: the trainer's error is its rounding. All sequences in the sample: exact equality."""
    steps = decomposed(run.path, "--dtype", "bfloat16", "--reference", reference, "--reference-sequences", "99")
    for step in range(3):
        engine, trainer = truth(run, step)
        row = steps.iloc[step]
        assert row["error_engine_rms"] == pytest.approx(np.sqrt(np.mean(engine**2)), rel=1e-3)
        assert row["error_trainer_rms"] == pytest.approx(np.sqrt(np.mean(trainer**2)), rel=1e-3)
        assert row["error_covariance"] == pytest.approx(np.mean(engine * trainer), abs=2e-7)
        shares = [row[f"error_share_{part}"] for part in ("engine", "trainer", "covariance")]
        assert sum(shares) == pytest.approx(1) and 0.001 < shares[1] < 0.9
        assert row["error_engine_rms_ci_low"] < row["error_engine_rms"] < row["error_engine_rms_ci_high"]
        assert (row["reference_sequences"], row["reference_dtype"]) == (32, reference)
        assert row["reference_tokens"] == row["tokens"]
        d = row["discrepancy_rms"]
        parts = row["error_engine_rms"] ** 2 + row["error_trainer_rms"] ** 2 - 2 * row["error_covariance"]
        assert parts == pytest.approx(d * d)


def test_a_sample_is_whole_sequences_of_all_groups_and_the_same_each_time(run: Planted) -> None:
    options = ("--dtype", "bfloat16", "--reference", "float32", "--reference-sequences", "8")
    first = decomposed(run.path, *options)
    assert (first["reference_sequences"] == 8).all()
    assert (first["reference_tokens"] < first["tokens"]).all()
    assert first["error_engine_rms_ci_high"].notna().all()
    before = (run.path / "mismatch_probe" / "steps.parquet").read_bytes()
    decomposed(run.path, *options, "--no-cache")
    assert (run.path / "mismatch_probe" / "steps.parquet").read_bytes() == before
    # The rest of the row is that of a run without a reference.
    plain = decomposed(run.path, "--dtype", "bfloat16")
    same = [name for name in plain if not name.startswith(("error_", "reference_"))]
    pd.testing.assert_frame_equal(first[same], plain[same])


def test_report_and_record_say_it(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    decomposed(run.path, "--dtype", "bfloat16", "--reference", "float32")
    said = " ".join(capsys.readouterr().out.split())
    assert "Whose error: " in said and "Against float32, rms" in said
    main(["ess-report", str(run.path), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["beside"][0].startswith("Whose error: ")
    record = open_analysis(run.path, None).record
    assert record["reference"] == {"dtype": "float32", "sequences": 16}
    assert record["options"]["reference"] == "float32"
    decomposed(run.path)
    assert open_analysis(run.path, None).record["reference"] is None
    assert "Whose error" not in capsys.readouterr().out


def test_scored_in_that_dtype_already_there_is_nothing_to_attribute(run: Planted) -> None:
    steps = decomposed(run.path, "--dtype", "float32", "--reference", "float32")
    assert steps[list(ERRORS)].isna().all(axis=None) and steps["reference_sequences"].isna().all()
    for reasons in steps["reasons"]:
        assert any("0 by construction" in why and "--reference float64" in why for why in reasons)


def test_without_sampler_log_probs_there_is_nothing_to_attribute(tmp_path: Path) -> None:
    run = plant(tmp_path, steps=1)
    for row in run.rows[0]:
        row["sampler_logprobs"] = None
    write_rows(tmp_path / "rollouts" / "step_000000.parquet", run.rows[0])
    row = decomposed(tmp_path, "--dtype", "bfloat16", "--reference", "float32").iloc[0]
    assert math.isnan(row["error_engine_rms"])
    assert "reference: no sampler log-probs" in row["reasons"]


def test_without_the_samplers_weights_there_is_no_reference(tmp_path: Path) -> None:
    plant(tmp_path, steps=2, sampler_version=lambda step: 0)
    (tmp_path / "checkpoints" / "step_000000").rename(tmp_path / "away")
    row = decomposed(tmp_path, "--steps", "1", "--dtype", "bfloat16", "--reference", "float32").iloc[0]
    assert math.isnan(row["error_engine_rms"])
    assert "reference: log pi_s is not rescored" in row["reasons"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reference", "bfloat16"], "--reference bfloat16: unknown. Use float32 or float64"),
        (["--reference", "float32", "--dtype", "float64"], "narrower than float64"),
    ],
)
def test_references_that_are_none_are_refused(
    run: Planted, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["decompose", str(run.path), "--overwrite", *options]) == 2
    assert said in capsys.readouterr().err


def test_float64_is_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match="on a CPU only"):
        reference_options(ScoringOptions(device="cuda", dtype="bfloat16"), "float64")
