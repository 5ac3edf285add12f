"""slime's train dumps, of either format, as one row a trained sample with arrays over the whole response.

Format 2 (since 2026-08-12) is one file a rollout. Before it every rank wrote its own: the ranks of one data-parallel
group repeat the samples, those of the last pipeline stage hold log-probs, and under context parallelism each holds two
slices of every response (a zig-zag: slice r and slice 2C - 1 - r of the sequence cut into 2C).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.pickles import REPAIR

_COLUMNS = ("rollout_log_probs", "log_probs", "advantages")


@dataclass
class TrainRow:
    """One trained sample: ids of prompt and response, and arrays over the response, None where the file has none."""

    file: Path
    number: int
    tokens: np.ndarray[Any, Any]
    response_length: int
    position: int | None
    sample_index: int | None
    loss_mask: np.ndarray[Any, Any] | None
    truncated: bool
    columns: dict[str, np.ndarray[Any, Any] | None] = field(default_factory=dict)
    late: bool = False
    """True where an optimizer step of the same rollout came before the one that trained this sample."""


@dataclass
class TrainData:
    """The rows of one rollout's train dump, its rewards by rollout position, and its number of optimizer steps."""

    rows: list[TrainRow]
    raw_reward: list[Any] | None = None
    steps: int = 1
    complete: bool = True
    notices: list[str] = field(default_factory=list)


Refuse = Callable[[Path, int, str], None]
"""Sets one row aside: file, 1-based row, reason."""


def read_format_2(file: Path, payload: Any, refuse: Refuse) -> TrainData:
    """Rows of the one file that a rollout has since format 2.

    Raises:
        BadFileError: it lacks ``samples``.
    """
    samples = payload.get("samples") if isinstance(payload, dict) else None
    if not isinstance(samples, list):
        raise BadFileError(file, None, "a slime train dump without samples", REPAIR)
    data = TrainData([], raw_reward=_list(payload.get("raw_reward")))
    shards = [shard for shard in _list(payload.get("dp_shards")) or [] if isinstance(shard, dict)]
    data.steps = max([1, *(len(_list(shard.get("num_microbatches")) or [0]) for shard in shards)])
    late = {position for shard in shards for position in _late_positions(shard)} if data.steps > 1 else set()
    for number, sample in enumerate(samples, 1):
        try:
            row = _row(file, number, sample, sample.get("sample_index"), sample.get("rollout_position"))
            for name in _COLUMNS:
                row.columns[name] = _whole(sample.get(name), row.response_length, name)
            row.late = row.position in late
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            refuse(file, number, f"not a sample of slime's train dump: {error}")
            continue
        data.rows.append(row)
    return data


def _late_positions(shard: dict[str, Any]) -> list[int]:
    """Rollout positions of a shard's samples that its second and later optimizer steps trained."""
    micro_batches, counts = _list(shard.get("micro_batch_indices")) or [], _list(shard.get("num_microbatches")) or []
    partition = _list(shard.get("partition")) or []
    try:
        late = [int(at) for micro_batch in micro_batches[int(counts[0]) :] for at in micro_batch]
        return [int(partition[at]) for at in late]
    except (TypeError, ValueError, IndexError):
        return []


def read_format_1(files: list[tuple[Path, Any]], refuse: Refuse) -> TrainData:
    """Rows of the files of all ranks, in order of rank: copies count once, context-parallel slices are put together.

    Raises:
        BadFileError: a file lacks ``rollout_data``.
    """
    groups: dict[bytes, list[tuple[Path, dict[str, Any]]]] = {}
    for file, payload in files:
        columns = payload.get("rollout_data") if isinstance(payload, dict) else None
        if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list):
            raise BadFileError(file, None, "a slime train dump without rollout_data", REPAIR)
        groups.setdefault(_identity(columns["tokens"]), []).append((file, columns))
    data = TrainData([], complete=False)
    for copies in groups.values():
        _add_group(data, copies, refuse)
    return data


