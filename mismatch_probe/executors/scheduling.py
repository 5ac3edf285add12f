"""Which unit goes to which worker, and what becomes of the units of a worker that died."""

from __future__ import annotations

from mismatch_probe.errors import UsageError
from mismatch_probe.scoring.units import Unit

MOST_KILLS = 3
"""A unit whose workers died so often is not given out again."""


class Schedule:
    """Units that wait, and workers by name, each with at most one unit.

    A worker gets the earliest unit whose checkpoints it has loaded, then the earliest whose checkpoints no other worker
    has, then the earliest.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Unit] = {}
        self._units: dict[int, Unit] = {}
        self._given: dict[str, int | None] = {}
        self._loaded: dict[str, frozenset[str]] = {}
        self._kills: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """Units that no worker has."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Units that a worker has."""
        return sum(key is not None for key in self._given.values())

    def put(self, key: int, unit: Unit) -> None:
        """A unit waits; keys grow in the order of units."""
        self._units[key] = self._waiting[key] = unit

    def join(self, worker: str) -> None:
        """A worker is ready."""
        self._given[worker], self._loaded[worker] = None, frozenset()

    def knows(self, worker: str) -> bool:
        """True from when a worker joined until it leaves."""
        return worker in self._given

    def give(self) -> tuple[str, int] | None:
        """The next idle worker and the key of the unit that it gets; None where there is no worker or no unit."""
        idle = [worker for worker, key in self._given.items() if key is None]
        if not idle or not self._waiting:
            return None
        # A worker that has loaded what some unit needs goes first, so that no other takes that unit from it.
        choices = [(self._rank(worker, key), worker) for worker in idle for key in self._waiting]
        (_, key), worker = min(choices)
        del self._waiting[key]
        self._given[worker], self._loaded[worker] = key, _weights(self._units[key])
        return worker, key

    def done(self, worker: str) -> int:
        """The worker has scored its unit; its key."""
        key = self._given[worker]
        assert key is not None
        self._given[worker] = None
        del self._units[key]
        self._kills.pop(key, None)
        return key

    def leave(self, worker: str, blame: bool) -> None:
        """A worker died; its unit waits again, before all later ones.

        Args:
            worker: which.
            blame: False where its whole node went, for which no unit is to blame.

        Raises:
            UsageError: the unit's workers died too often.
        """
        key = self._given.pop(worker)
        del self._loaded[worker]
        if key is None:
            return
        self._kills[key] = self._kills.get(key, 0) + blame
        unit = self._units[key]
        if self._kills[key] >= MOST_KILLS:
            raise UsageError(
                f"step {unit.step}, unit {unit.number} ({len(unit.response)} sequences): its worker died "
                f"{MOST_KILLS} times, as from lack of memory. See Ray's logs, or pass a smaller --max-tokens"
            )
        self._waiting = dict(sorted([*self._waiting.items(), (key, unit)]))

    def _rank(self, worker: str, key: int) -> tuple[int, int]:
        needs = _weights(self._units[key])
        if needs <= self._loaded[worker] and needs:
            return 0, key
        elsewhere = any(needs and needs <= loaded for name, loaded in self._loaded.items() if name != worker)
        return (2 if elsewhere else 1), key


def _weights(unit: Unit) -> frozenset[str]:
    return frozenset(map(str, unit.paths))
