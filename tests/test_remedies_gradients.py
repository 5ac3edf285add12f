"""Every correction's autograd gradient against enumeration of a tiny vocabulary, in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_probe import remedies
from mismatch_probe.remedies import CORRECTIONS, Batch, FullCentre, RatioClip, TopKCentre
from mismatch_probe.stats.corrections import CORRECTIONS as ANALYSED
from mismatch_probe.stats.corrections import Bounds, correction_weights
from mismatch_probe.stats.ratios import Levels
from tests.conftest import ROOT
from tests.remedies_truth import LENGTH, RESPONSES, World, gradient_of, on_policy, summed_scores, world

CENTRED = ("score_centring", "dlc")


def expected(made: World, loss: Callable[..., Tensor], batch: Batch | None = None, **options: object) -> Tensor:
    """Gradient of the loss's expectation over the sampler's responses, summed over tokens."""
    losses = loss(made.at_tokens(made.trainer), batch or made.batch(), reduction="none", **options)
    return gradient_of((made.drawn()[:, None] * losses).sum(), made.trainer)


def full(made: World) -> FullCentre:
    ids = torch.tensor(RESPONSES)
    return FullCentre(made.rows(made.trainer), ids, made.rows(made.sampler), made.rows(made.stale))


def ppo(r: float, a: float, low: float, high: float) -> float:
    return 0.0 if (r > high and a > 0) or (r < low and a < 0) else r


# Each by hand: from (w_D, w_L) of this token, those of the response, and A.
BY_HAND: dict[str, tuple[dict[str, object], Callable[..., float]]] = {
    "none": ({}, lambda wd, wl, sd, sl, a: 1.0),
    "token_tis": ({"cap": 1.3}, lambda wd, wl, sd, sl, a: min(wd * wl, 1.3)),
    "token_mask": ({"band": (0.6, 1.5)}, lambda wd, wl, sd, sl, a: wd * wl if 0.6 <= wd * wl <= 1.5 else 0.0),
    "sequence_is": ({"cap": 2.5}, lambda wd, wl, sd, sl, a: min(sd * sl, 2.5)),
    "sequence_mask": ({"band": (0.4, 2.0)}, lambda wd, wl, sd, sl, a: sd * sl if 0.4 <= sd * sl <= 2.0 else 0.0),
    "geometric_mask": ({"band": (0.7, 1.2)}, lambda wd, wl, sd, sl, a: float(0.7 <= (sd * sl) ** 0.5 <= 1.2)),
    "ppo_clip": ({"clip": 0.3}, lambda wd, wl, sd, sl, a: ppo(wl, a, 0.7, 1.3)),
    "ppo_coupled": ({"clip": 0.3}, lambda wd, wl, sd, sl, a: ppo(wd * wl, a, 0.7, 1.3)),
    "ppo_decoupled": ({"clip": 0.3, "cap": 1.2}, lambda wd, wl, sd, sl, a: min(wd, 1.2) * ppo(wl, a, 0.7, 1.3)),
    "gspo": ({"clip": (0.2, 0.3)}, lambda wd, wl, sd, sl, a: ppo(sl**0.5, a, 0.8, 1.3)),
    "cispo": ({"high": 1.4, "low": 0.5}, lambda wd, wl, sd, sl, a: max(0.5, min(wl, 1.4))),
}


def hand_weights(made: World, weight: Callable[..., float]) -> Tensor:
    trainer, stale, sampler = (made.at_tokens(each).detach() for each in (made.trainer, made.stale, made.sampler))
    wd, wl = (stale - sampler).exp(), (trainer - stale).exp()
    out = torch.empty(len(RESPONSES), LENGTH, dtype=torch.float64)
    for at in range(len(RESPONSES)):
        sd, sl = float(wd[at].prod()), float(wl[at].prod())
        for t in range(LENGTH):
            out[at, t] = weight(float(wd[at, t]), float(wl[at, t]), sd, sl, float(made.advantages[at, t]))
    return out


def test_every_correction_is_checked_by_hand() -> None:
    assert set(BY_HAND) | set(CENTRED) == set(CORRECTIONS) >= set(ANALYSED)


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_the_one_of_the_formula(name: str, seed: int) -> None:
    made = world(seed)
    options, weight = BY_HAND[name]
    weights = hand_weights(made, weight)
    assert name == "none" or weights.unique().numel() > 2 or name == "geometric_mask"
    torch.testing.assert_close(
        expected(made, CORRECTIONS[name], **options), summed_scores(made, weights), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("clip", [RatioClip(high=1.3), RatioClip("mask", 0.7, 1.4), RatioClip.ppo(), None], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_exactly_centred_gradient_is_the_one_of_the_formula(clip: RatioClip | None, seed: int) -> None:
    """Both losses: each token's weighted score less the mean of mu w s over the vocabulary."""
    made = world(seed)
    if clip is None:
        found = expected(made, remedies.score_centring_loss, centre=full(made))
        f = lambda r, a: 1.0  # noqa: E731
    else:
        found = expected(made, remedies.dlc_loss, centre=full(made), clip=clip)
        kinds = {
            "truncate": lambda r, a: min(r, clip.high),
            "mask": lambda r, a: r if clip.low <= r <= clip.high else 0.0,
            "ppo": lambda r, a: ppo(r, a, clip.low, clip.high),
        }
        f = kinds[clip.kind]
    mu, stale, pi = (made.rows(each).detach().exp() for each in (made.sampler, made.stale, made.trainer))
    weights = hand_weights(made, lambda wd, wl, sd, sl, a: f(wl, a))
    means = torch.empty_like(mu)
    for at in range(len(RESPONSES)):
        for t in range(LENGTH):
            ratios = [f(float(r), float(made.advantages[at, t])) for r in pi[at, t] / stale[at, t]]
            mass = mu[at, t] * torch.tensor(ratios, dtype=torch.float64)
            means[at, t] = mass - pi[at, t] * mass.sum()
    torch.testing.assert_close(found, summed_scores(made, weights, means), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("how", ["sampled", "top-k", "full"])
@pytest.mark.parametrize("reduction", ["sum", "token-mean", "sequence-mean", "sequence-sum"])
def test_on_policy_every_correction_is_reinforce(name: str, how: str, reduction: str) -> None:
    made = on_policy()
    batch, options = made.batch(), {}
    if name in CENTRED and how == "full":
        options["centre"] = full(made)
    elif name in CENTRED and how == "top-k":
        two = torch.tensor([0, 2])
        heads = (made.rows(each)[..., two] for each in (made.trainer, made.sampler, made.stale))
        options["centre"] = TopKCentre(*heads)
    plain = gradient_of(remedies.reinforce_loss(made.at_tokens(made.trainer), batch, reduction=reduction), made.trainer)
    loss = CORRECTIONS[name](made.at_tokens(made.trainer), batch, reduction=reduction, **options)
    assert plain.abs().max() > 0.01
    torch.testing.assert_close(gradient_of(loss, made.trainer), plain, rtol=0, atol=1e-12)


def test_plain_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    """Sequence-level advantages, on-policy; and sequence importance sampling is, at any lag and discrepancy."""
    for made, loss in ((on_policy(), remedies.reinforce_loss), (world(3), remedies.sequence_is_loss)):
        rewards = torch.linspace(-1, 2, len(RESPONSES), dtype=torch.float64)
        made.advantages = rewards[:, None].expand(-1, LENGTH).contiguous()
        value = (made.at_tokens(made.trainer).sum(-1).exp() * rewards).sum()
        torch.testing.assert_close(-expected(made, loss), gradient_of(value, made.trainer), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(cap=1.2, mask=(0.8, 1.3), geometric=(0.9, 1.2), clip=0.1)])
