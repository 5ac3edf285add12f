"""Exact score centring from whole distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_probe.remedies.batch import Terms
from mismatch_probe.remedies.logprobs import chunks, wide
from mismatch_probe.remedies.ratios import RatioClip


@dataclass(frozen=True, eq=False)
class FullCentre:
    """The mean weighted score m = sum_v mu_v f(pi_v / pi_s_v) s_v over the whole vocabulary, exact.

    What is left after it is no leading bias: with lag 0 the mean update misses the on-policy one at that prefix by
    sum_v (mu_v - pi_v) (A_v - E_mu[A]) s_v, which does not change when a constant is added to A.

    The loss's whole gradient reaches the network through ``logits``, in one pass that makes nothing of their size
    except their gradient; the loss's ``logprobs`` are read and get none.

    Args:
        logits: the trainer's, (..., V), with gradient.
        token_ids: the sampled tokens, (...); ids below 0 only where the mask is False.
        sampler_logprobs: log mu, (..., V), normalised; -inf for tokens that could not be drawn.
        stale_logprobs: log pi_s, (..., V), normalised; needed as soon as the batch has ``stale_logprobs``.
        temperature: the trainer's logits are divided by it.

    Raises:
        ValueError: shapes that differ.
    """

    logits: Tensor
    token_ids: Tensor
    sampler_logprobs: Tensor
    stale_logprobs: Tensor | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("sampler_logprobs", "stale_logprobs"):
            value = getattr(self, name)
            if value is not None and value.shape != self.logits.shape:
                given = tuple(value.shape), tuple(self.logits.shape)
                raise ValueError(f"the centre's {name} are {given[0]}, its logits {given[1]}: give the same shape")
        if self.token_ids.shape != self.logits.shape[:-1]:
            given = tuple(self.token_ids.shape), tuple(self.logits.shape)
            raise ValueError(f"the centre's token_ids are {given[0]}, its logits {given[1]}: give one id a prefix")

    def score(self, terms: Terms, weight: Tensor, clip: RatioClip | None) -> Tensor:
        """See ``Centre``.

        Raises:
            ValueError: the lag is known at the sampled tokens but not over the vocabulary.
        """
        if clip is not None and self.stale_logprobs is None and terms.batch.stale_logprobs is not None:
            raise ValueError("the batch has stale_logprobs and the centre has none: give pi_s over the vocabulary too")
        flat = [
            None if values is None else values.reshape(-1, self.logits.shape[-1])
            for values in (self.logits, self.sampler_logprobs, self.stale_logprobs)
        ]
        bounds = ("", 0.0, 0.0) if clip is None else (clip.kind, clip.low, clip.high)
        tokens = (self.token_ids.clamp(min=0), weight, terms.advantage, terms.mask)
        place = tuple(values.reshape(-1, 1) for values in tokens)
        score: Tensor = _CentredScore.apply(*flat, *place, *bounds, self.temperature)  # type: ignore[no-untyped-call]
        return score.reshape(terms.mask.shape)


class _CentredScore(torch.autograd.Function):
    """w_a log pi(a) - sum_v mu_v w_v log pi_v of (n, V) distributions, (n,)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        made: tuple[Tensor, Tensor] = _centred_score(*given)
        ctx.save_for_backward(*given[:7], made[1])
        ctx.options = given[7:]
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _centred_gradient(*ctx.saved_tensors, grads[0], *ctx.options), *[None] * 10


_GIVEN = "Tensor logits, Tensor sampler, Tensor? stale, Tensor ids, Tensor weight, Tensor advantage, Tensor mask"
_OPTIONS = "str kind, float low, float high, float temperature"


@torch.library.custom_op(
    "mismatch_probe::centred_score", mutates_args=(), schema=f"({_GIVEN}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _centred_score(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The score, (n,), and the log normaliser, (n, 1)."""
    known, clip, temperature = given[:6], given[6:9], given[9]
    score, normaliser = _score_shapes(logits)
    for span in chunks(logits):
        logp = wide(logits[span], temperature)
        normaliser[span] = logp.logsumexp(-1, keepdim=True)
        logp = logp - normaliser[span]
        coefficient = _coefficients(logp, span, known, clip)
        # 0 log 0 = 0: what can neither be drawn nor was has no part.
        score[span] = torch.where(coefficient == 0, 0.0, coefficient * logp).sum(-1)
    return score, normaliser


@_centred_score.register_fake
def _score_shapes(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(logits.shape[0], dtype=kind), logits.new_empty(logits.shape[0], 1, dtype=kind)


@torch.library.custom_op(
    "mismatch_probe::centred_gradient",
    mutates_args=(),
    schema=f"({_GIVEN}, Tensor normaliser, Tensor grad, {_OPTIONS}) -> Tensor",
)
def _centred_gradient(logits: Tensor, *given: Any) -> Tensor:
    """(n, V)."""
    known, (normaliser, grad), clip, temperature = given[:6], given[6:8], given[8:11], given[11]
    grad = grad[:, None] / temperature
    out = torch.empty_like(logits)
    for span in chunks(logits):
        logp = wide(logits[span], temperature) - normaliser[span]
        coefficient = _coefficients(logp, span, known, clip)
        out[span] = (coefficient - logp.exp() * coefficient.sum(-1, keepdim=True)) * grad[span]
    return out


@_centred_gradient.register_fake
def _gradient_shape(logits: Tensor, *given: Any) -> Tensor:
    return torch.empty_like(logits)


def _coefficients(logp: Tensor, span: slice, known: tuple[Any, ...], clip: tuple[Any, ...]) -> Tensor:
    """What log pi_v is multiplied with: w_a at the sampled token, less mu_v w_v where the prefix counts, (m, V)."""
    cut: list[Any] = [None if each is None else each[span] for each in known]
    sampler, stale, ids, weight, advantage, mask = cut
    mass = torch.where(mask, sampler.to(logp.dtype), -torch.inf).exp()
    if clip[0] and stale is not None:
        lag = logp - torch.where(mask, stale.to(logp.dtype), logp)
        mass = torch.where(mass == 0, 0.0, mass * RatioClip(*clip).weight(lag, advantage))
    return mass.neg().scatter_add(-1, ids, weight)
