"""prime-rl's transport files, msgpack arrays whose fields are known by their place only.

``rollouts/step_N/rank_R.bin`` holds the packed micro batches of one trainer rank, ``rollouts.bin`` (later
``train_rollouts.bin``) the unpacked batch that the orchestrator sent. They are written with
``rollout_transport.type = "filesystem"``, the default before v0.8. The number of fields in a row names the version:
10 v0.4, 12 v0.5, 17 v0.6, 18 v0.7, 19 v0.8, 16 since 2026-08-08. They name no weight version and no group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.files import read_bytes
from mismatch_probe.readers.prime_rl_samples import WEIGHTS, Sample, bools, floats, ints, member, sample
from mismatch_probe.readers.rows import RowBuilder

Fields = Mapping[int, str]

_PACKED = {0: "token_ids", 1: "loss_mask", 2: "advantages", 3: "logprobs", 4: "position_ids"}
_OLD = {**_PACKED, 5: "temperatures"}
_NEW = {**_PACKED, 5: "sequence_lengths", 6: "temperatures"}
_MICRO_BATCH: Mapping[int, Fields] = {
    10: _OLD,
    12: _OLD,
    17: {**_OLD, 7: "sequence_lengths", 13: "training_mode", 14: "rewards"},
    18: {**_NEW, 13: "rl_weights", 14: "ce_weights", 15: "ref_kl_weights"},
    19: {**_NEW, 14: "rl_weights", 15: "ce_weights", 16: "ref_kl_weights"},
    16: {**_NEW, 13: "rl_weights", 14: "ce_weights", 15: "ref_kl_weights"},
}
_PARTS = dict(enumerate(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")))
_PARTS[5] = "completion_temperatures"
_WHOLE = dict(enumerate(("token_ids", "loss_mask", "logprobs", "temperatures", "env_name")))
_SAMPLE: Mapping[int, Fields] = {
    11: {**_PARTS, 7: "advantage", 8: "reward"},
    13: {**_PARTS, 7: "advantage", 8: "reward"},
    14: {**_PARTS, 8: "advantage", 9: "reward", 13: "training_mode"},
    # Since v0.7 a row has 13 fields again, the fifth of them a text: prompt and response are one.
    -13: {**_WHOLE, **dict(enumerate(WEIGHTS, 9)), 12: "advantages"},
}
_FROM_ZERO = (10, 11, 12, 13, 14, 17)


class NotABatch(Exception):
    """The file is not what prime-rl writes, and why."""


@dataclass(frozen=True)
class Start:
    """What the first row of a transport file tells: whether steps count from 0, and the temperature of a token."""

    counts_from_zero: bool
    temperature: float | None


def start_of(file: Path) -> Start | None:
    """What the file begins with, None where it is no transport file; reads its first row only."""
    try:
        most = file.stat().st_size
        with file.open("rb") as stream, _readable():
            unpacker = _unpacker(most, stream)
            layouts = _layouts(file)
            for _ in range(1 if layouts is _MICRO_BATCH else 2):
                if not unpacker.read_array_header():
                    return None
            layout, values = _row(unpacker, layouts)
            ids = ints(values["token_ids"] if "token_ids" in values else values["prompt_ids"], "token ids")
            key = "temperatures" if "temperatures" in values else "completion_temperatures"
            temperatures = floats(values[key], key)
    except (NotABatch, OSError):
        return None
    if not len(ids):
        return None
    known = temperatures is not None and len(temperatures) > 0
    return Start(layout in _FROM_ZERO, float(temperatures[0]) if temperatures is not None and known else None)


def read_ranks(files: tuple[Path, ...], step: int, builder: RowBuilder, skip_bad: bool) -> list[Sample]:
    """The sequences packed in the rank files of one step; identical files count once."""
    samples: list[Sample] = []
    seen: dict[bytes, Path] = {}
    empty = 0
    for file in files:
        data = _content(file, builder, skip_bad)
        earlier = seen.setdefault(hashlib.blake2b(data, digest_size=16).digest(), file)
        if earlier != file:
            builder.notice(f"step {step}: {file.name} is a copy of {earlier.name} and counts once")
            continue
        for number, values in _rows(file, data, builder, skip_bad):
            try:
                found, without = _unpack(file, number, f"step{step}-{file.stem}-{number - 1}", values)
            except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                builder.reject(file, number, None, f"not a micro batch: {error}")
                continue
            samples += found
            empty += without
    if empty:
        builder.notice(
            f"step {step}: {empty} packed sequences hold no sampled token (padding, and batches repeated to fill the "
            "ranks); passed over"
        )
    return samples


def read_batch(file: Path, step: int, builder: RowBuilder, skip_bad: bool) -> list[Sample]:
    """The sequences of the orchestrator's batch."""
    samples = []
    for number, values in _rows(file, _content(file, builder, skip_bad), builder, skip_bad):
        try:
            samples.append(_training_sample(file, number, f"step{step}-{number - 1}", values))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            builder.reject(file, number, None, f"not a training sample: {error}")
    return samples


def _content(file: Path, builder: RowBuilder, skip_bad: bool) -> bytes:
    try:
        return read_bytes(file)
    except BadFileError:
        if not skip_bad:
            raise
        builder.reject(file, 0, None, "cannot be read")
        return b"\x90"


