"""Which version fits each token of a sequence: the cheapest path over versions, judged on tokens it did not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, capped
from mismatch_probe.run import Bools, Floats, Ints

OUTLIER, SWITCH, LEAVE = 4.0, 6.0, 3.0
"""In units of the noise: what a token counts at most, what a change of version costs, what leaving the label costs."""
_FLOOR = 0.002


@dataclass(frozen=True, eq=False)
class Paths:
    """``state`` (n,) is the reading of each token, 0 as claimed, from 1 on the candidates tried, -1 unknown.

    ``held_out`` (n,) is the reading that the other tokens of its sequence choose for each token, -1 unknown: its |D|
    there is that of a token that had no part in the choice.
    """

    state: Ints
    held_out: Ints


def find_paths(difference: Floats, sequence: Ints) -> Paths:
    """The versions along each sequence.

    Args:
        difference: D of each token under each reading, as claimed first, (S, n), NaN unknown.
        sequence: of each token, ascending, (n,).
    """
    absolute = capped(difference)
    known = np.asarray(~np.isnan(absolute).all(axis=0), dtype=np.bool_)
    cost = np.where(np.isnan(absolute), CAP, absolute)
    cost[:, ~known] = 0.0
    noise = _noise(cost, sequence, known)
    state = _path(cost, sequence, known, noise)
    for _ in range(2):
        noise = max(_FLOOR, float(cost[state, np.arange(len(sequence))][known].mean()))
        state = _path(cost, sequence, known, noise)
    held_out = np.full(len(sequence), -1, dtype=np.int64)
    half = np.arange(len(sequence)) % 2 == 0
    for seen in (half, ~half):
        chosen = _path(cost, sequence, known & seen, noise)
        told = known & ~seen
        held_out[told] = chosen[told]
    return Paths(np.where(known, state, -1), held_out)


def _noise(cost: Floats, sequence: Ints, known: Bools) -> float:
    """Mean |D| when every sequence has the one version that fits it best."""
    _, number = np.unique(sequence, return_inverse=True)
    sums = np.array([np.bincount(number, weights=row) for row in cost])
    return max(_FLOOR, float(sums.min(axis=0).sum() / max(1, known.sum())))


def _path(cost: Floats, sequence: Ints, seen: Bools, noise: float) -> Ints:
    """The cheapest path of every sequence over the tokens that are ``seen``, (n,)."""
    names, row = np.unique(sequence, return_inverse=True)
    start = np.searchsorted(row, np.arange(len(names)))
    place = np.arange(len(row)) - start[row]
    longest = int(place.max()) + 1 if len(place) else 0
    table = np.zeros((longest, len(names), len(cost)))
    table[place, row] = np.where(seen, np.minimum(cost, OUTLIER * noise), 0.0).T
    total = np.where(np.arange(len(cost)) > 0, LEAVE * noise, 0.0)[None] + table[0]
    came_from = np.zeros(table.shape, dtype=np.int64)
    stay = np.broadcast_to(np.arange(len(cost)), total.shape)
    for at in range(1, longest):
        best = total.argmin(axis=1)
        moved = total[np.arange(len(names)), best] + SWITCH * noise
        came_from[at] = np.where(moved[:, None] < total, best[:, None], stay)
        total = np.minimum(total, moved[:, None]) + table[at]
    out = np.zeros((longest, len(names)), dtype=np.int64)
    last = np.bincount(row, minlength=len(names)) - 1
    # Beyond its last token a sequence costs nothing, so the cheapest end is that of its last token.
    state = total.argmin(axis=1)
    for at in range(longest - 1, -1, -1):
        out[at] = state
        state = np.where(at <= last, came_from[at, np.arange(len(names)), state], state)
    found: Ints = out[place, row]
    return found
