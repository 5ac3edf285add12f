from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import OutputError
from tests.planted import VOCAB, Planted, plant, write_rows, write_toml


@pytest.fixture
def run(planted: Planted, tmp_path: Path) -> Planted:
    """A copy of the planted run, without its analysis."""
    shutil.copytree(planted.path, tmp_path / "run", ignore=shutil.ignore_patterns("mismatch_probe"))
    return Planted(tmp_path / "run", planted.trainer, planted.mu, copy.deepcopy(planted.rows))


def analysis(run: Planted) -> Path:
    return run.path / "mismatch_probe"


def steps(run: Planted) -> pd.DataFrame:
    return pd.read_parquet(analysis(run) / "steps.parquet").set_index("step")


def tokens(run: Planted, step: int) -> pd.DataFrame:
    return pd.read_parquet(analysis(run) / "tokens" / f"step={step}" / "part-0.parquet")


def decompose(run: Planted, *options: str) -> int:
    return main(["decompose", str(run.path), "-q", *options])


def rewrite(run: Planted, step: int) -> None:
    write_rows(run.path / "rollouts" / f"step_{step:06d}.parquet", run.rows[step])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_same_input_same_bytes(run: Planted) -> None:
    assert decompose(run) == 0
    first = contents(analysis(run))
    assert decompose(run, "-o", str(run.path / "elsewhere")) == 0
    assert contents(run.path / "elsewhere") == first
    assert {"steps.parquet", "sequences.parquet", "rejected.parquet", "run.json"} < set(first)


def test_tables_carry_units_definitions_and_provenance(planted: Planted) -> None:
    schema = pq.read_schema(analysis(planted) / "tokens" / "step=1" / "part-0.parquet")
    assert schema.metadata[b"mismatch_probe.schema_version"] == b"1"
    assert schema.metadata[b"mismatch_probe.dtype"] == b"float64"
    assert schema.field("lag").metadata == {b"definition": b"L = log pi - log pi_s: stale weights", b"unit": b"nats"}
    whole = pq.read_schema(analysis(planted) / "steps.parquet")
    assert all(whole.field(name).metadata.get(b"definition") for name in whole.names)


def test_run_json_records_what_was_compared(planted: Planted) -> None:
    record = json.loads((analysis(planted) / "run.json").read_text())
    assert record["scoring"]["dtype"] == "float64" and record["scoring"]["device"] == "cpu"
    assert record["steps"] == [0, 1, 2, 3] and record["steps_left_out"] == []
    assert set(record["checkpoints"]) == {f"checkpoints/step_{v:06d}" for v in range(4)}
    assert len(set(record["checkpoints"].values())) == 4
    assert "rollouts/step_000000.parquet" in record["files"]
    assert "top_p" in record["assumed"] and "temperature" not in record["assumed"]


def test_each_logprob_says_where_it_came_from(run: Planted) -> None:
    for row in run.rows[1]:
        row["trainer_logprobs"] = [-9.0] * len(row["response_ids"])
    rewrite(run, 1)
    assert decompose(run) == 0
    found = tokens(run, 1)
    assert set(found["sampler_logprob_source"]) == {"logged"}
    assert set(found["stale_trainer_logprob_source"]) == set(found["trainer_logprob_source"]) == {"rescored"}
    assert (found["logged_trainer_logprob"] == -9.0).all()  # kept beside, neither used nor overwritten
    logged = [value for row in run.rows[1] for value in row["sampler_logprobs"]]
    assert found["sampler_logprob"].tolist() == logged
    assert steps(run).loc[1, "logged_trainer_gap_max"] > 5


def test_masked_tokens_are_never_counted(run: Planted) -> None:
    for row in run.rows[1]:
        row["loss_mask"] = [i != 1 for i in range(len(row["response_ids"]))]
        row["sampler_logprobs"][1] = 0.0
    rewrite(run, 1)
    assert decompose(run) == 0
    found = tokens(run, 1)
    assert 1 not in set(found["position"])
    assert len(found) == sum(len(row["response_ids"]) - 1 for row in run.rows[1]) == steps(run).loc[1, "tokens"]


