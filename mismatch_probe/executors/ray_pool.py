"""Workers on a Ray cluster, as many as it has room for at the moment."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from mismatch_probe.errors import UsageError
from mismatch_probe.executors.ray_worker import Outcome, Setup, Worker
from mismatch_probe.scoring.units import Unit

_api: Any = ray
"""Some of Ray's functions have no types."""
_PATIENCE = 30.0
"""Seconds without a worker after which the user is told."""
_STARTS = 3
"""So many workers may die before one is ready."""
_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, OutOfMemoryError)


class _Actor(Worker):
    def hello(self) -> tuple[str | None, str]:
        """Why it cannot serve, and its node."""
        return self.check(), str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True)
class Event:
    """A worker is ready, gave an outcome, or died; ``blame`` where its node is not known to be gone."""

    worker: str
    outcome: Outcome | None = None
    died: bool = False
    blame: bool = False


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to a cluster, which ends at exit; without an address a cluster on this machine, which ends too.

    Raises:
        UsageError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None and "RAY_ADDRESS" not in os.environ:
        options |= {"address": "local", "include_dashboard": False}
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--address {address}: no Ray cluster: {reason}. Start one with: ray start --head") from None
    try:
        yield
    finally:
        ray.shutdown()


class Pool:
    """Workers by name; ``grow`` starts those that the cluster now has room for.

    Args:
        setup: what each is told.
        gpus: GPUs of one worker, a part of one allowed; 0 for one CPU core.
        most: workers at most, None for as many as fit.
    """

    def __init__(self, setup: Setup, gpus: float, most: int | None) -> None:
        self._setup, self._gpus, self._most = ray.put(setup), gpus, most
        self._class = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        self._calls: dict[Any, str] = {}
        self._started = self._failed = 0
        self._alone_since = time.monotonic()

    @property
    def room(self) -> int:
        """Workers that the cluster as it is now holds, one at least."""
        key, each = ("GPU", self._gpus) if self._gpus else ("CPU", 1.0)
        room = max(1, int(_api.cluster_resources().get(key, 0.0) / each))
        return room if self._most is None else min(room, self._most)

    def grow(self) -> None:
        """Start workers up to what there is room for; Ray places each when its resources are free."""
        for _ in range(self.room - len(self._actors)):
            self._started += 1
            name = f"worker {self._started}"
            self._actors[name] = self._class.remote(self._setup)
            self._calls[self._actors[name].hello.remote()] = name

    def score(self, worker: str, unit: Unit) -> None:
        """Give a unit to a worker."""
        present: list[Path] = [path for path in unit.paths if path.exists()]
        self._calls[self._actors[worker].score.remote(unit, present)] = worker

    def events(self, timeout: float) -> Iterator[Event]:
        """What happened, waiting for something so many seconds at most.

        Raises:
            UsageError: workers cannot start, or are not such as give the same scores.
        """
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        for call in ready:
            name = self._calls.pop(call)
            try:
                found = ray.get(call)
            except _LOST as error:
                yield self._died(name, error)
                continue
            if isinstance(found, Outcome):
                yield Event(name, found)
                continue
            why, self._nodes[name] = found
            if why is not None:
                raise UsageError(why)
            self._failed = 0
            yield Event(name)

    def waits_long(self) -> bool:
        """True once when no worker has been ready for long."""
        if self._nodes:
            self._alone_since = time.monotonic()
        long = time.monotonic() - self._alone_since > _PATIENCE
        if long:
            self._alone_since = float("inf")
        return long

    def close(self) -> None:
        """End all workers."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def _died(self, name: str, error: Exception) -> Event:
        with contextlib.suppress(RayError):
            ray.kill(self._actors[name])
        del self._actors[name]
        node = self._nodes.pop(name, None)
        if node is None:
            self._failed += 1
            if self._failed >= _STARTS:
                reason = " ".join(str(error).split())[:400]
                raise UsageError(f"workers of the Ray cluster do not start: {reason}")
        alive = {found["NodeID"] for found in _api.nodes() if found["Alive"]}
        return Event(name, died=True, blame=node in alive)
