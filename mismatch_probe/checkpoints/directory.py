"""Hugging Face directories: ``config.json`` beside safetensors or ``pytorch_model*.bin``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_probe.checkpoints.files import read_json, safetensors_sources
from mismatch_probe.checkpoints.sources import LazyTensors, Source
from mismatch_probe.checkpoints.torchfile import tensor_sources
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def matches(path: Path) -> bool:
    """True where ``config.json`` lies."""
    return (path / "config.json").is_file()


def weight_files(path: Path) -> list[Path]:
    """The files that hold the model, sorted by name: safetensors before ``.bin``, those of an index before others.

    Raises:
        CheckpointError: there are none, or shards that the index names are missing.
    """
    for kind, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        there = sorted(path.glob(f"*.{suffix}" if suffix == "safetensors" else f"{kind}*.{suffix}"))
        index = path / f"{kind}.{suffix}.index.json"
        if index.is_file():
            return _indexed(path, index, {file.name for file in there})
        if there:
            single = path / f"{kind}.{suffix}"
            return [single] if single in there else there
    raise CheckpointError(f"{path}: config.json and no weights (*.safetensors). Copy it anew from the run")


def _indexed(path: Path, index: Path, there: set[str]) -> list[Path]:
    named = read_json(index).get("weight_map", {})
    names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
    if missing := sorted(names - there):
        raise CheckpointError(f"{path}: {missing[0]} is missing ({len(missing)} of {len(names)} shards). Copy it anew")
    if not names:
        raise CheckpointError(f"{index}: names no weight files. Copy it anew from the run")
    return [path / name for name in sorted(names)]


def read_tensors(path: Path, base: Path | None) -> Mapping[str, torch.Tensor]:
    """Every tensor in the directory's files, as named there."""
    sources: dict[str, Source] = {}
    for file in weight_files(path):
        sources.update(safetensors_sources(file) if file.suffix == ".safetensors" else tensor_sources(file))
    return LazyTensors(sources)
