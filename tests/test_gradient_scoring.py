"""Factors of the head's gradient as the scorer makes them: against autograd, and projected against whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.assemble import halves
from mismatch_probe.scoring.head import compare
from mismatch_probe.scoring.head import score as score_one
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.score import StepScorer
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.sketch import CAP, Factors, HeadSketch, Running
from mismatch_probe.stats.corrections import CORRECTIONS, Bounds
from mismatch_probe.stats.gradient import TokenGradients, gradient_bias
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.updates import chosen_tokens
from tests.tiny import VOCAB, random_rollouts, save_model

OPTIONS = ScoringOptions(device="cpu", dtype="float64")


def pair(folder: Path, kind: str = "qwen3", **extra) -> tuple[Network, Network]:
    for seed, name in enumerate(("stale", "trainer")):
        save_model(folder / name, kind, seed=seed, dtype="float64", **extra)
    return Network(folder / "stale", OPTIONS), Network(folder / "trainer", OPTIONS)


def factors_of(stale: Network, trainer: Network, ids: torch.Tensor, temperature: float = 1.0) -> Factors:
    states = [network.hidden(ids[None])[0] for network in (stale, trainer)]
    found = compare(
        (stale, states[0]), (trainer, states[1]), ids, ids % 2, temperature, 5 * VOCAB, HeadSketch(trainer.weight)
    )
    assert found.factors is not None
    return found.factors


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["qwen3", "granite"])
def test_the_closed_form_is_the_gradient_that_autograd_finds(tmp_path: Path, kind: str, temperature: float) -> None:
    """Losses as a trainer writes them: -A w log p, and the centred one with its sum over the vocabulary."""
    stale, trainer = pair(tmp_path, kind)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, size=40))
    found = factors_of(stale, trainer, ids, temperature)
    generator = torch.Generator().manual_seed(1)
    advantage, weight = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    x = trainer.hidden(ids[None])[0].clone()
    head = trainer.weight.detach().clone().requires_grad_()
    q = torch.log_softmax(stale.logits(stale.hidden(ids[None])[0]) / temperature, -1).exp().clone()
    scale = (trainer.logits(x[:1]) / (x[:1] @ trainer.weight.T)).median()  # granite divides its logits
    logp = torch.log_softmax(x @ head.T * scale / temperature, -1)
    taken = logp.gather(-1, ids[:, None])[:, 0]
    ratio = (logp.detach().exp() / q).clamp_max(CAP)
    mine = ratio.gather(-1, ids[:, None])[:, 0]
    losses = {
        "score": (advantage * weight * taken).sum(),
        "centred": (advantage * (mine * taken - (q * ratio * logp).sum(-1))).sum(),
    }
    closed = {"score": (advantage * weight)[:, None] * found.score, "centred": advantage[:, None] * found.centred}
    for name, loss in losses.items():
        (oracle,) = torch.autograd.grad(loss, head, retain_graph=True)
        ours = closed[name].T @ found.state * scale / temperature
        assert float(oracle.abs().max()) > 0.1
        assert float((ours - oracle).abs().max()) < 1e-10, name


def test_one_set_of_weights_needs_no_centring(tmp_path: Path) -> None:
    stale, trainer = pair(tmp_path)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, size=30))
    both = factors_of(trainer, trainer, ids)
    alone = score_one(trainer, trainer.hidden(ids[None])[0], ids, 1.0, 5 * VOCAB, HeadSketch(trainer.weight))[1]
    assert alone is not None
    assert torch.equal(alone.score, both.score) and torch.equal(alone.centred, alone.score)
    assert float((both.centred - both.score).abs().max()) < 1e-14
    assert float((factors_of(stale, trainer, ids).centred - both.score).abs().max()) > 0.01


def tokens_with(score: torch.Tensor, centred: torch.Tensor, state: torch.Tensor, exact: bool) -> TokenGradients:
    rng = np.random.default_rng(5)
    n = len(score)
    return TokenGradients(
        0.05 * rng.normal(size=n),
        0.2 * rng.normal(size=n),
        rng.normal(size=n),
        score.numpy(),
        centred.numpy(),
        state.numpy(),
        Levels(np.arange(n) // 8, np.arange(n // 8) // 4),
        exact,
    )


def test_a_projection_errs_by_what_it_says() -> None:
    """400 ids and 150 hidden dimensions, projected to 64 by 64, against the whole."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(400, 150, generator=generator, dtype=torch.float64)
    n = 320
    p, q = (torch.softmax(2 * torch.randn(n, 400, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    q = 0.8 * p + 0.2 * q
    ids, x = torch.multinomial(p, 1, generator=generator)[:, 0], torch.randn(n, 150, generator=generator).double()
    at, mass = ids[:, None], torch.minimum(p, CAP * q)
    mine = (p / q).clamp_max(CAP).gather(-1, at)
    drawn = torch.nn.functional.one_hot(ids, 400).double()
    whole = tokens_with(drawn - p, mine * drawn - mass + (mass.sum(-1, keepdim=True) - mine) * p, x, True)
    sketch = HeadSketch(weight)
    kept = sketch.empty(x)
    running = Running(sketch, p)
    for tile in (slice(0, 130), slice(130, 400)):
        running.add(tile, q[:, tile], p[:, tile])
    running.put(kept, slice(0, n), ids, x, (p / q).gather(-1, at)[:, 0])
    assert kept.score.shape == (n, 64) and kept.state.shape == (n, 64) and not sketch.exact
    projected = replace(
        whole, score=kept.score.numpy(), centred=kept.centred.numpy(), state=kept.state.numpy(), exact=False
    )
    true, ours = (gradient_bias(t, ClusterIntervals(10), Bounds(), "token") for t in (whole, projected))
    error = ours.values["gradient_sketch_error"]
    assert true.values["gradient_sketch_error"] == 0.0 and 0.001 < error < 0.1
    off = {
        key: abs(interval.value - true.intervals[key].value)
        for key, interval in ours.intervals.items()
        if key != "gradient_signal"
    }
    assert len(off) == 4 * len(CORRECTIONS) and 0.3 * error < max(off.values()) < 1.2 * error, (off, error)


def scored(folder: Path, rollouts, wanted: np.ndarray | None = None, **options) -> StepScores:
    scorer = StepScorer(ScoringOptions(device="cpu", **options))
    wanted = rollouts.loss_mask if wanted is None else wanted
    return scorer.score(rollouts, halves(rollouts), folder / "trainer", lambda _: folder / "stale", wanted)


def test_units_batches_and_choice_change_no_factor(tmp_path: Path) -> None:
    pair(tmp_path)
    rollouts = random_rollouts(np.random.default_rng(6))
    whole = scored(tmp_path, rollouts).factors
    some = chosen_tokens(rollouts, seed=0, step=0, most=60)
    parts = scored(tmp_path, rollouts, some, max_tokens=4, chunk_elements=3 * VOCAB).factors
    assert whole is not None and parts is not None and 0 < some.sum() <= 60
    kept = some[rollouts.loss_mask]
    for name in ("score", "centred", "state"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name)[kept], abs=1e-4)
        assert np.isfinite(getattr(whole, name)).all()


def test_whole_groups_are_chosen_by_seed() -> None:
    rollouts = random_rollouts(np.random.default_rng(7), n=30)
    group = rollouts.group_of_sequence[rollouts.sequence_of_token]
    chosen = chosen_tokens(rollouts, seed=3, step=1, most=100)
    assert (chosen == chosen_tokens(rollouts, seed=3, step=1, most=100)).all()
    assert (chosen != chosen_tokens(rollouts, seed=4, step=1, most=100)).any()
    for g in range(group.max() + 1):
        mine = rollouts.loss_mask & (group == g)
        assert (chosen[mine]).all() or not chosen[mine].any()
    assert (chosen_tokens(rollouts, 3, 1) == rollouts.loss_mask).all()


def test_a_head_that_caps_its_logits_has_no_factors(tmp_path: Path) -> None:
    pair(tmp_path, "gemma2")
    rollouts = random_rollouts(np.random.default_rng(8))
    scores = scored(tmp_path, rollouts)
    assert scores.factors is None and np.isfinite(scores.trainer_logprob[rollouts.loss_mask]).all()
