"""Which steps and which sequences are analysed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from mismatch_probe.errors import UsageError
from mismatch_probe.run import Ints, Rollouts, Step

_RANGE = re.compile(r"(\d*)(?::(\d*))?(?::(\d+))?")


@dataclass(frozen=True)
class StepSelection:
    """Step numbers as the user wrote them with an ``option``: ``10:40:5`` (first, end, stride; end left out), ``7``,
    ``3,8,20:30``.
    """

    text: str
    option: str = "--steps"

    def __post_init__(self) -> None:
        for part in self.text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if not part.strip() or match is None or match.group(3) == "0":
                raise UsageError(
                    f"{self.option} {self.text}: {part!r} is not FIRST:END:STRIDE, as in 10:40:5, or a number"
                )

    def choose(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Steps of the run that are meant, ascending.

        Raises:
            UsageError: none is.
        """
        chosen = tuple(
            step for step in steps if any(_covers(part.strip(), step.index) for part in self.text.split(","))
        )
        if not chosen:
            there = f"{steps[0].index} to {steps[-1].index}" if steps else "none"
            raise UsageError(f"{self.option} {self.text}: the run has no such step (it has {there})")
        return chosen


def _covers(part: str, step: int) -> bool:
    if ":" not in part:
        return step == int(part)
    first, end, *stride = part.split(":")
    start = int(first or 0)
    return start <= step and (not end or step < int(end)) and (step - start) % (int(stride[0]) if stride else 1) == 0


def limit_sequences(rollouts: Rollouts, limit: int, seed: int, step: int) -> Rollouts:
    """Whole prompt groups, drawn by seed, up to ``limit`` sequences (at least one group)."""
    return rollouts.take(limited_rows(rollouts, limit, seed, step))


def limited_rows(rollouts: Rollouts, limit: int, seed: int, step: int) -> Ints:
    """Rows of ``limit_sequences``, ascending."""
    if len(rollouts) <= limit:
        return np.arange(len(rollouts), dtype=np.int64)
    group = rollouts.group_of_sequence
    size = np.bincount(group)
    order = np.random.default_rng([seed, step]).permutation(len(size))
    taken = order[: max(1, int((np.cumsum(size[order]) <= limit).sum()))]
    return np.flatnonzero(np.isin(group, taken)).astype(np.int64)
