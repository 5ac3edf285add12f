"""slime's weight versions -> how many rollouts had been trained when those weights were pushed to the engine.

The engine's number counts pushes since the program started, not updates: the weights that a start at rollout S loads
are pushed first and become "1", and so again "1" after every resume. Every further push adds one: after each rollout,
or in ``train_async.py`` after each ``--update-weights-interval``-th. Neither S nor the interval is in the dump. Both
are inferred here from the numbers themselves, and where more than one reading is possible the answer is None. What is
relied on: the newest number of a rollout falls only at a resume, and no program is resumed before one of its rollouts
could have carried its second push (that would read as one program that samples ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Numbering:
    """Turns (rollout id, engine's number) into a version, reading the numbers of other rollouts only when needed.

    Args:
        steps: rollout ids whose files are there, ascending.
        numbers: rollout id -> the engine's numbers in that file (a cached read), None where they are unreadable.
        written: rollout id -> when its file was written, in any unit.
        interval: ``--update-weights-interval``, None where no saved arguments tell it.
        synchronous: True where they say that each rollout is sampled after the push that follows the one before.
    """

    def __init__(
        self,
        steps: list[int],
        numbers: Callable[[int], frozenset[int] | None],
        written: Callable[[int], int],
        interval: int | None = None,
        synchronous: bool = False,
    ) -> None:
        self._steps, self._numbers, self._written = steps, numbers, written
        self._interval, self._synchronous = (1, True) if synchronous else (interval, False)

    def versions(self, step: int) -> tuple[Mapping[int, int], str]:
        """Version of each number in the rollout's file that has only one reading, and a remark ("" when none)."""
        own = self._numbers(step)
        if not own:
            return {}, ""
        if min(own) < 1 or max(own) > step + 1:
            return {}, _NOT_SLIMES
        # Since no push can come before its rollout, the newest possible number proves a start at rollout 0.
        if max(own) == step + 1:
            return {number: number - 1 for number in own}, ""
        before = [other for other in self._steps if other <= step]
        earlier = [other for other in before if self._written(other) <= self._written(step)]
        known, remark = self._read(step, own, before)
        if known and earlier != before:
            # A resumed program wrote some of them later than this one, or they were copied in any order.
            other_known, _ = self._read(step, own, earlier)
            agreed = dict(known.items() & other_known.items())
            return agreed, remark if len(agreed) == len(known) else _OUT_OF_ORDER
        return known, remark

    def _read(self, step: int, own: frozenset[int], before: list[int]) -> tuple[dict[int, int], str]:
        """As ``versions``, taking the files ``before`` (``step`` included) for those written one after the other."""
        start, seen, reason = self._start(step, before)
        if start is None or start < 0:
            return {}, reason
        if max(own) > step - start + 1:
            return {}, _NOT_SLIMES
        intervals = self._intervals(start, seen)
        known = {}
        for number in own:
            readings = {_weights(start, interval, number) for interval in intervals}
            if len(readings) == 1:
                known[number] = readings.pop()
        resumed = f"the run started, or was resumed, at rollout {start}, where the count begins at 1" if start else ""
        return known, resumed if len(known) == len(own) else _NO_INTERVAL

    def _start(self, step: int, before: list[int]) -> tuple[int | None, list[tuple[int, int]], str]:
        """Rollout at which the program began that sampled ``step``, (rollout, newest number) since, why it is None."""
        newest = max(self._numbers(step) or {0})
        if self._synchronous:
            return step + 1 - newest, [(step, newest)], _NOT_SLIMES
        start = self._first(before[0])
        # A resume lowers the numbers; within one update of the newest possible there is no room for one.
        if start is not None and newest >= step - start:
            return start, [(step, newest)], ""
        seen: list[tuple[int, int]] = []
        start, last, reason = None, 0, _NO_START
        for other in before:
            numbers = self._numbers(other)
            if not numbers:
                continue
            if not seen or max(numbers) < last:
                start, seen, reason = self._first(other), [], _NO_START
            elif start is not None and max(numbers) == last == 1 and _most_ahead(start, self._interval or 1, other) > 1:
                # Either the weights were not pushed for long, or the program began again: 1 says neither.
                start, reason = None, _STILL_ONE
            last = max(numbers)
            seen.append((other, last))
        return start, seen, reason

    def _first(self, step: int) -> int | None:
        """``step`` when its file can be the first of a program's: everything in it was sampled by the first push."""
        return step if self._numbers(step) == frozenset({1}) else None

    def _intervals(self, start: int, seen: list[tuple[int, int]]) -> list[int]:
        """Intervals between pushes under which every number seen could have been pushed by then."""
        if self._interval is not None:
            return [self._interval]
        last = max(step for step, _ in seen)
        return [
            interval
            for interval in range(1, last + 2)
            if all(newest <= _most(start, interval, step) for step, newest in seen)
        ]


def _most(start: int, interval: int, step: int) -> int:
    """Newest number that the samples of ``step`` can carry: the first push and those after it."""
    return 1 + step - start if interval == 1 else _most_ahead(start, interval, step)


def _most_ahead(start: int, interval: int, step: int) -> int:
    """The same under ``train_async.py``: a rollout is on its way before the push that waits for it, and misses it."""
    return 1 + max(0, (step - 1) // interval - start // interval)


def _weights(start: int, interval: int, number: int) -> int:
    return start if number == 1 else (start // interval + number - 1) * interval


_NOT_SLIMES = "the engine's version numbers are not slime's count of pushes"
_NO_START = (
    "the dump does not hold the first rollout after the program's start, so its count of pushes cannot be turned into "
    "versions"
)
_STILL_ONE = (
    "the engine's number stays 1 over several rollouts, of rare pushes or of a resume, so it cannot be turned into "
    "versions; a Megatron checkpoint beside the dump, which saves the arguments, tells the interval of pushes"
)
_OUT_OF_ORDER = (
    "files of earlier rollouts are newer than this one's, as after a resume that has not come this far, so the "
    "engine's count cannot be turned into versions"
)
_NO_INTERVAL = (
    "the engine's count of pushes fits several --update-weights-interval, so it cannot be turned into versions; keep a "
    "Megatron checkpoint, which saves the arguments, beside the dump"
)
