"""A planted prime-rl run, end to end: which weights a step trains, and which sampled it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from tests.prime_rl_files import episode, write_traces
from tests.reader_cases import Case
from tests.tiny import save_model


def logprobs(model: torch.nn.Module, ids: list[int], start: int, temperature: float) -> list[float]:
    """Log-prob of each token from ``start`` on, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    scores = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return scores[start - 1 :].tolist()


def test_step_n_trains_version_n_minus_1_and_traces_name_the_samplers(tmp_path: Path) -> None:
    stale = save_model(tmp_path / "broadcasts" / "step_2", "qwen3", seed=2)
    trainer = save_model(tmp_path / "broadcasts" / "step_3", "qwen3", seed=3)
    rng = np.random.default_rng(0)
    planted, lag = [], []
    for number in range(4):
        prompt, response = rng.integers(3, 60, 4).tolist(), rng.integers(3, 60, 6).tolist()
        sampler = logprobs(stale, prompt + response, 4, 0.75)
        lag += (np.array(logprobs(trainer, prompt + response, 4, 0.75)) - sampler).tolist()
        case = Case(f"s{number}", number // 2, prompt, response, [1] * 6, sampler, sampler, [2] * 6, 0.5, 1.0)
        case.turns = [("assistant", 6)]
        planted.append(episode(case, number))
    write_traces(tmp_path, planted, 4)
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    tokens = pd.read_parquet(tmp_path / "mismatch_probe" / "tokens" / "step=4" / "part-0.parquet")
    assert (tokens["sampler_version"] == 2).all() and (tokens["trainer_version"] == 3).all()
    assert np.abs(tokens["discrepancy"]).max() < 1e-4
    assert tokens["lag"].tolist() == pytest.approx(lag, abs=1e-4)
