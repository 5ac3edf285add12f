"""Scans: which version, temperature and shift bring the logged log-probs closest to the rescored ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, Evidence, capped
from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.intervals import ClusterIntervals, group_sums, mean

SHIFTS = (-2, -1, 0, 1, 2)
BETTER = 0.7
"""A change of version, temperature or shift is believed where it leaves at most this share of what fewer leave."""
LEAST = 0.002
"""And where it takes away so many nats at least: below, kernels and rounding differ by as much."""


@dataclass(frozen=True)
class Candidate:
    """Weights that the sampler may have held: ``version`` None where they have no number, such as a reference model.

    ``whose`` says where the run has checkpoints of both: "sampler" or "trainer".
    """

    name: str
    version: int | None
    path: Path
    whose: str = ""


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


def unshifted(evidence: Evidence, shift: int, among: Bools) -> Floats:
    """The log's values moved to the tokens that they belong to, for the tokens ``among``; others as they are, (m,)."""
    sequence = evidence.tokens.sequence
    at = np.arange(len(sequence)) - shift
    inside = (at >= 0) & (at < len(sequence))
    at = np.clip(at, 0, max(0, len(sequence) - 1))
    moved = np.where(inside & (sequence[at] == sequence), evidence.tokens.sampler[at], np.nan)
    return np.where(among, moved, evidence.tokens.sampler)


class Window:
    """The scanned sequences of one step: |D| of their tokens under any reading.

    ``at`` (n,) are the places of all their tokens, ascending; ``slot`` (n,) where each is in the scan, -1 for nowhere.

    Args:
        evidence: the run.
        scan: its scan.
        mine: the log's places that count, (m,), of one step.
    """

    def __init__(self, evidence: Evidence, scan: Scan, mine: Bools) -> None:
        tokens, first = evidence.tokens, evidence.sequences.first
        inside = np.flatnonzero(mine[scan.tokens])
        rows = np.unique(tokens.sequence[scan.tokens[inside]])
        spans = [np.arange(first[row], first[row + 1]) for row in rows]
        self.at: Ints = np.concatenate([np.zeros(0, dtype=np.int64), *spans]).astype(np.int64)
        known = np.flatnonzero(np.isin(scan.tokens, self.at))
        self.slot = np.full(len(self.at), -1, dtype=np.int64)
        self.slot[np.searchsorted(self.at, scan.tokens[known])] = known
        self.sequence, self.group = tokens.sequence[self.at], evidence.group_of_token[self.at]
        # A masked token's log-prob says nothing, and a place that a shift brings in from outside is not counted either.
        self._counts = mine[self.at] & evidence.usable[self.at]
        self._sampler, self._scan = tokens.sampler[self.at], scan
        self.tried = np.flatnonzero(~np.isnan(scan.logprob[:, scan.declared][:, inside]).all(axis=1))

    def source(self, shift: int) -> tuple[Bools, Ints]:
        """Log places whose token at p + ``shift`` was scanned, (n,), and where those tokens are in the scan."""
        places = np.arange(len(self.at)) + shift
        inside = (places >= 0) & (places < len(self.at))
        places = np.clip(places, 0, max(0, len(self.at) - 1))
        slot = np.where(inside & (self.sequence[places] == self.sequence), self.slot[places], -1)
        there = self._counts & (slot >= 0)
        return there, slot[there]

    def gaps(self, shift: int) -> Floats:
        """Mean capped |D| of each reading at one shift, (1 + K, T): as claimed first, NaN where nothing is known."""
        there, slot = self.source(shift)
        sampler, scan = self._sampler[there], self._scan
        out = np.full((1 + len(scan.candidates), len(scan.temperatures)), np.nan)
        if not len(slot):
            return out
        named = scan.claimed[slot] >= 0
        claimed = scan.logprob[scan.claimed[slot[named]], :, slot[named]].T  # (T, n)
        out[0] = _means(claimed[None] - sampler[named])[0]
        out[1 + self.tried] = _means(scan.logprob[self.tried][:, :, slot] - sampler)
        return out

    def absolute(self, choice: Choice) -> Floats:
        """Capped |D| under one reading, (n,), NaN where it is unknown."""
        there, slot = self.source(choice.shift)
        scan = self._scan
        candidate = scan.claimed[slot] if choice.candidate is None else np.full(len(slot), choice.candidate)
        found = scan.logprob[candidate, choice.temperature, slot]
        out = np.full(len(self.at), np.nan)
        out[there] = np.where(candidate >= 0, capped(found - self._sampler[there]), np.nan)
        return out


