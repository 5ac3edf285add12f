"""The native layout: the shared cases in each file format, and damaged files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.readers.rows import RowBuilder
from tests.planted import write_rows
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz


def row(case: Case) -> dict:
    return {
        "sequence_id": case.name,
        "group_id": f"g{case.group}",
        "prompt_ids": case.prompt,
        "response_ids": case.response,
        "sampler_logprobs": [
            value if counted else None for value, counted in zip(case.sampler, case.mask, strict=True)
        ],
        "loss_mask": [bool(counted) for counted in case.mask],
        "sampler_version": case.version,
        "trainer_logprobs": case.trainer,
        "advantages": case.advantage,
        "reward": case.reward,
        "finish_reason": case.finish_reason,
    }


def write(run_dir: Path, suffix: str = "parquet") -> Path:
    file = run_dir / "rollouts" / f"step_000003.{suffix}"
    write_rows(file, [row(case) for case in cases()])
    return file


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_shared_cases_read_as_written(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, suffix)
    rollouts = open_run(tmp_path).steps[0].load()
    assert_same(rollouts, cases())
    assert [(bad.sequence_id, bad.reason) for bad in rollouts.rejected] == [("empty", "response_ids is empty")]


@pytest.mark.parametrize("kind", ["gz", "zst", "crlf", "bom"])
def test_lines_are_read_however_they_are_packed(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, "jsonl")
    data = file.read_bytes()
    if kind in ("gz", "zst"):
        file.unlink()
        file = file.with_name(f"{file.name}.{kind}")
        data = gzip.compress(data) if kind == "gz" else pa.compress(data, codec="zstd", asbytes=True)
    else:
        data = data.replace(b"\n", b"\r\n") if kind == "crlf" else b"\xef\xbb\xbf" + data
    file.write_bytes(data)
    assert_same(open_run(tmp_path).steps[0].load(), cases())


def test_a_packed_file_that_is_cut_short_or_a_bomb_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl")
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes())[:-40])
    file.unlink()
    with pytest.raises(BadFileError, match=r"step_000003\.jsonl\.gz: cannot be read"):
        open_run(tmp_path).steps[0].load()
    packed.write_bytes(gzip.compress(bytes(200 << 20)))
    with pytest.raises(BadFileError, match="unpacks to more than 50 times its size"):
        open_run(tmp_path).steps[0].load()


def test_with_skip_bad_rows_a_file_that_cannot_be_unpacked_is_set_aside(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl")
    file.with_name("step_000003_rank_1.jsonl.gz").write_bytes(b"not gzip")
    rollouts = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[0].load()
    assert_same(rollouts, cases())
    assert [bad.file for bad in rollouts.rejected if bad.row == 0] == ["rollouts/step_000003_rank_1.jsonl.gz"]


def test_a_file_that_lies_there_twice_counts_once(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.with_name("step_000003_rank_1.parquet").write_bytes(file.read_bytes())
    rollouts = open_run(tmp_path).steps[0].load()
    assert_same(rollouts, cases())
    assert "5 rows are exact copies of others and count once" in rollouts.notices[0]


def test_ids_in_two_dimensions_are_set_aside(tmp_path: Path) -> None:
    builder = RowBuilder(3, tmp_path, None, ReadOptions())
    builder.add({**row(cases()[0]), "response_ids": np.ones((2, 2), dtype=np.int64)}, tmp_path / "file", 1)
    assert [bad.reason for bad in builder.build().rejected] == ["response_ids is not a flat list"]


def test_deep_nesting_is_a_clean_error(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl")
    file.write_bytes(b"[" * 100_000 + b"\n" + file.read_bytes())
    with pytest.raises(BadFileError, match="row 1: not valid JSON"):
        open_run(tmp_path).steps[0].load()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_damaged_files_read_or_end_in_a_clean_error(suffix: str) -> None:
    fuzz(lambda run_dir: write(run_dir, suffix), examples=60)
    fuzz(lambda run_dir: write(run_dir, suffix), skip_bad_rows=True)


def test_json_writers_nan_is_null(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl")
    first = {**row(cases()[0]), "sampler_logprobs": [float("nan"), -1.0, float("-inf"), -0.5]}
    file.write_text(json.dumps(first) + "\n")
    rollouts = open_run(tmp_path).steps[0].load()
    assert [value == value for value in rollouts.sampler_logprob] == [False, True, False, True]
