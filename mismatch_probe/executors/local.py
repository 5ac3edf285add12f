"""Units scored one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mismatch_probe.executors.kept import KeptScores
from mismatch_probe.executors.plan import Callbacks, P
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.memory import in_memory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.parallel import Scorer, check_devices, leading
from mismatch_probe.scoring.plan import forward_tokens
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import StepScores, joined
from mismatch_probe.scoring.units import Unit


class LocalExecutor:
    """Scores units in order; the checkpoint that comes next is read from disk while the current one scores.

    Args:
        options: device, dtype, temperature, bounds.
        base: the model below checkpoints that are adapters.
        cache: where scores are kept; None for nowhere.
        callbacks: whom to tell what.
    """

    def __init__(
        self, options: ScoringOptions, base: Path | None, cache: ScoreCache | None, callbacks: Callbacks
    ) -> None:
        check_devices(options)
        self._base, self._callbacks = base, callbacks
        self._networks = Networks(options, base, 2, callbacks.on_unusable, callbacks.on_notice)
        self._scorer: Scorer = UnitScorer(options, self._networks, callbacks.on_tokens)
        self._kept = KeptScores(cache, base)

    def run(self, plans: Iterable[P]) -> Iterator[tuple[P, StepScores]]:
        """As ``Executor.run``."""
        try:
            with leading(self._scorer, self._base, self._callbacks.on_unusable is not None) as self._scorer:
                for plan, following in _with_next(plans):
                    self._callbacks.on_plan(plan)
                    units = plan.units
                    upcoming = [*units[1:], *(following.units[:1] if following is not None else [])]
                    after = zip(units, [*upcoming, None], strict=False)
                    yield plan, joined(plan.tokens, [(unit.place, self._score(unit, then)) for unit, then in after])
        finally:
            self._kept.close()

    def _score(self, unit: Unit, after: Unit | None) -> StepScores:
        file = self._kept.file(unit)
        found = self._kept.get(file)
        if found is not None:
            self._callbacks.on_tokens(forward_tokens([unit]))
            return found
        if after is not None:
            self._kept.ahead(after.paths)
        scores = in_memory(self._scorer, self._networks, lambda: self._scorer.score(unit), self._callbacks.on_notice)
        # What is absent because it could not be loaded may be mended the next time.
        if not self._networks.unusable.intersection(unit.paths):
            self._kept.put(file, scores)
        return scores


def _with_next(plans: Iterable[P]) -> Iterator[tuple[P, P | None]]:
    """Each plan and the one that follows it."""
    held: P | None = None
    for plan in plans:
        if held is not None:
            yield held, plan
        held = plan
    if held is not None:
        yield held, None
