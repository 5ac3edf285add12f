"""Every null of the steps table is explained: by the column's option, or by a reason that stands in the step's row."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from mismatch_probe.nulls import null_reasons
from mismatch_probe.tables import STEPS
from tests.conftest import SAMPLE
from tests.decompose_cases import rewrite
from tests.planted import Planted, plant

NOT_ASKED = (
    (r"full_kl_fresh_.*", "fresh_rollouts", "fresh rollouts:"),
    (r"discrepancy_(prefill|decode)_.*", "engine", "engine split not summarised"),
    (r"(reference|error)_.*", "reference", "reference:"),
    (r"gradient_(?!advantages).*", "gradient", "gradient"),
)
"""Columns of an option, null where it was not asked for; else the reason that must stand there."""
NO_SPLIT = r"split not summarised|no checkpoint|no sampler log-prob|no number|no trainer"
EXPLAINED = (
    (r".*", r"^no counted token$"),
    (r".*_ci_(low|high)", r"^no interval: "),
    (r"full_kl_trainer_stale.*", r"^full KL"),
    (r"gradient_.*", r"^gradient"),
    (r"clip_.*", r"^gradient, clipping: neither"),
    (r"breakdown_probability", r"^no interval: "),
    # What needs D, L or d at the tokens.
    (r"(discrepancy|lag|log_ratio|ess|pareto_k|perplexity_ess|max_weight_share|chi_square|second_moment)_.*", NO_SPLIT),
    (r"(share|predicted_ess|bias|prefix_kl|entropy|top1|full_kl_trainer|gradient|clip)_?.*", NO_SPLIT),
    (r"breakdown_probability|noise_floor_.*|logged_trainer_gap_.*", NO_SPLIT),
)
"""Columns, and a reason that explains a null of theirs."""


def unexplained(row: dict, options: dict) -> list[str]:
    told = list(row["reasons"])
    named = {name for reason in told if reason.startswith("null: ") for name in reason.split(": ")[-1].split(", ")}
    out = []
    for name in (name for name, value in row.items() if value is None):
        option = next(((o, why) for pattern, o, why in NOT_ASKED if re.fullmatch(pattern, name)), None)
        if option and (not options[option[0]] or any(reason.startswith(option[1]) for reason in told)):
            continue
        reasons = [why for pattern, why in EXPLAINED if re.fullmatch(pattern, name)]
        if name not in named and not any(re.search(why, reason) for why in reasons for reason in told):
            out.append(name)
    return out


def rows_of(folder: Path) -> tuple[list[dict], dict]:
    return pq.read_table(folder / "steps.parquet").to_pylist(), json.loads((folder / "run.json").read_text())["options"]


def without_log_probs(run: Planted) -> None:
    for row in run.rows[1]:
        row["sampler_logprobs"] = None
    for row in run.rows[2][:3]:
        row["sampler_logprobs"] = None


def without_versions_and_rewards(run: Planted) -> None:
    for rows in run.rows.values():
        for row in rows:
            row.pop("reward")
            row.pop("sampler_version")


def of_one_length(run: Planted) -> None:
    for row in run.rows[1]:
        row["reward"] = 1.0
        row["loss_mask"] = [False] * len(row["loss_mask"])


def without_a_checkpoint(run: Planted) -> None:
    shutil.rmtree(run.path / "checkpoints" / "step_000001")


def unaltered(run: Planted) -> None:
    pass


CASES = {
    "log-probs missing": (without_log_probs, {}),
    "checkpoint missing": (without_a_checkpoint, {"sampler_version": lambda step: max(0, step - 1)}),
    "one prompt group": (unaltered, {"groups": 1}),
    "versions and rewards missing": (without_versions_and_rewards, {}),
    "a step without a counted token": (of_one_length, {}),
    "far apart": (unaltered, {"drift": 30.0}),
    "two groups of one": (unaltered, {"groups": 2, "per_group": 1}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [(), ("--dtype", "float32", "--reference", "float64", "--no-gradient")])
def test_every_null_of_a_planted_run_has_its_reason(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    alter, how = CASES[name]
    run = plant(tmp_path / "run", steps=3, **how)
    alter(run)
    for step in run.rows:
        rewrite(run, step)
    assert main(["decompose", str(run.path), "-q", "-o", str(tmp_path / "a"), *options]) == 0
    rows, asked = rows_of(tmp_path / "a")
    assert len(rows) == 3
    assert {row["step"]: unexplained(row, asked) for row in rows} == {0: [], 1: [], 2: []}


def test_every_null_of_the_sample_runs_has_its_reason(stale_analysis: Path, tmp_path: Path) -> None:
    assert main(["decompose", str(SAMPLE / "broken_sync_run"), "-q", "-o", str(tmp_path / "a"), "--no-gradient"]) == 0
    for folder in (stale_analysis, tmp_path / "a"):
        rows, asked = rows_of(folder)
        assert [name for row in rows for name in unexplained(row, asked)] == []
        assert any(value is None for row in rows for value in row.values())


def test_a_null_without_a_reason_would_be_found(stale_analysis: Path) -> None:
    rows, asked = rows_of(stale_analysis)
    row = rows[1] | {"entropy_stale": None, "reward_mean": None, "lag_rms_ci_low": None}
    assert set(unexplained(row, asked)) >= {"entropy_stale", "reward_mean", "lag_rms_ci_low"}


WITHOUT_INTERVAL = {
    "counts": r"step|sequences|groups|tokens|tokens_with_.*|rejected|sampler_from_engine|.*_tokens|.*_sequences",
    "options and words": r"breakdown_(level|ratio|threshold)|status|reasons|reference_dtype|gradient_advantages",
    "read off an interval": r"breakdown_probability",
    "largest of a sample, which no resampling of it gives": r"nearest_gap_max|version_lag_max|max_weight_share_.*|"
    r"noise_floor_max|logged_trainer_gap_max",
    "shape of a tail, read against a limit that depends on the sample": r"pareto_k_.*",
    "themselves errors of estimates": r"ess_.*_bias|bias_.*_(noise|split_half_cosine)|gradient_sketch_error",
    "has its noise beside it": r"bias_.*_(norm|cosine_previous)",
    "checks of the tool, held against a bound": r"full_kl_fresh_gap_rms|gradient_target_ess",
}


def test_a_number_without_an_interval_is_of_a_kind_that_has_none() -> None:
    pattern = "|".join(WITHOUT_INTERVAL.values())
    bare = [column.name for column in STEPS if not column.interval and column.name != "noise_floor_rms"]
    assert [name for name in bare if not re.fullmatch(pattern, name)] == []
    assert [column.name for column in STEPS if column.interval and re.fullmatch(pattern, column.name)] == []


def test_reasons_are_those_of_nulls_that_nothing_else_explains() -> None:
    known = {name: 1.0 for column in STEPS for name in (column.name, f"{column.name}_ci_low", f"{column.name}_ci_high")}
    assert null_reasons(known) == []
    row = known | {"ess_lag_token_bias": None, "pareto_k_lag_token": float("nan"), "pareto_k_total_token": None}
    assert null_reasons(row) == [
        "null: one prompt group cannot be resampled: ess_lag_token_bias",
        "null: fewer than 25 weights, or those of the tail tie: pareto_k_lag_token, pareto_k_total_token",
    ]
    # Without an ESS the ratio itself is null, which the step's own reasons say.
    assert len(null_reasons(row | {"ess_lag_token": None})) == 1 and null_reasons(row | {"tokens": 0}) == []
