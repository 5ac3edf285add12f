"""verl's two dump files as plain columns: ``tq_batch.pt`` and ``*.dp``, read without torch, tensordict or verl.

``tq_batch.pt`` is a torch archive of ``{tensordict, tags, keys, global_steps}``. A ``.dp`` file is a pickled
``verl.protocol.DataProto``, whose state is (batch, columns that are no tensors, meta): the batch is a torch archive
inside the pickle (consolidated into one storage or not) or, with ``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``, a
tuple of raw arrays.
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.files import read_bytes
from mismatch_probe.readers.pickles import REPAIR, Stub, first_global, first_line, load_pickle, plain
from mismatch_probe.readers.torch_archive import load_torch
from mismatch_probe.readers.verl_tensors import NAMES, WANTED, Consolidated, Jagged, Nested, Tensor, typed

_HEAD = 1 << 16
_VALUES = frozenset(
    (
        *("datetime.datetime", "datetime.date", "datetime.timedelta", "datetime.timezone", "decimal.Decimal"),
        *("uuid.UUID", "collections.defaultdict", "collections.deque", "collections.Counter", "pathlib.PosixPath"),
        *("builtins.list", "builtins.dict", "builtins.int", "builtins.float", "builtins.str", "builtins.tuple"),
        *("builtins.bytes", "builtins.bool", "_io.BytesIO"),
    )
)
"""Python's own classes that a dataset's columns hold."""


@dataclass(frozen=True)
class Batch:
    """Columns by name (Jagged, numpy arrays or lists, ``rows`` long) and what else the file says of each row."""

    rows: int
    columns: dict[str, Any]
    keys: list[str] | None = None
    tags: list[Any] | None = None

    def cell(self, name: str, row: int) -> Any:
        """One value, None where the column or the value is absent."""
        column = self.columns.get(name)
        return None if column is None else column[row]


def is_tq(file: Path) -> bool:
    """True when the file is a torch archive whose pickle begins with a tensordict; reads its first part only."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.partition("/")[2] == "data.pkl"]
            with archive.open(names[0]) as stream:
                head = stream.read(_HEAD)
    except (OSError, zipfile.BadZipFile, IndexError, NotImplementedError, RuntimeError, EOFError, ValueError):
        return False
    return b"tensordict" in head and first_global(head).startswith("tensordict.")


def is_dp(file: Path) -> bool:
    """True when the file is a pickle whose first name is verl's DataProto; reads its first part only."""
    try:
        with file.open("rb") as stream:
            return first_global(stream.read(_HEAD)) == "verl.protocol.DataProto"
    except OSError:
        return False


def load_tq(file: Path) -> Batch:
    """Read ``tq_batch.pt``.

    Raises:
        BadFileError: unreadable, hostile, or without the columns that such a file has.
    """

    def finish(payload: Any) -> Batch:
        if not isinstance(payload, dict) or not isinstance(payload.get("keys"), list):
            raise _bad(file, "holds no list of trajectory keys")
        keys = [str(key) for key in payload["keys"]]
        tags = payload.get("tags")
        columns = _columns(payload.get("tensordict"), file)
        return _checked(Batch(len(keys), columns, keys, tags if isinstance(tags, list) else None), file)

    batch: Batch = load_torch(file, file, _inert, NAMES, finish=finish)
    return batch


def load_dp(file: Path) -> Batch:
    """Read a pickled DataProto.

    Raises:
        BadFileError: unreadable, hostile, or without the columns that such a file has.
    """
    proto = load_pickle(read_bytes(file), file, _inert, NAMES)
    state = proto.state if isinstance(proto, Stub) and proto.name == "verl.protocol.DataProto" else None
    if not isinstance(state, tuple) or len(state) != 3:
        raise _bad(file, "is no DataProto with a batch, other columns and meta")
    batch, others = state[0], state[1]
    if isinstance(batch, bytes):
        columns = load_torch(batch, file, _inert, NAMES, finish=lambda table: _columns(table, file))
    else:
        columns = _from_numpy(batch, file)
    extra = {key: plain(others[key]) for key in WANTED if key in others} if isinstance(others, dict) else {}
    rows = len(columns["prompts"]) if isinstance(columns.get("prompts"), np.ndarray | Jagged) else 0
    return _checked(Batch(rows, {**extra, **columns}), file)


def _bad(file: Path, reason: str) -> BadFileError:
    return BadFileError(file, None, reason, REPAIR)


def _checked(batch: Batch, file: Path) -> Batch:
    """Columns that have a row for each trajectory; those that tensors of another shape left are dropped."""
    kept = {name: column for name, column in batch.columns.items() if column is not None}
    for name in ("prompts", "responses"):
        if name not in kept:
            raise _bad(file, f"holds no column {name!r} of token ids")
    for name, column in kept.items():
        if (isinstance(column, np.ndarray) and column.ndim == 0) or len(column) != batch.rows:
            raise _bad(file, f"column {name!r} does not have one value for each of {batch.rows} trajectories")
    return Batch(batch.rows, kept, batch.keys, batch.tags)


def _columns(tensordict: Any, file: Path) -> dict[str, Any]:
    """The wanted columns of an unpickled TensorDict; a value that all rows share, or of unknown kind, is left out."""
    if isinstance(tensordict, Consolidated):
        columns: dict[str, Any] = _read(tensordict.columns, file)
        return columns
    if not isinstance(tensordict, dict):
        raise _bad(file, "holds no TensorDict")
    return {
        name: _read(lambda value=value: _column(value), file) for name, value in tensordict.items() if name in WANTED
    }


def _read(make: Any, file: Path) -> Any:
    """What ``make`` reads from the archive."""
    try:
        return make()
    # A damaged archive can name any type where a number is due, and then nearly any error follows.
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        raise _bad(file, f"a column does not fit its storage ({first_line(error)})") from None


def _column(value: Any) -> Any:
    if isinstance(value, Tensor | Nested):
        return value.read()
    if isinstance(value, Stub) and isinstance(value.state, dict) and isinstance(value.state.get("tensordicts"), list):
        return [_datum(item) for item in value.state["tensordicts"]]
    return None


def _datum(item: Any) -> Any:
    """The object inside a NonTensorData."""
    state = item.state if isinstance(item, Stub) else None
    if not isinstance(state, dict):
        return None
    inner = state.get("non_tensordict", state.get("_non_tensordict"))
    value = inner.get("data") if isinstance(inner, dict) else None
    return value.read() if isinstance(value, Tensor) else plain(value)


def _from_numpy(batch: Any, file: Path) -> dict[str, Any]:
    """The ``numpy`` form: (batch size, device, {name: (dtype, shape, bytes)}); nested columns have another."""
    if not isinstance(batch, tuple) or len(batch) != 3 or not isinstance(batch[2], dict):
        raise _bad(file, "holds no batch")
    return {
        name: _read(lambda value=value: _raw_column(plain(value)), file)
        for name, value in batch[2].items()
        if name in WANTED
    }


def _raw_column(value: Any) -> Any:
    dtype, shape, data = value
    return typed(np.frombuffer(bytes(data), dtype=np.uint8), dtype, shape)


def _inert(name: str) -> bool:
    """Classes of frameworks and of the user's own may stand as stubs; of Python itself only those of plain values."""
    name = name.replace("__builtin__.", "builtins.", 1)  # as pickles of the older protocols call it
    return name in _VALUES or not (name.partition(".")[0] in sys.stdlib_module_names or name.startswith("__"))
