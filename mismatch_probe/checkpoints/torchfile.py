"""Files of ``torch.save``: the tensors in them, by where their bytes lie. No torch, and nothing in them is run."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints.pickles import MAX_PICKLE_BYTES, TORCH_NAMES, InertNames, Stub, read_pickle, stub
from mismatch_probe.checkpoints.sources import ITEM_BYTES, Source, Stored
from mismatch_probe.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_PLACEMENTS = ("Shard", "Replicate", "Partial", "_StridedShard")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then the lengths of the name and of the extra field of a zip entry."""


@dataclass(frozen=True)
class Storage:
    """Bytes that tensors share: where they are, how many, and the dtype (None = each tensor says it)."""

    offset: int
    room: int
    dtype: str | None


@dataclass(frozen=True)
class Sharded:
    """One rank's part of a DTensor.

    ``placements`` has an entry for each mesh dimension: the tensor dimension that is split, or None for a replica.
    ``coordinate`` is this rank's place in the mesh; ``shape`` that of the whole tensor.
    """

    local: Stored
    shape: tuple[int, ...]
    placements: tuple[int | None, ...]
    coordinate: tuple[int, ...]


class _View(io.RawIOBase):
    """Part of a file, as a file: DCP puts one torch file after another."""

    def __init__(self, stream: io.BufferedIOBase, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._stream.seek(self._start + self._at)
        data = self._stream.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def read_torch_file(file: Path, start: int = 0, length: int | None = None, others_inert: bool = False) -> Any:
    """The object that was saved, with ``Stored`` for each tensor and ``Sharded`` for each DTensor.

    Args:
        file: the file.
        start: byte at which the saved object begins.
        length: its bytes, None = up to the end of the file.
        others_inert: read objects of any other class as inert stubs instead of refusing the file.

    Raises:
        CheckpointError: not a file of torch.save (1.6 or later), torn, or it names anything but tensors.
    """
    try:
        size = file.stat().st_size
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise CheckpointError(f"{file}: {length} bytes at {start} are declared, and it has {size}. Copy it anew")
        with file.open("rb") as stream, zipfile.ZipFile(_View(stream, start, length)) as archive:
            entries = _entries(file, archive, stream, start, length)
            pickled = next((name for name in entries if name.endswith("data.pkl")), None)
            if pickled is None:
                raise zipfile.BadZipFile("it holds no data.pkl")
            root = pickled.removesuffix("data.pkl")
            _check_byte_order(file, stream, entries.get(f"{root}byteorder"))
            offset, room = entries[pickled]
            stream.seek(offset)
            data = stream.read(min(room, MAX_PICKLE_BYTES + 1))
    except (OSError, zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{file}: not a file of torch.save 1.6 or later, or torn ({error}). Copy the checkpoint anew from the run"
        ) from None
    reader = _Objects(file, {name.removeprefix(f"{root}data/"): place for name, place in entries.items()})
    return read_pickle(data, file, InertNames(reader.names) if others_inert else reader.names, reader.storage)


def _entries(
    file: Path, archive: zipfile.ZipFile, stream: io.BufferedIOBase, start: int, length: int
) -> dict[str, tuple[int, int]]:
    """Offset in the file and size of each entry; compressed ones are refused, since their size is only claimed."""
    places = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(f"{file}: {entry.filename} is compressed, which torch.save never does. Copy it anew")
        stream.seek(start + entry.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
        offset = entry.header_offset + _LOCAL_HEADER.size + name + extra
        if signature != b"PK\x03\x04" or offset + entry.file_size > length:
            raise zipfile.BadZipFile(f"{entry.filename} lies outside it")
        places[entry.filename] = (start + offset, entry.file_size)
    return places


def _check_byte_order(file: Path, stream: io.BufferedIOBase, place: tuple[int, int] | None) -> None:
    if place is not None:
        stream.seek(place[0])
        if stream.read(min(place[1], 16)).strip() != b"little":
            raise CheckpointError(f"{file}: written in another byte order. Export it as safetensors")


class _Objects:
    """What a torch pickle may build: storages, tensors, DTensors and their meshes."""

    def __init__(self, file: Path, places: dict[str, tuple[int, int]]) -> None:
        self._file, self._places = file, places
        self.names: dict[str, Any] = {
            **TORCH_NAMES,
            **{f"torch {name}": code for name, code in _STORAGES.items()},
            "torch.storage UntypedStorage": "untyped",
            "torch._utils _rebuild_tensor_v2": self._tensor,
            "torch._utils _rebuild_tensor_v3": self._typed_tensor,
            "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils _rebuild_parameter_with_state": lambda tensor, *_: tensor,
            "torch.nn.parameter Parameter": stub("Parameter"),
            "torch._utils _rebuild_wrapper_subclass": stub("Wrapper"),
            "torch._tensor _rebuild_from_type_v2": self._from_type,
            **{f"{module} {name}": stub(name) for module, name in _DISTRIBUTED},
        }

    def storage(self, pid: Any) -> Storage:
        """Where a persistent id's bytes lie."""
        kind, dtype, key = pid[0], pid[1], pid[2]
        if kind != "storage" or key not in self._places:
            raise ValueError(f"it refers to data {key!r}, which is not there")
        offset, room = self._places[key]
        return Storage(offset, room, None if dtype == "untyped" else str(dtype))

    def _tensor(self, storage: Storage, begin: int, shape: Any, stride: Any, *_: Any) -> Stored:
        if storage.dtype is None:
            raise ValueError("a tensor without a dtype")
        return self._stored(storage, begin, shape, stride, storage.dtype)

    def _typed_tensor(self, storage: Storage, begin: int, shape: Any, stride: Any, *rest: Any) -> Stored:
        """Dtypes without a storage class of their own (float8) come with the dtype fourth from here."""
        return self._stored(storage, begin, shape, stride, str(rest[2]))

    def _stored(self, storage: Storage, begin: int, shape: Any, stride: Any, dtype: str) -> Stored:
        skipped = int(begin) * ITEM_BYTES.get(dtype, 1)
        if skipped < 0:
            raise ValueError("a tensor that begins before its data")
        shape, stride = tuple(shape), tuple(stride)
        dense, step = True, 1
        for size, found in zip(reversed(shape), reversed(stride), strict=True):
            dense &= found == step or size == 1
            step *= size
        place = (storage.offset + skipped, storage.room - skipped)
        return Stored(self._file, *place, shape, dtype, None if dense else stride)

    def _from_type(self, build: Any, kind: Any, args: Any, state: Any) -> Any:
        if getattr(build, "name", "") != "Wrapper":
            return build(*args)
        # A class with slots has its state in two dicts.
        fields = {
            key: value
            for part in (state if isinstance(state, tuple) else (state,))
            for key, value in (part or {}).items()
        }
        spec, local = fields["_spec"], fields["_local_tensor"]
        mesh = spec.get("mesh")
        coordinate = mesh.get("_coordinate_on_dim")
        if coordinate is None:
            raise ValueError("a DTensor that does not say its rank's place in the mesh")
        shape, coordinate = tuple(spec.get("tensor_meta").args[0]), tuple(coordinate)
        if not all(isinstance(number, int) for number in (*shape, *coordinate)) or not isinstance(local, Stored):
            raise ValueError("a DTensor whose parts make no sense")
        return Sharded(local, shape, tuple(map(_split_dimension, spec.get("placements"))), coordinate)


def _split_dimension(placement: Stub) -> int | None:
    if placement.name == "Shard":
        return int(placement.get("dim"))
    if placement.name == "Replicate":
        return None
    raise ValueError(f"a DTensor placed as {placement.name.lstrip('_')}, which is not merged here")


_DISTRIBUTED = (
    *(("torch.distributed.tensor", name) for name in ("DTensor", *_PLACEMENTS)),
    *(("torch.distributed.tensor._api", name) for name in ("DTensor",)),
    *(("torch.distributed._tensor.api", name) for name in ("DTensor",)),
    *(("torch.distributed.tensor.placement_types", name) for name in _PLACEMENTS),
    *(("torch.distributed._tensor.placement_types", name) for name in (*_PLACEMENTS, "DTensorSpec", "TensorMeta")),
    *(("torch.distributed.tensor._dtensor_spec", name) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
)


def tensor_sources(file: Path) -> dict[str, Source]:
    """The tensors of a file that holds a plain state dict.

    Raises:
        CheckpointError: as ``read_torch_file``, or something else than tensors by name is in it.
    """
    found = read_torch_file(file)
    if isinstance(found, dict) and set(found) <= {"state_dict"} and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Stored) for name, value in found.items()
    ):
        raise CheckpointError(f"{file}: not a dict of tensors by name. Export the checkpoint as safetensors")
    return dict(found)
