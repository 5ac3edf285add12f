from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe import recompute
from mismatch_probe.entry import main
from mismatch_probe.folder import open_analysis
from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.health import level_log_weights
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.stream import RunningEss, RunningLevels
from tests.planted import Planted

_WEIGHTS = st.lists(st.floats(-1e4, 1e4) | st.just(math.nan), min_size=1, max_size=40)


@given(_WEIGHTS, st.integers(1, 7))
def test_chunks_do_not_change_the_ess(values: list[float], size: int) -> None:
    log_weights = np.array(values)
    running = RunningEss()
    for start in range(0, len(values), size):
        running.add(log_weights[start : start + size])
    assert running.value() == pytest.approx(ess(log_weights), rel=1e-12, nan_ok=True)
    assert math.isnan(running.value()) or 0 < running.value() <= 1


@given(_WEIGHTS, st.integers(1, 7), st.integers(0, 99))
def test_levels_over_chunks_agree_with_the_whole(values: list[float], size: int, seed: int) -> None:
    log_weights = np.array(values)
    sequence = np.random.default_rng(seed).integers(0, 5, len(values))
    group_of_sequence = np.array([0, 1, 0, 2, 1])[: int(sequence.max()) + 1]
    running = RunningLevels()
    for start in range(0, len(values), size):
        running.add(log_weights[start : start + size], sequence[start : start + size])
    whole = level_log_weights(log_weights, Levels(sequence, group_of_sequence))
    for level, value in running.values(group_of_sequence).items():
        assert value == pytest.approx(ess(whole[level]), rel=1e-7, nan_ok=True), level


@pytest.mark.parametrize("batch", [1 << 17, 7])
def test_recomputed_ess_is_that_of_the_steps_table(
    stale_analysis: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(recompute, "_BATCH", batch)
    analysis = open_analysis(stale_analysis, stale_analysis)
    rows = list(recompute.stats_of_tokens(analysis))
    assert len(rows) == len(analysis.steps)
    for row, (_, step) in zip(rows, analysis.steps.iterrows(), strict=True):
        for name, value in row.items():
            assert value == pytest.approx(step[name], rel=1e-12, nan_ok=True), name


def test_ess_report_checks_the_steps_table_against_its_tokens(planted: Planted, tmp_path: Path, capsys) -> None:
    source = planted.path / "mismatch_probe"
    assert main(["ess-report", str(planted.path), "--recompute"]) == 0
    assert "tokens: every ESS is as steps.parquet has it." in capsys.readouterr().err
    shutil.copytree(source, tmp_path / "a")
    part = tmp_path / "a" / "tokens" / "step=3" / "part-0.parquet"
    table = pq.read_table(part)
    pq.write_table(table.slice(0, table.num_rows - 20), part)
    assert main(["ess-report", str(planted.path), "-o", str(tmp_path / "a"), "--recompute"]) == 2
    assert "at step 3 is" in capsys.readouterr().err
