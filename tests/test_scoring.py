from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.assemble import halves
from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.errors import CheckpointError, UsageError
from mismatch_probe.resolve import StepCheckpoints
from mismatch_probe.run import CheckpointPattern, Rollouts, Run, Settings
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.plan import batches, forward_passes
from mismatch_probe.scoring.score import StepScorer
from mismatch_probe.scoring.scores import COLUMNS, StepScores
from tests.tiny import VOCAB, random_rollouts, save_model


def plain_logprobs(model, rollouts: Rollouts, temperature: float = 1.0) -> np.ndarray:
    """The textbook way, one sequence at a time, all logits at once."""
    out = []
    for row in range(len(rollouts)):
        ids = torch.from_numpy(np.concatenate([rollouts.prompt[row], rollouts.response[row]]))
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, dim=-1)
        start = len(rollouts.prompt[row])
        out.append(logp[start - 1 : -1].gather(-1, ids[start:, None])[:, 0].numpy())
    return np.concatenate(out)


def score(path: Path, rollouts: Rollouts, stale: Path | None = None, **options) -> StepScores:
    scorer = StepScorer(ScoringOptions(device="cpu", **options))
    return scorer.score(rollouts, halves(rollouts), path, lambda _: stale or path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "qwen2", "gemma2", "cohere", "granite", "mixtral", "opt"])
def test_scores_equal_a_plain_forward(tmp_path: Path, kind: str, tied: bool) -> None:
    one = save_model(tmp_path / "one", kind, tied=tied, seed=1)
    two = save_model(tmp_path / "two", kind, tied=tied, seed=2)
    rollouts = random_rollouts(np.random.default_rng(0))
    scores = score(tmp_path / "one", rollouts, tmp_path / "two", max_tokens=70, chunk_elements=7 * VOCAB)
    mask = rollouts.loss_mask
    assert scores.trainer_logprob[mask] == pytest.approx(plain_logprobs(one, rollouts)[mask], abs=1e-5)
    assert scores.stale_logprob[mask] == pytest.approx(plain_logprobs(two, rollouts)[mask], abs=1e-5)
    assert plain_logprobs(one, rollouts).std() > 0.1  # no uniform distribution passes for agreement


def test_masked_tokens_are_not_scored(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3")
    rollouts = random_rollouts(np.random.default_rng(0))
    scores = score(tmp_path / "one", rollouts)
    for name in COLUMNS:
        assert (np.isnan(getattr(scores, name)) == ~rollouts.loss_mask).all()


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2", "mixtral"])
def test_batch_shape_and_order_never_change_a_score(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "one", kind, seed=1)
    save_model(tmp_path / "two", kind, seed=2)
    rollouts = random_rollouts(np.random.default_rng(3), n=15)
    alone = score(tmp_path / "one", rollouts, tmp_path / "two", max_tokens=1)
    together = score(tmp_path / "one", rollouts, tmp_path / "two", max_tokens=10_000)
    order = np.random.default_rng(4).permutation(len(rollouts))
    shuffled = rollouts.take(order)
    mixed = score(tmp_path / "one", shuffled, tmp_path / "two", max_tokens=64)
    token = np.concatenate([np.arange(rollouts.response.offsets[r], rollouts.response.offsets[r + 1]) for r in order])
    for name in COLUMNS:
        assert getattr(alone, name) == pytest.approx(getattr(together, name), abs=1e-5, nan_ok=True)
        assert getattr(mixed, name) == pytest.approx(getattr(together, name)[token], abs=1e-5, nan_ok=True)
    assert np.abs(together.noise).max() < 1e-5 and len(together.noise) > 0


def test_each_token_is_scored_under_the_version_that_drew_it(tmp_path: Path) -> None:
    """In-flight weight updates: the version changes inside a response."""
    models = [save_model(tmp_path / str(v), "qwen3", seed=v) for v in range(3)]
    rollouts = random_rollouts(np.random.default_rng(5))
    rollouts.sampler_version[:] = np.where(rollouts.position_of_token < 4, 0, 1)
    scorer = StepScorer(ScoringOptions(device="cpu"))
    scores = scorer.score(rollouts, halves(rollouts), tmp_path / "2", lambda version: tmp_path / str(version))
    expected = np.where(rollouts.position_of_token < 4, *(plain_logprobs(model, rollouts) for model in models[:2]))
    mask = rollouts.loss_mask
    assert scores.stale_logprob[mask] == pytest.approx(expected[mask], abs=1e-5)
    assert scores.trainer_logprob[mask] == pytest.approx(plain_logprobs(models[2], rollouts)[mask], abs=1e-5)


def test_the_plan_is_what_is_forwarded(tmp_path: Path) -> None:
    """Tokens that inspect and the progress bar announce."""
    for version in range(3):
        save_model(tmp_path / "checkpoints" / f"step_{version:06d}", "qwen3", seed=version)
    pattern = CheckpointPattern(tmp_path, "checkpoints/step_{version:06d}")
    run = Run(tmp_path, "native", Settings(), (), pattern)
    rollouts = random_rollouts(np.random.default_rng(5))
    rollouts.sampler_version[:] = np.where(rollouts.position_of_token < 4, 0, 1)
    forwarded: list[int] = []
    scorer = StepScorer(ScoringOptions(device="cpu", max_tokens=20), forwarded.append)
    checkpoints = StepCheckpoints(run, rollouts, 2, tolerant=False)
    scorer.score(rollouts, halves(rollouts), checkpoints.trainer, checkpoints.sampler)
    planned = checkpoints.units(0, rollouts, halves(rollouts), 160)
    assert len(planned) > 1
    assert sum(forwarded) == sum(tokens for unit in planned for _, tokens in forward_passes(unit))


def test_many_units_give_the_same_scores(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3", seed=1)
    save_model(tmp_path / "two", "qwen3", seed=2)
    rollouts = random_rollouts(np.random.default_rng(6))
    whole = score(tmp_path / "one", rollouts, tmp_path / "two")
    parts = score(tmp_path / "one", rollouts, tmp_path / "two", max_tokens=2)
    for name in COLUMNS:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-6, nan_ok=True)
    assert parts.bias_lag_sum == pytest.approx(whole.bias_lag_sum, abs=1e-5)
    assert (parts.bias_lag_tokens == whole.bias_lag_tokens).all()


def test_dropout_in_the_config_is_off(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "gpt2")
    rollouts = random_rollouts(np.random.default_rng(7))
    first, second = (score(tmp_path / "one", rollouts).trainer_logprob for _ in range(2))
    assert (first[rollouts.loss_mask] == second[rollouts.loss_mask]).all()


def test_bfloat16_weights_score_with_a_float32_head(tmp_path: Path) -> None:
    model = save_model(tmp_path / "one", "qwen3", dtype="bfloat16")
    rollouts = random_rollouts(np.random.default_rng(8))
    scores = score(tmp_path / "one", rollouts, dtype="bfloat16")
    mask = rollouts.loss_mask
    gap = scores.trainer_logprob[mask] - plain_logprobs(model.float(), rollouts)[mask]
    assert 1e-4 < np.abs(gap).max() < 0.2
    grid = scores.trainer_logprob[mask] * 256
    assert (grid != np.round(grid)).mean() > 0.9  # not stuck on bfloat16's grid


def test_a_step_without_any_checkpoint_says_so(tmp_path: Path) -> None:
    rollouts = random_rollouts(np.random.default_rng(9), version=4)
    scores = StepScorer(ScoringOptions(device="cpu")).score(rollouts, halves(rollouts), None, lambda _: None)
    assert np.isnan(scores.stale_logprob).all()
    assert set(scores.reasons) == {
        "no checkpoint of the trainer's weights at this step",
        "no checkpoint for sampler version 4",
    }


def test_missing_tensors_are_refused_not_invented(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "one", "qwen3")
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        Network(tmp_path / "one", ScoringOptions(device="cpu"))


def test_a_head_that_is_not_understood_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "granite")
    monkeypatch.setattr("mismatch_probe.scoring.network._logit_multiplier", lambda config: 1.0)
    with pytest.raises(CheckpointError, match="not those of its hidden states"):
        Network(tmp_path / "one", ScoringOptions(device="cpu"))


