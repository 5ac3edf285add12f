"""A real Ray cluster on this machine: the same bytes as in one process, whatever happens to workers and nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from mismatch_probe.entry import main
from mismatch_probe.executors.ray import RayExecutor
from mismatch_probe.executors.ray_pool import Event, Pool
from mismatch_probe.scoring.score import UnitScorer
from tests.decompose_cases import tables
from tests.planted import Planted

# Ray's own, not of the code under test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SMALL = ["--max-tokens", "3", "-q", "--no-diagnose"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def local(planted: Planted, tmp_path: Path) -> dict[str, bytes]:
    assert main(["decompose", str(planted.path), "-o", str(tmp_path / "local"), *SMALL]) == 0
    return tables(tmp_path / "local")


def workers() -> list[int]:
    """Processes of workers, below the nodes that this process started."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                named = (process / "cmdline").read_bytes().startswith(b"ray::_Actor")
                if named and parent(parent(int(process.name))) == os.getpid():
                    found.append(int(process.name))
            except (OSError, ProcessLookupError):
                continue
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def watch(monkeypatch: pytest.MonkeyPatch, act: Any) -> list[Event]:
    """The pool's events; ``act`` is called with those so far, after each outcome."""
    seen: list[Event] = []
    events = Pool.events

    def note(self: Pool, timeout: float) -> Iterator[Event]:
        for event in events(self, timeout):
            seen.append(event)
            yield event
            if event.outcome is not None:
                act(seen)

    monkeypatch.setattr(Pool, "events", note)
    return seen


def decompose(planted: Planted, folder: Path, *options: str) -> dict[str, bytes]:
    assert main(["decompose", str(planted.path), "-o", str(folder), *SMALL, "--executor", "ray", *options]) == 0
    return tables(folder)


def test_a_cluster_of_our_own_gives_the_same_bytes_and_ends(
    planted: Planted, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []

    def kill(seen: list[Event]) -> None:
        if not killed:
            killed.extend(workers())
            for process in killed:
                os.kill(process, signal.SIGKILL)

    seen = watch(monkeypatch, kill)
    assert decompose(planted, tmp_path / "ray") == local
    assert killed and any(event.died and event.blame for event in seen)
    assert not ray.is_initialized() and not workers()
    # Kept by the driver, in the same files: nothing is scored again, with either executor.
    monkeypatch.setattr(UnitScorer, "score", None)
    again = ["-o", str(tmp_path / "again"), "--cache", str(tmp_path / "ray" / "scores")]
    assert main(["decompose", str(planted.path), *again, *SMALL]) == 0
    assert tables(tmp_path / "again") == local


def test_a_node_joins_and_leaves(
    planted: Planted, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    nodes: list[Any] = []

    def change(seen: list[Event]) -> None:
        served = {event.worker for event in seen if event.outcome is not None}
        if not nodes:
            nodes.append(cluster.add_node(num_cpus=1))
        elif len(served) < 2:
            time.sleep(0.4)
        elif len(nodes) == 1:
            cluster.remove_node(nodes[0], allow_graceful=False)
            nodes.append(None)

    seen = watch(monkeypatch, change)
    assert decompose(planted, tmp_path / "ray", "--address", cluster.address) == local
    assert len(nodes) == 2, "both nodes served before one left"
    assert sum(event.died for event in seen) <= 1, "the unit that went with the node is lost once"


def test_a_unit_that_kills_its_workers_ends_the_run(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = Pool.score

    def kill(self: Pool, worker: str, unit: Any) -> None:
        for process in workers():
            os.kill(process, signal.SIGKILL)
        score(self, worker, unit)

    monkeypatch.setattr(Pool, "score", kill)
    command = ["decompose", str(planted.path), "-o", str(tmp_path / "ray"), *SMALL, "--executor", "ray"]
    assert main([*command, "--workers", "1"]) == 2
    assert "unit 0" in (said := capsys.readouterr().err) and "its worker died 3 times" in said
    assert not ray.is_initialized() and not (tmp_path / "ray" / "run.json").exists()


def test_ctrl_c_ends_the_cluster(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RayExecutor, "_note", interrupt)
    command = ["decompose", str(planted.path), "-o", str(tmp_path / "ray"), *SMALL, "--executor", "ray"]
    assert main(command) == 130
    assert not ray.is_initialized() and not workers()


def test_no_cluster_at_the_address(planted: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["decompose", str(planted.path), "-o", str(tmp_path / "ray"), "-q", "--executor", "ray"]
    assert main([*command, "--address", "nowhere"]) == 2
    assert "--address nowhere: no Ray cluster" in capsys.readouterr().err
