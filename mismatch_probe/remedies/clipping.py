"""Corrections that clip a ratio against old weights. All take (logprobs, batch), as those of ``corrections``."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_probe.remedies.batch import Batch, Ratio, Reduction
from mismatch_probe.remedies.ratios import DEFAULTS, RatioClip

GSPO_CLIP = (3e-4, 4e-4)
CISPO_HIGH = 5.0


def ppo_clip_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    clip: float = DEFAULTS.clip,
    ratio: Ratio = "lag",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """PPO anchored at pi_s: the gradient of min(r A, clamp(r, 1 - clip, 1 + clip) A) with r = e^L.

    That is w = r, or 0 where r > 1 + clip and A > 0, or r < 1 - clip and A < 0. D is ignored, as by trainers that
    recompute old log-probs and correct for nothing. Source: Schulman et al. (2017), arXiv 1707.06347.
    """
    terms = batch.terms(logprobs)
    return terms.loss(RatioClip.ppo(clip).weight(terms.log_ratio(ratio), terms.advantage) * terms.trainer, reduction)


def ppo_coupled_loss(
    logprobs: Tensor, batch: Batch, *, clip: float = DEFAULTS.clip, reduction: Reduction = "token-mean"
) -> Tensor:
    """PPO with one ratio for both parts, r = e^d = pi / mu: D uses up the trust region that is meant for L.

    Source: Schulman et al. (2017), with the engine's log-probs as the old ones.
    """
    return ppo_clip_loss(logprobs, batch, clip=clip, ratio="total", reduction=reduction)


def ppo_decoupled_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    clip: float = DEFAULTS.clip,
    cap: float = DEFAULTS.cap,
    reduction: Reduction = "token-mean",
) -> Tensor:
    """PPO anchored at pi_s and weighted for the discrepancy: min(e^D, cap) times the weight of ``ppo_clip_loss``.

    Source: Hilton, Cobbe and Schulman (2021), arXiv 2110.00641, with pi_s as the proximal policy; the cap is that of
    Yao et al. (2025).
    """
    terms = batch.terms(logprobs)
    behaviour = RatioClip("truncate", 0.0, cap).weight(terms.discrepancy, terms.advantage)
    return terms.loss(behaviour * RatioClip.ppo(clip).weight(terms.lag, terms.advantage) * terms.trainer, reduction)


def gspo_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    clip: tuple[float, float] = GSPO_CLIP,
    ratio: Ratio = "lag",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """GSPO: each token has its sequence's geometric mean ratio s = (prod r)^(1/T), clipped as PPO clips a token's.

    w = s, or 0 where s > 1 + clip[1] and A > 0, or s < 1 - clip[0] and A < 0; T counts the sequence's counted tokens.
    The paper reduces with ``sequence-mean``. Source: Zheng et al. (2025), arXiv 2507.18071.
    """
    terms = batch.terms(logprobs)
    mean = batch.spread(batch.sums(terms.log_ratio(ratio)) / terms.lengths())
    return terms.loss(
        RatioClip("ppo", 1 - clip[0], 1 + clip[1]).weight(mean, terms.advantage) * terms.trainer, reduction
    )


def cispo_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    high: float = CISPO_HIGH,
    low: float = 0.0,
    ratio: Ratio = "lag",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """CISPO: w = clamp(r, low, high), held fixed, so that no token loses its gradient.

    Source: MiniMax (2025), arXiv 2506.13585, which tunes only the upper bound; Khatri et al. (2025), arXiv 2510.13786.
    """
    terms = batch.terms(logprobs)
    weight = RatioClip("truncate", low, high).weight(terms.log_ratio(ratio), torch.zeros_like(terms.advantage))
    return terms.loss(weight * terms.trainer, reduction)
