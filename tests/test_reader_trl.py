"""TRL: runs that its own trainer wrote (see fixtures/trl/write.py), and one of each trap."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, NothingToJudgeError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz
from tests.trl_writer import row, write_table

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "trl"


def one_version(step: int, seed: int = 0) -> list[Case]:
    """Cases as a table of TRL can hold them: one version a sequence, that before the update."""
    made = cases(step, seed)
    for case in made:
        case.version = [step - 1] * len(case.response)
    return made


def test_the_real_trainers_tokens_are_what_its_engine_returned() -> None:
    run = open_run(FIXTURES / "run", ReadOptions(overrides=("model=base",)))
    truth = json.loads((FIXTURES / "run" / "truth.json").read_text())
    made = [(r["prompt"], r["completion"], r["logprobs"], r["version"]) for r in truth if r["train"]]
    read = []
    for step in run.steps:
        rollouts = step.load()
        assert run.trainer_version(step.index) == step.index - 1
        for at in range(len(rollouts)):
            part = slice(rollouts.response.offsets[at], rollouts.response.offsets[at + 1])
            versions = set(rollouts.sampler_version[part].tolist())
            assert versions == {step.index - 1}
            logprobs = rollouts.sampler_logprob[part].tolist()
            read.append((rollouts.prompt[at].tolist(), rollouts.response[at].tolist(), logprobs, versions.pop()))
    # An evaluation at steps 3 and 4 took the place of two training rows in each of their files.
    assert len(read) == 12 and all(entry in made for entry in read)
    settings = run.settings
    assert (settings.temperature, settings.top_k, settings.group_size) == (0.8, 0, 2)
    assert settings.sources["temperature"] == "checkpoint-1/training_args.bin: temperature"


@pytest.mark.parametrize(("name", "lags"), [("run", [0, 0, 0, 0]), ("reused", [0, 1, 0, 1])])
def test_the_versions_named_are_the_weights_that_sampled(tmp_path: Path, name: str, lags: list[int]) -> None:
    """The engine that stood in was the trainer's network itself, so at the right version D is rounding alone."""
    assert main(["decompose", str(FIXTURES / name), "--set", "model=base", "-o", str(tmp_path / "out"), "-q"]) == 0
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    assert (steps["discrepancy_rms"] < 1e-5).all() and len(steps) == 4
    for at, lag in enumerate(lags):
        assert steps.loc[at, "lag_rms"] == 0.0 if lag == 0 else steps.loc[at, "lag_rms"] > 1e-3


@pytest.mark.parametrize("name", ["run", "reused"])
def test_the_saved_arguments_imply_the_version_that_the_column_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "completions").mkdir()
    arguments = FIXTURES / name / "checkpoint-1" / "training_args.bin"
    (tmp_path / "checkpoint-1" / "training_args.bin").write_bytes(arguments.read_bytes())
    named = {step.index: set(step.load().sampler_version) for step in open_run(FIXTURES / name).steps}
    for file in (FIXTURES / name / "completions").iterdir():
        table = pd.read_parquet(file)
        table = table[table["sampler_version"] < table["step"]].drop(columns="sampler_version")
        table.to_parquet(tmp_path / "completions" / file.name)
    assert {step.index: set(step.load().sampler_version) for step in open_run(tmp_path).steps} == named


def test_evaluation_rows_in_a_training_table_are_set_aside() -> None:
    rollouts = open_run(FIXTURES / "run").steps[2].load()
    assert [rejected.row for rejected in rollouts.rejected] == [3, 4]
    assert "a row of an evaluation" in rollouts.rejected[0].reason
    assert len(set(rollouts.group_id)) == 1


def test_a_batch_that_two_updates_share_is_said() -> None:
    assert "generates once for 2 updates" in " ".join(open_run(FIXTURES / "reused").notices)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_complete_table_is_read(tmp_path: Path, as_json: bool) -> None:
    rows = []
    for case in one_version(3):
        entry = row(case, 3, old_per_token_logps=case.trainer)
        lists = [key for key, value in entry.items() if isinstance(value, list)]
        rows.append(entry | {key: json.dumps(entry[key]) for key in lists if as_json})
    write_table(tmp_path, 3, rows)
    run = open_run(tmp_path)
    assert run.first_version == -1 and run.trainer_version(3) == 2
    rollouts = run.steps[0].load()
    assert_same(rollouts, one_version(3), without=("finish_reason",))
    assert [rejected.reason for rejected in rollouts.rejected] == ["response_ids is empty"]


def test_group_size_makes_groups_of_consecutive_rows(tmp_path: Path) -> None:
    first, second = one_version(3)[:2]
    rows = [row(case, 3, completion_ids=[at + 5, 9, 9, 2][: len(case.response)], tool_mask=None, sampler_logprobs=None)
            for at, case in enumerate([first] * 4)]  # fmt: skip
    write_table(tmp_path, 3, rows)
    rollouts = open_run(tmp_path, ReadOptions(overrides=("group_size=2",))).steps[0].load()
    assert len(set(rollouts.group_id)) == 2 and rollouts.group_id[0] == rollouts.group_id[1]
    rollouts = open_run(tmp_path).steps[0].load()
    assert len(set(rollouts.group_id)) == 1 and "group_size=N" in rollouts.notices[0]
    write_table(tmp_path, 3, [row(second, 3), row(one_version(3)[2], 3)])
    rollouts = open_run(tmp_path, ReadOptions(overrides=("group_size=2",))).steps[0].load()
    assert len(set(rollouts.group_id)) == 2 and "do not share a prompt" in rollouts.notices[0]


