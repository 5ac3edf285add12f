"""The recorded runs, as shipped: real vLLM log-probs, real float32 training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.entry import main
from mismatch_probe.readers import open_run
from tests.conftest import SAMPLE


def analysed(run: str, tmp_path: Path) -> Path:
    folder = tmp_path / run
    assert main(["decompose", str(SAMPLE / run), "-o", str(folder), "-q"]) == 0
    return folder


def steps(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "steps.parquet").set_index("step")


def tokens(folder: Path, step: int) -> pd.DataFrame:
    return pd.read_parquet(folder / "tokens" / f"step={step}" / "part-0.parquet")


def test_the_folder_is_small_enough_to_ship() -> None:
    assert sum(f.stat().st_size for f in SAMPLE.rglob("*") if f.is_file()) <= 12e6


@pytest.mark.parametrize("run", ["stale_run", "synced_run", "broken_sync_run"])
def test_runs_are_whole(run: str) -> None:
    opened = open_run(SAMPLE / run)
    assert opened.settings.logprobs_mode == "processed" and not opened.settings.assumed
    for step in opened.steps:
        rollouts = step.load()
        assert len(rollouts) == 128 and len(set(rollouts.group_id)) == 16
        assert not rollouts.rejected and not rollouts.notices
        assert opened.trainer_checkpoint(step.index) is not None
        versions = np.unique(rollouts.sampler_version)
        assert all(opened.sampler_checkpoint(int(v)) is not None for v in versions)


def test_stale_run_breaks_down_and_the_step_is_named(stale_analysis: Path, tmp_path, monkeypatch, capsys) -> None:
    assert main(["ess-report", "-o", str(stale_analysis), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["first_breakdown_step"], report["lasting_breakdown_step"]) == (8, 8)
    verdict = "Importance weighting breaks down at step 8 and stays broken: the sequence ESS of the lag falls"
    assert report["verdict"].startswith(verdict)
    ess = steps(stale_analysis)["ess_lag_sequence"]
    assert (ess[:6] >= 0.5).all() and (ess[6:] < 0.5).all()
    monkeypatch.chdir(tmp_path)
    assert main(["gate", "-o", str(stale_analysis)]) == 1
    out = capsys.readouterr().out
    assert "Gate failed: min-ess" in out and "first at step 6" in " ".join(out.split())


def test_in_stale_run_the_lag_grows_and_the_numerics_do_not(stale_analysis: Path) -> None:
    table = steps(stale_analysis)
    assert table["lag_rms"][10] > 10 * table["lag_rms"][1] > 0
    assert table["discrepancy_rms"].between(0.005, 0.02).all()
    assert table["version_lag_max"].tolist() == list(range(17))
    # The mass audit: the logged log-probs are those of the distribution that sampled.
    assert table["discrepancy_mean_weight"].between(0.999, 1.001).all()
    assert (table["noise_floor_rms"] < table["discrepancy_rms"] / 1000).all()


def test_rescored_trainer_logprobs_are_the_trainers_own(stale_analysis: Path) -> None:
    """In float32 each is up to 2.4e-5 from float64, and rounds in its own way."""
    assert (steps(stale_analysis)["logged_trainer_gap_max"] < 5e-5).all()
    assert (steps(stale_analysis)["logged_trainer_gap_rms"] < 5e-6).all()


def test_lag_of_stale_run_against_plain_transformers(stale_analysis: Path) -> None:
    """An independent pass over one step: one sequence at a time, full logits, no code of ours."""
    rows = pd.read_parquet(SAMPLE / "stale_run" / "rollouts" / "step_000008.parquet")
    models = [
        AutoModelForCausalLM.from_pretrained(SAMPLE / "stale_run" / "checkpoints" / f"step_{v:06d}").eval()
        for v in (0, 8)
    ]
    lag, kl = [], []
    for row in rows.itertuples():
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        start = len(row.prompt_ids)
        with torch.no_grad():
            stale, now = (m(ids[None]).logits[0, start - 1 : -1].double().log_softmax(-1) for m in models)
        lag.append((now - stale).gather(-1, ids[start:, None])[:, 0])
        kl.append((stale.exp() * (stale - now)).sum(-1))
    found = tokens(stale_analysis, 8)
    assert found["lag"].to_numpy() == pytest.approx(torch.cat(lag).numpy(), abs=5e-5)
    assert found["kl_stale_trainer"].to_numpy() == pytest.approx(torch.cat(kl).numpy(), abs=5e-5)


def test_synced_run_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    folder = analysed("synced_run", tmp_path)
    table = steps(folder)
    assert (table["status"] == "ok").all()
    for level in ("token", "sequence", "prompt"):
        assert (table[f"ess_lag_{level}"] > 0.9).all()
    monkeypatch.chdir(tmp_path)
    assert main(["gate", "-o", str(folder)]) == 0
    # From step 6 on the version changes inside the responses: begun by k - 1, ended by k.
    assert (table["lag_rms"][:6] == 0).all() and (table["lag_rms"][6:] > 0).all()
    inside = tokens(folder, 8)
    assert set(inside.loc[inside["position"] < 6, "sampler_version"]) == {7}
    assert set(inside.loc[inside["position"] >= 6, "sampler_version"]) == {8}
    assert (inside.loc[inside["sampler_version"] == 8, "lag"] == 0).all()


def test_in_flight_tokens_fit_the_version_that_is_recorded(tmp_path: Path) -> None:
    """Each half of a response was drawn under its own version: the other one fits worse."""
    folder = analysed("synced_run", tmp_path)
    for step in range(6, 12):
        begun = tokens(folder, step).query("position < 6")
        own = (begun["stale_trainer_logprob"] - begun["sampler_logprob"]).abs().mean()
        other = (begun["trainer_logprob"] - begun["sampler_logprob"]).abs().mean()
        assert own < other / 2


def test_broken_sync_run_is_a_new_body_under_an_old_head(tmp_path: Path, capsys) -> None:
    """By its labels the run is on-policy; the engine's log-probs are those of the new body and version 0's head."""
    folder = analysed("broken_sync_run", tmp_path)
    table = steps(folder)
    assert main(["ess-report", "-o", str(folder)]) == 0
    assert "look for a sync or logging fault" in " ".join(capsys.readouterr().out.split())
    assert (table["lag_rms"] == 0).all() and (table["ess_lag_sequence"] == 1).all()
    assert table["discrepancy_mean_abs"].is_monotonic_increasing
    assert table["discrepancy_mean_abs"][40] > 10 * table["discrepancy_mean_abs"][0]
    path = SAMPLE / "broken_sync_run" / "checkpoints"
    body, first = (AutoModelForCausalLM.from_pretrained(path / f"step_{v:06d}").eval() for v in (40, 0))
    rows = pd.read_parquet(SAMPLE / "broken_sync_run" / "rollouts" / "step_000040.parquet")
    gaps = []
    for row in rows.itertuples():
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        start = len(row.prompt_ids)
        with torch.no_grad():
            hidden = body.model(ids[None]).last_hidden_state[0, start - 1 : -1]
            logp = (hidden @ first.get_output_embeddings().weight.T).log_softmax(-1)
        gaps.append(logp.gather(-1, ids[start:, None])[:, 0] - torch.tensor(row.sampler_logprobs))
    assert float(torch.cat(gaps).abs().mean()) < 0.01 < table["discrepancy_mean_abs"][40] / 5
