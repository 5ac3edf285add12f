"""prime-rl's files when they are torn, packed, in another encoding, or damaged."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import Rollouts
from tests.prime_rl_files import DATA, exported, ranked, traced
from tests.reader_fuzz import fuzz

Write = Callable[[Path, int], Path]
TEXT = [exported, traced]


def first(run: Path, options: ReadOptions | None = None) -> Rollouts:
    return open_run(run, options).steps[0].load()


def rewrite(run: Path, write: Write, change: Callable[[bytes], bytes], suffix: str = "") -> None:
    file = write(run, 4)
    data = change(file.read_bytes())
    file.unlink()
    file.with_name(file.name + suffix).write_bytes(data)


@pytest.mark.parametrize("write", TEXT)
@pytest.mark.parametrize(
    ("change", "suffix"),
    [
        (lambda data: data.replace(b"\n", b"\r\n"), ""),
        (lambda data: b"\xef\xbb\xbf" + data, ""),
        (lambda data: data + b"\n\n" + bytes(64), ""),
        (gzip.compress, ".gz"),
        (lambda data: pa.compress(data, codec="zstd", asbytes=True), ".zst"),
    ],
    ids=["crlf", "bom", "blank", "gzip", "zstd"],
)
def test_text_in_other_clothes_reads_the_same(tmp_path: Path, write: Write, change, suffix: str) -> None:
    rewrite(tmp_path, write, change, suffix)
    rollouts = first(tmp_path)
    assert len(rollouts) == 5 and int(rollouts.loss_mask.sum()) == 22


@pytest.mark.parametrize("write", TEXT)
def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path, write: Write) -> None:
    rewrite(tmp_path, write, lambda data: data[:-30])
    rollouts = first(tmp_path)
    assert len(rollouts) in (4, 5) and any("torn last line dropped" in text for text in rollouts.notices)
    with pytest.raises(BadFileError, match="torn last line"):
        first(tmp_path, ReadOptions(strict=True))


@pytest.mark.parametrize("write", TEXT)
@pytest.mark.parametrize("bad", [b'{"torn', b"\xff\xfe", b"[1, 2]"], ids=["torn", "non-utf-8", "list"])
def test_a_bad_line_in_the_middle_is_refused_or_set_aside(tmp_path: Path, write: Write, bad: bytes) -> None:
    rewrite(tmp_path, write, lambda data: data.replace(b"\n", b"\n" + bad + b"\n", 1))
    with pytest.raises(BadFileError, match="row 2"):
        first(tmp_path)
    rollouts = first(tmp_path, ReadOptions(skip_bad_rows=True))
    assert len(rollouts) == 5 and rollouts.rejected[0].row == 2


@pytest.mark.parametrize("write", [*TEXT, ranked])
def test_an_empty_first_file_is_no_run(tmp_path: Path, write: Write) -> None:
    write(tmp_path, 4).write_bytes(b"")
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)


@pytest.mark.parametrize("write", [*TEXT, ranked])
def test_an_empty_later_file_has_no_rows(tmp_path: Path, write: Write) -> None:
    write(tmp_path, 4)
    write(tmp_path, 5).write_bytes(b"")
    step = open_run(tmp_path).steps[1]
    if write is ranked:
        with pytest.raises(BadFileError, match="step_5/rank_0"):
            step.load()
    else:
        assert len(step.load()) == 0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("write", [*TEXT, ranked])
def test_damaged_files_read_or_end_in_a_clean_error(write: Write, skip: bool) -> None:
    fuzz(lambda run: write(run, 4), skip_bad_rows=skip)


def _batch(tag: str) -> Callable[[Path], Path]:
    def write(run: Path) -> Path:
        source = next((DATA / tag / "rollouts").glob("step_*/*rollouts.bin"))
        file = run / "rollouts" / source.parent.name / source.name
        file.parent.mkdir(parents=True)
        file.write_bytes(source.read_bytes())
        return file

    return write


@pytest.mark.parametrize("tag", ["v0.5.0", "v0.6.0", "v0.8.0"])
def test_a_damaged_batch_reads_or_ends_in_a_clean_error(tag: str) -> None:
    fuzz(_batch(tag))


@pytest.mark.parametrize("variant", ["june", "v0.8.0"])
def test_a_damaged_older_export_reads_or_ends_in_a_clean_error(variant: str) -> None:
    fuzz(lambda run: exported(run, 4, variant))


def test_a_damaged_flat_export_reads_or_ends_in_a_clean_error() -> None:
    def write(run: Path) -> Path:
        file = exported(run, 4, "june")
        return file.rename(run / "token_exports" / file.name)

    fuzz(write)


@pytest.mark.parametrize("fields", [10, 12, 17, 18, 19])
def test_damaged_older_rows_read_or_end_in_a_clean_error(fields: int) -> None:
    fuzz(lambda run: ranked(run, 4, fields), skip_bad_rows=True)


def test_damaged_traces_beside_an_export_read_or_end_in_a_clean_error() -> None:
    def write(run: Path) -> Path:
        exported(run, 4)
        return traced(run, 4)

    fuzz(write, skip_bad_rows=True)