def test_weights_are_those_that_the_analysis_of_a_run_uses(bounds: Bounds) -> None:
    made = world(5)
    batch = made.batch()
    logprobs = made.at_tokens(made.trainer).detach().requires_grad_()
    terms = batch.terms(logprobs)
    levels = Levels(np.repeat(np.arange(len(RESPONSES)), LENGTH), np.zeros(len(RESPONSES), dtype=np.int64))
    flat = (each.reshape(-1).numpy() for each in (terms.discrepancy, terms.lag, terms.advantage))
    options: dict[str, dict[str, object]] = {
        "token_tis": {"cap": bounds.cap},
        "token_mask": {"band": bounds.mask},
        "geometric_mask": {"band": bounds.geometric},
        "ppo_clip": {"clip": bounds.clip},
    }
    for name, weights in correction_weights(*flat, levels, bounds).items():
        loss = CORRECTIONS[name](logprobs, batch, reduction="sum", **options.get(name, {}))
        found = -gradient_of(loss, logprobs) / batch.advantages
        np.testing.assert_allclose(found.reshape(-1), weights, rtol=1e-12, atol=0)
        if bounds == Bounds():
            plain = CORRECTIONS[name](logprobs, batch, reduction="sum")
            torch.testing.assert_close(plain, loss, rtol=0, atol=0)


