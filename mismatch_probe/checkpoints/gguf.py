"""GGUF files: the header is read here, without any package; the tensors through transformers and ``gguf``."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_EXACT = {0: "F32", 1: "F16", 30: "BF16"}
_WIDTHS = {0: 4, 1: 2, 30: 2}
"""Bytes an element of the types that are not quantised."""
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself; a tensor's shape is as GGUF writes it, the fastest dimension first."""

    architecture: str
    values: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int]]

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape, _ in self.tensors.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """F32, F16, BF16, and GGML_n for quantised types by their number."""
        return tuple(sorted({_EXACT.get(kind, f"GGML_{kind}") for _, kind in self.tensors.values()}))

    @property
    def quantised(self) -> bool:
        """True when a tensor is stored in blocks of integers."""
        return any(kind not in _EXACT for _, kind in self.tensors.values())

    def value(self, key: str) -> int | None:
        """An integer below the architecture's name (``llama.embedding_length``), None where there is none."""
        found = self.values.get(f"{self.architecture}.{key}")
        return found if isinstance(found, int) else None


def matches(path: Path) -> bool:
    """True for a ``.gguf`` file, or a directory with one."""
    return (path.is_file() and path.suffix == ".gguf") or any(path.glob("*.gguf"))


def gguf_file(path: Path) -> Path:
    """The file.

    Raises:
        CheckpointError: several lie there.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(files) != 1:
        named = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            f"{path}: {len(files)} GGUF files ({named}). Keep one (merge parts with llama-gguf-split)"
        )
    return files[0]


def read_header(path: Path) -> Header:
    """Read the header; every declared length is held against the file first.

    Raises:
        CheckpointError: not GGUF version 2 or 3, or it declares more than the file holds.
    """
    file = gguf_file(path)
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise CheckpointError(f"{file}: not a readable GGUF file ({error}). Copy it anew") from None


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """The tensors under Hugging Face names, in float32: exact for F32, F16 and BF16, dequantised otherwise.

    Raises:
        CheckpointError: the file is torn, a package is missing, or transformers does not know the architecture.
    """
    import torch

    from mismatch_probe.checkpoints.huggingface import load_gguf

    state: dict[str, torch.Tensor] = load_gguf(gguf_file(path), torch.float32).state_dict()
    return state


class _Cursor:
    """A place in the file that only moves over what is there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if self._number("I") not in (2, 3):
            raise ValueError("neither version 2 nor 3, little-endian")
        tensors, pairs = self._count(24), self._count(12)
        values = {self._string(): self._value(self._number("I"), 0) for _ in range(pairs)}
        infos = [self._tensor() for _ in range(tensors)]
        align = values.get("general.alignment") or 32
        start = -(-self._at // align) * align
        for name, (shape, kind, offset) in infos:
            # The finest quantisation takes more than an eighth of a byte an element.
            size = math.prod(shape) * _WIDTHS[kind] if kind in _WIDTHS else math.prod(shape) // 8
            if start + offset + size > len(self._data):
                raise ValueError(f"{name} of shape {shape} lies outside it")
        found = {name: (shape, kind) for name, (shape, kind, _) in infos}
        return Header(str(values.get("general.architecture")), values, found)

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, dimensions = self._string(), self._number("I")
        if dimensions > 8:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, (shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind]) if kind in _SCALARS else self._unknown(kind)
        if depth == _MAX_DEPTH:
            raise ValueError("arrays inside arrays")
        inner = self._number("I")
        if inner in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[inner]}")
            self._take(self._count(width) * width)
        else:
            for _ in range(self._count(8)):
                self._value(inner, depth + 1)
        return None  # vocabularies and merges: long, and not needed

    def _unknown(self, kind: int) -> Any:
        raise ValueError(f"a value of unknown type {kind}")

    def _count(self, width: int) -> int:
        """A number of items of at least ``width`` bytes each."""
        count: int = self._number("Q")
        if count * width > len(self._data) - self._at:
            raise ValueError(f"it declares {count} items, more than it holds")
        return count

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("it ends in its header")
        self._at += size
        return self._data[self._at - size : self._at]
