from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Rollouts
from tests.planted import write_rows, write_toml


def row(name: str = "a", **changes) -> dict:
    return {
        "sequence_id": name,
        "group_id": "g",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "sampler_logprobs": [-0.1, -0.2, -0.3],
        "loss_mask": [1, 0, 1],
        "sampler_version": 2,
        **changes,
    }


def write(path: Path, rows: list[dict], suffix: str = "jsonl") -> Path:
    write_rows(path / "rollouts" / f"step_000003.{suffix}", rows)
    write_toml(path)
    return path


def load(path: Path, **options) -> Rollouts:
    return open_run(path, ReadOptions(**options)).steps[0].load()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_is_read_as_written(tmp_path: Path, suffix: str) -> None:
    rollouts = load(write(tmp_path, [row(reward=1.5, finish_reason="stop", advantages=0.5)], suffix))
    assert rollouts.sequence_id.tolist() == ["a"]
    assert rollouts.prompt[0].tolist() == [1, 2] and rollouts.response[0].tolist() == [3, 4, 5]
    assert rollouts.sampler_logprob.tolist() == [-0.1, -0.2, -0.3]
    assert rollouts.loss_mask.tolist() == [True, False, True]
    assert rollouts.sampler_version.tolist() == [2, 2, 2]
    assert rollouts.advantage.tolist() == [0.5] * 3
    assert rollouts.reward.tolist() == [1.5] and rollouts.finish_reason.tolist() == ["stop"]
    assert np.isnan(rollouts.trainer_logprob).all()  # absent is null, never 0.0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_versions_may_change_inside_a_response(tmp_path: Path, suffix: str) -> None:
    rollouts = load(write(tmp_path, [row(sampler_version=[2, 2, 3])], suffix))
    assert rollouts.sampler_version.tolist() == [2, 2, 3]


def test_what_is_absent_is_unknown(tmp_path: Path) -> None:
    short = {key: value for key, value in row().items() if key not in ("sampler_version", "loss_mask")}
    rollouts = load(write(tmp_path, [short]))
    assert (rollouts.sampler_version == UNKNOWN_VERSION).all() and rollouts.loss_mask.all()


MISFITS = {
    "sampler_logprobs has 2 values for 3 response tokens": {"sampler_logprobs": [-0.1, -0.2]},
    "loss_mask has 4 values for 3 response tokens": {"loss_mask": [1, 1, 1, 1]},
    "trainer_logprobs has 1 values for 3 response tokens": {"trainer_logprobs": [-0.1]},
    "sampler_version has 2 values for 3 response tokens": {"sampler_version": [1, 2]},
    "loss_mask holds values other than 0 and 1": {"loss_mask": [1, 2, 1]},
    "response_ids holds id 16, outside the vocabulary of 16": {"response_ids": [3, 16, 5]},
    "prompt_ids holds id 1099511627776, outside the vocabulary of 16": {"prompt_ids": [2**40]},
    "response_ids holds the negative id -1": {"response_ids": [3, -1, 5]},
    "response_ids holds values that are not integers": {"response_ids": [3, 4.5, 5]},
    "sampler_logprobs holds values that are not numbers": {"sampler_logprobs": ["x", -0.2, -0.3]},
    "prompt_ids holds values that are not integers": {"prompt_ids": ["1", "2"]},
    "sampler_version holds values that are not integers": {"sampler_version": [True, True, True]},
    "prompt_ids holds values that are not numbers": {"prompt_ids": [10**400]},
    "sequence_id is not valid text": {"sequence_id": "\ud800"},
    "response_ids is empty": {"response_ids": []},
    "prompt_ids is empty, so the first response token has no prefix to be scored on": {"prompt_ids": []},
    "group_id is missing": {"group_id": None},
    "sampler_version holds the negative version -3": {"sampler_version": -3},
}


@pytest.mark.parametrize("reason", MISFITS)
def test_a_row_that_does_not_fit_is_set_aside_with_its_place(tmp_path: Path, reason: str) -> None:
    write(tmp_path, [row("good"), row("bad", **MISFITS[reason]), row("fine")])
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["good", "fine"]
    (rejected,) = rollouts.rejected
    assert (rejected.file, rejected.row) == ("rollouts/step_000003.jsonl", 2)
    assert rejected.reason == reason
    with pytest.raises(BadFileError, match="row 2"):
        load(tmp_path, strict=True)


def test_a_misspelt_field_is_named(tmp_path: Path) -> None:
    wrong = row()
    wrong["respones_ids"] = wrong.pop("response_ids")
    (rejected,) = load(write(tmp_path, [wrong])).rejected
    assert rejected.reason == "response_ids is missing (is 'respones_ids' meant?)"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "null or NaN"),
        (None, "null or NaN"),
        ("nan", "null or NaN"),
        (-math.inf, "infinite"),
        (-3.4028235e38, "below -700 (a stand-in)"),
        (-9999.0, "below -700 (a stand-in)"),
    ],
)
def test_values_that_are_no_logprob_become_null_and_are_said(tmp_path: Path, value, kind: str) -> None:
    rollouts = load(write(tmp_path, [row(), row("b", sampler_logprobs=[value, -0.2, -0.3])]))
    assert len(rollouts) == 2 and not rollouts.rejected
    assert np.isnan(rollouts.sampler_logprob).tolist() == [False, False, False, True, False, False]
    (notice,) = rollouts.notices
    assert notice.startswith(f"rollouts/step_000003.jsonl, row 2: sampler_logprobs {kind} at loss tokens")


