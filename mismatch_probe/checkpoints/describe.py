"""What a checkpoint holds, told from its config and tensor headers alone: no torch, no weights read."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.errors import CheckpointError

_LEARNED_POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
_COPY = "Copy the checkpoint anew from the run"
_EDGE = 1 << 20


@dataclass(frozen=True)
class Description:
    """Facts about one checkpoint directory.

    ``max_positions`` is the longest sequence that a table of learned positions allows, None where there is no table.
    ``parameters`` and ``dtypes`` are None and empty where the weights are not in safetensors files.
    """

    path: Path
    architecture: str
    vocab_size: int | None
    max_positions: int | None
    hidden_size: int | None
    parameters: int | None
    dtypes: tuple[str, ...]
    bytes: int


def describe(path: Path) -> Description:
    """Read ``config.json`` and the safetensors headers of a Hugging Face directory.

    Raises:
        CheckpointError: no ``config.json``, or a file that cannot be parsed.
    """
    config = _read_json(path / "config.json")
    files = weight_files(path)
    _check_shards(path, files)
    try:
        return _describe(path, config, files)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: config.json or a weight file's header makes no sense ({error!r}). {_COPY}"
        ) from None


def _describe(path: Path, config: dict[str, Any], files: list[Path]) -> Description:
    text_config = config.get("text_config") or config
    tensors: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors.update(_header(file))
    positions = [int(tensor["shape"][0]) for name, tensor in tensors.items() if name.endswith(_LEARNED_POSITIONS)]
    # OPT-like tables begin with rows for padding that no position uses; the config then says what is usable.
    limit = min([*positions, text_config.get("max_position_embeddings") or math.inf]) if positions else None
    return Description(
        path=path,
        architecture=", ".join(config.get("architectures") or ["unknown"]),
        vocab_size=text_config.get("vocab_size"),
        max_positions=None if limit is None else int(limit),
        hidden_size=text_config.get("hidden_size") or text_config.get("n_embd"),
        parameters=sum(math.prod(tensor["shape"]) for tensor in tensors.values()) or None,
        dtypes=tuple(sorted({str(tensor["dtype"]) for tensor in tensors.values()})),
        bytes=sum(file.stat().st_size for file in files),
    )


def weight_files(path: Path) -> list[Path]:
    """Files that hold tensors, sorted by name."""
    return sorted(file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(pattern))


def digest(path: Path) -> str:
    """Fingerprint of a checkpoint: config, names, sizes and the first and last MiB of each weight file.

    A cheap certificate, not a cryptographic one: gigabytes of weights are not read whole to name them.
    """
    mark = hashlib.blake2b(digest_size=16)
    config = path / "config.json"
    mark.update(config.read_bytes() if config.is_file() else b"")
    for file in weight_files(path):
        size = file.stat().st_size
        mark.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            mark.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            mark.update(stream.read(_EDGE))
    return mark.hexdigest()


def _check_shards(path: Path, files: list[Path]) -> None:
    """Refuse a directory whose weights are not all there."""
    if not files:
        raise CheckpointError(f"{path}: config.json and no weights (*.safetensors). Copy it anew from the run")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise CheckpointError(
                f"{path}: {missing[0]} is missing ({len(missing)} of {len(named)} shards). Copy it anew"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent}: no config.json. Only Hugging Face directories (config.json and weights) are read; "
            "convert the checkpoint with its framework's exporter"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be parsed ({error}). Copy it anew from the run") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: not a JSON object. Copy it anew from the run")
    return table


def _header(file: Path) -> dict[str, dict[str, Any]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end > file.stat().st_size:
            raise ValueError("it is shorter than its header says")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        reason = "it is shorter than a header" if isinstance(error, struct.error) else str(error)
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({reason}). Copy it anew from the run"
        ) from None
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
