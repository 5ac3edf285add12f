"""torch DCP: ``.metadata`` says which part of which tensor lies where in the ``.distcp`` files. No process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.checkpoints.names import model_names
from mismatch_probe.checkpoints.pickles import MAX_PICKLE_BYTES, TORCH_NAMES, Stub, read_pickle, stub
from mismatch_probe.checkpoints.sources import ITEM_BYTES, Chunked, LazyTensors, Source, Stored
from mismatch_probe.checkpoints.torchfile import read_torch_file
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES: dict[str, Any] = {
    **TORCH_NAMES,
    **{
        f"{_METADATA} {name}": stub(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
            *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    "torch.distributed.checkpoint.filesystem _StorageInfo": stub("_StorageInfo"),
    # Megatron-Core keeps the plans of the save in it, and called both by names of its own for a while.
    **{
        f"torch.distributed.checkpoint.planner {name}": stub(name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    "megatron.core.dist_checkpointing.strategies.torch MCoreMetadata": stub("Metadata"),
    "megatron.core.dist_checkpointing.strategies.torch MCoreSavePlan": stub("SavePlan"),
}
_ANEW = "Copy the checkpoint anew from the run"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: its shape, its dtype and where a torch file with it lies."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    length: int

    def load(self) -> torch.Tensor:
        """Read it.

        Raises:
            CheckpointError: the file is torn, or holds a tensor of another shape.
        """
        found = read_torch_file(self.file, self.start, self.length)
        if not isinstance(found, Stored) or (found.shape, found.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self.file}: at byte {self.start}, not the {self.dtype} tensor of shape {self.shape} that .metadata "
                f"declares. {_ANEW}"
            )
        return found.load()


def matches(path: Path) -> bool:
    """True where ``.metadata`` or a ``.distcp`` file lies."""
    return (path / ".metadata").is_file() or any(path.glob("*.distcp"))


def read_dcp(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> LazyTensors:
    """Every wanted tensor of the checkpoint (optimizer state too) under the names that the trainer gave them.

    Only ``.metadata`` is read; its pickle is not run. Objects other than tensors are left out.

    Raises:
        CheckpointError: no ``.metadata``, it is torn or names what it should not, or a file that it names is missing.
    """
    file = path / ".metadata"
    try:
        if file.stat().st_size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes are more than any checkpoint needs. {_ANEW}")
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: *.distcp files and no .metadata, which says what is in them. It is written last, so the save "
            "was not finished: take an earlier checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}). {_ANEW}") from None
    metadata = read_pickle(data, file, _NAMES)
    try:
        return LazyTensors(_sources(path, metadata, wanted))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{file}: makes no sense ({error!r}). {_ANEW}") from None


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """The model's tensors under Hugging Face names: prefixes that trainers put before them are taken off."""
    found = read_dcp(path).sources
    return LazyTensors({name: found[raw] for raw, name in model_names(found, path).items()})


def _sources(path: Path, metadata: Stub, wanted: Callable[[str], bool]) -> dict[str, Source]:
    places: dict[tuple[str, tuple[int, ...] | None], Stub] = {}
    for index, info in metadata.get("storage_data").items():
        offset = index.get("offset")
        places[index.get("fqn"), None if offset is None else tuple(offset)] = info
    sizes = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    sources: dict[str, Source] = {}
    for name, entry in metadata.get("state_dict_metadata").items():
        if entry.name == "TensorStorageMetadata" and wanted(str(name)):
            sources[str(name)] = _chunked(path, str(name), entry, places, sizes)
    return sources


def _chunked(path: Path, name: str, entry: Stub, places: dict[Any, Stub], sizes: dict[str, int]) -> Chunked:
    shape, dtype = tuple(entry.get("size")), str(entry.get("properties").state[0])
    pieces: list[tuple[tuple[int, ...], Piece]] = []
    for chunk in entry.get("chunks"):
        offsets, extent = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        info = places.get((name, offsets)) or places.get((name, None))
        if info is None:
            raise CheckpointError(f"{path}: .metadata does not say where {name} at {offsets} lies. {_ANEW}")
        pieces.append((offsets, _piece(path, name, extent, dtype, info, sizes)))
    return Chunked(name, path, shape, dtype, tuple(pieces))


def _piece(path: Path, name: str, extent: Any, dtype: str, info: Stub, sizes: dict[str, int]) -> Piece:
    file, start, length = str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))
    if "/" in file or "\\" in file or file in ("", ".", ".."):
        raise CheckpointError(f"{path}: .metadata points outside of the checkpoint ({file}). It is not followed")
    if info.get("transform_descriptors"):
        raise CheckpointError(f"{path}: {name} is stored compressed. Save the checkpoint without extensions")
    if file not in sizes:
        raise CheckpointError(f"{path}: {file} is missing, which holds {name}. {_ANEW}")
    if start < 0 or length < 0 or start + length > sizes[file]:
        raise CheckpointError(f"{path / file}: ends before {name} does. {_ANEW}")
    if math.prod(extent) * ITEM_BYTES.get(dtype, 1) > length:
        raise CheckpointError(f"{path}: {name}: shape {extent} is declared, and {length} bytes are there. {_ANEW}")
    return Piece(extent, dtype, path / file, start, length)
