"""Scores that are kept: found again where scoring would give the same, never elsewhere."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import OutputError
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.plan import units
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import COLUMNS, StepScores
from tests.decompose_cases import decompose, tables
from tests.planted import Planted, write_rows
from tests.tiny import random_rollouts, save_model

OPTIONS = ScoringOptions(device="cpu")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints whose networks were loaded, as they are."""
    names: list[str] = []
    begin = Network.__init__

    def note(self: Network, path: Path, *args, **kwargs) -> None:
        names.append(path.name)
        begin(self, path, *args, **kwargs)

    monkeypatch.setattr(Network, "__init__", note)
    return names


def hold_20_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the device one that holds 20 tokens a pass."""
    packed = Network.packed

    def small(self: Network, pack, memory) -> torch.Tensor:
        if len(pack.ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return packed(self, pack, memory)

    monkeypatch.setattr(Network, "packed", small)


def test_a_second_run_scores_nothing_and_gives_the_same_bytes(run: Planted, loaded: list[str]) -> None:
    assert decompose(run) == 0 and len(loaded) >= 4
    first = tables(run.path / "mismatch_probe")
    loaded.clear()
    assert decompose(run, "--overwrite") == 0
    assert loaded == [] and tables(run.path / "mismatch_probe") == first
    assert decompose(run, "-o", str(run.path / "b"), "--cache", str(run.path / "mismatch_probe" / "scores")) == 0
    assert loaded == [] and tables(run.path / "b") == first and not (run.path / "b" / "scores").exists()


def test_a_second_run_scans_nothing_and_gives_the_same_findings(run: Planted, loaded: list[str]) -> None:
    assert main(["decompose", str(run.path), "-q"]) == 0
    findings = (run.path / "mismatch_probe" / "findings.json").read_bytes()
    loaded.clear()
    assert main(["decompose", str(run.path), "-q", "--overwrite"]) == 0
    assert main(["diagnose", str(run.path), "-q"]) == 0
    assert loaded == []
    assert (run.path / "mismatch_probe" / "findings.json").read_bytes() == findings
    assert main(["decompose", str(run.path), "-q", "--overwrite", "--no-cache"]) == 0
    assert (run.path / "mismatch_probe" / "findings.json").read_bytes() == findings


def test_a_scan_that_runs_out_of_memory_makes_smaller_passes(run: Planted, monkeypatch, capsys) -> None:
    assert decompose(run) == 0
    hold_20_tokens(monkeypatch)
    assert main(["diagnose", str(run.path), "--max-tokens", "64"]) == 0
    assert "out of memory; passes of 16 tokens" in capsys.readouterr().err


def test_no_cache_keeps_nothing_and_finds_nothing(run: Planted, loaded: list[str]) -> None:
    assert decompose(run, "--no-cache") == 0
    assert not (run.path / "mismatch_probe" / "scores").exists()
    first = tables(run.path / "mismatch_probe")
    assert decompose(run, "--overwrite") == 0
    loaded.clear()
    assert decompose(run, "--overwrite", "--no-cache") == 0
    assert len(loaded) >= 4 and tables(run.path / "mismatch_probe") == first


def test_a_new_step_is_all_that_is_scored(run: Planted, loaded: list[str]) -> None:
    last = run.path / "rollouts" / "step_000003.parquet"
    held = last.read_bytes()
    last.unlink()
    assert decompose(run) == 0
    last.write_bytes(held)
    loaded.clear()
    assert decompose(run, "--overwrite") == 0
    assert sorted(loaded) == ["step_000000", "step_000003"]
    with_cache = tables(run.path / "mismatch_probe")
    assert decompose(run, "--overwrite", "--no-cache") == 0
    assert tables(run.path / "mismatch_probe") == with_cache


def test_what_changes_a_score_is_scored_again(run: Planted, loaded: list[str]) -> None:
    """One token, one weight in the middle of a file of the same size, the temperature, the dtype."""
    assert decompose(run, "--steps", "1") == 0
    for change in ("nothing", "token", "weight", "temperature", "dtype"):
        options: list[str] = []
        if change == "token":
            ids = run.rows[1][0]["response_ids"]
            ids[1] = (ids[1] + 1) % 16
            write_rows(run.path / "rollouts" / "step_000001.parquet", run.rows[1])
        elif change == "weight":
            file = run.path / "checkpoints" / "step_000001" / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[len(data) // 2 + 3] ^= 1
            file.write_bytes(bytes(data))
        elif change == "temperature":
            options = ["--set", "temperature=0.9"]
        elif change == "dtype":
            options = ["--dtype", "float32"]
        loaded.clear()
        assert decompose(run, "--steps", "1", "--overwrite", *options) == 0
        assert (loaded == []) == (change == "nothing"), change


def unit_scores(tmp_path: Path, **options) -> tuple[ScoreCache, Path, StepScores]:
    for seed, name in enumerate(("one", "two")):
        save_model(tmp_path / name, "qwen3", seed=seed)
    rollouts = random_rollouts(np.random.default_rng(0))
    half = np.arange(len(rollouts)) % 2
    (unit,) = units(
        0, rollouts, half, tmp_path / "one", lambda _: tmp_path / "two", 10_000, gradient=rollouts.loss_mask
    )
    from mismatch_probe.scoring.networks import Networks

    scores = UnitScorer(OPTIONS, Networks(OPTIONS), lambda _: None).score(unit)
    cache = ScoreCache(tmp_path / "scores", replace(OPTIONS, **options))
    return cache, cache.path(unit, {tmp_path / "one": "a", tmp_path / "two": "b"}), scores


def test_what_is_put_comes_back_whole(tmp_path: Path) -> None:
    cache, path, scores = unit_scores(tmp_path)
    scores.count("a reason, with commas", 3)
    assert cache.get(path) is None
    cache.put(path, scores)
    found = cache.get(path)
    assert found is not None and scores.factors is not None and found.factors is not None
    for name in (*COLUMNS, "bias_lag_sum", "bias_lag_tokens", "noise"):
        assert np.array_equal(getattr(found, name), getattr(scores, name), equal_nan=True), name
    for name in ("wanted", "score", "centred", "state"):
        assert np.array_equal(getattr(found.factors, name), getattr(scores.factors, name)), name
    assert found.reasons == scores.reasons and found.factors.exact == scores.factors.exact
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_cache_that_is_a_file_is_one_line(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "f").write_text("")
    assert main(["decompose", str(run.path), "-q", "--cache", str(run.path / "f")]) == 2
    assert "f: cannot be written" in capsys.readouterr().err


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    cache, path, scores = unit_scores(tmp_path)
    path.parent.mkdir(parents=True)
    for name, age in ((".part-old", 7200), (".part-new", 10)):
        (path.parent / name).write_text("half")
        os.utime(path.parent / name, (time.time() - age,) * 2)
    cache.put(path, scores)
    assert sorted(file.name for file in path.parent.iterdir()) == sorted([".part-new", path.name])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "pickle", "other"])
def test_a_damaged_file_is_no_score(tmp_path: Path, damage: str) -> None:
    cache, path, scores = unit_scores(tmp_path)
    cache.put(path, scores)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 3] ^= 0xFF
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pickle":
        np.savez(path, stale_logprob=np.array([{"a": 1}], dtype=object))
    else:
        np.savez(path, something=np.zeros(3))
    assert cache.get(path) is None


def test_the_bounds_are_part_of_the_key(tmp_path: Path) -> None:
    _, path, _ = unit_scores(tmp_path)
    for change in ({"max_tokens": 7}, {"chunk_elements": 9}, {"temperature": 0.5}, {"dtype": "float64"}):
        other, _, _ = unit_scores(tmp_path, **change)
        rollouts = random_rollouts(np.random.default_rng(0))
        (unit,) = units(
            *(0, rollouts, np.arange(len(rollouts)) % 2, tmp_path / "one", lambda _: tmp_path / "two", 10_000),
            gradient=rollouts.loss_mask,
        )
        assert other.path(unit, {tmp_path / "one": "a", tmp_path / "two": "b"}) != path


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path, scores = unit_scores(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OutputError, match=r"scores: cannot be written \(No space left on device\).*--no-cache$"):
        cache.put(path, scores)
    assert list(path.parent.iterdir()) == []


def test_half_memory_halves_the_passes(run: Planted, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A device that holds 20 tokens a pass; the scores are those of small passes, and it is said once."""
    hold_20_tokens(monkeypatch)
    assert main(["decompose", str(run.path), "--no-cache", "--no-diagnose", "--max-tokens", "64"]) == 0
    assert capsys.readouterr().err.count("out of memory; passes of 16 tokens from here on") == 1
    monkeypatch.undo()
    halved = tables(run.path / "mismatch_probe")
    assert decompose(run, "-o", str(run.path / "b"), "--max-tokens", "16", "--no-cache") == 0
    parts = [name for name in halved if name.startswith("tokens/")]
    assert parts and all(halved[name] == tables(run.path / "b")[name] for name in parts)


