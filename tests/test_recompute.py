"""The steps table again from the tokens table."""

from __future__ import annotations

import math
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mismatch_probe import recompute, token_chunks
from mismatch_probe.entry import main
from mismatch_probe.errors import InputError
from mismatch_probe.folder import open_analysis
from mismatch_probe.token_chunks import StepIndex, TokenFile
from tests.decompose_cases import analysis, decompose, rewrite
from tests.planted import Planted

CANCELS = ("_bias", "chi_square", "_ci_low", "_ci_high")
"""Small differences of large numbers: 1e-12 of what was subtracted."""


def compare(folder: Path) -> list[dict[str, float]]:
    found = open_analysis(folder, folder)
    rows = list(recompute.stats_of_tokens(found))
    stored = found.steps.set_index("step")
    assert [row["step"] for row in rows] == stored.index.tolist()
    for row in rows:
        for name, value in row.items():
            if name != "step" and name not in recompute.UNCHECKED:
                slack = 1e-12 if any(part in name for part in CANCELS) else 1e-300
                there = float(stored[name].loc[int(row["step"])])
                assert value == pytest.approx(there, rel=1e-12, abs=slack, nan_ok=True), (row["step"], name)
    return rows


@pytest.mark.parametrize(("batch", "held"), [(1 << 17, 52_000_000), (97, 4_000)])
def test_every_statistic_is_that_of_the_steps_table(
    stale_analysis: Path, monkeypatch: pytest.MonkeyPatch, batch: int, held: int
) -> None:
    monkeypatch.setattr(token_chunks, "_BATCH", batch)
    monkeypatch.setattr(token_chunks, "_HELD", held)
    rows = compare(stale_analysis)
    names = set(rows[0])
    assert len(names) > 180
    for kind in ("ess", "pareto_k", "perplexity_ess", "max_weight_share", "chi_square", "second_moment"):
        assert {
            f"{kind}_{r}_{lvl}" for r in ("lag", "discrepancy", "total") for lvl in ("token", "sequence", "prompt")
        } <= names
    assert {
        "ess_lag_sequence_ci_low",
        "log_ratio_k3_ci_high",
        "full_kl_trainer_stale",
        "bias_discrepancy_norm",
    } <= names


