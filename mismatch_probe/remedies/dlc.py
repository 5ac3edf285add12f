"""Discrepancy-lag correction: centre the discrepancy, clip the lag ratio; ``ResyncMonitor`` is its third part."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_probe.remedies.batch import Batch, Reduction
from mismatch_probe.remedies.centring import Centre, SampledCentre
from mismatch_probe.remedies.ratios import RatioClip

LAG_CLIP = RatioClip()


def score_centring_loss(
    logprobs: Tensor, batch: Batch, *, centre: Centre | None = None, reduction: Reduction = "token-mean"
) -> Tensor:
    """Score centring alone: -A (log pi(a) - sum_v mu_v log pi_v) with mu held fixed.

    Its mean update at a prefix is Cov_mu(A, s). ``pi_s`` is not needed; where it is given it has no part.

    Args:
        logprobs: log pi of the sampled tokens, nats, with gradient, of the shape of ``batch.sampler_logprobs``.
        batch: the tokens.
        centre: ``FullCentre``, ``TopKCentre``, or None for ``SampledCentre``, with the bias that one leaves.
        reduction: see ``Terms.loss``.

    Raises:
        ValueError: shapes that do not fit each other.

    Source: Marek and Ryabinin (2026), "Score Centering Stabilizes Off-policy RL".
    """
    terms = batch.terms(logprobs)
    score = (centre or SampledCentre()).score(terms, torch.ones_like(terms.lag), None)
    return terms.loss(score, reduction)


def dlc_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    centre: Centre | None = None,
    clip: RatioClip = LAG_CLIP,
    reduction: Reduction = "token-mean",
) -> Tensor:
    """-A (w_a log pi(a) - sum_v mu_v w_v log pi_v), w_v = f(pi_v / pi_s_v), with w and mu held fixed.

    The weight is the lag ratio alone, clipped by f. The mean of the weighted score under the sampler is taken off,
    which removes what the discrepancy, and what clipping, adds to the mean update whatever was rewarded. With lag 0 and
    ``FullCentre`` the mean update at a prefix misses the on-policy one by sum_v (mu_v - pi_v) (A_v - E_mu[A]) s_v and
    nothing else. Its parts alone: ``score_centring_loss`` (no lag ratio); ``token_tis_loss(ratio="lag")`` (no
    centring); ``clip=RatioClip.unclipped()``; and the sampler is resynchronised when ``ResyncMonitor`` says so.

    Args:
        logprobs: log pi of the sampled tokens, nats, with gradient, of the shape of ``batch.sampler_logprobs``.
        batch: the tokens; ``batch.stale_logprobs`` None means that the lag is 0.
        centre: ``FullCentre``, ``TopKCentre``, or None for ``SampledCentre``, with the bias that one leaves.
        clip: f; by default min(r, 2).
        reduction: see ``Terms.loss``.

    Raises:
        ValueError: shapes that do not fit each other, or a centre that lacks pi_s where the batch has it.

    Source: "Training-Inference Mismatch in LLM RL: Origins and Remedies" (2026), whose text was not at hand: range and
    kind of the clip are this project's choice, and options.
    """
    terms = batch.terms(logprobs)
    weight = clip.weight(terms.lag, terms.advantage)
    return terms.loss((centre or SampledCentre()).score(terms, weight, clip), reduction)
