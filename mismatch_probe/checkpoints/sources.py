"""Tensors that are not read yet: shape and dtype are known from headers, values come from the file when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class Source(Protocol):
    """One tensor: ``shape``, ``dtype`` (a safetensors code such as BF16) and ``load``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors spells it."""

    def load(self) -> torch.Tensor:
        """Read it, on the CPU, as stored."""


@dataclass(frozen=True)
class Stored:
    """A tensor whose numbers lie in ``file`` from byte ``offset`` on; ``stride`` in elements, None = contiguous.

    Raises:
        CheckpointError: it does not fit into the ``room`` bytes that are there, so nothing is allocated for it.
    """

    file: Path
    offset: int
    room: int
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{self.file}: dtype {self.dtype} is not read. Export the checkpoint in bfloat16")
        sizes = (*self.shape, *(self.stride or ()))
        if any(not isinstance(size, int) or size < 0 for size in sizes) or self.offset < 0 or self.room < 0:
            raise CheckpointError(f"{self.file}: a tensor of shape {self.shape} makes no sense. Copy it anew")
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise CheckpointError(f"{self.file}: strides {self.stride} do not fit shape {self.shape}. Copy it anew")
        if max(self._elements, math.prod(self.shape)) * ITEM_BYTES[self.dtype] > self.room:
            raise CheckpointError(
                f"{self.file}: a tensor of shape {self.shape} in {self.dtype} is declared, and {self.room} bytes are "
                "there for it. Copy the checkpoint anew from the run"
            )

    @property
    def _elements(self) -> int:
        """Elements from the first to the last one that the tensor reaches."""
        if 0 in self.shape:
            return 0
        if self.stride is None:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def load(self) -> torch.Tensor:
        """Read it.

        Raises:
            CheckpointError: the file is gone or was cut short.
        """
        import torch

        dtype = getattr(torch, _TORCH_DTYPES[self.dtype])
        data = bytearray(self._elements * ITEM_BYTES[self.dtype])
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                count = stream.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read ({error.strerror}). Copy it anew") from None
        if count != len(data):
            raise CheckpointError(f"{self.file}: ends before its tensors do. Copy the checkpoint anew from the run")
        flat = torch.frombuffer(data, dtype=dtype)
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Chunked:
    """A tensor in pieces, each with the offsets of its first element in the whole.

    Raises:
        CheckpointError: the pieces do not cover ``shape``. ``name`` and ``where`` are for that message.
    """

    name: str
    where: Path
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[tuple[int, ...], Source], ...]

    def __post_init__(self) -> None:
        inside = all(
            at >= 0 and at + size <= whole
            for offsets, piece in self.pieces
            for at, size, whole in zip(offsets, piece.shape, self.shape, strict=True)
        )
        covered = sum(math.prod(piece.shape) for _, piece in self.pieces)
        apart = len({offsets for offsets, _ in self.pieces}) == len(self.pieces)
        if not (inside and apart and covered == math.prod(self.shape)):
            raise CheckpointError(
                f"{self.where}: {self.name}: its pieces do not cover shape {self.shape}. Copy the checkpoint anew"
            )

    def load(self) -> torch.Tensor:
        """Put it together."""
        loaded = self.pieces[0][1].load()
        if len(self.pieces) == 1:
            return loaded
        import torch

        whole = torch.empty(self.shape, dtype=loaded.dtype)
        for number, (offsets, piece) in enumerate(self.pieces):
            where = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
            whole[where] = loaded if number == 0 else piece.load()
        return whole


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensors by name; each access reads one anew, so that no more than is asked for is in memory."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sources)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.sources[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)
