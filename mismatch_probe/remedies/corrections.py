"""Corrections that weight tokens or sequences by a ratio, or drop them. All take (logprobs, batch).

``logprobs`` is log pi of the sampled tokens, nats, with gradient, of the shape of ``batch.sampler_logprobs``. Each
returns the loss -A w log pi(a), reduced; only its gradient has a meaning, -A w grad log pi(a), with w held fixed. r is
e^d = pi / mu of a token; ``ratio="lag"`` takes e^L = pi / pi_s and ``"discrepancy"`` e^D = pi_s / mu instead.
ValueError: shapes that do not fit, an unknown ratio or reduction, bounds that make no sense.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_probe.remedies.batch import Batch, Ratio, Reduction
from mismatch_probe.remedies.ratios import DEFAULTS, RatioClip


def reinforce_loss(logprobs: Tensor, batch: Batch, *, reduction: Reduction = "token-mean") -> Tensor:
    """No correction: w = 1.

    Its mean update is off by E_mu[A s] - E_pi[A s] at each prefix, of first order in D and in L.
    Source: Williams (1992).
    """
    terms = batch.terms(logprobs)
    return terms.loss(terms.trainer, reduction)


def token_tis_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    cap: float = DEFAULTS.cap,
    ratio: Ratio = "total",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """Truncated importance sampling of tokens: w = min(r, cap).

    Unbiased for the token-level target where nothing is capped; prefixes stay the sampler's.
    Source: Ionides (2008); Yao et al. (2025), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    terms = batch.terms(logprobs)
    weight = RatioClip("truncate", 0.0, cap).weight(terms.log_ratio(ratio), terms.advantage)
    return terms.loss(weight * terms.trainer, reduction)


def token_mask_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    band: tuple[float, float] = DEFAULTS.mask,
    ratio: Ratio = "total",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """Masked importance sampling, IcePop: w = r inside the band, else 0.

    Source: Ling team (2025), arXiv 2510.18855, where r is pi_s / mu (``ratio="discrepancy"``).
    """
    terms = batch.terms(logprobs)
    weight = RatioClip("mask", *band).weight(terms.log_ratio(ratio), terms.advantage)
    return terms.loss(weight * terms.trainer, reduction)


def sequence_is_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    cap: float = math.inf,
    ratio: Ratio = "total",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """Importance sampling of sequences: w = min(prod r, cap), the product over the response.

    Uncapped it is the only one whose mean update is the on-policy one at any lag (with ``reduction`` ``sum`` or
    ``sequence-sum``); its variance grows exponentially with the length.
    """
    terms = batch.terms(logprobs)
    sums = batch.sums(terms.log_ratio(ratio))
    weight = RatioClip("truncate", 0.0, cap).weight(sums, torch.zeros_like(sums))
    return terms.loss(batch.spread(weight) * terms.trainer, reduction)


def sequence_mask_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    band: tuple[float, float] = (0.0, DEFAULTS.cap),
    ratio: Ratio = "total",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """Masked importance sampling of sequences: w = prod r inside the band, else 0.

    Source: Liu, Li et al. (2025), "When Speed Kills Stability", with the band (0, 2).
    """
    terms = batch.terms(logprobs)
    sums = batch.sums(terms.log_ratio(ratio))
    weight = RatioClip("mask", *band).weight(sums, torch.zeros_like(sums))
    return terms.loss(batch.spread(weight) * terms.trainer, reduction)


def geometric_mask_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    band: tuple[float, float] = DEFAULTS.geometric,
    ratio: Ratio = "total",
    reduction: Reduction = "token-mean",
) -> Tensor:
    """Sequences whose geometric mean ratio is outside the band are dropped: w = 1 inside, else 0.

    The mean is that of a sequence's counted tokens, so a long sequence is as easily kept as a short one.
    Source: Li et al. (2025), "Rollout correction"; the band is SkyRL's.
    """
    terms = batch.terms(logprobs)
    mean = batch.sums(terms.log_ratio(ratio)) / terms.lengths()
    ratio_inside = RatioClip("mask", *band).weight(mean, torch.zeros_like(mean))
    # A ratio that is NaN stays one: it is neither kept nor dropped in silence.
    weight = torch.where(ratio_inside.isnan(), ratio_inside, (ratio_inside > 0).to(mean.dtype))
    return terms.loss(batch.spread(weight) * terms.trainer, reduction)
