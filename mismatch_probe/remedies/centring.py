"""Score centring: the mean score under the sampler is taken off, so that a biased mean no longer moves the policy.

With the score s_v = grad log pi(v|h) and weights w_v = f(pi(v|h) / pi_s(v|h)), a weighted policy gradient has the mean

    E_mu[A w s] = E_mu[A] m + Cov_mu(A, w s),     m = sum_v mu_v w_v s_v

m is 0 when mu = pi_s and nothing is clipped. Otherwise the first term moves the policy in the same direction whatever
was rewarded. A centred loss subtracts c = sum_v c_v log pi_v, where c_v is held fixed, whose gradient is m. Three ways
to know m: ``FullCentre`` (exact), ``TopKCentre`` (the sampler's k largest), and ``SampledCentre`` (only log mu and
log pi_s of the sampled token). None of them touches Cov_mu(A, w s) - Cov_pi(A, s), nor whose prefixes these are.

Source: Marek and Ryabinin (2026), "Score Centering Stabilizes Off-policy RL", for w a ratio pi / mu; the split weight
is that of discrepancy-lag correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mismatch_probe.remedies.batch import Terms
from mismatch_probe.remedies.ratios import RatioClip

TAIL_FLOOR = 1e-6
"""Mass outside the head below which it is taken for this much, under every network: a float32 sum cannot tell it."""


class Centre(Protocol):
    """What ``score_centring_loss`` and ``dlc_loss`` take for ``centre``."""

    def score(self, terms: Terms, weight: Tensor, clip: RatioClip | None) -> Tensor:
        """w_a log pi(a) - c, nats, of the tokens' shape; its gradient is the weighted, centred score.

        Args:
            terms: of the sampled tokens.
            weight: w_a.
            clip: f; None for weights of 1.
        """
        ...


@dataclass(frozen=True, eq=False)
class TopKCentre:
    """The sampler's k largest probabilities at each prefix, and the rest modelled in the trainer's shape.

    With the head H, P = sum_H pi, Q = sum_H mu, R = sum_H pi_s: outside H, mu is taken for rho pi and pi_s for
    sigma pi, rho = (1 - Q) / (1 - P), sigma = (1 - R) / (1 - P). As sum_v pi_v s_v = 0, only the head's log-probs are
    needed:

        c = sum_H c_v log pi_v,     c_v = mu_v f(pi_v / pi_s_v) - rho f(1 / sigma) pi_v

    Exact where the head holds everything or the model is right; else what is left of m is
    sum_tail (mu_v f(pi_v / pi_s_v) - rho f(1 / sigma) pi_v) s_v. The head must not depend on which token was drawn:
    adding the sampled token to it biases the centre (``SampledCentre`` is the extreme of that).

    Args:
        logprobs: log pi of the head's tokens, nats, (..., k), with gradient; see ``token_and_head_logprobs``.
        sampler_logprobs: log mu of them, of the whole vocabulary's distribution, not renormalised, (..., k).
        stale_logprobs: log pi_s of them, (..., k); needed as soon as the batch has ``stale_logprobs``.
        ids: (..., k); entries below 0 are left out. None: all are there.

    Raises:
        ValueError: shapes that differ.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    stale_logprobs: Tensor | None = None
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("sampler_logprobs", "stale_logprobs", "ids"):
            value = getattr(self, name)
            if value is not None and value.shape != self.logprobs.shape:
                given = tuple(value.shape), tuple(self.logprobs.shape)
                raise ValueError(f"the head's {name} are {given[0]}, its logprobs {given[1]}: give the same shape")

    def score(self, terms: Terms, weight: Tensor, clip: RatioClip | None) -> Tensor:
        """See ``Centre``.

        Raises:
            ValueError: the lag is known at the sampled tokens but not at the head's.
        """
        if clip is not None and self.stale_logprobs is None and terms.batch.stale_logprobs is not None:
            raise ValueError("the batch has stale_logprobs and the head has none: score the head's ids with pi_s too")
        counted = terms.mask[..., None] if self.ids is None else terms.mask[..., None] & (self.ids >= 0)
        given = (
            self.logprobs,
            self.sampler_logprobs,
            self.logprobs if self.stale_logprobs is None else self.stale_logprobs,
        )
        head = [torch.where(counted, values.detach().to(terms.trainer.dtype), -torch.inf) for values in given]
        coefficient = head_coefficients(head[0], head[1], head[2], terms.advantage[..., None], clip)
        logprobs = torch.where(counted, self.logprobs, 0.0)
        return weight * terms.trainer - (torch.where(counted, coefficient, 0.0) * logprobs).sum(-1)


@dataclass(frozen=True, eq=False)
class SampledCentre:
    """The centre from what every trainer has: log mu and log pi_s of the sampled token.

    The top-k centre with the head {a}: mu is taken for pi_s off the sampled token, scaled so that masses add up. Where
    nothing is clipped the loss is then the lag-weighted one times (1 - mu_a) / (1 - pi_s_a).

    The bias that is left, because which probability is known depends on the draw: with lag 0, A constant and
    delta = mu - pi_s small, the mean update is in logit space, to first order in delta,

        A (b - pi sum_v b_v),     b_v = delta_v (1 - 2 pi_v) / (1 - pi_v)

    against A delta without centring. So it is gone where two tokens share the mass, small at confident prefixes, and
    untouched for tokens of small probability. (The unbiased one-sample centre (1 - e^D) s_a is no alternative: it turns
    the loss into importance weighting by e^D.)
    """

    def score(self, terms: Terms, weight: Tensor, clip: RatioClip | None) -> Tensor:
        """See ``Centre``."""
        now = terms.trainer.detach()
        parts = now, now - terms.log_ratio("total"), now - terms.lag
        head = [torch.where(terms.mask, part, -torch.inf)[..., None] for part in parts]
        coefficient = head_coefficients(head[0], head[1], head[2], terms.advantage[..., None], clip)[..., 0]
        return (weight - torch.where(terms.mask, coefficient, 0.0)) * terms.trainer


def head_coefficients(
    trainer: Tensor, sampler: Tensor, stale: Tensor, advantage: Tensor, clip: RatioClip | None
) -> Tensor:
    """c_v of the head's tokens, (..., k), without gradient.

    Args:
        trainer, sampler, stale: log pi, log mu and log pi_s of the head's tokens, nats, (..., k); -inf for no token.
        advantage: A of the sampled token, (..., 1).
        clip: f; None for weights of 1.
    """
    p, q = trainer.exp(), sampler.exp()
    tails = [(1 - mass.sum(-1, keepdim=True)).clamp(min=TAIL_FLOOR) for mass in (p, q, stale.exp())]
    rho = tails[1] / tails[0]
    if clip is None:
        return q - rho * p
    # A token without mass under both networks has no ratio, and no mass that could count.
    lag = torch.where(trainer == stale, 0.0, trainer - stale)
    head = torch.where(q == 0, 0.0, q * clip.weight(lag, advantage))
    return head - rho * clip.weight((tails[0] / tails[2]).log(), advantage) * p
