"""Rows of JSONL and Parquet files, with the line or row number each came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.errors import BadFileError

Row = dict[str, Any]
Torn = Callable[[int, str], None]

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_LARGEST_RATIO = 50
_LARGEST_SMALL = 64 << 20
_REPAIR = "Restore the file, or pass --skip-bad-rows to analyse the rest"


def read_bytes(path: Path) -> bytes:
    """A file's content; ``.gz`` and ``.zst`` files are unpacked.

    Raises:
        BadFileError: it cannot be read or unpacked, or it unpacks to far more than a log compresses to.
    """
    kind = _COMPRESSION.get(path.suffix)
    try:
        if kind is None:
            return path.read_bytes()
        limit = _LARGEST_RATIO * path.stat().st_size + _LARGEST_SMALL
        with pa.input_stream(str(path), compression=kind) as stream:
            data = bytes(stream.read(limit + 1))
    except (OSError, pa.ArrowException) as error:
        reason = f"cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise BadFileError(path, None, reason, "Restore the file, or check its permissions") from None
    if len(data) > limit:
        raise BadFileError(path, None, f"unpacks to more than {_LARGEST_RATIO} times its size", "Unpack it by hand")
    return data


def parse_json(line: bytes) -> Any:
    """One JSON value; ``NaN`` and ``Infinity`` are accepted, as Python's json writes them.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    # The strict parser also refuses NaN, Infinity and integers beyond 64 bits.
    try:
        return json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def jsonl_rows(path: Path, on_torn: Torn, on_bad: Torn | None) -> Iterator[tuple[int, Row]]:
    """Yield (1-based line, object) for each line; blank lines are passed over.

    A last line that does not parse is a torn write: ``on_torn(line, reason)``. One in the middle goes to ``on_bad``, or
    raises BadFileError where that is None. ``NaN`` and ``Infinity``, which several writers emit, are accepted.
    """
    for number, row in jsonl_values(path, on_torn, on_bad):
        if isinstance(row, dict):
            yield number, row
            continue
        reason = f"not valid JSON (a JSON {type(row).__name__} where an object was expected)"
        if on_bad is None:
            raise BadFileError(path, number, reason, _REPAIR)
        on_bad(number, reason)


def jsonl_values(path: Path, on_torn: Torn, on_bad: Torn | None) -> Iterator[tuple[int, Any]]:
    """As ``jsonl_rows``, for writers whose lines hold any JSON value."""
    try:
        lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except BadFileError as error:
        if on_bad is None:
            raise
        on_bad(0, error.reason)
        return
    # NUL bytes at the end are a file system's filler after a crash: blank.
    filled = [number for number, line in enumerate(lines, 1) if line.strip(b" \t\r\0")]
    for number in filled:
        try:
            row = parse_json(lines[number - 1])
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


def parquet_rows(path: Path, on_bad: Torn | None, unread: Container[str] = ()) -> Iterator[tuple[int, Row]]:
    """Yield (1-based row, values) for each row; list columns come as numpy arrays, nulls inside them as NaN.

    A file that is not Parquet goes to ``on_bad(0, reason)``, or raises BadFileError where that is None. Columns in
    ``unread`` are left out.
    """
    try:
        names = [name for name in pq.read_schema(path).names if name not in unread] if unread else None
        table = pq.read_table(path, columns=names)
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
