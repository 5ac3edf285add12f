"""Update columns of a run, end to end, and clipping by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.stats.clipping import sign_skew
from mismatch_probe.stats.corrections import CORRECTIONS
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import Levels, split
from mismatch_probe.tables_gradient import GRADIENT
from tests.gradient_truth import expected, token_gradients
from tests.planted import Planted, plant, write_rows

PARTS = ("relative_size", "cosine", "bias_discrepancy", "bias_lag")


def steps_of(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "steps.parquet").set_index("step")


@pytest.mark.parametrize("target", ["token", "per-decision", "sequence"])
def test_a_planted_run_gives_what_its_tables_give(tmp_path: Path, target: str) -> None:
    """From checkpoints and rollouts on disk to the columns, with reward minus group mean for the advantage."""
    made = plant(tmp_path / "run", steps=2, noise=0.1, drift=0.15)
    made.rows[1] = [
        {**row, "response_ids": row["response_ids"][:3], "sampler_logprobs": row["sampler_logprobs"][:3]}
        | {"loss_mask": [True] * 3}
        for row in made.rows[1]
    ]
    write_rows(made.path / "rollouts" / "step_000001.parquet", made.rows[1])
    assert main(["decompose", str(made.path), "-q", "--gradient-target", target, "--dtype", "float64"]) == 0
    found = steps_of(made.path / "mismatch_probe").loc[1]
    rows = np.array([[row["prompt_ids"][-1], *row["response_ids"]] for row in made.rows[1]])
    group = np.repeat(np.arange(6), 4)
    advantage = np.tile(np.arange(4.0) - 1.5, 6)
    tokens = token_gradients(rows, group, advantage, made.mu[0], made.trainer[0], made.trainer[1])
    assert found["gradient_advantages"] == "reward - group mean" and found["gradient_tokens"] == 72
    assert any("reward minus group mean" in reason for reason in found["reasons"])
    for name in CORRECTIONS:
        for part, value in expected(tokens, name, target).items():
            assert found[f"gradient_{name}_{part}"] == pytest.approx(value, abs=1e-6, nan_ok=True), (name, part)
    assert found["gradient_sketch_error"] == 0.0  # 16 ids and 16 dimensions are kept whole


def test_on_policy_every_update_is_the_target(tmp_path: Path) -> None:
    made = plant(tmp_path / "run", steps=1, noise=0.0)
    assert main(["decompose", str(made.path), "-q"]) == 0
    found = steps_of(made.path / "mismatch_probe").loc[0]
    for name in CORRECTIONS:
        values = [found[f"gradient_{name}_{part}"] for part in PARTS]
        assert values == pytest.approx([1, 1, 0, 0], abs=1e-9), name
    assert found["clip_flips"] == found["clip_share_positive"] == found["clip_share_negative"] == 0.0
    assert np.isnan(found["clip_skew"])


def test_logged_advantages_are_taken_first(planted: Planted, tmp_path: Path) -> None:
    rows = [{**row, "advantages": [0.5 - i % 2] * len(row["response_ids"])} for i, row in enumerate(planted.rows[1])]
    made = plant(tmp_path / "run", steps=2)
    write_rows(made.path / "rollouts" / "step_000001.parquet", rows)
    assert main(["decompose", str(made.path), "-q", "--steps", "1"]) == 0
    assert steps_of(made.path / "mismatch_probe").loc[1, "gradient_advantages"] == "logged"


def test_without_advantages_and_rewards_it_is_null_with_the_reason(tmp_path: Path) -> None:
    made = plant(tmp_path / "run", steps=2)
    rows = [{key: value for key, value in row.items() if key != "reward"} for row in made.rows[1]]
    write_rows(made.path / "rollouts" / "step_000001.parquet", rows)
    assert main(["decompose", str(made.path), "-q"]) == 0
    found = steps_of(made.path / "mismatch_probe").loc[1]
    assert all(pd.isna(found[column.name]) for column in GRADIENT)
    assert "gradient, clipping: neither advantages nor rewards are known" in list(found["reasons"])


def test_a_null_leaves_out_its_sequence(tmp_path: Path) -> None:
    made = plant(tmp_path / "run", steps=2)
    made.rows[1][3]["sampler_logprobs"][1] = None
    write_rows(made.path / "rollouts" / "step_000001.parquet", made.rows[1])
    assert main(["decompose", str(made.path), "-q"]) == 0
    found = steps_of(made.path / "mismatch_probe").loc[1]
    length, tokens = len(made.rows[1][3]["response_ids"]), found["tokens"]
    assert found["gradient_tokens"] == tokens - length
    assert any(f"{length} of {tokens} tokens left out" in reason for reason in found["reasons"])


def test_no_gradient_leaves_it_out_and_keeps_the_rest(planted: Planted, tmp_path: Path) -> None:
    for name in ("--gradient", "--no-gradient"):
        assert main(["decompose", str(planted.path), "-q", name, "--clip-eps", "0.3", "-o", str(tmp_path / name)]) == 0
    on, off = (steps_of(tmp_path / name) for name in ("--gradient", "--no-gradient"))
    gradient = [name for name in on if name.startswith("gradient_") and name != "gradient_advantages"]
    assert len(gradient) > 80 and off[gradient].isna().all(axis=None) and on[gradient].notna().any(axis=None)
    same = [name for name in on if name not in gradient and name != "reasons"]
    pd.testing.assert_frame_equal(on[same], off[same])
    options = json.loads((tmp_path / "--gradient" / "run.json").read_text())["options"]
    assert (options["gradient"], options["gradient_target"], options["clip_eps"]) == (True, "token", 0.3)


def test_clipping_by_hand() -> None:
    """Eight tokens in two groups, epsilon .2: 1.2 is e^.182 and .8 is e^-.223."""
    lag = np.array([0.3, 0.1, -0.3, 0.25, -0.25, -0.3, np.nan, 0.3])
    discrepancy = np.array([0.0, 0.1, 0.0, -0.1, 0.1, 0.0, 0.0, 0.0])
    advantage = np.array([3.0, 2.0, 1.0, -1.0, -1.0, -1.0, 1.0, 0.0])
    levels = Levels(np.array([0, 0, 0, 1, 1, 1, 1, 1]), np.array([0, 1]))
    known = split(np.zeros(8), discrepancy, discrepancy + lag)
    found = sign_skew(known, advantage, levels, ClusterIntervals(2), 0.2)
    assert found["clip_share_positive"].value == pytest.approx(2 / 3)
    assert found["clip_share_negative"].value == 1.0
    # Tokens 0, 2, 3, 4 and 5 are outside; their d are .3, -.3, .15, -.15 and -.3.
    assert found["clip_skew"].value == pytest.approx((0.3 - 0.3 - 0.15 + 0.15 + 0.3) / 5)
    # Token 1 is clipped on .2 and not on .1, token 4 on -.25 and not on -.15; the rest stay as they are.
    assert found["clip_flips"].value == pytest.approx(2 / 6)
    assert (found["clip_flips"].low, found["clip_flips"].high) == (found["clip_flips"].value,) * 2  # 1 of 3 in both


def test_clip_skew_has_the_sign_of_what_is_rewarded() -> None:
    lag = np.array([0.5, -0.5, 0.5, -0.5])
    levels = Levels(np.arange(4), np.arange(4) // 2)
    known = split(np.zeros(4), np.zeros(4), lag)
    for sign in (1.0, -1.0):
        found = sign_skew(known, sign * np.sign(lag), levels, ClusterIntervals(2), 0.2)
        assert found["clip_skew"].value == pytest.approx(sign * 0.5)
