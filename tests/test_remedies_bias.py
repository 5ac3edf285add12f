"""What centring leaves of the discrepancy's bias, enumerated: nothing of its leading part, the rest as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mismatch_probe.remedies import Batch, FullCentre, RatioClip, TopKCentre, dlc_loss, reinforce_loss, token_tis_loss
from mismatch_probe.remedies import score_centring_loss as sc_loss
from mismatch_probe.scoring.sketch import CAP, HeadSketch, Running
from tests.remedies_truth import RESPONSES, gradient_of, world

WORDS = 6


class Prefix:
    """One prefix: logits of pi over WORDS, mu = pi + delta, pi_s = pi unless a lag is given, an advantage a word."""

    def __init__(self, seed: int, scale: float = 0.05, lag: float = 0.0, words: int = WORDS) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda: torch.randn(words, dtype=torch.float64, generator=generator)  # noqa: E731
        self.logits = draw().requires_grad_()
        self.pi = self.logits.detach().softmax(-1)
        direction = draw()
        self.delta = scale * self.pi * (direction - (self.pi * direction).sum())
        self.mu = self.pi + self.delta
        self.stale = (self.logits.detach() + lag * draw()).softmax(-1)
        self.advantage = draw()
        self.words = words

    def batch(self, advantage: Tensor) -> Batch:
        """Each word once, as a response of its own."""
        return Batch(self.mu.log()[:, None], advantage[:, None], self.stale.log()[:, None])

    def rows(self, values: Tensor) -> Tensor:
        return values.expand(self.words, 1, -1)

    def full(self) -> FullCentre:
        ids = torch.arange(self.words)[:, None]
        return FullCentre(self.rows(self.logits), ids, self.rows(self.mu.log()), self.rows(self.stale.log()))

    def head(self, ids: Tensor, *, stale: bool = True) -> TopKCentre:
        parts = (self.rows(each[ids]) for each in (self.logits.log_softmax(-1), self.mu.log(), self.stale.log()))
        now, sampler, old = parts
        return TopKCentre(now, sampler, old if stale else None)

    def update(self, loss, advantage: Tensor | None = None, **options: object) -> Tensor:
        """Mean update in logit space, the negative gradient of the expected loss, (WORDS,)."""
        batch = self.batch(self.advantage if advantage is None else advantage)
        logprobs = self.logits.log_softmax(-1)[:, None]
        losses = loss(logprobs, batch, reduction="none", **options)
        return -gradient_of((self.mu[:, None] * losses).sum(), self.logits)

    def target(self) -> Tensor:
        """sum_v pi_v A_v s_v, the on-policy update."""
        return self.pi * (self.advantage - (self.pi * self.advantage).sum())


def scores(pi: Tensor) -> Tensor:
    """s_v = e_v - pi in row v."""
    return torch.eye(len(pi), dtype=pi.dtype) - pi


@pytest.mark.parametrize("seed", range(5))
def test_lag_0_centred_exactly_the_residual_is_the_predicted_one(seed: int) -> None:
    at = Prefix(seed, scale=0.3)
    assert torch.allclose(at.stale, at.pi)
    predicted = (at.delta * (at.advantage - (at.mu * at.advantage).sum())) @ scores(at.pi)
    found = at.update(dlc_loss, centre=at.full()) - at.target()
    torch.testing.assert_close(found, predicted, rtol=0, atol=1e-14)
    assert predicted.abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_lag_0_no_leading_bias_is_left(seed: int) -> None:
    """The bias that moves the policy whatever was rewarded: of a constant advantage, it is all there is."""
    at, constant = Prefix(seed, scale=0.3), torch.full((WORDS,), 1.7, dtype=torch.float64)
    leading = 1.7 * at.delta  # sum_v mu_v s_v = mu - pi
    torch.testing.assert_close(at.update(reinforce_loss, constant), leading, rtol=0, atol=1e-14)
    for loss in (dlc_loss, sc_loss):
        assert at.update(loss, constant, centre=at.full()).abs().max() < 1e-15
        shifted = at.update(loss, at.advantage + 1.7, centre=at.full())
        torch.testing.assert_close(shifted, at.update(loss, centre=at.full()), rtol=0, atol=1e-14)
    assert leading.abs().max() > 1e-3


@pytest.mark.parametrize("clip", [RatioClip(high=1.2), RatioClip("mask", 0.8, 1.2), RatioClip.ppo()], ids=str)
def test_with_a_lag_the_leading_bias_of_discrepancy_and_clipping_is_gone(clip: RatioClip) -> None:
    at, constant = Prefix(1, scale=0.3, lag=0.8), torch.ones(WORDS, dtype=torch.float64)
    assert at.update(dlc_loss, constant, centre=at.full(), clip=clip).abs().max() < 1e-15
    ratios = at.pi / at.stale
    assert (ratios > clip.high).any()  # something is clipped
    assert at.update(token_tis_loss, constant, ratio="lag").abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(5))
def test_unclipped_the_residual_of_the_lag_weighted_update_is_its_covariance_under_delta(seed: int) -> None:
    """With mu = pi_s and nothing clipped, DLC is unbiased at the prefix at any lag."""
    at = Prefix(seed, scale=0.0, lag=0.8)
    at.mu = at.stale
    found = at.update(dlc_loss, centre=at.full(), clip=RatioClip.unclipped())
    torch.testing.assert_close(found, at.target(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("lag", [0.0, 0.6])
@pytest.mark.parametrize("clip", [RatioClip(high=1.1), RatioClip("mask", 0.7, 1.3), RatioClip.ppo(0.1)], ids=str)
def test_a_head_of_all_words_is_exact(lag: float, clip: RatioClip) -> None:
    at = Prefix(2, scale=0.3, lag=lag)
    for loss, options in ((dlc_loss, {"clip": clip}), (sc_loss, {})):
        found = at.update(loss, centre=at.head(torch.arange(WORDS)), **options)
        torch.testing.assert_close(found, at.update(loss, centre=at.full(), **options), rtol=0, atol=1e-13)


@pytest.mark.parametrize("lag", [0.0, 0.6])
def test_a_head_leaves_the_bias_of_its_modelled_tail(lag: float) -> None:
    at, constant, clip = Prefix(3, scale=0.3, lag=lag), torch.ones(WORDS, dtype=torch.float64), RatioClip(high=1.1)
    head = torch.tensor([0, 2, 5])
    tail = torch.tensor([1, 3, 4])
    mass = {name: 1 - getattr(at, name)[head].sum() for name in ("pi", "mu", "stale")}
    f = lambda ratio: ratio.clamp(max=1.1)  # noqa: E731
    modelled = mass["mu"] / mass["pi"] * f(mass["pi"] / mass["stale"]) * at.pi
    left = (at.mu * f(at.pi / at.stale) - modelled)[tail] @ scores(at.pi)[tail]
    found = at.update(dlc_loss, constant, centre=at.head(head), clip=clip)
    torch.testing.assert_close(found, left, rtol=0, atol=1e-14)
    assert left.abs().max() > 1e-4
    unweighted = (at.mu - mass["mu"] / mass["pi"] * at.pi)[tail] @ scores(at.pi)[tail]
    torch.testing.assert_close(at.update(sc_loss, constant, centre=at.head(head)), unweighted, rtol=0, atol=1e-14)


def test_a_tail_in_the_trainers_shape_leaves_nothing() -> None:
    at, constant = Prefix(4), torch.ones(WORDS, dtype=torch.float64)
    at.mu = at.pi * torch.tensor([1.3, 1, 1, 1, 1, 1], dtype=torch.float64)
    at.mu[1:] *= (1 - at.mu[0]) / at.mu[1:].sum()
    for loss in (dlc_loss, sc_loss):
        assert at.update(loss, constant, centre=at.head(torch.tensor([0]))).abs().max() < 1e-15


@pytest.mark.parametrize("seed", range(5))
def test_from_the_sampled_token_alone_the_residual_is_the_stated_one(seed: int) -> None:
    """To first order in delta: halving delta quarters what the statement misses."""
    missed, left = [], []
    for scale in (0.02, 0.01):
        at, constant = Prefix(seed, scale=scale), torch.ones(WORDS, dtype=torch.float64)
        b = at.delta * (1 - 2 * at.pi) / (1 - at.pi)
        found = at.update(dlc_loss, constant)
        missed.append(float((found - (b - at.pi * b.sum())).norm()))
        left.append(float(found.norm() / at.delta.norm()))
    assert missed[0] / missed[1] == pytest.approx(4, rel=0.2)
    assert missed[1] < 0.05 * at.delta.norm()
    assert left[0] == pytest.approx(left[1], rel=0.1)  # first order: a fixed share of the bias is left


def test_from_the_sampled_token_alone_two_words_are_centred_exactly() -> None:
    at, constant = Prefix(6, scale=0.3, lag=0.5, words=2), torch.ones(2, dtype=torch.float64)
    assert at.update(reinforce_loss, constant).abs().max() > 1e-3
    for clip in (RatioClip.unclipped(), RatioClip(high=1.01)):
        assert at.update(dlc_loss, constant, clip=clip).abs().max() < 1e-15


def test_from_the_sampled_token_alone_the_weight_is_the_stated_one() -> None:
    """Unclipped, the lag ratio times (1 - mu_a) / (1 - pi_s_a)."""
    made = world(4)
    logprobs = made.at_tokens(made.trainer).detach().requires_grad_()
    batch = made.batch()
    loss = dlc_loss(logprobs, batch, clip=RatioClip.unclipped(), reduction="sum")
    sampler, stale, trainer = (made.at_tokens(each).detach().exp() for each in (made.sampler, made.stale, made.trainer))
    stated = trainer / stale * (1 - sampler) / (1 - stale)
    torch.testing.assert_close(-gradient_of(loss, logprobs) / batch.advantages, stated, rtol=1e-12, atol=0)


def test_centred_under_the_stale_trainer_it_is_the_update_that_the_analysis_rates() -> None:
    made = world(8)
    made = replace(made, sampler=made.stale)
    logits = made.rows(made.trainer).detach().requires_grad_()
    ids = torch.tensor(RESPONSES)
    centre = FullCentre(logits, ids, made.rows(made.sampler), made.rows(made.stale))
    batch = made.batch()
    loss = dlc_loss(made.at_tokens(made.trainer), batch, centre=centre, clip=RatioClip(high=CAP), reduction="sum")
    update = -gradient_of(loss, logits) / batch.advantages[..., None]
    sketch = HeadSketch(torch.empty(4, 2, dtype=torch.float64))
    hidden = torch.zeros(32, 2, dtype=torch.float64)
    factors = sketch.empty(hidden)
    stale, trainer = (each.detach().exp().reshape(-1, 4) for each in (made.rows(made.stale), made.rows(made.trainer)))
    running = Running(sketch, trainer)
    running.add(slice(None), stale, trainer)
    at = ids.reshape(-1, 1)
    running.put(factors, slice(None), at[:, 0], hidden, (trainer.gather(-1, at) / stale.gather(-1, at))[:, 0])
    torch.testing.assert_close(update.reshape(-1, 4), factors.centred, rtol=0, atol=1e-12)


def test_a_centre_must_know_the_lag_that_the_batch_knows() -> None:
    at = Prefix(0, lag=0.5)
    with pytest.raises(ValueError, match="the head has none: score the head's ids with pi_s"):
        at.update(dlc_loss, centre=at.head(torch.arange(3), stale=False))
    with pytest.raises(ValueError, match="the centre has none"):
        at.update(dlc_loss, centre=replace(at.full(), stale_logprobs=None))
    at.update(sc_loss, centre=at.head(torch.arange(3), stale=False))
    with pytest.raises(ValueError, match=r"the head's sampler_logprobs are \(6, 1, 3\), its logprobs \(6, 1, 2\)"):
        TopKCentre(torch.zeros(6, 1, 2), torch.zeros(6, 1, 3))
    with pytest.raises(ValueError, match="give one id a prefix"):
        FullCentre(torch.zeros(6, 1, 2), torch.zeros(6), torch.zeros(6, 1, 2))
    with pytest.raises(ValueError, match="the centre's stale_logprobs are"):
        FullCentre(torch.zeros(6, 1, 2), torch.zeros(6, 1), torch.zeros(6, 1, 2), torch.zeros(6, 2))