def test_a_null_under_the_mask_needs_no_word(tmp_path: Path) -> None:
    assert load(write(tmp_path, [row(sampler_logprobs=[-0.1, None, -0.3])])).notices == ()


def test_positive_logprobs_are_kept_and_said(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, [row(sampler_logprobs=[0.03, -0.2, 5e-5])]))
    assert rollouts.sampler_logprob[0] == 0.03
    assert "above 0" in rollouts.notices[0]


def test_a_torn_last_line_is_passed_over_with_a_notice(tmp_path: Path) -> None:
    file = write(tmp_path, [row("a"), row("b"), row("c")]) / "rollouts" / "step_000003.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["a", "b"]
    assert rollouts.notices[0].startswith("rollouts/step_000003.jsonl, row 3: torn last line dropped")
    with pytest.raises(BadFileError, match="row 3: torn last line"):
        load(tmp_path, strict=True)


def test_a_torn_line_in_the_middle_is_an_error_unless_skipped(tmp_path: Path) -> None:
    file = write(tmp_path, [row("a"), row("b"), row("c")]) / "rollouts" / "step_000003.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(BadFileError, match=r"row 2: not valid JSON.*--skip-bad-rows"):
        load(tmp_path)
    rollouts = load(tmp_path, skip_bad_rows=True)
    assert rollouts.sequence_id.tolist() == ["a", "c"]
    assert rollouts.rejected[0].row == 2


def test_a_broken_last_line_with_its_newline_is_no_torn_write(tmp_path: Path) -> None:
    file = write(tmp_path, [row("a")]) / "rollouts" / "step_000003.jsonl"
    file.write_text(file.read_text() + '{"broken"\n')
    with pytest.raises(BadFileError, match="row 2"):
        load(tmp_path)


@pytest.mark.parametrize(
    "mangle",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data + b"\n  \n",
        lambda data: data.rstrip(b"\n"),
    ],
    ids=["byte order mark", "CRLF", "blank lines", "no last newline"],
)
def test_harmless_oddities_of_jsonl(tmp_path: Path, mangle) -> None:
    file = write(tmp_path, [row("a"), row("b")]) / "rollouts" / "step_000003.jsonl"
    file.write_bytes(mangle(file.read_bytes()))
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["a", "b"] and rollouts.notices == ()


def test_cut_inside_a_character(tmp_path: Path) -> None:
    file = write(tmp_path, [row("a"), row("b")]) / "rollouts" / "step_000003.jsonl"
    file.write_bytes(file.read_bytes() + '{"sequence_id": "é'.encode()[:-1])
    assert load(tmp_path).sequence_id.tolist() == ["a", "b"]


def test_copies_are_equal_in_everything(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, [row("a"), row("a"), row("a", sampler_version=1)]))
    assert len(rollouts) == 1 and "1 rows are exact copies" in rollouts.notices[0]
    assert rollouts.rejected[0].reason == "sequence_id was used before in this step, with other content"


def test_a_reward_that_is_no_number_is_null(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, [row("a", reward={"format": 1.0}), row("b", reward=2)]))
    assert np.isnan(rollouts.reward[0]) and rollouts.reward[1] == 2.0


def test_an_empty_file_holds_no_rows(tmp_path: Path) -> None:
    assert len(load(write(tmp_path, []))) == 0


def test_ranks_are_joined_and_copies_count_once(tmp_path: Path) -> None:
    write(tmp_path, [])
    (tmp_path / "rollouts" / "step_000003.jsonl").unlink()
    write_rows(tmp_path / "rollouts" / "step_000003_rank_0.jsonl", [row("a"), row("b")])
    write_rows(
        tmp_path / "rollouts" / "step_000003_rank_1.jsonl", [row("b"), row("c"), row("a", response_ids=[9, 9, 9])]
    )
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["a", "b", "c"]
    assert "1 rows are exact copies" in rollouts.notices[0]
    assert "used before in this step" in rollouts.rejected[0].reason


def test_parquet_that_is_none_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, [row()], "parquet")
    (tmp_path / "rollouts" / "step_000003.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(BadFileError, match=r"step_000003\.parquet: not a readable Parquet file"):
        load(tmp_path)
    assert load(tmp_path, skip_bad_rows=True).rejected[0].row == 0


def test_parquet_of_large_lists_and_narrow_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "sequence_id": ["a", "b"],
            "group_id": pa.array([1, 1]),
            "prompt_ids": pa.array([[1], [2, 3]], pa.large_list(pa.int32())),
            "response_ids": pa.array([[4, 5], [6]], pa.list_(pa.uint16())),
            "sampler_logprobs": pa.array([[-0.5, None], [-0.25]], pa.list_(pa.float32())),
            "loss_mask": pa.array([[True, True], [False]]),
        }
    )
    (tmp_path / "rollouts").mkdir()
    pq.write_table(table, tmp_path / "rollouts" / "step_000000.parquet")
    rollouts = load(tmp_path)
    assert rollouts.response.values.tolist() == [4, 5, 6]
    assert rollouts.group_id.tolist() == ["1", "1"]
    assert rollouts.sampler_logprob[[0, 2]].tolist() == [-0.5, -0.25] and np.isnan(rollouts.sampler_logprob[1])
    assert rollouts.loss_mask.tolist() == [True, True, False]
