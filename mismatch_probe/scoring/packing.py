"""Which tokens go through the network together: packed without padding, each prompt once for all its responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mismatch_probe.run import Bools, Ints, Ragged


@dataclass(frozen=True)
class Trunk:
    """A prompt, or a whole sequence where nobody shares its prompt: [start, stop) of the packed row.

    ``branches`` are the (start, stop) of the responses that continue it; each begins at the place after its end.
    ``length`` is the trunk's in tokens. With ``keep`` the passes that follow continue it too; with ``kept`` it was in
    an earlier pass, and no token of it is in this one (start == stop).
    """

    start: int
    stop: int
    length: int
    branches: tuple[tuple[int, int], ...] = ()
    keep: bool = False
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Pack:
    """One forward pass.

    ``ids`` and ``places`` (N,) are the tokens and their positions in their sequences. The state at ``source`` (m,) of
    the packed row predicts the wanted token number ``target`` (m,), counted over all wanted tokens. ``rows`` are the
    sequences whose responses are in it.
    """

    ids: Ints
    places: Ints
    trunks: tuple[Trunk, ...]
    source: Ints
    target: Ints
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Row:
    """The part of one sequence that is run: its response up to the last wanted token, that one left out."""

    number: int
    ids: Ints
    wanted: Ints
    target: Ints


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences with the same prompt."""

    prompt: Ints
    rows: tuple[_Row, ...]

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(row.ids) for row in self.rows)


def packs(prompt: Ragged, response: Ragged, wanted: Bools, max_tokens: int) -> Iterator[Pack]:
    """Cut sequences into passes of at most ``max_tokens`` tokens, the largest prompt groups first.

    Largest first finds a lack of memory at once. A group that is too large is cut into passes that share its prompt's
    keys and values; a prompt or response that alone is longer than the budget goes as it is.

    Args:
        prompt, response: the sequences.
        wanted: response tokens whose hidden states are wanted, (tokens,).
        max_tokens: tokens of one pass.
    """
    waiting: list[_Group] = []
    for group in sorted(_groups(prompt, response, wanted), key=lambda group: -group.size):
        if group.size > max_tokens:
            yield from _cut(group, max_tokens)
            continue
        if sum(other.size for other in waiting) + group.size > max_tokens:
            yield _pack(waiting)
            waiting = []
        waiting.append(group)
    if waiting:
        yield _pack(waiting)


def unique_tokens(prompt: Ragged, response: Ragged, wanted: Bools) -> int:
    """Tokens that ``packs`` runs."""
    return sum(group.size for group in _groups(prompt, response, wanted))


def sharing_rows(prompt: Ragged, response: Ragged, wanted: Bools, max_tokens: int) -> Ints:
    """Sequences that share a pass with another one, ascending."""
    shared = [row for pack in packs(prompt, response, wanted, max_tokens) if len(pack.rows) > 1 for row in pack.rows]
    return np.sort(np.array(shared, dtype=np.int64))


def _groups(prompt: Ragged, response: Ragged, wanted: Bools) -> list[_Group]:
    """Sequences that hold a wanted token, by prompt, in the order of first occurrence."""
    target = np.cumsum(wanted) - 1
    found: dict[bytes, list[_Row]] = {}
    for row in range(len(response)):
        start, stop = response.offsets[row], response.offsets[row + 1]
        own = np.flatnonzero(wanted[start:stop])
        if len(own):
            ids = response.values[start : start + own[-1]]
            found.setdefault(prompt[row].tobytes(), []).append(_Row(row, ids, own, target[start + own]))
    return [_Group(np.frombuffer(ids, dtype=np.int64), tuple(rows)) for ids, rows in found.items()]


def _cut(group: _Group, max_tokens: int) -> Iterator[Pack]:
    """The passes of one group that is larger than a pass may be."""
    batches: list[list[_Row]] = []
    room = max_tokens - len(group.prompt)
    for row in sorted(group.rows, key=lambda row: -len(row.ids)):
        if not batches or (len(row.ids) and room < len(row.ids)):
            batches.append([])
            room = max_tokens - (len(group.prompt) if len(batches) == 1 else 0)
        batches[-1].append(row)
        room -= len(row.ids)
    for number, rows in enumerate(batches):
        later = [row for batch in batches[1:] for row in batch] if number == 0 else []
        builder = _Builder()
        builder.add(_Group(group.prompt, tuple(rows)), later, keep=len(batches) > 1 and number == 0, kept=number > 0)
        yield builder.pack()


def _pack(groups: list[_Group]) -> Pack:
    builder = _Builder()
    for group in groups:
        builder.add(group)
    return builder.pack()


class _Builder:
    """Lays groups one after another into a packed row."""

    def __init__(self) -> None:
        self._ids: list[Ints] = []
        self._places: list[Ints] = []
        self._source: list[Ints] = []
        self._target: list[Ints] = []
        self._trunks: list[Trunk] = []
        self._rows: list[int] = []
        self._length = 0

    def add(self, group: _Group, later: list[_Row] | None = None, keep: bool = False, kept: bool = False) -> None:
        """Add one group; the first tokens of rows that come ``later`` hang on the trunk, which is here."""
        length = len(group.prompt)
        self._rows += [row.number for row in group.rows]
        if len(group.rows) == 1 and not keep and not kept:
            row = group.rows[0]
            start = self._put(np.concatenate([group.prompt, row.ids]), 0)
            self._source.append(start + length + row.wanted - 1)
            self._target.append(row.target)
            self._trunks.append(Trunk(start, self._length, self._length - start))
            return
        start = self._length if kept else self._put(group.prompt, 0)
        stop = self._length
        branches = []
        for row in (*group.rows, *(later or ())):
            first = row.wanted == 0
            if not kept:
                self._source.append(np.full(int(first.sum()), stop - 1))
                self._target.append(row.target[first])
        for row in group.rows:
            rest = row.wanted > 0
            begin = self._put(row.ids, length)
            self._source.append(begin + row.wanted[rest] - 1)
            self._target.append(row.target[rest])
            if self._length > begin:
                branches.append((begin, self._length))
        self._trunks.append(Trunk(start, stop, length, tuple(branches), keep, kept))

    def _put(self, ids: Ints, place: int) -> int:
        start = self._length
        self._ids.append(ids)
        self._places.append(np.arange(place, place + len(ids)))
        self._length += len(ids)
        return start

    def pack(self) -> Pack:
        """What was laid down."""
        return Pack(
            ids=np.concatenate(self._ids),
            places=np.concatenate(self._places),
            trunks=tuple(self._trunks),
            source=np.concatenate(self._source),
            target=np.concatenate(self._target),
            rows=tuple(self._rows),
        )
