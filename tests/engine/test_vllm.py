"""vLLM itself, on a model small enough for a CPU: ``make test-engine`` runs this where vLLM is. A missing one fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import EngineError
from mismatch_probe.folder import open_analysis
from mismatch_probe.scoring import engine_session
from mismatch_probe.scoring.engine import EngineOptions, EngineProcess
from tests.planted import write_rows, write_toml
from tests.tiny import VOCAB, save_model

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """One step whose sampler log-probs are the float64 model's minus planted noise, and the noise, (tokens,)."""
    path = tmp_path_factory.mktemp("vllm") / "run"
    checkpoint = path / "checkpoints" / "step_000000"
    save_model(checkpoint, "qwen3", tied=True, head_dim=32)
    model = save_model(path / "float64", "qwen3", tied=True, head_dim=32).double()
    rng = np.random.default_rng(0)
    rows, planted = [], []
    for number in range(12):
        prompt = rng.integers(0, VOCAB, size=3 + number // 3).tolist()
        response = rng.integers(0, VOCAB, size=5 + number % 4).tolist()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        place = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        exact = logits.log_softmax(-1)[place, torch.tensor(response)].numpy()
        noise = 0.05 * rng.standard_normal(len(response))
        planted.append(noise)
        rows.append(
            {
                "sequence_id": f"s{number}",
                "group_id": f"g{number // 3}",
                "prompt_ids": prompt,
                "response_ids": response,
                "sampler_logprobs": (exact - noise).tolist(),
                "loss_mask": [True] * len(response),
                "sampler_version": 0,
            }
        )
    write_rows(path / "rollouts" / "step_000000.parquet", rows)
    write_toml(path, vocab_size=VOCAB, temperature=TEMPERATURE)
    return path, np.concatenate(planted)


def decompose(path: Path, folder: Path, *options: str) -> tuple[pd.DataFrame, dict, dict]:
    assert main(["decompose", str(path), "-o", str(folder), "--engine", "vllm", "-q", *options]) == 0
    table = pq.read_table(folder / "tokens" / "step=0" / "part-0.parquet").to_pandas()
    row = open_analysis(path, folder).steps.iloc[0].to_dict()
    return table, row, json.loads((folder / "run.json").read_text())["engine"]


def test_in_float32_the_planted_noise_is_what_decoding_added(recorded, tmp_path: Path) -> None:
    path, noise = recorded
    table, row, facts = decompose(path, tmp_path / "a", "--engine-dtype", "float32", "--engine-top-k", "2")
    np.testing.assert_allclose(table["discrepancy_decode"], noise, atol=2e-5)
    np.testing.assert_allclose(table["discrepancy_prefill"], 0, atol=2e-5)
    np.testing.assert_allclose(
        table["discrepancy_prefill"] + table["discrepancy_decode"], table["discrepancy"], rtol=0, atol=4e-15
    )
    assert row["discrepancy_decode_share"] == pytest.approx(1, abs=1e-3)
    tops = np.stack(table["engine_top_logprobs"].to_numpy())
    assert (np.diff(tops) <= 0).all() and (table["engine_logprob"] <= tops[:, 0]).all()
    assert facts["dtype"] == "float32" and facts["temperature"] == TEMPERATURE and facts["attention_backends"]
    assert facts["check"]["mean_difference"] < 1e-5 and facts["prefix_caching"] is False


def test_in_bfloat16_its_rounding_is_the_engines(recorded, tmp_path: Path) -> None:
    path, noise = recorded
    table, row, facts = decompose(path, tmp_path / "a", "--engine-dtype", "bfloat16")
    rounding = table["discrepancy_prefill"].to_numpy()
    assert 1e-3 < np.sqrt(np.mean(rounding**2)) < 0.3 and facts["dtype"] == "bfloat16"
    np.testing.assert_allclose(table["discrepancy_decode"] + rounding, noise, atol=2e-5)
    assert row["discrepancy_prefill_rms"] > 1e-3


def test_an_engine_with_another_head_is_refused(recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets a copy whose head is not tied to its embeddings any more, as after a sync that forgot it."""
    path, _ = recorded
    other = tmp_path / "other"
    model = save_model(other, "qwen3", tied=False, head_dim=32)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    monkeypatch.setattr(engine_session, "engine_directory", lambda *_: other)
    assert main(["decompose", str(path), "-o", str(tmp_path / "a"), "--engine", "vllm", "-q"]) == 2


def test_weights_that_do_not_fit_are_one_error(recorded, tmp_path: Path) -> None:
    path, _ = recorded
    config = json.loads((path / "checkpoints" / "step_000000" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="did not start"):
        EngineProcess(tmp_path, EngineOptions("float32"), 20)
