"""Each chosen step -> what of it is scored, under which weights, in which units."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.assemble import halves
from mismatch_probe.errors import BadFileError
from mismatch_probe.resolve import StepCheckpoints, set_aside
from mismatch_probe.run import Bools, Ints, Rollouts, Run, Step
from mismatch_probe.scoring.plan import forward_tokens
from mismatch_probe.scoring.units import Unit
from mismatch_probe.selection import limit_sequences


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: its sequences (those set aside are gone), its checkpoints, and the units that are to be scored.

    ``half`` is 0 or 1 for each sequence where prompt groups are not halved as in ``assemble.halves``, (n,). ``look``
    numbers the parts of a step that is scored part by part.
    """

    step: Step
    rollouts: Rollouts
    checkpoints: StepCheckpoints
    trainer_version: int
    units: list[Unit]
    half: Ints | None = None
    look: int = 0

    @property
    def tokens(self) -> int:
        """Response tokens, counted or not."""
        return len(self.rollouts.response.values)

    @property
    def forward_tokens(self) -> int:
        """Tokens that go through a network, each once for each set of weights."""
        return forward_tokens(self.units)


@dataclass(frozen=True)
class Planning:
    """How steps are planned.

    ``limit`` and ``seed``: sequences a step, drawn by seed, None for all. ``tolerant``, ``strict``, ``nearest``: as the
    options of ``decompose``. ``unit_tokens``: counted tokens of a unit. ``gradient``: of a step's sequences the tokens
    whose gradients are compared, (tokens,); None for none. ``whole`` False leaves the units to ``Planner.part``.
    """

    limit: int | None
    seed: int
    tolerant: bool
    strict: bool
    nearest: bool
    unit_tokens: int
    gradient: Callable[[Rollouts, int], Bools] | None
    whole: bool = True


class Planner:
    """Plans the steps of a run, one when it is asked for; every step is read once before the first is planned.

    Args:
        run: where the rollouts and checkpoints are.
        options: see there.
        say: called with what the user must know of a step's files.
    """

    def __init__(self, run: Run, options: Planning, say: Callable[[str], None]) -> None:
        self._run, self._options, self._say = run, options, say

    def plans(self, steps: Sequence[Step]) -> Iterator[StepPlan]:
        """One plan a step, in order.

        Raises:
            BadFileError, CheckpointError: as their names say.
        """
        repeated = self._repeated(steps)
        for step in steps:
            yield self._plan(step, repeated)

    def _plan(self, step: Step, repeated: frozenset[bytes]) -> StepPlan:
        options = self._options
        rollouts = self._load(step)
        version = self._run.trainer_version(step.index)
        checkpoints = StepCheckpoints(self._run, rollouts, version, options.tolerant, options.nearest)
        rollouts = self._set_aside(rollouts, checkpoints, step)
        for notice in (*rollouts.notices, *checkpoints.problems, *checkpoints.approximations, *checkpoints.notes):
            self._say(notice)
        units: list[Unit] = []
        if self._run.trainer_checkpoints is not None and options.whole:
            gradient = None if options.gradient is None else options.gradient(rollouts, step.index)
            recurring = np.array([mark in repeated for mark in _marks(rollouts)], dtype=np.bool_)
            units = checkpoints.units(
                step.index, rollouts, halves(rollouts), options.unit_tokens, gradient=gradient, recurring=recurring
            )
        return StepPlan(step, rollouts, checkpoints, version, units)

    def part(self, plan: StepPlan, rows: Ints, half: Ints, look: int, gradient: bool) -> StepPlan:
        """Some sequences of a planned step, with their units.

        Args:
            plan: the whole step.
            rows: which of its sequences, (k,).
            half: 0 or 1 for each of them, by prompt group, (k,).
            look: its number.
            gradient: compare gradients here, where they are compared at all.
        """
        rollouts, options = plan.rollouts.take(rows), self._options
        units: list[Unit] = []
        if self._run.trainer_checkpoints is not None:
            wanted = options.gradient(rollouts, plan.step.index) if gradient and options.gradient else None
            units = plan.checkpoints.units(plan.step.index, rollouts, half, options.unit_tokens, gradient=wanted)
        return replace(plan, rollouts=rollouts, units=units, half=half, look=look)

    def _load(self, step: Step) -> Rollouts:
        rollouts = step.load()
        if self._options.limit is None:
            return rollouts
        return limit_sequences(rollouts, self._options.limit, self._options.seed, step.index)

    def _repeated(self, steps: Sequence[Step]) -> frozenset[bytes]:
        """Sequences that more than one of the steps hold, as when rollouts are replayed."""
        if len(steps) < 2 or self._run.trainer_checkpoints is None:
            return frozenset()
        seen = Counter(mark for step in steps for mark in set(_marks(self._load(step))))
        return frozenset(mark for mark, count in seen.items() if count > 1)

    def _set_aside(self, rollouts: Rollouts, checkpoints: StepCheckpoints, step: Step) -> Rollouts:
        kept = set_aside(rollouts, checkpoints, step.index)
        if self._options.strict and len(kept.rejected) > len(rollouts.rejected):
            first = kept.rejected[len(rollouts.rejected)]
            raise BadFileError(first.file, first.row, first.reason, "Drop --strict to set it aside")
        return kept


def _marks(rollouts: Rollouts) -> list[bytes]:
    """Digest of each sequence's tokens."""
    return [
        hashlib.blake2b(
            rollouts.prompt[row].tobytes() + b"|" + rollouts.response[row].tobytes(), digest_size=16
        ).digest()
        for row in range(len(rollouts))
    ]
