"""One model over several processes: process 0 leads, and the others follow it from unit to unit.

All of them hold a slice of every network, as transformers' plan for the architecture cuts it, and run the same forward
passes. Process 0 alone plans, keeps scores, writes and prints. The processes are started here, or by torchrun.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mismatch_probe.errors import ExitCode, MismatchProbeError, UsageError
from mismatch_probe.launched import launched_processes
from mismatch_probe.scoring.memory import out_of_memory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit

_PATIENCE = timedelta(days=7)
"""Followers wait so long for the next unit: a leader that finds everything in the cache sends none."""
_STOP_SECONDS = 30
_FOLLOWER = ("-m", "mismatch_probe.scoring.follower")


class Scorer(Protocol):
    """What scores units."""

    options: ScoringOptions

    def score(self, unit: Unit) -> StepScores:
        """Score every counted token of a unit."""


@contextmanager
def leading(scorer: Scorer, base: Path | None, tolerant: bool) -> Iterator[Scorer]:
    """The scorer itself; with ``tensor_parallel`` one that takes the other processes along, until the context ends.

    Args:
        scorer: scores in this process.
        base: the model below checkpoints that are adapters.
        tolerant: checkpoints that cannot be loaded count as absent.

    Raises:
        UsageError: the devices are not there, or torchrun started another number of processes.
    """
    size = scorer.options.tensor_parallel
    if size == 1:
        yield scorer
        return
    followers = _Followers(size) if launched_processes() is None else None
    try:
        group = _join(scorer.options)
        _send(("start", scorer.options, base, tolerant), group)
        leader = _Leader(scorer, group)
        try:
            yield leader
        finally:
            if not leader.broken:
                _send(("stop",), group)
                if followers is not None:
                    followers.wait()
                dist.destroy_process_group()
    finally:
        if followers is not None:
            followers.end()


def check_devices(options: ScoringOptions) -> None:
    """Refuse what ``tensor_parallel`` cannot do here.

    Raises:
        UsageError: fewer devices than processes, or a CPU beside CUDA devices.
    """
    size, device = options.tensor_parallel, options.torch_device()
    launched = launched_processes()
    if launched is not None and launched != size:
        raise UsageError(f"--tensor-parallel {size}: torchrun started {launched} processes. Give both the same number")
    if size == 1:
        return
    here = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if launched is not None else size
    if device.type == "cuda" and here < local:
        raise UsageError(f"--tensor-parallel {size}: this machine has {here} CUDA devices")
    if device.type != "cuda" and here:
        raise UsageError(f"--tensor-parallel {size}: transformers puts the parts on CUDA. Use --device cuda")
    if options.device.startswith("cuda:"):
        raise UsageError(f"--tensor-parallel {size}: takes the first devices. Use --device cuda, not {options.device}")


def follow() -> None:
    """Run what the leader runs, until it stops; errors that it meets too are left to it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cuda = torch.cuda.is_available()
    group = _join(ScoringOptions(device="cuda" if cuda else "cpu", tensor_parallel=2))
    _, options, base, tolerant = _receive(group)
    networks = Networks(options, base, on_unusable=(lambda _: None) if tolerant else None)
    scorer = UnitScorer(options, networks, lambda _: None)
    while (message := _receive(group))[0] == "unit":
        _, unit, scorer.options = message
        try:
            scorer.score(unit)
        except MismatchProbeError:
            continue  # the leader meets it too, says it, and stops or goes on
    dist.destroy_process_group()


class _Leader:
    """Scores units together with the followers."""

    def __init__(self, scorer: Scorer, group: Any) -> None:
        self._scorer, self._group = scorer, group
        self.broken = False

    @property
    def options(self) -> ScoringOptions:
        return self._scorer.options

    @options.setter
    def options(self, options: ScoringOptions) -> None:
        self._scorer.options = options

    def score(self, unit: Unit) -> StepScores:
        """As ``UnitScorer.score``."""
        _send(("unit", unit, self.options), self._group)
        try:
            return self._scorer.score(unit)
        except MismatchProbeError:
            raise
        except BaseException as error:
            self.broken = True  # the followers are somewhere in the pass, and cannot be told
            if not out_of_memory(error):
                raise
            tokens = self.options.max_tokens
            raise UsageError(
                f"{self.options.torch_device()}: out of memory with passes of {tokens} tokens. "
                f"Pass --max-tokens {tokens // 2}"
            ) from None


class _Followers:
    """The other processes of this machine, started here."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= shared | {"RANK": "0", "LOCAL_RANK": "0"}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))}
        command = [sys.executable, *_FOLLOWER]
        self._folder = tempfile.TemporaryDirectory(prefix="mismatch-probe-")
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            said = Path(self._folder.name) / f"{rank}.log"
            with said.open("wb") as log:
                self._processes[said] = subprocess.Popen(
                    command,
                    env=os.environ | threads | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
        self._ending = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self) -> None:
        """Let them end by themselves."""
        self._ending.set()
        for process in self._processes.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def end(self) -> None:
        """End them, whatever they are doing."""
        self._ending.set()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _watch(self) -> None:
        """End this process with a follower's: it would wait forever for the other's part of a sum."""
        while not self._ending.wait(0.5):
            for log, process in self._processes.items():
                if process.poll() is not None and not self._ending.is_set():
                    self._lose(log, process.returncode)

    def _lose(self, log: Path, code: int) -> None:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = said[-1] if said else "it said nothing"
        sys.stderr.write(f"error: a process of --tensor-parallel ended (exit code {code}): {reason}\n")
        sys.stderr.flush()
        for process in self._processes.values():
            process.kill()
        self._folder.cleanup()
        os._exit(int(ExitCode.USAGE))


def _join(options: ScoringOptions) -> Any:
    """Join the processes; gives the group through which units are sent, which may wait for long."""
    device = options.torch_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


def _send(message: tuple[Any, ...], group: Any) -> None:
    dist.broadcast_object_list([message], src=0, group=group, device=torch.device("cpu"))


def _receive(group: Any) -> tuple[Any, ...]:
    held: list[Any] = [None]
    dist.broadcast_object_list(held, src=0, group=group, device=torch.device("cpu"))
    found: tuple[Any, ...] = held[0]
    return found
