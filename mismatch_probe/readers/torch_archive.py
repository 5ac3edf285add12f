"""``torch.save`` archives (the zip form of torch 1.6 and later) as numpy arrays, without torch and without their code.

The unpickler is C and the tensors are views of the archive's bytes, so this is also faster than
``torch.load(weights_only=True)``, whose unpickler is Python.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.pickles import HARMLESS, REPAIR, Names, first_line, unpickle


def load_torch(
    source: bytes | Path,
    file: Path,
    stubs: Callable[[str], bool],
    extra: Names | None = None,
    most_dimensions: int | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Read what ``torch.save`` wrote (the zip form, torch 1.6 or later): a path, or an archive inside a pickle.

    Args:
        source: where the archive is.
        file: the file to name in errors.
        stubs: which "module.class" may stand as a Stub.
        extra: further allowed names.
        most_dimensions: tensors with more are not read, and are None: routed experts or images can be gigabytes.
        finish: makes the result out of what was unpickled while the archive is still open: storages are read when
            their ``data`` is first asked for, so one that nothing asks for costs nothing.

    Raises:
        BadFileError: as in ``load_pickle``, or not such an archive, or a tensor that does not fit its storage.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            storages = _Storages(archive)
            data = storages.member("data.pkl")
            names = {**HARMLESS, **_TORCH, **(_narrow(most_dimensions) if most_dimensions is not None else {})}
            names |= extra or {}
            value = unpickle(data, file, stubs, names, storages.get, storages.size)
            return value if finish is None else finish(value)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        raise BadFileError(file, None, f"not a readable torch archive ({first_line(error)})", REPAIR) from None


class _Storages:
    """The members of a torch archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        self._made: dict[tuple[str, str], _Storage] = {}
        # What the directory claims is bounded by the file itself.
        self.size = min(sum(info.file_size for info in archive.infolist()), _length(archive))

    def member(self, name: str) -> bytes:
        """Bytes of one member; torch stores, it never compresses, so no member is larger than the archive."""
        info = self._names.get(name)
        if info is None:
            raise zipfile.BadZipFile(f"no {name} in it")
        if info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{name} is compressed, which torch.save does not do")
        return self._archive.read(info)

    def get(self, pid: Any) -> _Storage:
        """The storage that a persistent id names: ("storage", type, key, device, elements)."""
        kind, storage_type, key, _, _ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"it refers to {kind!r}")
        if (key, storage_type) not in self._made:
            self._made[key, storage_type] = _Storage(partial(self.member, f"data/{key}"), storage_type)
        return self._made[key, storage_type]


def _length(archive: zipfile.ZipFile) -> int:
    """Bytes of the archive as it lies on disk or in memory."""
    stream = archive.fp
    return stream.seek(0, io.SEEK_END) if stream is not None else 0


class _Storage:
    """Numbers of one dtype."""

    def __init__(self, read: Callable[[], bytes], dtype: str) -> None:
        self._read, self.dtype = read, dtype

    @cached_property
    def data(self) -> bytes:
        """The bytes, read when they are first needed."""
        return self._read()


_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


def tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    """A tensor as an array, read-only where its elements lie in one piece; every element must be in the storage."""
    size, stride = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    code = "<u2" if storage.dtype == "bfloat16" else f"<{storage.dtype}" if storage.dtype != "?" else "?"
    flat = np.frombuffer(storage.data, dtype=code)
    if min((*size, *stride, offset, 0)) < 0 or len(size) != len(stride):
        raise ValueError("a tensor with negative sizes")
    elements = int(np.prod(np.array(size, dtype=object))) if size else 1
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if elements and (last >= len(flat) or (elements > len(flat) and 0 not in stride)):
        raise ValueError("a tensor larger than its storage")
    if elements > 64 * len(flat) + 4096:
        raise ValueError("an expanded tensor far larger than its storage")
    if not elements:
        return np.zeros(size, dtype="f4" if storage.dtype == "bfloat16" else flat.dtype)
    if stride == tuple(int(np.prod(size[at + 1 :], dtype=object)) for at in range(len(size))):
        view = flat[offset : offset + elements].reshape(size)
    else:
        steps = tuple(step * flat.itemsize for step in stride)
        view = np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False).copy()
    return (view.astype(np.uint32) << 16).view(np.float32) if storage.dtype == "bfloat16" else view


def _narrow(most: int) -> Names:
    def narrow(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        return tensor(storage, offset, size, stride) if len(size) <= most else None

    return {("torch._utils", name): narrow for name in ("_rebuild_tensor", "_rebuild_tensor_v2")}


def _parameter(data: Any, *_: Any) -> Any:
    return data


_TORCH: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): tensor,
    ("torch._utils", "_rebuild_tensor_v2"): tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def _pass_over(*_: Any) -> None:
    """In place of a tensor that is not wanted."""


PASSED_OVER: Names = {
    ("torch._utils", "_rebuild_tensor_v2"): _pass_over,
    ("torch.storage", "_load_from_bytes"): _pass_over,
}
"""For ``load_pickle``: tensors that were pickled raw, outside any archive, come back as None."""