def test_spare_networks_go_before_passes_are_halved(run: Planted, loaded: list[str], monkeypatch, capsys) -> None:
    packed, failed = Network.packed, []

    def tight(self: Network, pack, memory) -> torch.Tensor:
        if len(loaded) == 4 and not failed:
            failed.append(self.path.name)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return packed(self, pack, memory)

    monkeypatch.setattr(Network, "packed", tight)
    assert main(["decompose", str(run.path), "--no-cache"]) == 0
    assert failed and "out of memory" not in capsys.readouterr().err


def test_no_memory_at_all_is_one_line(run: Planted, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def none(self: Network, pack, memory) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Network, "packed", none)
    assert main(["decompose", str(run.path), "--no-cache", "-q"]) == 2
    assert "out of memory with passes of 16 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["plenty", "little"])
def test_versions_of_one_response_stay_loaded_where_there_is_memory(
    run: Planted, loaded: list[str], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In-flight updates: step 3 drawn by versions 0, 1 and 2, in many units."""
    for row in run.rows[3]:
        row["sampler_version"] = [min(2, place // 2) for place in range(len(row["response_ids"]))]
    write_rows(run.path / "rollouts" / "step_000003.parquet", run.rows[3])
    if memory == "little":
        monkeypatch.setattr("mismatch_probe.scoring.networks.free_memory", lambda _: 1000)
    assert decompose(run, "--steps", "3", "--no-cache", "--max-tokens", "2") == 0
    assert (sorted(loaded) == [f"step_00000{v}" for v in range(4)]) == (memory == "plenty")
    assert set(loaded) == {f"step_00000{v}" for v in range(4)}


def test_replayed_sequences_are_forwarded_once_under_the_weights_that_drew_them(
    run: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 holds the rollouts of step 1 again: version 0 sees them once, versions 1 and 2 once each."""
    run.rows[2] = copy.deepcopy(run.rows[1])
    write_rows(run.path / "rollouts" / "step_000002.parquet", run.rows[2])
    seen: dict[str, int] = {}
    packed = Network.packed

    def counted(self: Network, pack, memory) -> torch.Tensor:
        seen[self.path.name] = seen.get(self.path.name, 0) + len(pack.ids)
        return packed(self, pack, memory)

    monkeypatch.setattr(Network, "packed", counted)
    monkeypatch.setattr("mismatch_probe.scoring.score.noise_rows", lambda unit, shared: shared[:0])
    assert decompose(run, "--steps", "1,2") == 0
    once = sum(map(len, {tuple(row["prompt_ids"]) for row in run.rows[1]}))
    once += sum(len(row["response_ids"]) - 1 for row in run.rows[1])
    assert seen == {"step_000000": once, "step_000001": once, "step_000002": once}
    replayed = tables(run.path / "mismatch_probe")
    # Interrupted after step 1 and gone on with, the bytes are the same.
    assert decompose(run, "--steps", "1,2", "-o", str(run.path / "b")) == 0
    for file in sorted((run.path / "b" / "scores").rglob("*.npz"))[::2]:
        file.unlink()
    assert decompose(run, "--steps", "1,2", "-o", str(run.path / "b"), "--overwrite") == 0
    assert tables(run.path / "b") == replayed