def test_ratios_can_be_of_one_part() -> None:
    """IcePop as published masks pi_s / mu; TIS of the lag alone is DLC without centring."""
    made = world(6)
    discrepancy = hand_weights(made, lambda wd, wl, sd, sl, a: wd if 0.8 <= wd <= 1.2 else 0.0)
    found = expected(made, remedies.token_mask_loss, ratio="discrepancy", band=(0.8, 1.2))
    torch.testing.assert_close(found, summed_scores(made, discrepancy), rtol=0, atol=1e-12)
    lag = hand_weights(made, lambda wd, wl, sd, sl, a: min(wl, 2.0))
    found = expected(made, remedies.token_tis_loss, ratio="lag")
    torch.testing.assert_close(found, summed_scores(made, lag), rtol=0, atol=1e-12)


def test_without_stale_log_probs_the_lag_is_zero() -> None:
    made = world(7)
    batch = Batch(made.at_tokens(made.sampler), made.advantages)
    terms = batch.terms(made.at_tokens(made.trainer))
    assert not terms.lag.any() and terms.discrepancy.abs().min() > 0
    torch.testing.assert_close(
        expected(made, remedies.ppo_clip_loss, batch), expected(made, remedies.reinforce_loss), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize(("low", "high"), [(1.1, 2.0), (0.5, 0.9), (-1.0, 2.0), (math.nan, 2.0)])
def test_a_clip_must_leave_the_ratio_of_one(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 <= low <= 1 <= high"):
        RatioClip("mask", low, high)


def test_unknown_names_are_refused() -> None:
    made = world()
    with pytest.raises(ValueError, match="none of truncate, mask, ppo"):
        RatioClip("clamp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of total, lag, discrepancy"):
        expected(made, remedies.token_tis_loss, ratio="both")
    with pytest.raises(ValueError, match="none of token-mean"):
        remedies.dlc_loss(made.at_tokens(made.trainer), made.batch(), reduction="mean")  # type: ignore[arg-type]


def test_public_names_are_all_there_and_sorted() -> None:
    names = remedies.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(getattr(remedies, name).__doc__ for name in names)
    public = {
        name for name, value in vars(remedies).items() if getattr(value, "__module__", "").startswith(remedies.__name__)
    }
    assert public <= set(names)


def test_a_trainer_imports_torch_and_numpy_and_little_else() -> None:
    code = "import sys, mismatch_probe.remedies; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(made.stdout.split())
    assert not loaded & {"pandas", "pyarrow", "transformers", "matplotlib", "typer", "rich", "msgpack", "orjson"}
    parts = {name.split(".")[1] for name in loaded if name.startswith("mismatch_probe.")}
    assert parts == {"errors", "remedies", "stats"}
