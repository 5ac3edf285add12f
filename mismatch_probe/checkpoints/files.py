"""JSON and safetensors files, read without torch and without trusting what they declare."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints.sources import ITEM_BYTES, Source, Stored
from mismatch_probe.errors import CheckpointError

MAX_JSON_BYTES = 1 << 28
"""Longest config, index or header that is read."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: it is missing, too long, not JSON or not an object.
    """
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file.stat().st_size} bytes")
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent}: no {file.name}. Copy the checkpoint anew from the run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be parsed ({error}). Copy it anew from the run") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: not a JSON object. Copy it anew from the run")
    return table


def safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the byte at which its data begins.

    Raises:
        CheckpointError: not such a file, or shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, MAX_JSON_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end > size:
            raise ValueError("it is shorter than its header says")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = "it is shorter than a header" if isinstance(error, struct.error) else str(error)
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({reason}). Copy it anew from the run"
        ) from None
    return header, 8 + length


def safetensors_sources(file: Path) -> dict[str, Source]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: the file is torn, or a tensor's shape does not fit its bytes.
    """
    header, start = safetensors_header(file)
    sources: dict[str, Source] = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = tensor["data_offsets"]
            shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
            if math.prod(shape) * ITEM_BYTES.get(dtype, 0) not in (0, end - begin):
                raise ValueError(f"{name}: shape {list(shape)} does not fill its {end - begin} bytes")
            sources[name] = Stored(file, start + begin, end - begin, shape, dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: its header makes no sense ({error}). Copy it anew from the run") from None
    return sources
