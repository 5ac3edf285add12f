"""Units scored one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mismatch_probe.checkpoints.fingerprint import Fingerprints
from mismatch_probe.errors import UsageError
from mismatch_probe.executors.plan import Callbacks, P
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.memory import out_of_memory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.parallel import Scorer, check_devices, leading
from mismatch_probe.scoring.plan import forward_passes
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import StepScores, joined
from mismatch_probe.scoring.units import Unit

LEAST_TOKENS = 16
"""Passes are not made smaller than this."""


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
        self._cache, self._base, self._callbacks = cache, base, callbacks
        self._networks = Networks(options, base, 2, callbacks.on_unusable, callbacks.on_notice)
        self._scorer: Scorer = UnitScorer(options, self._networks, callbacks.on_tokens)
        self._fingerprints = Fingerprints(None if cache is None else cache.folder / "weights.json", base)

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
            self._fingerprints.close()

    def _score(self, unit: Unit, after: Unit | None) -> StepScores:
        file = self._file(unit)
        found = self._cache.get(file) if self._cache is not None and file is not None else None
        if found is not None:
            self._callbacks.on_tokens(sum(tokens for _, tokens in forward_passes(unit)))
            return found
        if after is not None:
            self._fingerprints.ahead(after.paths)
        scores = self._score_in_memory(unit)
        # What is absent because it could not be loaded may be mended the next time.
        if self._cache is not None and file is not None and not self._networks.unusable.intersection(unit.paths):
            self._cache.put(file, scores)
        return scores

    def _file(self, unit: Unit) -> Path | None:
        if self._cache is None:
            return None
        prints = {path: self._fingerprints.of(path) for path in unit.paths}
        known = {path: found for path, found in prints.items() if found is not None}
        return self._cache.path(unit, known) if len(known) == len(prints) else None

    def _score_in_memory(self, unit: Unit) -> StepScores:
        """Score, with smaller passes where the memory does not hold those asked for."""
        while True:
            try:
                return self._scorer.score(unit)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._halve()

    def _halve(self) -> None:
        options = self._scorer.options
        tokens = options.max_tokens // 2
        if tokens < LEAST_TOKENS:
            raise UsageError(
                f"{options.torch_device()}: out of memory with passes of {options.max_tokens} tokens. "
                "Use a device with more memory, or a narrower --dtype"
            ) from None
        chunk = max(self._networks.vocab_size, options.chunk_elements // 2)
        self._scorer.options = replace(options, max_tokens=tokens, chunk_elements=chunk)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._callbacks.on_notice(
            f"{options.torch_device()}: out of memory; passes of {tokens} tokens from here on "
            f"(--max-tokens {tokens} begins with them)"
        )


def _with_next(plans: Iterable[P]) -> Iterator[tuple[P, P | None]]:
    """Each plan and the one that follows it."""
    held: P | None = None
    for plan in plans:
        if held is not None:
            yield held, plan
        held = plan
    if held is not None:
        yield held, None
