"""Rows of PipelineRL's streams in native field names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.pipeline_rl_steps import Placed, lines_of, samples_in
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.stored_lines import Line, values
from mismatch_probe.run import UNKNOWN_VERSION, Floats, Ints, Rollouts, Settings

_MASKED = -100
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


def load_actor(
    step: int, lines: list[Line], root: Path, settings: Settings, options: ReadOptions, size: int
) -> Rollouts:
    """Groups of the actor stream; versions are counts of samples over ``size``."""
    builder = RowBuilder(step, root, settings.vocab_size, options)
    for line, group in values(lines, builder, options):
        for at, text in _texts(group, line, builder):
            try:
                row = _actor_row(text, f"{line.number}/{at}", size)
            except _MALFORMED as error:
                builder.reject(line.file, line.number, None, f"text {at}: {_said(error)}")
                continue
            builder.add(row, line.file, line.number)
    return builder.build()


def load_training(
    step: int, lines: list[Line], root: Path, settings: Settings, options: ReadOptions, size: int, actors: Actors
) -> Rollouts:
    """Batches of the training_data stream; group, version and finish reason come from the actor stream."""
    builder = RowBuilder(step, root, settings.vocab_size, options)
    unjoined = 0
    for line, batch in values(lines, builder, options):
        for at, part in _parts(batch, line, builder):
            name = f"{line.file.parent.name}/{line.number}/{at}"
            try:
                row = _training_row(batch, part, name)
                joined = actors.find(row.pop("key"))
                row |= joined or {"group_id": f"prompt-{_digest(row['prompt_ids'])}"}
                unjoined += joined is None
                version = row.pop("version", UNKNOWN_VERSION)
                if version == UNKNOWN_VERSION and (batch["model_version"] == step * size or samples_in(batch) == 1):
                    version = batch["model_version"]  # the oldest of the batch, so exact where it is alone or current
                row["sampler_version"] = None if version == UNKNOWN_VERSION else version // size
            except _MALFORMED as error:
                builder.reject(line.file, line.number, None, f"sequence {at}: {_said(error)}")
                continue
            builder.add(row, line.file, line.number)
    if unjoined:
        builder.notice(
            f"step {step}: {unjoined} sequences are not in streams/actor, which alone names group and version; they "
            "are grouped by equal prompts, and a version is known only where the batch's oldest one is exact"
        )
    return builder.build()


class Actors:
    """What the actor stream says of a sequence, found by its tokens and log-probs; read when first asked."""

    def __init__(self, placed: list[Placed], options: ReadOptions) -> None:
        self._lines, self._options = lines_of(placed), options

    def find(self, key: int) -> dict[str, Any] | None:
        """Group, version and finish reason, None where there is no such sequence; a version in doubt is unknown."""
        keys, rows = self._table
        at = int(np.searchsorted(keys, key))
        if at == len(keys) or keys[at] != key:
            return None
        end = int(np.searchsorted(keys, key, side="right"))
        found = [rows[i] for i in range(at, end)]
        group, version, finished = found[0]
        if any(other[1] != version for other in found):
            version = UNKNOWN_VERSION
        return {"group_id": group, "version": version, "finish_reason": _finish_reason(finished)}

    @cached_property
    def _table(self) -> tuple[Ints, list[tuple[str, int, bool | None]]]:
        keys, rows = [], []
        # What is wrong with a line of the actor stream is no fault of the step that is being read.
        builder = RowBuilder(0, Path(), None, ReadOptions(skip_bad_rows=True))
        groups: dict[str, str] = {}
        for line, group in values(self._lines, builder, ReadOptions(skip_bad_rows=self._options.skip_bad_rows)):
            for _, text in _texts(group, line, builder):
                try:
                    key = _key(_integers(text["input_ids"], "input_ids"), _floats(text["logprobs"], "logprobs"))
                    version = int(text["metadata"]["model_version"])
                except _MALFORMED:
                    continue
                name = str(text.get("group_id"))
                keys.append(key)
                rows.append((groups.setdefault(name, name), version, text.get("finished")))
        order = np.argsort(np.array(keys, dtype=np.int64), kind="stable")
        return np.array(keys, dtype=np.int64)[order], [rows[i] for i in order]


def _texts(group: Any, line: Line, builder: RowBuilder) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not isinstance(group, list):
        builder.reject(line.file, line.number, None, "not a list of texts")
        return
    for at, text in enumerate(group):
        if isinstance(text, dict):
            yield at, text
        else:
            builder.reject(line.file, line.number, None, f"text {at}: not an object")


def _actor_row(text: Mapping[str, Any], place: str, size: int) -> dict[str, Any]:
    ids, labels = _integers(text["input_ids"], "input_ids"), _integers(text["labels"], "labels")
    of = text.get("metadata") or {}
    version = of.get("model_version")
    group = text.get("group_id")
    numbers = (of.get("rollout_index"), of.get("step_index"))
    named = group is not None and None not in numbers
    return {
        **_split(ids, labels, _floats(text["logprobs"], "logprobs")),
        "sequence_id": "/".join(map(str, (group, *numbers))) if named else place,
        "group_id": f"line-{place.partition('/')[0]}" if group is None else group,
        "sampler_version": None if version is None else int(version) // size,
        "reward": text.get("reward"),
        "finish_reason": _finish_reason(text.get("finished")),
    }


def _parts(batch: Any, line: Line, builder: RowBuilder) -> Iterator[tuple[int, tuple[int, slice]]]:
    """(number, (row, columns)) of each sequence of a packed or padded batch."""
    try:
        if batch.get("seq_boundaries") is None:
            for row, mask in enumerate(batch["attention_mask"]):
                there = np.flatnonzero(_integers(mask, "attention_mask"))
                if len(there) != (there[-1] - there[0] + 1 if len(there) else 0):
                    raise ValueError("attention_mask has holes")
                yield row, (row, slice(int(there[0]), int(there[-1]) + 1) if len(there) else slice(0, 0))
            return
        bounds = _integers(batch["seq_boundaries"], "seq_boundaries")
        if len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] != len(batch["input_ids"][0]):
            raise ValueError("seq_boundaries do not fit the batch")
        for at in range(samples_in(batch)):
            yield at, (0, slice(int(bounds[at]), int(bounds[at + 1])))
    except _MALFORMED as error:
        builder.reject(line.file, line.number, None, f"not a batch of PipelineRL: {_said(error)}")


def _training_row(batch: Mapping[str, Any], part: tuple[int, slice], name: str) -> dict[str, Any]:
    row, columns = part

    def column(key: str) -> Floats:
        # Tensors of float32 in shortest decimal form: only as float32 again are they the numbers that were logged.
        return _floats(batch[key][row][columns], key).astype(np.float32).astype(np.float64)

    ids, labels = (_integers(batch[key][row][columns], key) for key in ("input_ids", "labels"))
    sampled = labels != _MASKED
    # The collator puts the log-probs of the sampled tokens at the end, whichever positions those tokens have.
    old = column("old_logprobs")
    compact = old[len(old) - int(sampled.sum()) :]
    made = _split(ids, labels, compact)
    start = len(made["prompt_ids"])
    rewards, advantages = column("rewards"), column("advantages")
    if not len(ids) == len(old) == len(rewards) == len(advantages):
        raise ValueError("its columns differ in length")
    return {
        **made,
        "key": _key(ids, compact),
        "sequence_id": name,
        "advantages": advantages[start:],
        "reward": float(rewards[start]),
    }


def _split(ids: Ints, labels: Ints, compact: Floats) -> dict[str, Any]:
    """Prompt, response, mask and log-probs; the log-probs come for sampled tokens (labels not -100) only."""
    if ids.shape != labels.shape:
        raise ValueError(f"{len(labels)} labels for {len(ids)} input_ids")
    sampled = labels != _MASKED
    if not sampled.any():
        raise ValueError("labels mark no sampled token")
    if bool((ids[sampled] != labels[sampled]).any()):
        raise ValueError(
            "labels and input_ids differ: PipelineRL put another token where an id was not in its vocabulary"
        )
    if len(compact) != sampled.sum():
        raise ValueError(f"{len(compact)} logprobs for {int(sampled.sum())} sampled tokens")
    start = int(np.argmax(sampled))
    logprobs = np.full(len(ids), np.nan)
    logprobs[sampled] = compact
    return {
        "prompt_ids": ids[:start],
        "response_ids": ids[start:],
        "loss_mask": sampled[start:].astype(np.float64),
        "sampler_logprobs": logprobs[start:],
    }


def _finish_reason(finished: Any) -> str | None:
    """The dump keeps only whether a response ended by itself."""
    return None if not isinstance(finished, bool) else "stop" if finished else "length"


def _integers(value: Any, key: str) -> Ints:
    array = np.asarray(value)
    if array.ndim != 1 or (array.dtype.kind != "i" and len(array)):
        raise ValueError(f"{key} is not a flat list of integers")
    return array.astype(np.int64)


def _floats(value: Any, key: str) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{key} is not a flat list")
    return array


def _key(ids: Ints, compact: Floats) -> int:
    """Tokens and log-probs as one number; the batches hold float32, the actor stream more digits."""
    digest = hashlib.blake2b(ids.astype(np.int64).tobytes(), digest_size=8)
    digest.update(compact.astype(np.float32).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _digest(prompt: Ints) -> str:
    return hashlib.blake2b(prompt.tobytes(), digest_size=6).hexdigest()


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