def _identity(tokens: list[Any]) -> bytes:
    """What the ranks of one data-parallel group share: their samples."""
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    for sample in tokens:
        array = np.asarray(sample)
        digest.update(f"{array.shape}{array.dtype.kind}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return digest.digest()


def _add_group(data: TrainData, copies: list[tuple[Path, dict[str, Any]]], refuse: Refuse) -> None:
    file, first = copies[0]
    rows: list[TrainRow] = []
    for at in range(len(first["tokens"])):
        cells = {name: _cell(first, name, at) for name in ("tokens", "response_lengths", "loss_masks", "truncated")}
        try:
            row = _row(file, at + 1, cells, _cell(first, "sample_indices", at), _cell(first, "partition", at))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            refuse(file, at + 1, f"not a sample of slime's train dump: {error}")
            continue
        rows.append(row)
    for name in _COLUMNS:
        held = [(path, columns[name]) for path, columns in copies if isinstance(columns.get(name), list)]
        whole = _assembled([column for _, column in held], rows)
        for row, values in zip(rows, whole or [None] * len(rows), strict=True):
            row.columns[name] = values
        if held and whole is None and name == "log_probs":
            data.notices.append(
                f"{held[0][0].name}: log_probs is a context-parallel slice, and the files of the other ranks that "
                "complete it are not there; its trainer log-probs are null. Put the files of all ranks together"
            )
    data.rows += rows


def _assembled(held: list[list[Any]], rows: list[TrainRow]) -> list[Any] | None:
    """One array over the response for each row, from whole copies or from slices; None when they do not make one."""
    places = [row.number - 1 for row in rows]
    columns: list[list[Any]] = [[_flat(column[at]) if at < len(column) else None for at in places] for column in held]
    columns = [column for column in columns if all(cell is not None for cell in column)]
    lengths = [row.response_length for row in rows]
    for column in columns:
        if [len(cell) for cell in column] == lengths:
            return column
    for ranks in range(2, len(columns) + 1):
        if len(columns) % ranks == 0:
            joined = [_joined([column[at] for column in columns], row, ranks) for at, row in enumerate(rows)]
            if joined and all(cell is not None for cell in joined):
                return joined
    return None


def _joined(slices: list[Any], row: TrainRow, ranks: int) -> Any:
    """The response put together from the slices of ``ranks`` context-parallel ranks, each held by as many copies."""
    out = np.full(row.response_length, np.nan)
    filled = np.zeros(row.response_length, dtype=np.bool_)
    copies = len(slices) // ranks
    for rank in range(ranks):
        places = _zigzag(len(row.tokens), row.response_length, rank, ranks)
        for values in slices[rank * copies : (rank + 1) * copies]:
            if len(values) != len(places) or (filled[places].any() and not np.array_equal(out[places], values)):
                return None
            out[places] = values
            filled[places] = True
    return out if bool(filled.all()) else None


def _zigzag(total: int, response: int, rank: int, ranks: int) -> Any:
    """Response positions whose log-probs a context-parallel rank computes: its tokens' successors, in order."""
    chunk, prompt = -(-total // (2 * ranks)), total - response
    parts = []
    for piece in (rank, 2 * ranks - 1 - rank):
        # The logits at place i give the log-prob of token i + 1.
        begin, end = max(piece * chunk, prompt - 1), min((piece + 1) * chunk, total - 1)
        parts.append(np.arange(begin, max(begin, end)) - (prompt - 1))
    return np.concatenate(parts)


def _row(file: Path, number: int, cells: dict[str, Any], sample_index: Any, position: Any) -> TrainRow:
    tokens = _flat(cells["tokens"])
    if tokens is None or tokens.dtype.kind not in "iu":
        raise ValueError("tokens is not a list of integers")
    length = int(cells["response_lengths"])
    if not 0 <= length <= len(tokens):
        raise ValueError(f"response_lengths is {length} for {len(tokens)} tokens")
    return TrainRow(
        file, number, tokens, length, _integer(position), _integer(sample_index),
        _whole(cells.get("loss_masks"), length, "loss_masks"), bool(cells.get("truncated")),
    )  # fmt: skip


def _whole(value: Any, length: int, name: str) -> Any:
    if value is None:
        return None
    array = _flat(value)
    if array is None or len(array) != length:
        raise ValueError(f"{name} does not have the {length} values of the response")
    return array


def _flat(value: Any) -> Any:
    """A flat array of numbers, None when it is none."""
    array = np.asarray(value)
    return array if array.ndim == 1 and (array.dtype.kind in "iufb" or not len(array)) else None


def _cell(columns: dict[str, Any], name: str, at: int) -> Any:
    column = columns.get(name)
    return column[at] if isinstance(column, list | np.ndarray) and at < len(column) else None


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
