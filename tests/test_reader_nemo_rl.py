"""NeMo-RL's dump, built from the fields its writer is documented to emit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.readers import ReadOptions, open_run
from tests.reader_fuzz import fuzz


def line(rng: np.random.Generator, idx: int, width: int = 12, prompt: tuple[int, ...] = (7, 8, 9), **changes) -> dict:
    """One sample: prompt, response, padding to ``width``; every value in a list of length 1."""
    length = int(rng.integers(len(prompt) + 2, width + 1))
    ids = np.zeros(width, dtype=int)
    ids[: len(prompt)], ids[len(prompt) : length] = prompt, rng.integers(1, 50, size=length - len(prompt))
    mask = np.zeros(width, dtype=int)
    mask[len(prompt) : length] = 1
    generation = np.where(mask, rng.normal(-1, 0.2, size=width), 0.0)
    previous = np.where(mask, generation + rng.normal(0, 0.05, size=width), -11.9)
    previous[0] = 0.0
    return {
        "content": [["question", "answer"]],
        "rewards": [float(idx % 2)],
        "input_lengths": [length],
        "token_ids": [ids.tolist()],
        "token_loss_mask": [mask.tolist()],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * width],
        "generation_logprobs": [generation.tolist()],
        "prev_logprobs": [previous.tolist()],
        "idx": idx,
        **changes,
    }


def write(path: Path, lines: list[dict], step: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def test_samples_are_cut_to_their_lengths(tmp_path: Path) -> None:
    entry = line(np.random.default_rng(0), 0)
    rollouts = open_run(write(tmp_path, [entry])).steps[0].load()
    length = entry["input_lengths"][0]
    assert rollouts.prompt[0].tolist() == [7, 8, 9]
    assert rollouts.response[0].tolist() == entry["token_ids"][0][3:length]
    assert rollouts.sampler_logprob.tolist() == entry["generation_logprobs"][0][3:length]
    assert rollouts.trainer_logprob.tolist() == entry["prev_logprobs"][0][3:length]
    assert rollouts.loss_mask.all() and rollouts.reward.tolist() == [0.0]


def test_groups_are_equal_prompts(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lines = [line(rng, i, prompt=(7, 8, 9) if i < 3 else (4, 5)) for i in range(5)]
    rollouts = open_run(write(tmp_path, lines)).steps[0].load()
    assert len(set(rollouts.group_id[:3])) == 1 and len(set(rollouts.group_id)) == 2


def test_tool_tokens_and_dropped_samples_are_not_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tool = line(rng, 0, width=12)
    tool["token_loss_mask"][0][4] = 0
    dropped = line(rng, 1, sample_loss_mask=[0.0])
    rollouts = open_run(write(tmp_path, [tool, dropped])).steps[0].load()
    counted = np.bincount(rollouts.sequence_of_token[rollouts.loss_mask], minlength=2)
    assert counted.tolist() == [tool["input_lengths"][0] - 4, 0]


def test_all_zero_trainer_logprobs_mean_not_computed(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lines = [line(rng, i, prev_logprobs=[[0.0] * 12]) for i in range(2)]
    rollouts = open_run(write(tmp_path, lines)).steps[0].load()
    assert np.isnan(rollouts.trainer_logprob).all()
    assert "force_on_policy_ratio" in rollouts.notices[0]


def test_a_line_of_another_shape_is_set_aside(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    short = line(rng, 1)
    short["generation_logprobs"] = [[-0.5, -0.5]]
    rollouts = open_run(write(tmp_path, [line(rng, 0), short, {"generation_logprobs": [[0.0]]}])).steps[0].load()
    assert len(rollouts) == 1
    assert [r.row for r in rollouts.rejected] == [2, 3]
    assert "generation_logprobs has 2 values" in rollouts.rejected[0].reason


def test_nan_literals_of_the_json_writer_are_read(tmp_path: Path) -> None:
    entry = line(np.random.default_rng(7), 0)
    entry["generation_logprobs"][0][3] = float("nan")
    rollouts = open_run(write(tmp_path, [entry]), ReadOptions(strict=True)).steps[0].load()
    assert np.isnan(rollouts.sampler_logprob[0]) and not np.isnan(rollouts.sampler_logprob[1])


def test_decompose_gives_the_total_and_refuses_the_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(8)
    for step in (1, 2):
        prompts = [(7, 8, 9), (4, 5), (6,)]
        write(tmp_path / "log", [line(rng, i, prompt=prompts[i // 3]) for i in range(9)], step)
    assert main(["decompose", str(tmp_path / "log")]) == 0
    assert "not identifiable" in capsys.readouterr().err
    steps = pd.read_parquet(tmp_path / "log" / "mismatch_probe" / "steps.parquet")
    assert steps["step"].tolist() == [1, 2]
    assert steps[["discrepancy_mean", "lag_mean", "ess_lag_sequence", "prefix_kl_stale_trainer"]].isna().all(axis=None)
    assert (steps["status"] == "unjudged").all()
    part = tmp_path / "log" / "mismatch_probe" / "tokens" / "step=1" / "part-0.parquet"
    tokens = pd.read_parquet(part)
    assert (tokens["log_ratio"] == tokens["trainer_logprob"] - tokens["sampler_logprob"]).all()
    assert (tokens["trainer_logprob_source"] == "logged").all()
    weights = np.exp(tokens["log_ratio"])
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    # The lag cannot be judged, and that is no pass.
    assert main(["gate", str(tmp_path / "log"), "--format", "json"]) == 5
    assert main(["ess-report", str(tmp_path / "log")]) == 0
    assert main(["plot", str(tmp_path / "log"), "-q"]) == 0


def test_inspect_needs_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(9)
    write(tmp_path, [line(rng, i) for i in range(3)])
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "nemo-rl" in out and "nothing to score" in out


def test_rewards_of_the_filtered_batch_win(tmp_path: Path) -> None:
    entry = line(np.random.default_rng(10), 0, rewards=[9.0], filtered_rewards=[1.0])
    assert open_run(write(tmp_path, [entry])).steps[0].load().reward.tolist() == [1.0]


def test_exact_zeros_are_said(tmp_path: Path) -> None:
    entry = line(np.random.default_rng(11), 0)
    entry["generation_logprobs"][0][3] = 0.0
    rollouts = open_run(write(tmp_path, [entry])).steps[0].load()
    assert "exactly 0.0 at 1 loss tokens" in rollouts.notices[0] and rollouts.sampler_logprob[0] == 0.0


def test_damaged_files_read_or_end_in_a_clean_error() -> None:
    def make(run_dir: Path) -> Path:
        rng = np.random.default_rng(3)
        write(run_dir, [line(rng, i) for i in range(6)])
        return run_dir / "train_data_step1.jsonl"

    fuzz(make)
    fuzz(make, skip_bad_rows=True)