@pytest.mark.parametrize("held", [52_000_000, 100])
def test_places_are_those_of_the_places_table(planted: Planted, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(token_chunks, "_HELD", held)
    found = open_analysis(planted.path, None)
    there = pd.read_parquet(analysis(planted) / "places.parquet")
    names = pd.read_parquet(analysis(planted) / "sequences.parquet")
    for step in found.steps["step"]:
        rows = names[names["step"] == step]
        index = StepIndex.of(rows["sequence_id"].tolist(), rows["group_id"].tolist(), rows["tokens"].tolist())
        file = TokenFile(analysis(planted) / "tokens" / f"step={step}" / "part-0.parquet", index)
        _, places, _ = recompute.stats_of_file(file, found.record["options"])
        stored = there[there["step"] == step]
        for column, field in (
            *((name, name) for name in ("alive", "mean_weight", "missing_mass", "pareto_k", "identifiable")),
            ("mean_weight_ci_low", "mean_weight_low"),
            ("mean_weight_ci_high", "mean_weight_high"),
            ("effective_sequences", "effective"),
            ("prefix_kl_trainer_stale", "prefix_kl"),
            ("full_kl_trainer_stale", "full_kl"),
        ):
            expected = stored[column].to_numpy(dtype=float)
            assert getattr(places, field) == pytest.approx(expected, rel=1e-12, nan_ok=True), column


def test_masked_sequences_and_unknown_versions(run: Planted) -> None:
    """A group without a counted token still counts as a group; of a step known in part only the total ratio is left."""
    for at, row in enumerate(run.rows[1]):
        row["loss_mask"] = [at >= 4] * len(row["response_ids"])
        row["trainer_logprobs"] = [-2.0] * len(row["response_ids"])
    for row in run.rows[2][:5]:
        row["sampler_version"] = 77
    rewrite(run, 1)
    rewrite(run, 2)
    assert decompose(run, "--skip-bad-rows") == 0
    rows = {row["step"]: row for row in compare(analysis(run))}
    assert math.isnan(rows[2]["ess_lag_token"]) and not math.isnan(rows[2]["ess_total_token"])
    assert "tokens_with_lag" not in rows[2] and rows[1]["tokens_with_lag"] == rows[1]["tokens"]


def test_a_step_without_tokens(run: Planted) -> None:
    for row in run.rows[1]:
        row["loss_mask"] = [False] * len(row["response_ids"])
    rewrite(run, 1)
    assert decompose(run) == 0
    row = compare(analysis(run))[1]
    assert row["tokens"] == 0 and math.isnan(row["ess_lag_token"])


def test_ess_report_checks_the_steps_table_against_its_tokens(planted: Planted, tmp_path: Path, capsys) -> None:
    source = planted.path / "mismatch_probe"
    assert main(["ess-report", str(planted.path), "--recompute"]) == 0
    assert "numbers a step are as steps.parquet has them." in capsys.readouterr().err
    shutil.copytree(source, tmp_path / "a")
    part = tmp_path / "a" / "tokens" / "step=3" / "part-0.parquet"
    table = pq.read_table(part)
    pq.write_table(table.slice(0, table.num_rows - 20), part)
    assert main(["ess-report", str(planted.path), "-o", str(tmp_path / "a"), "--recompute"]) == 2
    assert "at step 3 is" in capsys.readouterr().err
    pq.write_table(table.drop_columns(["lag"]), part)
    assert main(["ess-report", str(planted.path), "-o", str(tmp_path / "a"), "--recompute"]) == 2
    assert "not readable" in capsys.readouterr().err


def test_a_sequence_that_the_sequences_table_lacks(planted: Planted) -> None:
    path = analysis(planted) / "tokens" / "step=1" / "part-0.parquet"
    with pytest.raises(InputError, match="s1-"):
        list(TokenFile(path, StepIndex.of(["other"], ["g"], [9])).chunks())


def test_tokens_of_a_sequence_may_lie_apart(planted: Planted, tmp_path: Path) -> None:
    """Order within a sequence counts; where its tokens lie among others does not."""
    source = analysis(planted) / "tokens" / "step=1" / "part-0.parquet"
    table = pq.read_table(source)
    order = np.argsort(table["position"].to_numpy(), kind="stable")
    pq.write_table(table.take(order), tmp_path / "apart.parquet")
    names = pd.read_parquet(analysis(planted) / "sequences.parquet")
    rows = names[names["step"] == 1]
    index = StepIndex.of(rows["sequence_id"].tolist(), rows["group_id"].tolist(), rows["tokens"].tolist())
    options = open_analysis(planted.path, None).record["options"]
    one, places, _ = recompute.stats_of_file(TokenFile(source, index), options)
    two, apart, _ = recompute.stats_of_file(TokenFile(tmp_path / "apart.parquet", index), options)
    for name, value in one.items():
        assert two[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name
    assert apart.mean_weight == pytest.approx(places.mean_weight, rel=1e-12)


def test_memory_is_a_fraction_of_the_columns(stale_analysis: Path, tmp_path: Path, monkeypatch) -> None:
    """The same sequences, each sixty times as long: what is held are a batch, some places, and sums."""
    monkeypatch.setattr(token_chunks, "_BATCH", 1 << 10)
    monkeypatch.setattr(token_chunks, "_HELD", 1 << 12)
    names = pd.read_parquet(stale_analysis / "sequences.parquet")
    rows = names[names["step"] == 5]
    index = StepIndex.of(rows["sequence_id"].tolist(), rows["group_id"].tolist(), rows["tokens"].tolist())
    options = open_analysis(stale_analysis, stale_analysis).record["options"]
    table = pq.read_table(stale_analysis / "tokens" / "step=5" / "part-0.parquet")
    path = tmp_path / "long.parquet"
    pq.write_table(table.take(np.repeat(np.arange(table.num_rows), 60)), path, row_group_size=1 << 12)
    tracemalloc.start()
    row, _, _ = recompute.stats_of_file(TokenFile(path, index), options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert index.longest < 200  # of the short ones: a wrong hint costs time only
    assert row["tokens"] == 60 * table.num_rows > 80_000
    assert peak < row["tokens"] * 8 * len(token_chunks.COLUMNS) / 4
