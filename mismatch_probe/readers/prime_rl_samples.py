"""One trained sequence of a prime-rl run, whichever of its files it was read from."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.run import Bools, Floats, Ints

WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
"""The parts of prime-rl's loss: importance-weighted, imitation, distillation. Absent, they are 1, 0 and 0."""
_FROM_TRACE = ("group_id", "sampler_version", "reward", "finish_reason")


@dataclass
class Sample:
    """One row in native field names, with the file and row it came from.

    ``tokens`` names the whole token sequence, prompt and response; ``temperature`` is the one it was sampled at.
    ``row["group_id"]`` is None where the file names no group.
    """

    file: Path
    number: int
    tokens: bytes
    row: dict[str, Any]
    temperature: float | None = None


def sample(
    file: Path, number: int, sequence_id: str, ids: Ints, mask: Bools, counted: Bools, columns: dict[str, Any]
) -> Sample:
    """Cut one packed sequence into prompt and response; arrays of ``columns`` are aligned to ``ids``.

    The response begins at the first token of ``mask``, the sampled ones; ``counted`` are those that the loss compares.
    The very first token has no prefix and is prompt, whatever its mask says.

    Raises:
        ValueError: the arrays do not fit, or no token was sampled.
    """
    for name, values in (("loss_mask", mask), *columns.items()):
        if isinstance(values, np.ndarray) and len(values) != len(ids):
            raise ValueError(f"{name} has {len(values)} values for {len(ids)} tokens")
    sampled = np.flatnonzero(mask[1:])
    if not len(sampled):
        raise ValueError("no token of it was sampled")
    start = int(sampled[0]) + 1
    row = {
        "sequence_id": sequence_id,
        "group_id": None,
        "prompt_ids": ids[:start],
        "response_ids": ids[start:],
        "loss_mask": counted[start:].astype(np.float64),
    }
    row |= {name: value[start:] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    return Sample(file, number, ids.tobytes(), row)


def ints(value: Any, name: str) -> Ints:
    """A flat array of integers.

    Raises:
        ValueError: it is none.
    """
    try:
        if not isinstance(value, list) or (value and isinstance(value[0], bool)):
            raise TypeError
        # array() reads a list of numbers about twice as fast as numpy does.
        return np.frombuffer(array("q", value), dtype=np.int64)
    except (TypeError, OverflowError):
        raise ValueError(f"{name} is not a flat list of integers") from None


def bools(value: Any, name: str) -> Bools:
    """A flat array of true and false, or of 0 and 1.

    Raises:
        ValueError: it is none.
    """
    try:
        if not isinstance(value, list):
            raise TypeError
        flags = np.frombuffer(bytes(value), dtype=np.uint8)
    except (TypeError, ValueError):
        flags = np.full(1, 2, dtype=np.uint8)
    if bool((flags > 1).any()):
        raise ValueError(f"{name} is not a flat list of true and false")
    return flags.astype(np.bool_)


def floats(value: Any, name: str) -> Floats | None:
    """A flat array of numbers, null as NaN; None where the list is absent or holds nothing but nulls.

    Raises:
        ValueError: it is none.
    """
    if value is None or (isinstance(value, list) and value and value[0] is None and value.count(None) == len(value)):
        return None
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    try:
        return np.frombuffer(array("d", value), dtype=np.float64)
    except (TypeError, OverflowError):
        numbers = [math.nan if item is None else item for item in value]
    try:
        return np.frombuffer(array("d", numbers), dtype=np.float64)
    except (TypeError, OverflowError):
        raise ValueError(f"{name} holds values that are not numbers") from None


def member(mask: Bools, rl: Floats | None, ce: Floats | None, ref_kl: Floats | None) -> Bools:
    """Sampled tokens that are no mere imitation: those with weight in the ce component of the loss alone are left out.

    The sampler's log-prob of such a token is not this policy's. A token without any weight (prime-rl takes those of
    advantage 0 out of the rl component) was sampled from it all the same, and counts.
    """
    if ce is None:
        return mask
    compared: Bools = ce == 0.0
    for stream in (np.ones(len(mask)) if rl is None else rl, ref_kl):
        if stream is not None:
            compared = compared | (stream != 0.0)
    return mask & compared


def join(samples: list[Sample], traces: list[Sample], name: str) -> list[str]:
    """Give each sample the group, version, reward and finish reason of the trace with exactly its tokens.

    Where several traces have the same tokens, only what they agree on is taken. ``name`` is the file they come from.

    Returns:
        What to say of it.
    """
    by_tokens: dict[bytes, list[Sample]] = {}
    for trace in traces:
        by_tokens.setdefault(trace.tokens, []).append(trace)
    found = Counter({"joined": 0, "shared": 0})
    for one in samples:
        candidates = by_tokens.get(one.tokens, [])
        found["joined"] += bool(candidates)
        found["shared"] += len(candidates) > 1
        for key in _FROM_TRACE:
            values = {trace.row.get(key) for trace in candidates}
            if len(values) == 1:
                value = values.pop()
                one.row[key] = one.row.get(key) if value is None else value
    said = [f"{found['joined']} of {len(samples)} sequences joined with {name} by their token ids"]
    if found["shared"]:
        said.append(f"{found['shared']} of them have the tokens of several rows there and got only what those agree on")
    return said


def name_groups(samples: Iterable[Sample], step: int) -> int:
    """Sequences without a group join the others of their step with exactly their prompt tokens; returns how many."""
    unnamed = [one for one in samples if one.row["group_id"] is None]
    for one in unnamed:
        digest = hashlib.blake2b(one.row["prompt_ids"].tobytes(), digest_size=6).hexdigest()
        one.row["group_id"] = f"step{step}-prompt-{digest}"
    return len(unnamed)


def zeros(samples: list[Sample], key: str) -> int:
    """Counted tokens whose log-prob is exactly 0.0; where all of the step's are, they were never computed: -1.

    Those are then taken out of the rows.
    """
    known = [(one, one.row[key][one.row["loss_mask"] > 0]) for one in samples if one.row.get(key) is not None]
    total, exact = sum(len(values) for _, values in known), sum(int((values == 0.0).sum()) for _, values in known)
    if total and exact == total:
        for one, _ in known:
            one.row[key] = None
        return -1
    return exact