def _means(difference: Floats) -> Floats:
    """Mean capped |D| over the last axis, NaN left out."""
    known = ~np.isnan(difference)
    total = np.minimum(np.abs(difference), CAP, where=known, out=np.zeros_like(difference)).sum(axis=-1)
    count = known.sum(axis=-1)
    out: Floats = np.divide(total, count, where=count > 0, out=np.full(total.shape, np.nan))
    return out


def fit_step(evidence: Evidence, scan: Scan, step: int, among: Bools | None = None) -> Fit | None:
    """The simplest reading of a step's tokens, or of those ``among``; None where none of them could be compared.

    Every combination of version, temperature and shift is tried. One with more changes is taken only where it leaves
    at most BETTER of the gap that the best one with fewer changes leaves, by LEAST nats, and beyond sampling error.
    """
    mine = evidence.step_of_token == step
    window = Window(evidence, scan, mine if among is None else mine & among)
    gaps = _readings(scan, window)
    claimed = Choice(None, scan.declared, 0)
    if not gaps:
        return None
    best = claimed if claimed in gaps else min(gaps, key=lambda choice: (choice.changes(scan.declared), gaps[choice]))
    ends = (0.0, 0.0)
    for changes in range(1, 4):
        rivals = [choice for choice in gaps if choice.changes(scan.declared) == changes]
        if not rivals:
            continue
        # Only the best of its kind matters: it is the one to beat what is simpler.
        rival = min(rivals, key=lambda choice: gaps[choice])
        if gaps[rival] <= BETTER * gaps[best] and gaps[best] - gaps[rival] >= LEAST:
            found = mean_difference(window.absolute(best), window.absolute(rival), window.group)
            if not found[0] <= 0:
                best, ends = rival, found
    others = [
        gap
        for choice, gap in gaps.items()
        if (choice.temperature, choice.shift) == (best.temperature, best.shift)
        and choice.candidate is not None
        and choice.candidate != best.candidate
    ]
    compared = int((~np.isnan(window.absolute(best))).sum())
    before = gaps.get(claimed, float("nan"))
    return Fit(step, best, before, gaps[best], *ends, min(others, default=float("nan")), compared)


def _readings(scan: Scan, window: Window) -> dict[Choice, float]:
    """The gap of every reading; a candidate that is the claimed one at every token is that reading already."""
    named = np.unique(scan.claimed[window.slot[window.slot >= 0]])
    everywhere = int(named[0]) if len(named) == 1 else None
    found: dict[Choice, float] = {}
    for shift in SHIFTS:
        for (row, temperature), gap in np.ndenumerate(window.gaps(shift)):
            candidate = None if row == 0 else int(row) - 1
            if not np.isnan(gap) and (candidate is None or candidate != everywhere):
                found[Choice(candidate, int(temperature), shift)] = float(gap)
    return found


def mean_difference(before: Floats, after: Floats, group: Ints) -> tuple[float, float]:
    """95 % interval of mean ``before`` - ``after`` over the tokens that both know, by prompt groups."""
    known = ~np.isnan(before) & ~np.isnan(after)
    names, number = np.unique(group[known], return_inverse=True)
    if len(names) < 2:
        return float("nan"), float("nan")
    sums = group_sums([(before - after)[known]], number.astype(np.int64), len(names))
    found = ClusterIntervals(len(names)).interval(sums, mean)
    return found.low, found.high
