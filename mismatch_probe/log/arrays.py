"""What a trainer holds (lists, numpy arrays, torch tensors on any device) -> numpy, and padded batches -> rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Row = dict[str, Any]

PER_TOKEN = ("sampler_logprobs", "trainer_logprobs")
PER_TOKEN_OR_ROW = ("sampler_version", "advantages")
PER_ROW = ("sequence_id", "group_id", "reward", "finish_reason")


def to_numpy(value: Any) -> Any:
    """A tensor as a numpy array, on the host; bfloat16, which numpy lacks, as float32. Other values as they are."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    return tensor.cpu().numpy()


def own_array(value: Any) -> Any:
    """A copy that later changes of the trainer's buffer cannot reach; a scalar as a Python number; None as None."""
    value = to_numpy(value)
    if value is None or isinstance(value, str | bytes):
        return value
    array = np.array(value)
    if array.dtype == object:
        # A None among numbers is a value that is not known; anything else is for the row check to name.
        try:
            array = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            return value
    return array.item() if array.ndim == 0 else array


def padded_rows(
    *, input_ids: Any, attention_mask: Any, response_mask: Any, loss_mask: Any = None, **fields: Any
) -> Iterator[Row]:
    """Cut a padded batch into native rows.

    Args:
        input_ids: (B, T) prompts and responses, padded on any side.
        attention_mask: (B, T); 0 is padding.
        response_mask: (B, W); the response runs from its first 1 to the last token that is no padding.
        loss_mask: (B, W'), 1 at tokens the loss counts; None takes ``response_mask``.
        fields: ``sampler_logprobs`` and ``trainer_logprobs`` (B, W''); ``sampler_version`` and ``advantages`` one
            value, (B,) or (B, W''); ``sequence_id``, ``group_id``, ``reward``, ``finish_reason`` (B,). None: absent.

    Each array's W columns belong to the last W columns of ``input_ids``: W = T is aligned, W = T - 1 shifted by one,
    W = R the response block after a prompt block.

    Raises:
        ValueError: shapes do not belong together.
    """
    ids, attended = _matrix("input_ids", input_ids), _matrix("attention_mask", attention_mask)
    if attended.shape != ids.shape:
        raise ValueError(f"attention_mask is {attended.shape}, input_ids {ids.shape}")
    rows, width = ids.shape
    attended = attended.astype(bool)
    respond = _aligned("response_mask", response_mask, rows, width).astype(bool)
    counted = respond if loss_mask is None else _aligned("loss_mask", loss_mask, rows, width).astype(bool) & respond
    columns = {key: _column(key, value, rows, width) for key, value in fields.items()}
    outside = np.flatnonzero((respond & ~attended).any(axis=1))
    if len(outside):
        raise ValueError(
            f"response_mask marks padding in row {outside[0]}; "
            "an array narrower than input_ids belongs to the last columns of it"
        )
    for row in range(rows):
        tokens = np.flatnonzero(attended[row])
        marked = np.flatnonzero(respond[row])
        start = int(np.searchsorted(tokens, marked[0])) if len(marked) else len(tokens)
        prompt, response = tokens[:start], tokens[start:]
        cells = {key: _cell(column, row, response) for key, column in columns.items()}
        yield {
            "prompt_ids": ids[row, prompt],
            "response_ids": ids[row, response],
            "loss_mask": counted[row, response],
            **cells,
        }


def batch_rows(columns: dict[str, Any]) -> Iterator[Row]:
    """Ragged columns, one entry a sequence, as rows. One ``sampler_version`` for all is repeated.

    Raises:
        ValueError: columns of unequal length.
    """
    columns = {key: value for key, value in columns.items() if value is not None}
    version = columns.get("sampler_version")
    if version is not None and not isinstance(version, list | tuple) and np.ndim(to_numpy(version)) == 0:
        columns["sampler_version"] = [version] * len(columns["response_ids"])
    lengths = {key: len(value) for key, value in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of unequal length: {', '.join(f'{key} {n}' for key, n in lengths.items())}")
    host = {key: to_numpy(value) for key, value in columns.items()}
    for row in range(next(iter(lengths.values()), 0)):
        yield {key: value[row] for key, value in host.items()}


def _matrix(key: str, value: Any) -> Array:
    matrix = np.asarray(to_numpy(value))
    if matrix.ndim != 2:
        raise ValueError(f"{key} has {matrix.ndim} dimensions, not (B, T)")
    return matrix


def _aligned(key: str, value: Any, rows: int, width: int) -> Array:
    """An array of W columns, put under the last W of ``width`` columns; what it does not cover is 0."""
    matrix = _matrix(key, value)
    if matrix.shape[0] != rows or matrix.shape[1] > width:
        raise ValueError(f"{key} is {matrix.shape}, input_ids ({rows}, {width})")
    if matrix.shape[1] == width:
        return matrix
    full = np.zeros((rows, width), dtype=matrix.dtype)
    full[:, width - matrix.shape[1] :] = matrix
    return full


def _column(key: str, value: Any, rows: int, width: int) -> Any:
    """None, a full (B, T) array, or a sequence of one value a row."""
    value = to_numpy(value)
    if value is None:
        return None
    if key in PER_TOKEN:
        return _aligned(key, value, rows, width)
    if key in PER_TOKEN_OR_ROW:
        if np.ndim(value) == 2:
            return _aligned(key, value, rows, width)
        if np.ndim(value) == 0:
            return [value] * rows
    elif key not in PER_ROW:
        raise ValueError(f"{key} is no field of a row")
    if len(value) != rows:
        raise ValueError(f"{key} has {len(value)} values for {rows} rows")
    return value


def _cell(column: Array | Sequence[Any] | None, row: int, response: npt.NDArray[np.int64]) -> Any:
    if column is None:
        return None
    if isinstance(column, np.ndarray) and column.ndim == 2:
        return column[row, response]
    return column[row]


def prompt_group(prompt_ids: Any) -> str:
    """A group's name made of its prompt, whatever the ids' dtype."""
    ids = np.asarray(prompt_ids)
    if ids.dtype.kind in "iuf":
        ids = ids.astype(np.int64)
    return f"prompt-{hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()}"
