"""Which worker gets which unit, retries, and what a worker says: without Ray."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import UsageError
from mismatch_probe.executors import ray as ray_executor
from mismatch_probe.executors.ray_worker import Setup, Worker
from mismatch_probe.executors.scheduling import MOST_KILLS, Schedule
from mismatch_probe.run import Ragged
from mismatch_probe.scoring.cache import code_digest
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.units import Unit
from tests.planted import Planted


def unit(number: int, trainer: Path) -> Unit:
    """One sequence of a two-token prompt and a three-token response."""
    prompt, response = Ragged.of([np.array([1, 2])]), Ragged.of([np.array([3, 4, 5])])
    every = np.ones(3, dtype=np.bool_)
    version, half = np.zeros(3, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Unit(7, number, np.arange(3), prompt, response, every, version, half, None, 1, trainer, {0: trainer})


def schedule(*trainers: str) -> Schedule:
    made = Schedule()
    for key, trainer in enumerate(trainers):
        made.put(key, unit(key, Path(trainer)))
    return made


def test_a_worker_keeps_to_the_weights_it_has_loaded() -> None:
    made = schedule("a", "b", "a", "b", "c")
    made.join("one")
    made.join("two")
    assert made.give() == ("one", 0) and made.give() == ("two", 1) and made.give() is None
    made.done("two")
    assert made.give() == ("two", 3)
    made.done("two")
    # What the other has loaded is left to it while there is something else.
    assert made.give() == ("two", 4)
    made.done("two")
    assert made.give() == ("two", 2), "an idle worker does not wait"
    assert (made.waiting, made.busy) == (0, 2)


def test_the_unit_of_a_dead_worker_comes_before_later_ones() -> None:
    made = schedule("a", "a", "a")
    made.join("one")
    assert made.give() == ("one", 0)
    made.leave("one", blame=True)
    assert made.waiting == 3 and not made.knows("one")
    made.join("two")
    assert made.give() == ("two", 0)


def test_a_unit_that_kills_its_workers_is_named() -> None:
    made = schedule("a")
    for kill in range(MOST_KILLS):
        made.join(f"lost {kill}")
        assert made.give() == (f"lost {kill}", 0)
        made.leave(f"lost {kill}", blame=False)
    for kill in range(MOST_KILLS - 1):
        made.join(str(kill))
        assert made.give() == (str(kill), 0)
        made.leave(str(kill), blame=True)
    made.join("last")
    assert made.give() == ("last", 0)
    with pytest.raises(UsageError, match=r"step 7, unit 0 \(1 sequences\): its worker died 3 times"):
        made.leave("last", blame=True)


def setup(tolerant: bool = False, code: str | None = None) -> Setup:
    options = ScoringOptions(device="cpu", dtype="float64", max_tokens=64)
    return Setup(options, None, tolerant, "cpu", code or code_digest())


def test_a_worker_says_what_it_cannot_see_and_survives_pickling(tmp_path: Path) -> None:
    outcome = pickle.loads(
        pickle.dumps(Worker(setup(tolerant=True)).score(unit(0, tmp_path / "no"), [tmp_path / "no"]))
    )
    assert isinstance(outcome.error, UsageError) and outcome.scores is None
    assert "mount the run's folder at the same place on every node" in str(outcome.error)


def test_an_unusable_checkpoint_is_said_with_every_unit_that_needs_it(tmp_path: Path) -> None:
    worker = Worker(setup(tolerant=True))
    for number in range(2):
        outcome = worker.score(unit(number, tmp_path), [tmp_path])
        assert list(outcome.unusable) == [tmp_path] and str(tmp_path) in outcome.unusable[tmp_path]
        assert outcome.scores is not None and np.isnan(outcome.scores.trainer_logprob).all()
    strict = Worker(setup()).score(unit(0, tmp_path), [tmp_path])
    assert strict.scores is None and str(tmp_path) in str(strict.error)


def test_a_worker_halves_its_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def score(self: UnitScorer, _: Unit) -> str:
        seen.append(self.options.max_tokens)
        if self.options.max_tokens > 16:
            raise torch.OutOfMemoryError
        return "scores"

    monkeypatch.setattr(UnitScorer, "score", score)
    outcome = Worker(setup()).score(unit(0, tmp_path), [])
    assert seen == [64, 32, 16] and outcome.scores == "scores"
    assert [note.split(";")[1] for note in outcome.notices] == [
        f" passes of {tokens} tokens from here on (--max-tokens {tokens} begins with them)" for tokens in (32, 16)
    ]


def test_other_code_on_a_worker_is_refused() -> None:
    assert Worker(setup()).check() is None
    assert "another version of mismatch-probe" in str(Worker(setup(code="other")).check())


def test_without_ray_one_line_names_the_extra(planted: Planted, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ray_executor, "find_spec", lambda _: None)
    assert main(["decompose", str(planted.path), "-o", str(tmp_path / "out"), "--executor", "ray"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'mismatch-probe[ray]'" in said and not (tmp_path / "out" / "run.json").exists()


def test_options_of_the_cluster_want_the_executor(planted: Planted, tmp_path: Path, capsys) -> None:
    assert main(["decompose", str(planted.path), "-o", str(tmp_path / "out"), "--workers", "2"]) == 2
    assert "--workers: only with --executor ray" in capsys.readouterr().err
