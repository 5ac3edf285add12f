"""Reduction over the vocabulary: from hidden states to log-probs, entropies, KL, total variation and bias.

The tokens are cut so that no (tokens, vocabulary) array exceeds ``chunk_elements``. Logits leave the head in float32
and are widened to float64 before anything is subtracted: KL divergences of 1e-6 nats survive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.scoring.network import Network


@dataclass(frozen=True)
class TokenScores:
    """One network at n prefixes: log-prob of the token that followed and entropy, nats, (n,) float64."""

    logprob: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class PairScores:
    """The stale trainer pi_s and the trainer pi at n prefixes, exact over the vocabulary; all float64.

    ``kl_stale_trainer`` is KL(pi_s || pi) and ``kl_trainer_stale`` KL(pi || pi_s), nats, (n,).
    ``total_variation`` is half the L1 norm of pi_s - pi, (n,).
    ``bias_sum`` sums the vectors pi_s - pi over the prefixes of each half of the prompt groups, (2, V).
    """

    stale: TokenScores
    trainer: TokenScores
    kl_stale_trainer: Tensor
    kl_trainer_stale: Tensor
    total_variation: Tensor
    bias_sum: Tensor


@torch.inference_mode()
def score(network: Network, hidden: Tensor, token_ids: Tensor, temperature: float, chunk_elements: int) -> TokenScores:
    """Log-prob of each token and entropy of its prefix.

    Args:
        network: gives the head.
        hidden: state of the position before each token, (n, H).
        token_ids: (n,).
        temperature: logits are divided by it.
        chunk_elements: bound on the entries of a (tokens, vocabulary) array.
    """
    token_ids = token_ids.to(hidden.device)
    scores = TokenScores(*_empty(2, hidden))
    for span in _chunks(len(token_ids), network.vocab_size, chunk_elements):
        logp = _log_softmax(network, hidden[span], temperature)
        scores.logprob[span] = _pick(logp, token_ids[span])
        scores.entropy[span] = _entropy(logp, logp.exp())
    return scores


@torch.inference_mode()
def compare(
    stale: tuple[Network, Tensor],
    trainer: tuple[Network, Tensor],
    token_ids: Tensor,
    half: Tensor,
    temperature: float,
    chunk_elements: int,
) -> PairScores:
    """Both networks on the same prefixes, in one pass over tokens; NaN where a network gives NaN.

    Args:
        stale, trainer: each a network and its hidden states, (n, H).
        token_ids: (n,).
        half: 0 or 1, which half of the prompt groups the token belongs to, (n,).
        temperature: logits of both are divided by it.
        chunk_elements: bound on the entries of a (tokens, vocabulary) array.
    """
    vocab_size = stale[0].vocab_size
    token_ids, half = token_ids.to(stale[1].device), half.to(stale[1].device)
    one, two = TokenScores(*_empty(2, stale[1])), TokenScores(*_empty(2, stale[1]))
    kl_st, kl_ts, variation = _empty(3, stale[1])
    bias_sum = torch.zeros(2, vocab_size, dtype=torch.float64, device=stale[1].device)
    for span in _chunks(len(token_ids), vocab_size, chunk_elements):
        logp_s = _log_softmax(stale[0], stale[1][span], temperature)
        logp_t = _log_softmax(trainer[0], trainer[1][span], temperature)
        p_s, p_t = logp_s.exp(), logp_t.exp()
        for scores, logp, p in ((one, logp_s, p_s), (two, logp_t, p_t)):
            scores.logprob[span] = _pick(logp, token_ids[span])
            scores.entropy[span] = _entropy(logp, p)
        gap = logp_s.sub_(logp_t)
        kl_st[span] = torch.linalg.vecdot(p_s, gap).clamp_min_(0.0)
        kl_ts[span] = torch.linalg.vecdot(p_t, gap).neg_().clamp_min_(0.0)
        # A token whose networks give NaN would spoil the sum of all others.
        difference = p_s.sub_(p_t).nan_to_num_(0.0, 0.0, 0.0)
        for which in (0, 1):
            bias_sum[which] += difference[half[span] == which].sum(0)
        variation[span] = torch.where(kl_st[span].isnan(), torch.nan, difference.abs_().sum(-1).mul_(0.5))
    return PairScores(one, two, kl_st, kl_ts, variation, bias_sum)


def _chunks(tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    width = max(1, chunk_elements // vocab_size)
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))


def _empty(count: int, like: Tensor) -> list[Tensor]:
    return [torch.empty(len(like), dtype=torch.float64, device=like.device) for _ in range(count)]


def _log_softmax(network: Network, hidden: Tensor, temperature: float) -> Tensor:
    logits = network.logits(hidden).double()
    if temperature != 1.0:
        logits /= temperature
    return torch.sub(logits, torch.logsumexp(logits, dim=-1, keepdim=True), out=logits)


def _pick(logp: Tensor, token_ids: Tensor) -> Tensor:
    return logp.gather(-1, token_ids[:, None])[:, 0]


def _entropy(logp: Tensor, p: Tensor) -> Tensor:
    return -(p * logp).sum(-1)
