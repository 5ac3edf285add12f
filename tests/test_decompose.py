from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from tests.decompose_cases import analysis, contents, decompose, rewrite, steps, tables, tokens
from tests.planted import VOCAB, Planted, write_toml


def test_same_input_same_bytes(run: Planted) -> None:
    assert decompose(run) == 0
    first = tables(analysis(run))
    assert decompose(run, "-o", str(run.path / "elsewhere")) == 0
    assert tables(run.path / "elsewhere") == first
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