def _rows(file: Path, data: bytes, builder: RowBuilder, skip_bad: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based row, fields by name)."""
    number = 0
    layouts = _layouts(file)
    batch = layouts is _SAMPLE
    try:
        with _readable():
            unpacker = _unpacker(len(data))
            unpacker.feed(data)
            for _ in range(2 if batch else 1):
                rows = unpacker.read_array_header()
        for number in range(1, rows + 1):
            with _readable():
                _, values = _row(unpacker, layouts)
            yield number, values
        with _readable():
            for _ in range(2 if batch else 0):
                unpacker.skip()
            if unpacker.tell() != len(data):
                raise NotABatch("something follows its last row")
    except NotABatch as error:
        reason = f"not a prime-rl batch ({error})"
        if not skip_bad:
            raise BadFileError(file, number or None, reason, "Restore the file, or pass --skip-bad-rows") from None
        builder.reject(file, number, None, reason)


def _layouts(file: Path) -> Mapping[int, Fields]:
    return _MICRO_BATCH if file.name.startswith("rank_") else _SAMPLE


def _unpacker(most: int, stream: Any = None) -> Any:
    import msgpack

    # No array or text has more members than the file has bytes, whatever its header declares.
    return msgpack.Unpacker(
        stream, raw=False, strict_map_key=False, unicode_errors="replace", max_buffer_size=most + 1,
        max_array_len=most, max_map_len=most, max_str_len=most, max_bin_len=most, max_ext_len=most,
    )  # fmt: skip


@contextmanager
def _readable() -> Iterator[None]:
    """Whatever msgpack raises on damaged data, as NotABatch."""
    import msgpack

    try:
        yield
    except (
        msgpack.UnpackException,
        ValueError,
        TypeError,
        KeyError,
        MemoryError,
        OverflowError,
        RecursionError,
    ) as error:
        raise NotABatch((str(error) or type(error).__name__).splitlines()[0]) from None


def _row(unpacker: Any, layouts: Mapping[int, Fields]) -> tuple[int, dict[str, Any]]:
    """(layout, fields by name) of the next row; fields that nobody reads are passed over, not built."""
    length = unpacker.read_array_header()
    if length not in layouts:
        known = ", ".join(str(n) for n in sorted(layouts) if n > 0)
        raise NotABatch(f"a row of {length} fields, known are {known}")
    wanted = {*layouts[length], *layouts.get(-length, ())}
    values: dict[int, Any] = {}
    for place in range(length):
        if place in wanted:
            values[place] = unpacker.unpack()
        else:
            unpacker.skip()
    layout = -length if -length in layouts and isinstance(values[4], str) else length
    return layout, {name: values[place] for place, name in layouts[layout].items()}


def _unpack(file: Path, number: int, name: str, values: dict[str, Any]) -> tuple[list[Sample], int]:
    """The sequences of a packed micro batch: each begins where position_ids is 0; and how many hold no sampled token.

    ``sequence_lengths`` counts the padding to the last sequence, so it only serves as a check.
    """
    columns = _columns(values)
    ids, mask = columns["ids"], columns["mask"]
    positions = ints(values["position_ids"], "position_ids")
    starts = np.flatnonzero(positions == 0)
    if len(positions) != len(ids) or (len(ids) and (not len(starts) or starts[0])):
        raise ValueError("position_ids do not begin at 0, or do not fit the tokens")
    lengths = values.get("sequence_lengths")
    if lengths is not None and set(np.cumsum(ints(lengths, "sequence_lengths"))) - {*starts.tolist(), len(ids)}:
        raise ValueError("sequence_lengths and position_ids cut it in different places")
    found, without = [], 0
    for at, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        part = slice(int(start), int(end))
        if not bool(mask[part][1:].any()):
            without += 1
            continue
        cut = {key: value[part] for key, value in columns.items() if isinstance(value, np.ndarray)}
        found.append(_sample(file, number, f"{name}-{at}", cut, None))
    return found, without


def _training_sample(file: Path, number: int, name: str, values: dict[str, Any]) -> Sample:
    if "token_ids" in values:
        return _sample(file, number, name, _columns(values), None)
    prompt = len(values["prompt_ids"])
    whole = {
        "token_ids": values["prompt_ids"] + values["completion_ids"],
        "loss_mask": values["prompt_mask"] + values["completion_mask"],
        "logprobs": [0.0] * prompt + values["completion_logprobs"],
        "temperatures": [1.0] * prompt + values["completion_temperatures"],
        "training_mode": values.get("training_mode"),
    }
    one = _sample(file, number, name, _columns(whole), values["reward"])
    one.row["advantages"] = values["advantage"]
    return one


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    """Arrays of one row under our names, all of one length.

    Raises:
        ValueError: they do not fit.
    """
    ids = ints(values["token_ids"], "token ids")
    columns: dict[str, Any] = {"ids": ids, "mask": bools(values["loss_mask"], "loss_mask")}
    for name in ("temperatures", *WEIGHTS, "rewards", "advantages"):
        columns[name] = floats(values.get(name), name)
    columns["sampler_logprobs"] = floats(values["logprobs"], "inference_logprobs")
    for name, array in columns.items():
        if array is not None and len(array) != len(ids):
            raise ValueError(f"{name} has {len(array)} values for {len(ids)} tokens")
    columns["counted"] = member(columns["mask"], *(columns.pop(name) for name in WEIGHTS))
    if values.get("training_mode") == "sft":
        columns["sampler_logprobs"] = None  # zeros, written where nothing was sampled
    return columns


def _sample(file: Path, number: int, name: str, columns: dict[str, Any], reward: Any) -> Sample:
    taken = {key: columns[key] for key in ("sampler_logprobs", "advantages") if columns.get(key) is not None}
    one = sample(file, number, name, columns["ids"], columns["mask"], columns["counted"], taken)
    first = len(one.row["prompt_ids"])
    rewards, temperatures = columns.get("rewards"), columns.get("temperatures")
    one.row["reward"] = reward if rewards is None else float(rewards[first])
    one.temperature = None if temperatures is None else float(temperatures[first])
    return one