def test_all_masked_rows_change_nothing(run: Planted, planted: Planted) -> None:
    extra = {**run.rows[1][0], "sequence_id": "masked", "loss_mask": [False] * len(run.rows[1][0]["response_ids"])}
    run.rows[1].append(extra)
    rewrite(run, 1)
    assert decompose(run) == 0
    before, after = steps(planted).loc[1], steps(run).loc[1]
    for name in ("discrepancy_mean", "ess_lag_token", "ess_lag_sequence", "ess_lag_prompt", "prefix_kl_stale_trainer"):
        assert after[name] == pytest.approx(before[name], abs=1e-12)


def test_a_step_and_a_run_without_loss_tokens(run: Planted) -> None:
    for row in run.rows[1]:
        row["loss_mask"] = [False] * len(row["response_ids"])
    rewrite(run, 1)
    assert decompose(run) == 0
    assert steps(run).loc[1, "status"] == "unjudged"
    first, assumed = steps(run).loc[1, "reasons"]
    assert first == "no counted token"
    assert assumed.startswith("assumed, since nothing states it: top_p 1.0, top_k -1, logprobs_mode processed.")
    assert decompose(run, "--steps", "1", "-o", str(run.path / "none")) == 5
    assert not (run.path / "none").exists()


def test_steps_are_chosen_like_slices(run: Planted) -> None:
    assert decompose(run, "--steps", "0:4:2,3") == 0
    assert steps(run).index.tolist() == [0, 2, 3]
    for wrong in ("one", "1:2:0", "77", ""):
        assert decompose(run, "--steps", wrong, "--overwrite") == 2


def test_limit_takes_whole_groups_by_seed(run: Planted) -> None:
    assert decompose(run, "--limit", "10") == 0
    first = pd.read_parquet(analysis(run) / "sequences.parquet")
    sizes = first.groupby(["step", "group_id"]).size()
    assert set(sizes) == {4} and set(first.groupby("step").size()) == {8}
    assert decompose(run, "--limit", "10", "--seed", "1", "--overwrite") == 0
    assert set(pd.read_parquet(analysis(run) / "sequences.parquet")["group_id"]) != set(first["group_id"])
    assert decompose(run, "--limit", "1", "--overwrite") == 0
    row = steps(run).loc[1]
    assert row["sequences"] == 4 and np.isnan(row["ess_lag_sequence_ci_low"])
    assert "no interval: one prompt group has no interval" in list(row["reasons"])


