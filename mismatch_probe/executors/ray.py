"""Units scored on the machines of a Ray cluster; the cache, the order and the joining stay in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.errors import CheckpointError, UsageError
from mismatch_probe.executors.kept import KeptScores
from mismatch_probe.executors.plan import Callbacks, P
from mismatch_probe.executors.ray_worker import Outcome, Setup
from mismatch_probe.executors.scheduling import Schedule
from mismatch_probe.scoring.cache import ScoreCache, code_digest
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.plan import forward_tokens
from mismatch_probe.scoring.scores import StepScores, joined
from mismatch_probe.scoring.units import Unit

if TYPE_CHECKING:
    from mismatch_probe.executors.ray_pool import Pool

_LOOK = 1.0
"""Seconds between looks at what the cluster has room for."""


@dataclass(frozen=True)
class RayOptions:
    """Which cluster (None starts one on this machine), GPUs of a worker (None: 1 on CUDA), workers at most."""

    address: str | None = None
    gpus_per_worker: float | None = None
    workers: int | None = None


class _Held:
    """A plan whose units are being scored."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.units: list[Unit] = plan.units
        self.scores: dict[int, StepScores] = {}
        self.unusable: dict[int, dict[Path, str]] = {}

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.units)


class RayExecutor:
    """Scores units on workers, several plans at a time, and gives the plans in order.

    Args:
        options: device, dtype, temperature, bounds.
        base: the model below checkpoints that are adapters.
        cache: where scores are kept, by this process alone; None for nowhere.
        callbacks: whom to tell what.
        cluster: where the workers are.

    Raises:
        UsageError: Ray is not installed, or what is asked does not go with it.
    """

    def __init__(
        self,
        options: ScoringOptions,
        base: Path | None,
        cache: ScoreCache | None,
        callbacks: Callbacks,
        cluster: RayOptions,
    ) -> None:
        if find_spec("ray") is None:
            raise UsageError("--executor ray needs the package ray: pip install 'mismatch-probe[ray]'")
        if options.tensor_parallel > 1:
            raise UsageError("--executor ray with --tensor-parallel: a worker holds whole networks. Drop one of them")
        device = options.torch_device().type
        self._setup = Setup(options, base, callbacks.on_unusable is not None, device, code_digest())
        gpus = 1.0 if device == "cuda" else 0.0
        self._gpus = gpus if cluster.gpus_per_worker is None else cluster.gpus_per_worker
        self._cluster, self._callbacks = cluster, callbacks
        self._kept = KeptScores(cache, base)
        self._files: dict[int, Path | None] = {}
        self._places: dict[int, tuple[_Held, int]] = {}
        self._count = 0
        self._said: set[str | Path] = set()

    def run(self, plans: Iterable[P]) -> Iterator[tuple[P, StepScores]]:
        """As ``Executor.run``, but plans are taken as far ahead as the workers have use for."""
        from mismatch_probe.executors.ray_pool import Pool, connected

        try:
            with connected(self._cluster.address):
                pool = Pool(self._setup, self._gpus, self._cluster.workers)
                try:
                    yield from self._run(iter(plans), pool)
                finally:
                    pool.close()
        finally:
            self._kept.close()

    def _run(self, plans: Iterator[P], pool: Pool) -> Iterator[tuple[P, StepScores]]:
        schedule, held, more = Schedule(), deque[_Held](), True
        while more or held:
            room = pool.room
            # As many units wait as there are workers, and results that wait for an earlier step are as few.
            while more and schedule.waiting < room and len(held) < 2 * room + 1:
                plan = next(plans, None)
                if plan is None:
                    more = False
                else:
                    held.append(self._begin(plan, schedule))
            while held and held[0].complete:
                done = held.popleft()
                yield done.plan, self._joined(done)
            if schedule.waiting or schedule.busy:
                self._turn(schedule, pool)

    def _begin(self, plan: Any, schedule: Schedule) -> _Held:
        """Take a plan: what is kept counts as scored, the rest waits."""
        self._callbacks.on_plan(plan)
        held = _Held(plan)
        for number, unit in enumerate(held.units):
            file = self._kept.file(unit)
            found = self._kept.get(file)
            if found is not None:
                self._callbacks.on_tokens(forward_tokens([unit]))
                held.scores[number] = found
                continue
            self._count += 1
            self._files[self._count], self._places[self._count] = file, (held, number)
            schedule.put(self._count, unit)
        return held

    def _turn(self, schedule: Schedule, pool: Pool) -> None:
        """Give out units, wait for something to happen, and note it."""
        if schedule.waiting:
            pool.grow()
        while (given := schedule.give()) is not None:
            worker, key = given
            held, number = self._places[key]
            pool.score(worker, held.units[number])
        for event in pool.events(_LOOK):
            if event.outcome is not None:
                self._note(schedule.done(event.worker), event.outcome)
            elif not event.died:
                schedule.join(event.worker)
            elif schedule.knows(event.worker):
                schedule.leave(event.worker, event.blame)
                self._say(f"{event.worker} of the Ray cluster died; what it had is scored again")
        if pool.waits_long():
            self._say("no worker of the Ray cluster is free yet; waiting for its resources")

    def _note(self, key: int, outcome: Outcome) -> None:
        (held, number), file = self._places.pop(key), self._files.pop(key)
        for text in outcome.notices:
            self._say(text)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.scores is not None
        self._callbacks.on_tokens(outcome.tokens)
        held.scores[number], held.unusable[number] = outcome.scores, outcome.unusable
        # What is absent because it could not be loaded may be mended the next time.
        if not outcome.unusable:
            self._kept.put(file, outcome.scores)

    def _joined(self, held: _Held) -> StepScores:
        # Said in the order of units, whichever worker was first.
        for _, unusable in sorted(held.unusable.items()):
            for path, text in unusable.items():
                if path not in self._said and self._callbacks.on_unusable is not None:
                    self._said.add(path)
                    self._callbacks.on_unusable(CheckpointError(text))
        parts = [(unit.place, held.scores[number]) for number, unit in enumerate(held.units)]
        return joined(held.plan.tokens, parts)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._callbacks.on_notice(text)
