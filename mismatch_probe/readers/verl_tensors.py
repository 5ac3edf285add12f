"""The tensors inside verl's dumps, read from their storage only when they are asked for.

tensordict keeps a table as named tensors or consolidated into one storage, and torch keeps rows of unequal length
as jagged nested tensors. Each is rebuilt here as numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_probe.readers.pickles import Names
from mismatch_probe.readers.torch_archive import tensor

WANTED = frozenset(
    (
        *("prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "attention_mask"),
        *("uid", "extra_fields", "min_global_steps", "max_global_steps", "__do_sample__"),
    )
)
"""Columns that are read; the others (positions, routed experts, images, ...) can be far larger."""
_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "bool": "?",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint8": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class Jagged:
    """Rows of unequal length: row i is ``values[starts[i] : stops[i]]``."""

    values: Any
    starts: list[int]
    stops: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Any:
        return self.values[self.starts[row] : self.stops[row]]


def typed(data: Any, dtype: str, shape: Any) -> Any:
    """Bytes as an array; bfloat16 becomes float32."""
    array = data.view(_code(dtype)).reshape(tuple(int(n) for n in shape))
    return (array.astype(np.uint32) << 16).view(np.float32) if "bfloat16" in str(dtype) else array


def _code(dtype: Any) -> str:
    return _DTYPES[str(dtype).removeprefix("torch.")]


class Tensor:
    """A tensor that is read from its storage when it is needed; the arguments are those of its rebuilder."""

    def __init__(self, storage: Any, *layout: Any) -> None:
        self.storage, self.layout = storage, layout

    def read(self) -> Any:
        """The tensor as an array."""
        return tensor(self.storage, *self.layout)


class Nested:
    """A nested tensor that is read when it is needed, as Jagged; None where a row has more than one dimension."""

    def __init__(self, values: Any, starts: Any, lengths: Any) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    def read(self) -> Any:
        """Values and bounds of the rows."""
        if self.values is None:
            return None
        starts = self.starts.read()
        lengths = np.diff(starts) if self.lengths is None else self.lengths.read()
        return _jagged(self.values.read(), starts[: len(lengths)], lengths)


def _nested_jagged(parts: Any) -> Nested:
    flat = parts["_ragged_idx"] == 1
    return Nested(parts["values"] if flat else None, parts["offsets"], parts.get("lengths"))


def _jagged(values: Any, starts: Any, lengths: Any) -> Jagged:
    if len(starts) != len(lengths) or (len(starts) and min(starts.min(), lengths.min()) < 0):
        raise ValueError("a nested tensor with offsets that do not ascend")
    stops = starts + lengths
    if len(starts) and int(stops.max()) > len(values):
        raise ValueError("a nested tensor larger than its values")
    return Jagged(values, starts.tolist(), stops.tolist())


class Consolidated:
    """A TensorDict in one storage: ``leaves`` is {name: (dtype, shape, start, stop, padded[, ragged dimension])}."""

    def __init__(self, meta: Any, storage: Any) -> None:
        self._leaves, self._storage = meta["leaves"], storage

    def columns(self) -> dict[str, Any]:
        """The wanted columns. Those of nested tensors do not occur: verl pads before it dumps this kind of table."""
        storage = self._storage.read()
        return {name: self._leaf(storage, *leaf[:4]) for name, leaf in self._leaves.items() if name in WANTED}

    def _leaf(self, storage: Any, dtype: str, shape: Any, start: int, stop: int) -> Any:
        count = int(np.prod([int(n) for n in shape], dtype=object))
        return typed(storage[start:stop][: count * np.dtype(_code(dtype)).itemsize], dtype, shape)


def _from_type(build: Any, _: Any, args: Any, __: Any) -> Any:
    return build(*args)


def _make_td(_: Any, state: Any) -> Any:
    return state.get("_tensordict")


NAMES: Names = {
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _nested_jagged,
    ("tensordict._reductions", "_make_td"): _make_td,
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): Consolidated,
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch", "Size"): tuple,
}
