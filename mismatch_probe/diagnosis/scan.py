"""Scans: which version, temperature and shift bring the logged log-probs closest to the rescored ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, Evidence
from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.intervals import ClusterIntervals, group_sums, mean

SHIFTS = (-2, -1, 0, 1, 2)
BETTER = 0.7
"""A change of version, temperature or shift is believed where it leaves at most this share of what fewer leave."""
LEAST = 0.002
"""And where it takes away so many nats at least: below, kernels and rounding differ by as much."""


@dataclass(frozen=True)
class Candidate:
    """Weights that the sampler may have held: ``version`` None where they have no number, such as a reference model."""

    name: str
    version: int | None
    path: Path


@dataclass(frozen=True, eq=False)
class Scan:
    """Rescored log-probs of some tokens under every candidate and temperature.

    ``tokens`` (n,) are places in ``Evidence.tokens``, ascending, whole sequences. ``logprob`` and ``entropy`` are
    (K, T, n), NaN where a candidate was not tried. ``claimed`` (n,) is the candidate that the run names for a token, -1
    for none. ``declared`` is the place of the declared temperature in ``temperatures``. ``unread`` says which
    candidates could not be loaded.
    """

    candidates: tuple[Candidate, ...]
    temperatures: tuple[float, ...]
    declared: int
    tokens: Ints
    logprob: Floats
    entropy: Floats
    claimed: Ints
    unread: tuple[str, ...] = ()

    def spread(self, total: int, candidate: int, temperature: int) -> Floats:
        """One candidate's log-probs at their places among ``total`` tokens, NaN elsewhere, (total,)."""
        out = np.full(total, np.nan)
        out[self.tokens] = self.logprob[candidate, temperature]
        return out

    def spread_claimed(self, total: int, temperature: int) -> Floats:
        """Each token's log-prob under the candidate that the run names for it, (total,)."""
        out = np.full(total, np.nan)
        known = np.flatnonzero(self.claimed >= 0)
        out[self.tokens[known]] = self.logprob[self.claimed[known], temperature, known]
        return out


@dataclass(frozen=True)
class Choice:
    """One way to read the log: ``candidate`` None means as the run claims, token by token."""

    candidate: int | None
    temperature: int
    shift: int

    def changes(self, declared: int) -> int:
        """How many of the three differ from what is claimed."""
        return (self.candidate is not None) + (self.temperature != declared) + (self.shift != 0)


@dataclass(frozen=True)
class Fit:
    """The simplest reading of one step that explains it.

    ``gap_claimed`` and ``gap`` are mean capped |D| as claimed and as chosen, nats; ``low`` and ``high`` hold the
    difference of the two, by prompt groups, in 95 % of samples (NaN: one group). ``gap_others`` is the smallest gap of
    another candidate at the chosen temperature and shift, NaN where there is none.
    """

    step: int
    choice: Choice
    gap_claimed: float
    gap: float
    low: float
    high: float
    gap_others: float
    tokens: int


def shifted(sequence: Ints, sampler: Floats, stale: Floats, shift: int) -> Floats:
    """D when the log-prob logged at place p belongs to the token at p + shift, at the places of the log, (m,).

    Args:
        sequence: of each token; a shift never leaves its sequence, (m,).
        sampler: as logged, (m,).
        stale: as rescored, (m,).
        shift: in tokens.
    """
    if not shift:
        return stale - sampler
    out = np.full(len(stale), np.nan)
    log, token = (slice(None, -shift), slice(shift, None)) if shift > 0 else (slice(-shift, None), slice(None, shift))
    same = sequence[log] == sequence[token]
    out[log][same] = stale[token][same] - sampler[log][same]
    return out


def unshifted(evidence: Evidence, shift: int, among: Bools) -> Floats:
    """The log's values moved to the tokens that they belong to, for the tokens ``among``; others as they are, (m,)."""
    sequence = evidence.tokens.sequence
    at = np.arange(len(sequence)) - shift
    inside = (at >= 0) & (at < len(sequence))
    at = np.clip(at, 0, max(0, len(sequence) - 1))
    moved = np.where(inside & (sequence[at] == sequence), evidence.tokens.sampler[at], np.nan)
    return np.where(among, moved, evidence.tokens.sampler)


