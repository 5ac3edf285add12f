"""slime's dumps: what is read equals what was written, from both files, from either, and from either train format."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Rollouts
from tests.reader_cases import assert_same, cases
from tests.slime_dump import sample, train_sample, write_rollout, write_train_1, write_train_2

STEP = 3
FIXTURES = Path(__file__).parent / "fixtures" / "slime"


def load(path: Path, step: int = STEP, **options) -> Rollouts:
    run = open_run(path, ReadOptions(**options))
    assert run.format == "slime"
    return next(each for each in run.steps if each.index == step).load()


def several_versions(rollouts: Rollouts, expected: list) -> list:
    """slime names versions a call, not a token: where a response has several they must read as null."""
    row = rollouts.sequence_id.tolist().index(f"rollout{STEP}-sample103")
    part = slice(int(rollouts.response.offsets[row]), int(rollouts.response.offsets[row + 1]))
    assert (rollouts.sampler_version[part] == UNKNOWN_VERSION).all()
    expected[3].version = [UNKNOWN_VERSION] * len(expected[3].response)
    return expected


def test_both_files_give_everything(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    write_train_2(tmp_path, [train_sample(case, at) for at, case in enumerate(expected)], STEP)
    rollouts = load(tmp_path)
    assert_same(rollouts, several_versions(rollouts, expected))
    assert "1 samples were sampled under several weight versions" in " ".join(rollouts.notices)
    assert [r.reason for r in rollouts.rejected] == ["response_ids is empty"]


def test_the_rollout_file_alone_lacks_the_trainer(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    run = open_run(tmp_path)
    rollouts = run.steps[0].load()
    assert_same(rollouts, several_versions(rollouts, expected), without=("trainer_logprob", "advantage"))
    assert "--save-debug-train-data" in " ".join(run.notices)


def test_the_train_file_alone_lacks_versions_and_groups(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_train_2(tmp_path, [train_sample(case, at) for at, case in enumerate(expected)], STEP)
    run = open_run(tmp_path)
    rollouts = run.steps[0].load()
    assert_same(rollouts, expected, without=("sampler_version", "finish_reason", "group"))
    assert "--save-debug-rollout-data" in " ".join(run.notices)
    assert "grouped by equal prompts" in " ".join(rollouts.notices)
    assert rollouts.finish_reason.tolist() == [None, None, "length", None, "length"]


def test_rows_of_a_train_file_are_grouped_by_group_size(tmp_path: Path) -> None:
    expected = [case for case in cases(STEP) if case.response][:4]
    write_train_2(tmp_path, [train_sample(case, at) for at, case in enumerate(expected)], STEP)
    rollouts = load(tmp_path, overrides=("group_size=2",))
    assert_same(rollouts, expected, without=("sampler_version", "finish_reason"))
    assert "grouped by 2 consecutive rows (group_size, --set)" in " ".join(rollouts.notices)


@pytest.mark.parametrize(
    "parallel", [{}, {"dp": 2}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2, "dp": 2, "pp": 2}, {"cp": 4}]
)
def test_format_1_is_joined_over_its_ranks(tmp_path: Path, parallel: dict) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    write_train_1(tmp_path, expected, STEP, **parallel)
    rollouts = load(tmp_path)
    assert_same(rollouts, several_versions(rollouts, expected))


@pytest.mark.parametrize("parallel", [{"dp": 2, "pp": 2}, {"cp": 2, "tp": 2}])
def test_format_1_alone(tmp_path: Path, parallel: dict) -> None:
    expected = cases(STEP)
    write_train_1(tmp_path, expected, STEP, **parallel)
    rollouts = load(tmp_path)
    without = ("sampler_version", "finish_reason", "group", "reward")
    assert_same(rollouts, expected, without=without, order=False)


def test_a_context_parallel_rank_that_is_missing_is_said(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    write_train_1(tmp_path, expected, STEP, cp=2)
    (tmp_path / "train_data" / f"{STEP}_1.pt").unlink()
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all() and not np.isnan(rollouts.sampler_logprob).any()
    assert "context-parallel slice" in " ".join(rollouts.notices)


def test_ranks_of_other_pipeline_stages_hold_no_logprobs(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    write_train_1(tmp_path, expected, STEP, pp=2)
    (tmp_path / "train_data" / f"{STEP}_1.pt").unlink()
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all()
    assert "other pipeline stages than the last" in " ".join(rollouts.notices)


def test_rows_in_another_order_are_joined_by_their_index(tmp_path: Path) -> None:
    expected = cases(STEP)
    write_rollout(tmp_path, [sample(case, at, STEP) for at, case in enumerate(expected)], STEP)
    rows = [train_sample(case, at) for at, case in enumerate(expected)]
    for row in rows:
        del row["rollout_position"]
        row["data_parallel_rank"] = 2
    write_train_2(tmp_path, rows[::-1], STEP)
    rollouts = load(tmp_path)
    assert_same(rollouts, several_versions(rollouts, expected))


@pytest.mark.parametrize("train", [["train_3.pt"], ["train_3_0.pt", "train_3_1.pt"]])
def test_what_slime_itself_wrote_is_read(tmp_path: Path, train: list[str]) -> None:
    """Written by slime's functions at 624b824a8 (format 2) and d38dc29c9 (format 1): see fixtures/slime/write.py."""
    for name in ["rollout_3.pt", *train]:
        shutil.copy(FIXTURES / name, tmp_path)
    rollouts = load(tmp_path)
    assert_same(rollouts, several_versions(rollouts, cases(STEP)))
