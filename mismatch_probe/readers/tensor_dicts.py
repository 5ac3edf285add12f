"""Pickled ``TensorDict`` batches inside a torch archive, as numpy arrays, without tensordict and without its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.pickles import REPAIR, Stub
from mismatch_probe.readers.torch_archive import load_torch

Array = npt.NDArray[Any]

_DTYPES = {
    "torch.float64": "<f8",
    "torch.float32": "<f4",
    "torch.float16": "<f2",
    "torch.bfloat16": "<u2",
    "torch.int64": "<i8",
    "torch.int32": "<i4",
    "torch.int16": "<i2",
    "torch.int8": "i1",
    "torch.uint8": "u1",
    "torch.bool": "?",
}


def load_tensor_dict(source: bytes | Path, file: Path) -> dict[str, Array]:
    """The tensors of a flat ``TensorDict`` that ``torch.save`` wrote, consolidated into one storage or not.

    Args:
        source: where the archive is.
        file: the file to name in errors.

    Raises:
        BadFileError: it is no such archive, or a tensor does not fit its storage.
    """
    loaded = load_torch(source, file, lambda name: name.startswith("tensordict."))
    try:
        return _leaves(loaded)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadFileError(file, None, f"not a TensorDict that is understood ({error})", REPAIR) from None


def _leaves(loaded: Any) -> dict[str, Array]:
    if not isinstance(loaded, Stub):
        raise ValueError(f"a {type(loaded).__name__}")
    function = loaded.name.rpartition(".")[2]
    if function == "_make_td":
        state = loaded.args[1]
        return {name: value for name, value in state["_tensordict"].items() if isinstance(value, np.ndarray)}
    if function != "_rebuild_tensordict_files_consolidated":
        raise ValueError(f"it was pickled by {loaded.name}")
    metadata, storage = loaded.args[:2]
    data = np.ascontiguousarray(storage).view(np.uint8).reshape(-1)
    return {name: _leaf(data, entry) for name, entry in metadata["leaves"].items() if entry[0] in _DTYPES}


def _leaf(data: Array, entry: Any) -> Array:
    """One tensor of a consolidated storage: (dtype, shape, first byte, one past the last byte, padding)."""
    name, shape, start, stop = entry[:4]
    if not 0 <= start <= stop <= len(data):
        raise ValueError("a tensor that reaches beyond its storage")
    dtype = np.dtype(_DTYPES[name])
    count = int(np.prod(np.array(shape, dtype=object))) if shape else 1
    # ``stop`` may lie past the data, at the next multiple of 8: the shape says how much of it is data.
    array = np.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape)
    if start + array.nbytes > stop:
        raise ValueError("a tensor larger than its place in the storage")
    return (array.astype(np.uint32) << 16).view(np.float32) if name == "torch.bfloat16" else array
