"""PipelineRL's streams when they are damaged: torn, filled with NULs, packed by hand, doubled."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.readers.pipeline_rl import matches
from mismatch_probe.run import Run
from tests.pipeline_rl_writer import batch, text, write_actor, write_config, write_training
from tests.reader_cases import cases
from tests.reader_fuzz import fuzz


def actor_file(out: Path, groups: int = 3) -> Path:
    rows = [case for case in cases() if case.response][:groups]
    return write_actor(out, [[text(case, 0, 0, group_id=f"g{at}")] for at, case in enumerate(rows)])


def training_file(out: Path, batches: int = 3) -> Path:
    rows = [case for case in cases() if case.response][:batches]
    write_config(out, 1)
    return write_training(out, [batch([text(case, 0, 0)]) for case in rows])


def loaded(run: Run) -> tuple[int, str, list[str]]:
    """Sequences, notices, and reasons for what was set aside."""
    made = [step.load() for step in run.steps]
    notices = " ".join(text for rollouts in made for text in rollouts.notices)
    return sum(map(len, made)), notices, [rejected.reason for rollouts in made for rejected in rollouts.rejected]


@pytest.mark.parametrize("write", [actor_file, training_file])
@pytest.mark.parametrize("tail", [b"", b"\0" * 40])
def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path, write, tail: bytes) -> None:
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[:-30] + tail)
    count, notices, _ = loaded(open_run(tmp_path))
    assert count == 2 and "row 3: torn last line dropped" in notices
    with pytest.raises(BadFileError, match="row 3: torn last line"):
        loaded(open_run(tmp_path, ReadOptions(strict=True)))


@pytest.mark.parametrize("write", [actor_file, training_file])
def test_nul_bytes_after_the_last_line_are_nothing(tmp_path: Path, write) -> None:
    file = write(tmp_path)
    file.write_bytes(file.read_bytes() + b"\0" * 64)
    assert loaded(open_run(tmp_path)) == (3, loaded(open_run(tmp_path))[1], [])
    assert "torn" not in loaded(open_run(tmp_path))[1]


def test_a_torn_middle_line_is_an_error_unless_skipped(tmp_path: Path) -> None:
    file = actor_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1][:-25]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(BadFileError, match=r"0\.jsonl, row 2: not valid JSON"):
        loaded(open_run(tmp_path))
    count, _, reasons = loaded(open_run(tmp_path, ReadOptions(skip_bad_rows=True)))
    assert count == 2 and len(reasons) == 1 and "not valid JSON" in reasons[0]


def test_a_torn_middle_batch_ends_the_count_of_samples(tmp_path: Path) -> None:
    actor_file(tmp_path)
    file = training_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1][:-25]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(BadFileError, match=r"0\.jsonl, row 2: not a batch"):
        open_run(tmp_path)
    run = open_run(tmp_path, ReadOptions(skip_bad_rows=True))
    assert not run.versions_known and "cannot be counted" in " ".join(run.notices)


@pytest.mark.parametrize("write", [actor_file, training_file])
@pytest.mark.parametrize("kind", ["crlf", "bom", "gz", "zst"])
def test_text_in_other_clothes_is_read(tmp_path: Path, write, kind: str) -> None:
    file = write(tmp_path)
    data = file.read_bytes()
    if kind == "crlf":
        file.write_bytes(data.replace(b"\n", b"\r\n"))
    elif kind == "bom":
        file.write_bytes(b"\xef\xbb\xbf" + data)
    else:
        packed = gzip.compress(data) if kind == "gz" else pa.compress(data, codec="zstd", asbytes=True)
        file.with_name(f"0.jsonl.{kind}").write_bytes(packed)
        file.unlink()
    assert loaded(open_run(tmp_path))[0] == 3


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    file = actor_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"question", b"\xff\xfe")
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(BadFileError, match="row 2"):
        loaded(open_run(tmp_path))


def test_empty_streams_are_no_run(tmp_path: Path) -> None:
    actor_file(tmp_path).write_bytes(b"")
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)
    with pytest.raises(NothingToJudgeError):
        open_run(tmp_path, format="pipeline-rl")


def test_a_line_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    file = actor_file(tmp_path)
    file.write_bytes(file.read_bytes() * 2)
    count, notices, _ = loaded(open_run(tmp_path))
    assert count == 3 and "3 rows are exact copies" in notices


@pytest.mark.parametrize("data", [b"\x00\xff", b"[]\n", b"[1]\n", b"{}\n", b'[{"input_ids": 1}]\n', b"\xef\xbb\xbf"])
def test_garbage_is_not_recognised(tmp_path: Path, data: bytes) -> None:
    for topic in ("actor", "training_data"):
        folder = tmp_path / "streams" / topic / "0" / "0"
        folder.mkdir(parents=True)
        (folder / "0.jsonl").write_bytes(data)
        (folder / "0.jsonl.gz").write_bytes(data)
        (folder / "0.jsonl.zst").write_bytes(data)
    assert not matches(tmp_path)


@pytest.mark.parametrize("change", [{"seq_boundaries": [0, 999]}, {"seq_boundaries": [0, -5]}, {"input_ids": 5}])
def test_a_batch_of_another_shape_is_set_aside(tmp_path: Path, change: dict) -> None:
    first, second = (batch([text(case, 0, 0)]) for case in cases()[:2])
    write_training(tmp_path, [first | change, second])
    write_config(tmp_path, 1)
    count, _, reasons = loaded(open_run(tmp_path))
    assert count <= 1 and len(reasons) >= 1


@pytest.mark.parametrize("write", [actor_file, training_file])
def test_damaged_files_read_or_end_in_a_clean_error(write) -> None:
    fuzz(write)
    fuzz(write, skip_bad_rows=True)
