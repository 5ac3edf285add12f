from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe import table_io
from mismatch_probe.errors import OutputError
from mismatch_probe.table_io import TableWriter, table_of, write_table
from mismatch_probe.tables import REJECTED

SAID = {"run": "one"}


def rows(first: int, count: int) -> pa.Table:
    made = [{"step": 1, "file": "f", "row": n, "sequence_id": None, "reason": "torn"} for n in range(count)]
    return table_of([row | {"row": first + row["row"]} for row in made], REJECTED, SAID)


@pytest.mark.parametrize("parts", [[], [0], [3], [4, 0, 1], [1, 2, 9, 3], [8]])
def test_parts_give_the_bytes_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[int]) -> None:
    monkeypatch.setattr(table_io, "_GROUP_ROWS", 4)
    held = 0
    with TableWriter(tmp_path / "parts.parquet", REJECTED, SAID) as writer:
        for at, count in enumerate(parts):
            writer.add(rows(sum(parts[:at]), count))
            held = max(held, sum(part.num_rows for part in writer._pending))
    assert writer.rows == sum(parts) and held < 4
    write_table(rows(0, sum(parts)), tmp_path / "whole.parquet")
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert pq.read_table(tmp_path / "parts.parquet")["row"].to_pylist() == list(range(sum(parts)))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"), TableWriter(tmp_path / "no" / "t", REJECTED, SAID):
        pass


@pytest.mark.parametrize("parts", [1, 3])
def test_a_full_disk_is_said(parts: int) -> None:
    with pytest.raises(OutputError, match="No space left"), TableWriter(Path("/dev/full"), REJECTED, SAID) as writer:
        for _ in range(parts):
            writer.add(rows(0, 3))


def test_what_went_wrong_inside_is_what_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TableWriter(tmp_path / "t", REJECTED, SAID):
        raise KeyError