def test_vocabularies_must_agree(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3")
    save_model(tmp_path / "two", "qwen3", vocab_size=VOCAB + 3)
    with pytest.raises(CheckpointError, match="same vocabulary padding"):
        score(tmp_path / "one", random_rollouts(np.random.default_rng(0)), tmp_path / "two")


def test_devices_that_are_not_there_are_refused() -> None:
    for device in ("cuda:99", "quantum"):
        with pytest.raises(UsageError, match=device):
            ScoringOptions(device=device).torch_device()


def test_description_needs_no_weights_in_memory(tmp_path: Path) -> None:
    model = save_model(tmp_path / "one", "opt", tied=True)
    found = describe(tmp_path / "one")
    assert (found.vocab_size, found.max_positions) == (VOCAB, 64)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.dtypes == ("F32",)
    save_model(tmp_path / "two", "qwen3")
    assert describe(tmp_path / "two").max_positions is None  # rotary positions have no table


def test_batches_respect_the_budget_and_lose_no_row() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, size=200)
    seen = []
    for batch in batches(lengths, 120):
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= 120
        seen += batch.tolist()
    assert sorted(seen) == list(range(200))


_MEASURE = """
import sys
from pathlib import Path
import torch
from mismatch_probe.scoring.head import compare
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.sketch import HeadSketch
torch.set_num_threads(1)
tokens, folder, dtype = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
options = ScoringOptions(device="cpu", dtype=dtype)
nets = [Network(folder / name, options) for name in ("one", "two")]
ids = torch.randint(0, nets[0].vocab_size, (tokens,))
hidden = [net.hidden(ids[None])[0] for net in nets]
sketch = HeadSketch(nets[1].weight) if sys.argv[4] == "gradient" else None

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

def reduce(n):
    return compare((nets[0], hidden[0][:n]), (nets[1], hidden[1][:n]), ids[:n], ids[:n] % 2, 1.0, 1 << 21, sketch)

reduce(1)  # what a network or a library keeps for itself is not the reduction's
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kilobytes("VmRSS")
assert reduce(tokens).kl_stale_trainer.isfinite().all()
print((kilobytes("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("dtype", "gradient"), [("float32", "no"), ("bfloat16", "no"), ("float32", "gradient")])
def test_memory_over_the_vocabulary_is_bounded_by_the_chunk(tmp_path: Path, dtype: str, gradient: str) -> None:
    """Peak memory at a 150,000-word vocabulary: a few chunks (2^21 entries, 8 MB in float32), whatever the tokens."""
    for seed, name in enumerate(("one", "two")):
        small = {"vocab_size": 150_000, "hidden_size": 16, "head_dim": 4, "num_hidden_layers": 1}
        save_model(tmp_path / name, "qwen3", seed=seed, **small, max_position_embeddings=512)
    peaks = {}
    for tokens in (40, 320):
        made = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(tokens), str(tmp_path), dtype, gradient],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ,
        )
        peaks[tokens] = float(made.stdout)
    chunk_mb = (1 << 21) * 4 / 2**20
    whole_mb = 320 * 150_000 * 4 / 2**20
    assert 2 * chunk_mb < peaks[320] < 6 * chunk_mb < whole_mb / 3
    assert abs(peaks[320] - peaks[40]) < 2 * chunk_mb