def test_trainer_logprobs_of_older_weights_are_left_out(tmp_path: Path) -> None:
    case = one_version(3)[0]
    write_table(tmp_path, 3, [row(case, 3, sampler_version=1, old_per_token_logps=case.trainer)])
    rollouts = open_run(tmp_path).steps[0].load()
    assert np.isnan(rollouts.trainer_logprob).all() and set(rollouts.sampler_version) == {1}
    assert "old_per_token_logps of 1 rows is left out" in " ".join(rollouts.notices)


def test_zeros_at_tool_tokens_without_a_mask_are_said(tmp_path: Path) -> None:
    write_table(tmp_path, 3, [row(one_version(3)[1], 3, tool_mask=None)])
    rollouts = open_run(tmp_path).steps[0].load()
    assert rollouts.loss_mask.all() and "exactly 0.0 at 3 loss tokens" in " ".join(rollouts.notices)


def test_left_padded_prompts_are_cut_by_their_mask(tmp_path: Path) -> None:
    case = one_version(3)[0]
    write_table(tmp_path, 3, [row(case, 3, prompt_ids=[0, 0, *case.prompt], prompt_mask=[0, 0, 1, 1, 1])])
    assert open_run(tmp_path).steps[0].load().prompt[0].tolist() == case.prompt


def test_null_logprobs_of_the_engine_are_nan(tmp_path: Path) -> None:
    case = one_version(3)[0]
    write_table(tmp_path, 3, [row(case, 3, sampler_logprobs=[None, *case.sampler[1:]])])
    rollouts = open_run(tmp_path).steps[0].load()
    assert np.isnan(rollouts.sampler_logprob).tolist() == [True, False, False, False]


def test_without_a_version_the_lag_is_said_and_can_be_declared(tmp_path: Path) -> None:
    write_table(tmp_path, 3, [row(case, 3, sampler_version=None) for case in one_version(3)[:2]])
    rollouts = open_run(tmp_path).steps[0].load()
    assert (rollouts.sampler_version == UNKNOWN_VERSION).all() and "sampler_lag=0" in " ".join(rollouts.notices)
    declared = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=0",))).steps[0].load()
    assert (declared.sampler_version == 2).all()


def test_rewards_with_unknown_weights_are_not_added(tmp_path: Path) -> None:
    case = one_version(3)[0]
    entry = row(case, 3)
    two = {key: entry[key] for key in ("step", "prompt", "completion")} | {"a": 1.0, "b": 0.5} | entry
    write_table(tmp_path, 3, [{key: value for key, value in two.items() if key != "accuracy_reward"}])
    rollouts = open_run(tmp_path).steps[0].load()
    assert np.isnan(rollouts.reward[0]) and "(a, b)" in " ".join(rollouts.notices)


def test_a_plain_table_is_answered_with_what_to_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [{"step": 1, "prompt": "q", "completion": "a", "reward": 1.0, "advantage": 0.1}]
    write_table(tmp_path, 1, plain)
    for command in ("inspect", "decompose"):
        assert main([command, str(tmp_path)]) == 5
        assert "GRPOTrainer._generate" in capsys.readouterr().err
    with pytest.raises(NothingToJudgeError, match="log_completions=True"):
        open_run(tmp_path / "completions")


def test_decompose_of_logged_trainer_logprobs(tmp_path: Path) -> None:
    made = [case for case in one_version(3) if case.response]
    write_table(tmp_path, 3, [row(case, 3, old_per_token_logps=case.trainer) for case in made])
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    ratio = np.concatenate([(np.array(c.trainer) - np.array(c.sampler))[np.array(c.mask) > 0] for c in made])
    weights = np.exp(ratio)
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def test_another_step_inside_a_file_is_set_aside(tmp_path: Path) -> None:
    write_table(tmp_path, 3, [row(one_version(3)[0], 3), row(one_version(3)[2], 4, sampler_version=2)])
    assert "its step column says 4" in open_run(tmp_path).steps[0].load().rejected[0].reason


class Hostile:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return Path.touch, (self.touched,)


def test_hostile_arguments_do_not_run(tmp_path: Path) -> None:
    write_table(tmp_path, 3, [row(one_version(3)[0], 3)])
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(tmp_path / "touched")))
    with pytest.raises(BadFileError, match="training_args"):
        open_run(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_garbage_is_not_recognised_and_only_this_reader_matches(tmp_path: Path) -> None:
    file = tmp_path / "completions" / "completions_00001.parquet"
    file.parent.mkdir()
    for data in (b"", b"PAR1", b"\0" * 100):
        file.write_bytes(data)
        assert not any(reader.matches(tmp_path) for reader in _READERS)
    write_table(tmp_path, 1, [row(one_version(1)[0], 1)])
    for place in (tmp_path, FIXTURES / "run"):
        assert [reader.FORMAT for reader in _READERS if reader.matches(place)] == ["trl"]


def test_truncated_tables_are_refused_or_skipped(tmp_path: Path) -> None:
    for step in (1, 2):
        file = write_table(tmp_path, step, [row(one_version(step)[0], step)])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BadFileError, match="completions_00002"):
        open_run(tmp_path).steps[1].load()
    rollouts = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[1].load()
    assert len(rollouts) == 0 and "not a readable Parquet file" in rollouts.rejected[0].reason


def test_damaged_files_read_or_end_in_a_clean_error() -> None:
    def write(run_dir: Path) -> Path:
        return write_table(run_dir, 3, [row(case, 3, old_per_token_logps=case.trainer) for case in one_version(3)])

    fuzz(write)
    fuzz(write, examples=15, skip_bad_rows=True)
