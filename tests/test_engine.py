"""The engine's log-probs, joined and refused, through a stand-in for vLLM in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mismatch_probe.engine_split import EngineSplit, engine_row
from mismatch_probe.entry import main
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.folder import open_analysis
from mismatch_probe.run import Ragged
from mismatch_probe.scoring.engine import EngineOptions, EngineProcess, EngineScores, engine_arguments
from mismatch_probe.stats.intervals import ClusterIntervals
from tests.planted import Planted, plant, write_rows

STAND_IN = Path(__file__).parent / "stand_in_engine"
ASK = ["--engine", "vllm", "--engine-dtype", "float32", "-q"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.delenv("STAND_IN_FAULT", raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Two steps sampled by version 0: D is the planted noise."""
    return plant(tmp_path_factory.mktemp("engine") / "run", steps=2, groups=4)


def tokens(folder: Path, step: int) -> pd.DataFrame:
    return pq.read_table(folder / "tokens" / f"step={step}" / "part-0.parquet").to_pandas()


def planted_noise(planted: Planted, table: pd.DataFrame, version: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with a token before them in the table, and log pi_s - log mu there."""
    inner = np.flatnonzero(table["position"].to_numpy() > 0)
    ids = table["token_id"].to_numpy()
    pair = ids[inner - 1], ids[inner]
    return inner, planted.trainer[version][pair] - planted.mu[version][pair]


def test_what_decoding_adds_is_what_was_planted(small: Planted, tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    assert main(["decompose", str(small.path), "-o", str(tmp_path / "a"), *ASK]) == 0
    for step in (0, 1):
        table = tokens(tmp_path / "a", step)
        inner, noise = planted_noise(small, table, 0)
        # The engine runs the sampler's very weights, in float32: nothing is left between it and the trainer.
        np.testing.assert_allclose(table["discrepancy_decode"].to_numpy()[inner], noise, atol=3e-6)
        np.testing.assert_allclose(table["discrepancy_prefill"], 0, atol=3e-6)
        parts = table["discrepancy_prefill"] + table["discrepancy_decode"]
        np.testing.assert_allclose(parts, table["discrepancy"], rtol=0, atol=4e-15)
        assert (table["engine_logprob"] == table["sampler_logprob"] + table["discrepancy_decode"]).mean() > 0.5
    steps = open_analysis(small.path, tmp_path / "a").steps
    assert (steps["discrepancy_decode_share"] > 0.999).all() and (steps["sampler_from_engine"] == 0).all()
    np.testing.assert_allclose(steps["discrepancy_prefill_share"] + steps["discrepancy_decode_share"], 1, rtol=1e-12)
    assert (steps["discrepancy_decode_rms_ci_low"] < steps["discrepancy_decode_rms"]).all()
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    engine = record["engine"]
    assert engine["dtype"] == "float32" and engine["attention_backends"] == ["STAND_IN"]
    assert engine["check"]["mean_difference"] < 1e-5 and engine["arguments"]["enable_prefix_caching"] is False


def test_the_engines_own_precision_is_the_prefill_part(
    small: Planted, tmp_path: Path, stand_in: pytest.MonkeyPatch
) -> None:
    assert main(["decompose", str(small.path), "-o", str(tmp_path / "a"), "--engine", "vllm", "-q"]) == 0
    steps = open_analysis(small.path, tmp_path / "a").steps
    assert (steps["discrepancy_prefill_rms"] > 1e-3).all()
    notices = json.loads((tmp_path / "a" / "run.json").read_text())["notices"]
    assert any("engine dtype bfloat16 is assumed" in notice for notice in notices)


def test_temperature_is_divided_out(tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    hot = plant(tmp_path / "run", steps=1, groups=3, temperature=0.7)
    assert main(["decompose", str(hot.path), "-o", str(tmp_path / "a"), *ASK]) == 0
    table = tokens(tmp_path / "a", 0)
    inner, noise = planted_noise(hot, table, 0)
    np.testing.assert_allclose(table["discrepancy_decode"].to_numpy()[inner], noise, atol=5e-6)


def test_each_version_is_asked_for_its_own_tokens(tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    two = plant(tmp_path / "run", steps=2, groups=3, sampler_version=lambda step: step)
    assert main(["decompose", str(two.path), "-o", str(tmp_path / "a"), "--engine-top-k", "3", *ASK]) == 0
    for step in (0, 1):
        table = tokens(tmp_path / "a", step)
        np.testing.assert_allclose(table["engine_logprob"], table["stale_trainer_logprob"], atol=3e-6)
        inner, _ = planted_noise(two, table, step)
        last = table["token_id"].to_numpy()[inner - 1]
        best = np.argsort(-two.trainer[step][last], axis=1)[:, :3]
        assert np.array_equal(np.stack(table["engine_top_ids"].to_numpy()[inner]), best)
        values = np.take_along_axis(two.trainer[step][last], best, axis=1)
        np.testing.assert_allclose(np.stack(table["engine_top_logprobs"].to_numpy()[inner]), values, atol=3e-6)


def test_a_run_without_sampler_log_probs_gets_an_approximate_discrepancy(
    tmp_path: Path, stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = plant(tmp_path / "run", steps=2, groups=4)
    for step, rows in bare.rows.items():
        kept = [{key: value for key, value in row.items() if key != "sampler_logprobs"} for row in rows]
        write_rows(bare.path / "rollouts" / f"step_{step:06d}.parquet", kept)
    folder = tmp_path / "a"
    rule = ["--ess-ratio", "total"]
    assert main(["decompose", str(bare.path), "-o", str(folder), "--engine", "vllm", "-q", *rule]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1*" in shown and "D of 2 of 2 steps is approximate" in shown and "No verdict" in shown
    table = tokens(folder, 1)
    assert set(table["sampler_logprob_source"]) == {"engine"}
    assert (table["sampler_logprob"] == table["engine_logprob"]).all() and table["discrepancy_decode"].isna().all()
    steps = open_analysis(bare.path, folder).steps
    assert (steps["status"] == "approximate").all() and (steps["sampler_from_engine"] == steps["tokens"]).all()
    assert (steps["discrepancy_prefill_rms"] == steps["discrepancy_rms"]).all()
    assert steps["discrepancy_prefill_share"].isna().all() and "approximate" in " ".join(steps["reasons"][0])
    assert main(["gate", str(bare.path), "-o", str(folder), "--min-ess", "0.0001", "--max-discrepancy-k3", "9"]) != 0
    gate = " ".join(capsys.readouterr().out.split())
    # The lag holds no log mu: it stays exact and is judged.
    assert "min-ess: worst" in gate and "2 steps judged" in gate and "max-discrepancy-k3: not judged" in gate


@pytest.mark.parametrize("fault", ["head", "ids"])
def test_an_engine_that_gives_other_numbers_is_refused(
    small: Planted, tmp_path: Path, stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    stand_in.setenv("STAND_IN_FAULT", fault)
    assert main(["decompose", str(small.path), "-o", str(tmp_path / "a"), *ASK]) == 2
    told = capsys.readouterr().err
    assert "nats a token in float32" in told and "more than 0.002" in told
    assert not (tmp_path / "a" / "steps.parquet").exists()


@pytest.mark.parametrize(
    ("fault", "what"), [("start", "did not start: .*no such device"), ("score", "ended while it scored")]
)
def test_an_engine_that_dies_is_one_error_with_the_end_of_its_log(
    small: Planted, stand_in: pytest.MonkeyPatch, fault: str, what: str
) -> None:
    stand_in.setenv("STAND_IN_FAULT", fault)
    ids = Ragged.of([np.array([1, 2])])
    model = small.path / "checkpoints" / "step_000000"
    with pytest.raises(EngineError, match=what), EngineProcess(model, EngineOptions("float32"), 8) as engine:
        engine.score(ids, ids)


def test_without_vllm_the_remedy_is_named(small: Planted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"pip install 'mismatch-probe\[vllm\]'"):
        EngineProcess(small.path / "checkpoints" / "step_000000", EngineOptions("float32"), 8)


def test_arguments_for_the_engine() -> None:
    found = engine_arguments(["max_num_seqs=64", "quantization=fp8", "async_scheduling=false"])
    assert found == {"max_num_seqs": 64, "quantization": "fp8", "async_scheduling": False}
    settings = EngineOptions(arguments=found).settings(Path("model"), 40)["arguments"]
    assert settings["max_num_seqs"] == 64 and settings["max_model_len"] == 41
    for text in ("no value", "dtype=float16", "enable_prefix_caching=true"):
        with pytest.raises(UsageError, match="--engine-set"):
            engine_arguments([text])


def test_a_split_that_is_known_in_part_is_not_summarised() -> None:
    stale, logged = np.array([-1.0, -2.0, -3.0]), np.array([-1.5, -2.5, -2.0])
    scores = EngineScores(np.array([-1.2, np.nan, -2.5]), np.zeros((3, 0), dtype=np.int64), np.zeros((3, 0)))
    made = EngineSplit.of(scores, np.ones(3, dtype=bool), stale, logged)
    np.testing.assert_allclose(made.prefill, [0.2, np.nan, -0.5])
    np.testing.assert_allclose(made.decode, [0.3, np.nan, -0.5])
    row = engine_row(made, stale - logged, np.arange(3), ClusterIntervals(3), partial=False)
    assert row == {"tokens_with_engine": 2, "sampler_from_engine": 0}
