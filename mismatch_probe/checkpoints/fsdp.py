"""FSDP shards of verl and SkyRL: ``model_world_size_W_rank_R.pt``, one a rank, DTensors merged along their mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.checkpoints.names import model_names
from mismatch_probe.checkpoints.peft import merge_inside
from mismatch_probe.checkpoints.sources import LazyTensors, Source, Stored
from mismatch_probe.checkpoints.torchfile import Sharded, read_torch_file
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


@dataclass(frozen=True)
class Joined:
    """A tensor split over ranks; ``parts`` by each rank's place in the mesh, one ``placement`` a mesh dimension."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[int | None, ...]
    parts: dict[tuple[int, ...], Stored]

    def load(self) -> torch.Tensor:
        """Put it together.

        Raises:
            CheckpointError: the parts do not give the whole tensor's shape.
        """
        whole = self._join(())
        if tuple(whole.shape) != self.shape:
            raise CheckpointError(
                f"{self.file.parent}: {self.name}: the ranks' parts give shape {tuple(whole.shape)}, and {self.shape} "
                "is declared. Copy the checkpoint anew from the run"
            )
        return whole

    def _join(self, place: tuple[int, ...]) -> torch.Tensor:
        """The part of the tensor that lies below a place in the first dimensions of the mesh."""
        import torch

        depth = len(place)
        if depth == len(self.placements):
            return self.parts[place].load()
        below = sorted({coordinate[depth] for coordinate in self.parts if coordinate[:depth] == place})
        dimension = self.placements[depth]
        if dimension is None or len(below) == 1:
            return self._join((*place, below[0]))
        return torch.cat([self._join((*place, at)) for at in below], dim=dimension)


@dataclass(frozen=True)
class Plain:
    """A tensor that is not a DTensor: equal on every rank it is a replica, otherwise its rows follow each other."""

    parts: tuple[Stored, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first rank's part."""
        return self.parts[0].shape

    @property
    def dtype(self) -> str:
        """Dtype of the first rank's part."""
        return self.parts[0].dtype

    def load(self) -> torch.Tensor:
        """Read it from every rank."""
        import torch

        found = [part.load() for part in self.parts]
        if all(torch.equal(found[0], other) for other in found[1:]):
            return found[0]
        return torch.cat(found, dim=0)


def matches(path: Path) -> bool:
    """True where a rank's file lies."""
    return any(_FILE.fullmatch(file.name) for file in path.glob("model_world_size_*_rank_*.pt"))


def rank_files(path: Path) -> list[Path]:
    """The file of each rank, by rank.

    Raises:
        CheckpointError: ranks are missing, or files of several world sizes lie there.
    """
    found: dict[int, dict[int, Path]] = {}
    for file in path.glob("model_world_size_*_rank_*.pt"):
        if match := _FILE.fullmatch(file.name):
            found.setdefault(int(match.group(1)), {})[int(match.group(2))] = file
    if len(found) != 1:
        sizes = " and ".join(str(size) for size in sorted(found)) or "no"
        raise CheckpointError(f"{path}: shards of {sizes} world sizes lie side by side. Keep those of one save")
    ((world, files),) = found.items()
    if len(files) < world or max(files) >= world:
        first = next(rank for rank in range(world) if rank not in files)
        raise CheckpointError(
            f"{path}: model_world_size_{world}_rank_{first}.pt is missing ({len(files)} of {world} ranks are there). "
            "Each node writes its own ranks: copy those of the others"
        )
    return [files[rank] for rank in range(world)]


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """The merged tensors under Hugging Face names; headers are read now, numbers when a tensor is asked for.

    Raises:
        CheckpointError: ranks are missing, a file is torn or hostile, or ranks disagree.
    """
    files = rank_files(path)
    ranks = [_state(file) for file in files]
    for file, rank in zip(files, ranks, strict=True):
        if odd := set(rank) ^ set(ranks[0]):
            raise CheckpointError(f"{file}: {sorted(odd)[0]} is not in every rank's file. Copy the checkpoint anew")
    merged: dict[str, Source] = {}
    for raw, name in model_names(ranks[0], path).items():
        merged[name] = _merge(name, files, [rank[raw] for rank in ranks])
    if any(".lora_" in name for name in merged):
        merged = merge_inside(path, merged, path / "huggingface" / "config.json")
    return LazyTensors(merged)


def _state(file: Path) -> dict[str, Any]:
    found = read_torch_file(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: not a state dict. Copy the checkpoint anew from the run")
    return {str(name): value for name, value in found.items() if isinstance(value, Stored | Sharded)}


def _merge(name: str, files: list[Path], values: list[Any]) -> Source:
    first = values[0]
    if all(isinstance(value, Stored) for value in values):
        return values[0] if len(values) == 1 else Plain(tuple(values))
    for file, value in zip(files, values, strict=True):
        alike = isinstance(value, Sharded) and (value.shape, value.placements) == (first.shape, first.placements)
        if not alike or value.local.dtype != first.local.dtype or len(value.coordinate) != len(value.placements):
            raise CheckpointError(f"{file}: {name} is not split as in the first rank's file. Copy it anew")
    parts = {value.coordinate: value.local for value in values}
    return Joined(name, files[0], first.shape, first.local.dtype, first.placements, parts)