def test_an_earlier_analysis_is_not_overwritten_unasked(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert decompose(run, "--steps", "1") == 0
    (analysis(run) / "plots").mkdir()
    (analysis(run) / "notes.txt").write_text("mine")
    before = contents(analysis(run))
    assert decompose(run) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert contents(analysis(run)) == before
    assert decompose(run, "--overwrite") == 0
    assert steps(run).index.tolist() == [0, 1, 2, 3]
    assert (analysis(run) / "notes.txt").exists() and not (analysis(run) / "plots").exists()


def test_missing_checkpoints_leave_the_rest_analysed(run: Planted) -> None:
    shutil.rmtree(run.path / "checkpoints" / "step_000002")
    assert decompose(run) == 0
    table = steps(run)
    assert table["status"].tolist()[2] == "unjudged" and table["tokens_with_lag"].tolist()[2] == 0
    assert table.loc[2, "tokens_with_discrepancy"] == table.loc[2, "tokens"]  # pi_s needs version 0 only
    assert any("trainer's weights" in reason for reason in table.loc[2, "reasons"])
    assert table.loc[3, "ess_lag_sequence"] < 1


def test_logged_trainer_logprobs_stand_in_for_a_missing_checkpoint(run: Planted) -> None:
    """On-policy, no weights kept, both log-probs logged: pi_s is pi, and nothing needs scoring."""
    shutil.rmtree(run.path / "checkpoints")
    for row in run.rows[0]:
        row["trainer_logprobs"] = [value + 0.01 for value in row["sampler_logprobs"]]
    rewrite(run, 0)
    assert decompose(run, "--steps", "0") == 0
    found = tokens(run, 0)
    assert found["discrepancy"].to_numpy() == pytest.approx(0.01, abs=1e-12)
    assert (found["lag"] == 0).all() and set(found["stale_trainer_logprob_source"]) == {"logged"}
    assert steps(run).loc[0, "ess_lag_sequence"] == 1.0
    assert np.isnan(steps(run).loc[0, "prefix_kl_stale_trainer"])


def test_versions_inside_a_response_are_scored_token_by_token(run: Planted) -> None:
    for row in run.rows[3]:
        row["sampler_version"] = [0, *[1] * (len(row["response_ids"]) - 1)]
    rewrite(run, 3)
    assert decompose(run, "--steps", "3") == 0
    found = tokens(run, 3)
    prefix = np.array([t for row in run.rows[3] for t in (row["prompt_ids"][-1], *row["response_ids"][:-1])])
    stale = np.stack(run.trainer)[found["sampler_version"], prefix, found["token_id"]]
    assert found["stale_trainer_logprob"].to_numpy() == pytest.approx(stale, abs=1e-9)
    assert steps(run).loc[3, "version_lag_max"] == 3 and steps(run).loc[3, "version_lag_mean"] < 3


def test_sampler_checkpoints_may_differ_from_the_trainers(run: Planted) -> None:
    (run.path / "exported").mkdir()
    shutil.copytree(run.path / "checkpoints" / "step_000003", run.path / "exported" / "step_000000")
    write_toml(run.path, sampler_checkpoints="exported/step_{version:06d}")
    assert decompose(run, "--steps", "0") == 0
    found = tokens(run, 0)
    prefix = np.array([t for row in run.rows[0] for t in (row["prompt_ids"][-1], *row["response_ids"][:-1])])
    expected = run.trainer[0][prefix, found["token_id"]] - run.trainer[3][prefix, found["token_id"]]
    assert found["lag"].to_numpy() == pytest.approx(expected, abs=1e-9)


def test_rows_outside_the_checkpoint_are_set_aside(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    write_toml(run.path, vocab_size=VOCAB + 8)
    run.rows[1][0]["response_ids"][0] = VOCAB + 1
    run.rows[1][2]["prompt_ids"] = [VOCAB]
    rewrite(run, 1)
    assert main(["decompose", str(run.path)]) == 0
    rejected = pd.read_parquet(analysis(run) / "rejected.parquet")
    assert rejected[["file", "row"]].values.tolist() == [["rollouts/step_000001.parquet", n] for n in (1, 3)]
    assert rejected["reason"].tolist()[0] == "token id 17 is outside the checkpoint's vocabulary of 16"
    assert "rollouts/step_000001.parquet, row 1: set aside" in capsys.readouterr().err
    assert steps(run).loc[1, ["sequences", "rejected"]].tolist() == [22, 2]
    assert decompose(run, "--strict", "--overwrite") == 2


def test_when_no_row_is_left_nothing_can_be_judged(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    for step, rows in run.rows.items():
        for row in rows:
            row["sampler_logprobs"] = row["sampler_logprobs"][:-1]
        rewrite(run, step)
    assert decompose(run) == 5
    error = capsys.readouterr().err
    assert "all 96 rows were set aside" in error and "step_000000.parquet, row 1" in error
    assert not analysis(run).exists()


def test_nan_logprobs_leave_d_null_and_the_lag_known(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    run.rows[1][0]["sampler_logprobs"][0] = float("nan")
    rewrite(run, 1)
    assert main(["decompose", str(run.path)]) == 0
    assert "step_000001.parquet, row 1: sampler_logprobs null or NaN" in capsys.readouterr().err
    row = steps(run).loc[1]
    assert row["tokens_with_lag"] == row["tokens"] == row["tokens_with_discrepancy"] + 1
    sequences = pd.read_parquet(analysis(run) / "sequences.parquet").query("step == 1")
    assert np.isnan(sequences["discrepancy_sum"].iloc[0]) and not np.isnan(sequences["lag_sum"].iloc[0])


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
    before = contents(analysis(run))
    damage(run.path / "checkpoints" / "step_000002")
    assert decompose(run, "--overwrite") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "step_000002" in error
    assert contents(analysis(run)) == before  # the earlier result is intact
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
    before = contents(analysis(run))

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
    assert contents(analysis(run)) == before


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_tidily(run: Planted, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mismatch_probe",
            "decompose",
            str(run.path),
            "-o",
            str(run.path / "out"),
            "--max-tokens",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (run.path / "out" / ".staging" / "tokens").exists():
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 130 and "interrupted; earlier results are as they were" in error
    assert [path.name for path in (run.path / "out").iterdir()] == ["scores"]  # what is finished is kept


def test_a_checkpoint_is_loaded_once_a_step_however_the_tokens_are_cut(run: Planted, monkeypatch) -> None:
    from mismatch_probe.scoring.network import Network

    loads: list[str] = []
    create = Network.__init__

    def counted(self, path, *options) -> None:
        loads.append(path.name)
        create(self, path, *options)

    for row in run.rows[3]:
        row["sampler_version"] = [i % 3 for i in range(len(row["response_ids"]))]
    rewrite(run, 3)
    monkeypatch.setattr(Network, "__init__", counted)
    monkeypatch.setattr("mismatch_probe.scoring.score.STATE_BYTES", VOCAB * 8 * 20)
    assert decompose(run, "--steps", "3") == 0
    assert sorted(loads) == [f"step_{v:06d}" for v in range(4)]
    loads.clear()
    assert decompose(run, "--steps", "0:3", "--overwrite") == 0
    assert sorted(loads) == [f"step_{v:06d}" for v in range(3)]  # version 0 stays loaded from step to step


def test_progress_in_a_terminal(run: Planted) -> None:
    """On a terminal stderr shows the bar with its rate and the time left."""
    import pty

    main_end, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe", "decompose", str(run.path)],
        stdout=subprocess.DEVNULL,
        stderr=program_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(program_end)
    seen = b""
    while True:
        try:
            chunk = os.read(main_end, 4096)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait() == 0
    assert b"(4/4)" in seen and b"%" in seen and b"wrote" in seen


def test_without_shared_batches_there_is_no_noise_to_tell(run: Planted) -> None:
    assert decompose(run, "--steps", "1", "--max-tokens", "1") == 0
    assert np.isnan(steps(run).loc[1, "noise_floor_max"]) and steps(run).loc[1, "noise_floor_tokens"] == 0
    assert decompose(run, "--steps", "1", "--overwrite") == 0
    assert steps(run).loc[1, "noise_floor_tokens"] > 0


@pytest.mark.parametrize(
    "config",
    [{"text_config": "x"}, {"architectures": 3}, {"vocab_size": VOCAB, "text_config": [1]}],
)
def test_a_config_that_makes_no_sense_is_one_line(run: Planted, config: dict, capsys) -> None:
    (run.path / "checkpoints" / "step_000002" / "config.json").write_text(json.dumps(config))
    assert decompose(run) == 2
    error = capsys.readouterr().err
    assert "makes no sense" in error and error.count("\n") == 1 and "--skip-bad-rows" in error


def test_another_vocabulary_is_left_out_on_request(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """The sampler's weights were exported with padding rows, the trainer's were not."""
    from tests.tiny import save_model

    shutil.rmtree(run.path / "checkpoints" / "step_000000")
    save_model(run.path / "checkpoints" / "step_000000", "llama", vocab_size=VOCAB + 8)
    assert decompose(run, "--steps", "1") == 2
    assert "same vocabulary padding. Or pass --skip-bad-rows" in capsys.readouterr().err
    assert decompose(run, "--steps", "1", "--skip-bad-rows") == 0
    assert steps(run).loc[1, "status"] == "unjudged" and steps(run).loc[1, "log_ratio_rms"] > 0


def test_scoring_below_float32_is_said(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decompose", str(run.path), "--steps", "1", "--dtype", "bfloat16"]) == 0
    assert "scored in bfloat16: its rounding is part of D and L" in capsys.readouterr().err
    assert main(["decompose", str(run.path), "--steps", "1", "--overwrite"]) == 0
    assert "its rounding" not in capsys.readouterr().err
