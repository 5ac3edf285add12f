"""Damaged input and output of ``decompose``: one line each, and the rest is analysed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.entry import main
from tests.decompose_cases import analysis, decompose, rewrite, steps, tables, tokens
from tests.planted import VOCAB, Planted, plant, write_toml


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model", "vocab_size": VOCAB}))


@pytest.mark.parametrize("damage", [break_header, cut_short, lose_config, unknown_model])
def test_an_unreadable_checkpoint_is_one_line(run: Planted, damage, capsys: pytest.CaptureFixture[str]) -> None:
    assert decompose(run) == 0
    before = tables(analysis(run))
    damage(run.path / "checkpoints" / "step_000002")
    assert decompose(run, "--overwrite") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "step_000002" in error
    assert tables(analysis(run)) == before  # the earlier result is intact
    assert decompose(run, "--overwrite", "--skip-bad-rows") == 0
    assert steps(run)["status"].tolist()[2] == "unjudged" and steps(run).loc[3, "ess_lag_token"] < 1


@pytest.mark.parametrize("where", ["file/below", "/proc/nowhere"])
def test_an_output_that_cannot_be_made_is_one_line(
    run: Planted, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "file").write_text("")
    assert decompose(run, "-o", str(run.path / where)) == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error and error.count("\n") == 1


def test_a_full_disk_leaves_the_earlier_analysis_intact(run: Planted) -> None:
    """A limit on the size of files stands in for a full disk: the kernel refuses the write in the same way."""
    assert decompose(run, "--steps", "0") == 0
    before = tables(analysis(run))

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    made = subprocess.run(
        [sys.executable, "-m", "mismatch_probe", "decompose", str(run.path), "--overwrite", "-q"],
        capture_output=True,
        text=True,
        preexec_fn=small_files,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert made.returncode == 2
    assert made.stderr.startswith("error: ") and "cannot be written (File too large)" in made.stderr
    assert made.stderr.count("\n") == 1 and ".staging" not in made.stderr
    assert tables(analysis(run)) == before


def test_raw_logprobs_are_compared_before_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plant(tmp_path / "run", steps=1, temperature=1.0)
    write_toml(made.path, temperature=0.6, logprobs_mode="raw")
    assert main(["decompose", str(made.path)]) == 0
    assert "compared before temperature" in capsys.readouterr().err
    assert np.abs(tokens(made, 0)["discrepancy"]).max() < 0.4  # raw against raw: the planted noise and no more


def test_progress_and_notices_go_to_stderr(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decompose", str(run.path)]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "status" in printed.out and "of the lag" in printed.out
    assert "wrote" in printed.err and "wrote" not in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80


def poison(folder: Path, token: int) -> None:
    """NaN in the embedding of one token, as a collapsed run leaves it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_nan_weights_are_said_and_not_summarised(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    poison(run.path / "checkpoints" / "step_000002", 9)
    assert main(["decompose", str(run.path)]) == 0
    assert "step_000002 gives no number (NaN weights or overflow) at" in capsys.readouterr().err
    row = steps(run).loc[2]
    assert row["status"] == "unjudged" and np.isnan(row["lag_mean"]) and np.isnan(row["bias_lag_tv"])
    assert 0 < row["tokens_with_lag"] < row["tokens"]
    assert any("split not summarised" in reason for reason in row["reasons"])
    assert steps(run).loc[3, "ess_lag_sequence"] < 1


def test_a_network_of_nothing_but_nan_is_refused(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    for token in range(VOCAB):
        poison(run.path / "checkpoints" / "step_000002", token)
    assert decompose(run) == 2
    assert "logits are not finite" in capsys.readouterr().err
    assert decompose(run, "--skip-bad-rows") == 0
    assert steps(run)["status"].tolist()[2] == "unjudged"


def test_tokens_of_some_versions_only_are_no_summary(run: Planted) -> None:
    """Half of the tokens have lag 0 by their label, the weights of the others are gone: a mean would be a lie."""
    shutil.rmtree(run.path / "checkpoints")
    for row in run.rows[1]:
        row["sampler_version"] = [0] + [1] * (len(row["response_ids"]) - 1)
        row["trainer_logprobs"] = row["sampler_logprobs"]
    rewrite(run, 1)
    assert decompose(run, "--steps", "1") == 0
    row = steps(run).loc[1]
    assert row["status"] == "unjudged" and np.isnan(row["lag_rms"]) and np.isnan(row["ess_lag_token"])
    assert row["log_ratio_rms"] == 0 and 0 < row["tokens_with_lag"] < row["tokens"]
    assert "no sample of all" in " ".join(row["reasons"])


def test_the_discrepancy_alone_is_an_answer(run: Planted) -> None:
    (run.path / "exported").mkdir()
    shutil.move(run.path / "checkpoints" / "step_000000", run.path / "exported" / "step_000000")
    shutil.rmtree(run.path / "checkpoints")
    write_toml(run.path, sampler_checkpoints="exported/step_{version:06d}")
    assert decompose(run) == 0
    assert (steps(run)["tokens_with_discrepancy"] == steps(run)["tokens"]).all()
    assert steps(run)["lag_mean"].isna().all() and steps(run)["discrepancy_rms"].notna().all()


def test_stand_ins_do_not_overflow(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    run.rows[1][0]["sampler_logprobs"][0] = -9999.0
    run.rows[2][0]["sampler_logprobs"][0] = -690.0  # improbable, not impossible
    rewrite(run, 1)
    rewrite(run, 2)
    assert main(["decompose", str(run.path)]) == 0
    assert "below -700 (a stand-in)" in capsys.readouterr().err
    table = steps(run)
    assert table.loc[1, "tokens_with_discrepancy"] == table.loc[1, "tokens"] - 1
    assert np.isfinite(table.loc[2, "ess_discrepancy_token"]) and table.loc[2, "ess_discrepancy_token"] < 0.02


def test_files_of_others_in_the_output_folder_stay(run: Planted) -> None:
    out = run.path / "results"
    (out / "plots").mkdir(parents=True)
    (out / "plots" / "mine.png").write_text("mine")
    (out / "report.html").write_text("mine")
    assert decompose(run, "-o", str(out)) == 0
    assert (out / "plots" / "mine.png").exists() and (out / "report.html").exists()
