"""Safetensors as ranks write them (torch's HuggingFaceStorageWriter, NeMo-RL before consolidation): one part a rank.

Each file's header says in ``DCP_SHARDING_INFO`` where its tensors begin in the whole ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.checkpoints.files import safetensors_header, safetensors_sources
from mismatch_probe.checkpoints.names import model_names
from mismatch_probe.checkpoints.sources import Chunked, LazyTensors, Source
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_KEY = "DCP_SHARDING_INFO"


def matches(path: Path) -> bool:
    """True where a safetensors file says that it holds parts of tensors."""
    first = next(iter(sorted(path.glob("*.safetensors"))), None)
    return first is not None and _KEY in _metadata(first)


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """The whole tensors under Hugging Face names.

    Raises:
        CheckpointError: a file is torn, a header does not say where its tensors belong, or parts are missing.
    """
    parts: dict[str, dict[tuple[int, ...], Source]] = defaultdict(dict)
    for file in sorted(path.glob("*.safetensors")):
        try:
            table = json.loads(_metadata(file)[_KEY])
            for name, source in safetensors_sources(file).items():
                parts[name][tuple(map(int, table[name]["saved_offsets"]))] = source
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: {_KEY} makes no sense ({error!r}). Copy the checkpoint anew") from None
    names = model_names(parts, path)
    return LazyTensors({names[raw]: _whole(names[raw], path, parts[raw]) for raw in names})


def _whole(name: str, path: Path, parts: dict[tuple[int, ...], Source]) -> Source:
    first = next(iter(parts.values()))
    if any(len(offsets) != len(first.shape) or piece.dtype != first.dtype for offsets, piece in parts.items()):
        raise CheckpointError(f"{path}: {name}: its parts differ in dtype or dimensions. Copy the checkpoint anew")
    ends = [[at + size for at, size in zip(offsets, piece.shape, strict=True)] for offsets, piece in parts.items()]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    return Chunked(name, path, shape, first.dtype, tuple(sorted(parts.items(), key=lambda part: part[0])))


def _metadata(file: Path) -> dict[str, Any]:
    try:
        metadata = safetensors_header(file)[0].get("__metadata__")
    except CheckpointError:
        return {}
    return metadata if isinstance(metadata, dict) else {}
