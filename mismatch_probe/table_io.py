"""How the tables are written and read: Arrow schemas with definitions and provenance, whole files or none."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe import __version__
from mismatch_probe.errors import InputError, OutputError
from mismatch_probe.stats.types import Floats
from mismatch_probe.tables import Column

STAGING = ".staging"
"""Folder inside the analysis folder where tables are collected until all are written."""
SCHEMA_VERSION = "1"
"""Additive changes keep it; a reader refuses a newer one."""
_GROUP_ROWS = 131072


def schema(columns: Iterable[Column], provenance: Mapping[str, str]) -> pa.Schema:
    """Arrow schema with definitions and units on each field and provenance on the table."""
    fields = []
    for column in columns:
        meta = {"definition": column.definition, **({"unit": column.unit} if column.unit else {})}
        fields.append(pa.field(column.name, column.type, metadata=meta))
        if column.interval:
            for end, word in (("low", "lower"), ("high", "upper")):
                meta = {"definition": f"{word} end of the interval of {column.name}", "unit": column.unit}
                fields.append(pa.field(f"{column.name}_ci_{end}", column.type, metadata=meta))
    stamp = {
        "mismatch_probe.schema_version": SCHEMA_VERSION,
        "mismatch_probe.version": __version__,
    }
    stamp.update({f"mismatch_probe.{key}": value for key, value in provenance.items()})
    return pa.schema(fields, metadata=stamp)


def table_of(rows: Sequence[Mapping[str, Any]], columns: Iterable[Column], provenance: Mapping[str, str]) -> pa.Table:
    """Rows -> table; NaN and missing become null."""
    target = schema(columns, provenance)
    return pa.table(
        {name: pa.array([_null(row.get(name)) for row in rows], target.field(name).type) for name in target.names},
        schema=target,
    )


def write_table(table: pa.Table, path: Path) -> None:
    """Write one Parquet file, zstd.

    Raises:
        OutputError: the folder is full, read-only or otherwise not writable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", row_group_size=_GROUP_ROWS)
    except OSError as error:
        raise output_error(path, error) from None


class TableWriter:
    """Context that writes one Parquet file as its rows come, the bytes those of ``write_table`` with all of them.

    Args:
        path: the file.
        columns: of the table.
        provenance: kept in its schema.

    Raises:
        OutputError: here and from every method: the folder is full, read-only or otherwise not writable.
    """

    def __init__(self, path: Path, columns: Iterable[Column], provenance: Mapping[str, str]) -> None:
        self.rows, self._path = 0, path
        self._pending = [schema(columns, provenance).empty_table()]
        self._file: pq.ParquetWriter | None = None

    def __enter__(self) -> TableWriter:
        try:
            self._file = pq.ParquetWriter(self._path, self._pending[0].schema, compression="zstd")
        except OSError as error:
            raise output_error(self._path, error) from None
        return self

    def add(self, table: pa.Table) -> None:
        """Take in rows; whole row groups are written at once, so that less than one is held."""
        self.rows += table.num_rows
        self._pending.append(table)
        held = sum(part.num_rows for part in self._pending)
        if held >= _GROUP_ROWS:
            self._write(held - held % _GROUP_ROWS)

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending = [table.slice(rows)]
        try:
            assert self._file is not None
            self._file.write_table(table.slice(0, rows), row_group_size=_GROUP_ROWS)
        except OSError as error:
            raise output_error(self._path, error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        if kind is not None:
            with contextlib.suppress(OSError):  # what goes wrong now is no news
                self._file.close()
            return
        left = sum(part.num_rows for part in self._pending)
        if left or not self.rows:
            self._write(left)
        try:
            self._file.close()
        except OSError as wrong:
            raise output_error(self._path, wrong) from None


def read_rows(path: Path) -> pa.Table:
    """Read a table that this program wrote.

    Raises:
        InputError: unreadable, not ours, or written by a newer version.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not readable ({reason}). Run decompose again with --overwrite") from None
    written = (table.schema.metadata or {}).get(b"mismatch_probe.schema_version", b"0").decode()
    if written != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema version {written}, this program reads {SCHEMA_VERSION}. "
            "Use the version that wrote it, or run decompose again with --overwrite"
        )
    return table


def output_error(path: Path, error: OSError) -> OutputError:
    """One clear line for a folder that cannot be written."""
    if error.errno:
        reason = os.strerror(error.errno)
    else:
        # pyarrow wraps the system's words: "Error writing bytes to file. Detail: [errno 28] No space left on device"
        reason = str(error).splitlines()[0].rsplit("[errno ", 1)[-1].split("] ", 1)[-1]
    path = Path(*(part for part in path.parts if part != STAGING))
    return OutputError(f"{path}: cannot be written ({reason}). Free some space or choose another folder with -o")


def nullable(values: Floats) -> pa.Array:
    """A column of numbers, NaN = null."""
    return pa.array(values, pa.float64(), mask=np.isnan(values))


def _null(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