class _StepReadings:
    """D of one step's tokens, or of those ``among``, under any reading, (n,); NaN where it is not known.

    Tokens lie sequence after sequence, so those of a step are one run of places.
    """

    def __init__(self, evidence: Evidence, scan: Scan, step: int, among: Bools | None) -> None:
        mine = np.flatnonzero(evidence.step_of_token == step)
        self._at = slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else slice(0, 0)
        self._scan, self._size = scan, len(mine)
        self._sequence = evidence.tokens.sequence[self._at]
        self._sampler = evidence.tokens.sampler[self._at]
        wanted = evidence.usable if among is None else evidence.usable & among
        # A masked token's log-prob says nothing, and a place that a shift brings in from outside is not counted either.
        self._wanted = wanted[self._at]
        self.group = evidence.group_of_token[self._at]
        low, high = np.searchsorted(scan.tokens, (self._at.start, self._at.stop))
        self._inside = slice(int(low), int(high))
        self._place = scan.tokens[self._inside] - self._at.start
        self.claimed = scan.claimed[self._inside]

    def choices(self) -> Iterator[Choice]:
        """Readings to try; a candidate that is the claimed one at every token is that reading already."""
        named = np.unique(self.claimed)
        everywhere = int(named[0]) if len(named) == 1 else None
        tried = np.flatnonzero(~np.isnan(self._scan.logprob[:, 0, self._inside]).all(axis=1))
        for temperature, shift in product(range(len(self._scan.temperatures)), SHIFTS):
            yield Choice(None, temperature, shift)
            yield from (Choice(int(c), temperature, shift) for c in tried if c != everywhere)

    def capped(self, choice: Choice) -> Floats:
        """|D|, at most CAP each."""
        logprob = self._scan.logprob[:, choice.temperature, self._inside]
        if choice.candidate is None:
            own = logprob[self.claimed, np.arange(len(self.claimed))]
            found = np.where(self.claimed >= 0, own, np.nan)
        else:
            found = logprob[choice.candidate]
        stale = np.full(self._size, np.nan)
        stale[self._place] = found
        difference = shifted(self._sequence, self._sampler, stale, choice.shift)
        return np.where(self._wanted, np.minimum(np.abs(difference), CAP), np.nan)


def fit_step(evidence: Evidence, scan: Scan, step: int, among: Bools | None = None) -> Fit | None:
    """The simplest reading of a step's tokens, or of those ``among``; None where none of them could be compared.

    Every combination of version, temperature and shift is tried. One with more changes is taken only where it leaves
    at most BETTER of the gap that the best one with fewer changes leaves, by LEAST nats, and beyond sampling error.
    """
    readings = _StepReadings(evidence, scan, step, among)
    absolute = {choice: readings.capped(choice) for choice in readings.choices()}
    gaps = {choice: _mean(found) for choice, found in absolute.items()}
    gaps = {choice: gap for choice, gap in gaps.items() if not np.isnan(gap)}
    claimed = Choice(None, scan.declared, 0)
    if not gaps:
        return None
    best = claimed if claimed in gaps else min(gaps, key=lambda choice: (choice.changes(scan.declared), gaps[choice]))
    ends = (0.0, 0.0)
    for changes in range(1, 4):
        for rival in sorted((c for c in gaps if c.changes(scan.declared) == changes), key=lambda c: gaps[c]):
            # Only the best of its kind matters: it is the one to beat what is simpler.
            if gaps[rival] <= BETTER * gaps[best] and gaps[best] - gaps[rival] >= LEAST:
                found = _difference(absolute[best], absolute[rival], readings.group)
                if not found[0] <= 0:
                    best, ends = rival, found
            break
    others = [
        gap
        for choice, gap in gaps.items()
        if (choice.temperature, choice.shift) == (best.temperature, best.shift)
        and choice.candidate is not None
        and choice.candidate != best.candidate
    ]
    compared = int((~np.isnan(absolute[best])).sum())
    before = gaps.get(claimed, float("nan"))
    return Fit(step, best, before, gaps[best], *ends, min(others, default=float("nan")), compared)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _difference(before: Floats, after: Floats, group: Ints) -> tuple[float, float]:
    """95 % interval of mean ``before`` - ``after`` over the tokens that both know, by prompt groups."""
    known = ~np.isnan(before) & ~np.isnan(after)
    names, number = np.unique(group[known], return_inverse=True)
    if len(names) < 2:
        return float("nan"), float("nan")
    sums = group_sums([(before - after)[known]], number.astype(np.int64), len(names))
    found = ClusterIntervals(len(names)).interval(sums, mean)
    return found.low, found.high
