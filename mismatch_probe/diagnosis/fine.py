"""The fine pass: which temperatures are tried for which candidates, and what that gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.scored import Scorer, scores_of
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Bools, Floats

WIDE = 0.02
"""Mean |D| of a step, nats, above which it is looked at more closely: bfloat16 on both sides gives .012 to .014."""


class FineTable:
    """What the fine pass found so far: log-probs and entropies by candidate, temperature and token, NaN elsewhere."""

    def __init__(
        self, evidence: Evidence, candidates: list[Candidate], grid: tuple[float, ...], wanted: Bools, scorer: Scorer
    ) -> None:
        self._evidence, self._candidates, self._grid, self._scorer = evidence, candidates, grid, scorer
        self._wanted = wanted
        self.tokens = np.flatnonzero(wanted)
        self._step = evidence.step_of_token[self.tokens]
        shape = (len(candidates), len(grid), len(self.tokens))
        self.logprob, self.entropy = np.full(shape, np.nan), np.full(shape, np.nan)
        self.unread: list[str] = []
        """What could not be loaded, and why."""

    def fill_all(self, chosen: Mapping[int, set[int]], named: Mapping[int, set[int]], declared: float) -> None:
        """Score what a step could mean: every temperature for the candidates that it names, few for the others.

        The others are tried as declared and at the temperature that fits the named ones best. Where that leaves a gap
        that numerics do not usually give, every temperature is tried for all.
        """
        whole = set(self._grid)

        def first(step: int, candidate: int) -> set[float]:
            return whole if candidate in named[step] or not named[step] else {declared}

        # Loading a network costs more than its few tokens, so one pass does all that is known to be needed.
        self._fill(chosen, first)
        best = {step: self._best(step, named[step]) for step in chosen if named[step]}
        others = {step: chosen[step] - named[step] for step in best}
        self._fill({step: others[step] for step in best if best[step] != declared}, lambda step, _: {best[step]})
        wide = {step: others[step] for step in best if self._gap(step) > WIDE}
        self._fill(wide, lambda step, _: whole - {declared, best[step]})

    def _fill(self, tried: Mapping[int, set[int]], temperatures: Callable[[int, int], set[float]]) -> None:
        """Score some candidates at some steps; steps of one set of temperatures go together."""
        for number in range(len(self._candidates)):
            together: dict[tuple[float, ...], list[int]] = {}
            for step, candidates in tried.items():
                if number in candidates:
                    together.setdefault(tuple(sorted(temperatures(step, number))), []).append(step)
            for grid, steps in together.items():
                at = np.isin(self._step, steps)
                if at.any() and grid:
                    asked = self._wanted & np.isin(self._evidence.step_of_token, steps)
                    try:
                        scores = scores_of(self._evidence, asked, asked, self._candidates[number], grid, self._scorer)
                    except CheckpointError as error:
                        if (said := f"not tried in the scans: {error}") not in self.unread:
                            self.unread.append(said)
                        continue
                    places = [self._grid.index(temperature) for temperature in grid]
                    for row, place in enumerate(places):
                        self.logprob[number, place, at] = scores.logprob[row]
                        self.entropy[number, place, at] = scores.entropy[row]

    def _best(self, step: int, named: set[int]) -> float:
        """The temperature at which the named candidates fit a step best, wherever each is tried."""
        mine = self._step == step
        found = self._absolute(mine)[sorted(named)]
        known = ~np.isnan(found).all(axis=(0, 2))
        if not known.any():
            return self._evidence.temperature  # none of them could be loaded
        gaps = np.full(len(self._grid), np.inf)
        gaps[known] = np.nanmean(found[:, known], axis=(0, 2))
        return self._grid[int(gaps.argmin())]

    def _gap(self, step: int) -> float:
        """The smallest mean |D| of the step under what was tried."""
        found = self._absolute(self._step == step)
        known = ~np.isnan(found).all(axis=2)
        return float(np.nanmean(found[known], axis=1).min()) if known.any() else 0.0

    def _absolute(self, mine: Bools) -> Floats:
        """Capped |D|, (K, T, n)."""
        return capped(self.logprob[:, :, mine] - self._evidence.tokens.sampler[self.tokens[mine]])
