"""Rows of JSONL and Parquet files, with the line or row number each came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import BadFileError

Row = dict[str, Any]
Torn = Callable[[int, str], None]

_REPAIR = "Restore the file, or pass --skip-bad-rows to analyse the rest"


def jsonl_rows(path: Path, on_torn: Torn, on_bad: Torn | None) -> Iterator[tuple[int, Row]]:
    """Yield (1-based line, object) for each line; blank lines are passed over.

    A last line that does not parse is a torn write: ``on_torn(line, reason)``. One in the middle goes to ``on_bad``, or
    raises BadFileError where that is None. ``NaN`` and ``Infinity``, which several writers emit, are accepted.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise BadFileError(path, None, f"cannot be read ({error.strerror})", "Check the file's permissions") from None
    filled = [number for number, line in enumerate(lines, 1) if line.strip()]
    for number in filled:
        try:
            row = json.loads(lines[number - 1].decode("utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"a JSON {type(row).__name__} where an object was expected")
        except ValueError as error:
            reason = f"not valid JSON ({str(error).splitlines()[0]})"
            # A writer that was killed leaves its last line unfinished: cut short and without a newline.
            if number == filled[-1] and number == len(lines):
                on_torn(number, reason)
            elif on_bad is not None:
                on_bad(number, reason)
            else:
                raise BadFileError(path, number, reason, _REPAIR) from None
        else:
            yield number, row


def parquet_rows(path: Path, on_bad: Torn | None) -> Iterator[tuple[int, Row]]:
    """Yield (1-based row, values) for each row; list columns come as numpy arrays, nulls inside them as NaN.

    A file that is not Parquet goes to ``on_bad(0, reason)``, or raises BadFileError where that is None.
    """
    try:
        table = pq.read_table(path)
        columns = {name: _cells(table[name]) for name in table.column_names}
    except (pa.ArrowException, OSError) as error:
        reason = f"not a readable Parquet file ({str(error).splitlines()[0]})"
        if on_bad is None:
            raise BadFileError(path, None, reason, _REPAIR) from None
        on_bad(0, reason)
        return
    for row in range(table.num_rows):
        yield row + 1, {name: cell(row) for name, cell in columns.items()}


def _cells(column: pa.ChunkedArray) -> Callable[[int], Any]:
    """A function row -> value that slices one flat array instead of building Python lists."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=column.type)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return _indexer(array)
    inner = array.type.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return _indexer(array)
    valid = np.asarray(array.is_valid())
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)
    return lambda row: values[offsets[row] : offsets[row + 1]] if valid[row] else None


def _indexer(array: pa.Array) -> Callable[[int], Any]:
    values: list[Any] = array.to_pylist()
    return lambda row: values[row]
