"""``torch.save`` archives (the zip form of torch 1.6 and later) as numpy arrays, without torch and without their code.

The unpickler is C and the tensors are views of the archive's bytes, so this is also faster than
``torch.load(weights_only=True)``, whose unpickler is Python.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
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
) -> Any:
    """Read what ``torch.save`` wrote (the zip form, torch 1.6 or later): a path, or an archive inside a pickle.

    Args:
        source: where the archive is.
        file: the file to name in errors.
        stubs: which "module.class" may stand as a Stub.
        extra: further allowed names.
        most_dimensions: tensors with more are not read, and are None: routed experts or images can be gigabytes.

    Raises:
        BadFileError: as in ``load_pickle``, or not such an archive, or a tensor that does not fit its storage.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            storages = _Storages(archive)
            data = storages.member("data.pkl")
            names = {**HARMLESS, **_TORCH, **(_narrow(most_dimensions) if most_dimensions is not None else {})}
            names |= extra or {}
            return unpickle(data, file, stubs, names, storages.get, storages.size)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise BadFileError(file, None, f"not a readable torch archive ({first_line(error)})", REPAIR) from None


class _Storages:
    """The members of a torch archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        self._loaded: dict[str, bytes] = {}
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
        return _Storage(partial(self._data, key), storage_type)

    def _data(self, key: str) -> bytes:
        if key not in self._loaded:
            self._loaded[key] = self.member(f"data/{key}")
        return self._loaded[key]


def _length(archive: zipfile.ZipFile) -> int:
    """Bytes of the archive as it lies on disk or in memory."""
    stream = archive.fp
    return stream.seek(0, io.SEEK_END) if stream is not None else 0


class _Storage:
    """Numbers of one dtype; their bytes are read when ``data`` is called."""

    def __init__(self, data: Callable[[], bytes], dtype: str) -> None:
        self.data, self.dtype = data, dtype


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


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    """A strided view of a storage, copied; every element must lie inside it."""
    size, stride = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    code = "<u2" if storage.dtype == "bfloat16" else f"<{storage.dtype}" if storage.dtype != "?" else "?"
    flat = np.frombuffer(storage.data(), dtype=code)
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
    steps = tuple(step * flat.itemsize for step in stride)
    view = np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False).copy()
    return (view.astype(np.uint32) << 16).view(np.float32) if storage.dtype == "bfloat16" else view


def _narrow(most: int) -> Names:
    def tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        return _tensor(storage, offset, size, stride) if len(size) <= most else None

    return {("torch._utils", name): tensor for name in ("_rebuild_tensor", "_rebuild_tensor_v2")}


def _parameter(data: Any, *_: Any) -> Any:
    return data


_TORCH: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
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
