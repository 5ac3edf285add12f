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
from mismatch_probe.scoring.sketch import Factors, HeadSketch


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
    ``factors`` are those of the head's gradient, where a sketch was given.
    """

    stale: TokenScores
    trainer: TokenScores
    kl_stale_trainer: Tensor
    kl_trainer_stale: Tensor
    total_variation: Tensor
    bias_sum: Tensor
    factors: Factors | None = None


@torch.inference_mode()
def score(
    network: Network,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> tuple[TokenScores, Factors | None]:
    """Log-prob of each token and entropy of its prefix, and the factors of the head's gradient where they are wanted.

    Args:
        network: gives the head.
        hidden: state of the position before each token, (n, H).
        token_ids: (n,).
        temperature: logits are divided by it.
        chunk_elements: bound on the entries of a (tokens, vocabulary) array.
        sketch: of the head, for its gradient's factors; None for none.
    """
    token_ids = token_ids.to(hidden.device)
    scores = TokenScores(*_empty(2, hidden))
    factors = None if sketch is None else sketch.empty(hidden)
    for span in _chunks(len(token_ids), network.vocab_size, chunk_elements):
        logp, p = _distributions(network, hidden[span], temperature)
        _put(scores, span, token_ids[span], logp, p)
        if sketch is not None and factors is not None:
            sketch.put(factors, span, token_ids[span], hidden[span], None, p)
    return scores, factors


@torch.inference_mode()
def compare(
    stale: tuple[Network, Tensor],
    trainer: tuple[Network, Tensor],
    token_ids: Tensor,
    half: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> PairScores:
    """Both networks on the same prefixes, in one pass over tokens; NaN where a network gives NaN.

    Args:
        stale, trainer: each a network and its hidden states, (n, H).
        token_ids: (n,).
        half: 0 or 1, which half of the prompt groups the token belongs to, (n,).
        temperature: logits of both are divided by it.
        chunk_elements: bound on the entries of a (tokens, vocabulary) array.
        sketch: of the trainer's head, for its gradient's factors; None for none.
    """
    vocab_size = stale[0].vocab_size
    token_ids, half = token_ids.to(stale[1].device), half.to(stale[1].device)
    kl_st, kl_ts, variation = _empty(3, stale[1])
    pair = PairScores(
        stale=TokenScores(*_empty(2, stale[1])),
        trainer=TokenScores(*_empty(2, stale[1])),
        kl_stale_trainer=kl_st,
        kl_trainer_stale=kl_ts,
        total_variation=variation,
        bias_sum=torch.zeros(2, vocab_size, dtype=torch.float64, device=stale[1].device),
        factors=None if sketch is None else sketch.empty(trainer[1]),
    )
    for span in _chunks(len(token_ids), vocab_size, chunk_elements):
        _compare_chunk(pair, span, (stale, trainer), token_ids[span], half[span], temperature, sketch)
    return pair


def _compare_chunk(
    pair: PairScores,
    span: slice,
    networks: tuple[tuple[Network, Tensor], tuple[Network, Tensor]],
    token_ids: Tensor,
    half: Tensor,
    temperature: float,
    sketch: HeadSketch | None,
) -> None:
    """Fill the tokens of one chunk. A function of its own: its arrays are gone before the next chunk's are made."""
    (stale, stale_states), (trainer, trainer_states) = networks
    logp_s, p_s = _distributions(stale, stale_states[span], temperature)
    logp_t, p_t = _distributions(trainer, trainer_states[span], temperature)
    _put(pair.stale, span, token_ids, logp_s, p_s)
    _put(pair.trainer, span, token_ids, logp_t, p_t)
    if sketch is not None and pair.factors is not None:
        sketch.put(pair.factors, span, token_ids, trainer_states[span], p_s, p_t)
    gap = logp_s.sub_(logp_t)
    kl = _dot(p_s, gap).clamp_min_(0.0)
    pair.kl_stale_trainer[span] = kl
    pair.kl_trainer_stale[span] = _dot(p_t, gap).neg_().clamp_min_(0.0)
    # A token whose networks give NaN would spoil the sum of all others.
    difference = p_s.sub_(p_t).nan_to_num_(0.0, 0.0, 0.0)
    pair.bias_sum.add_(torch.stack([half == 0, half == 1]).double() @ difference)
    pair.total_variation[span] = torch.where(kl.isnan(), torch.nan, difference.abs_().sum(-1).mul_(0.5))


def _chunks(tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    width = max(1, chunk_elements // vocab_size)
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))


def _empty(count: int, like: Tensor) -> list[Tensor]:
    return [torch.empty(len(like), dtype=torch.float64, device=like.device) for _ in range(count)]


def _distributions(network: Network, hidden: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities of each prefix, (n, V) float64: the only two arrays of a network's chunk."""
    logp = network.logits(hidden).double()
    if temperature != 1.0:
        logp /= temperature
    logp -= logp.amax(dim=-1, keepdim=True)
    p = logp.exp()
    mass = p.sum(dim=-1, keepdim=True)
    p /= mass
    logp -= mass.log()
    return logp, p


def _put(scores: TokenScores, span: slice, token_ids: Tensor, logp: Tensor, p: Tensor) -> None:
    scores.logprob[span] = logp.gather(-1, token_ids[:, None])[:, 0]
    scores.entropy[span] = -_dot(p, logp)


def _dot(one: Tensor, two: Tensor) -> Tensor:
    """Row by row, without an array of products."""
    return torch.bmm(one[:, None], two[:, :, None])[:, 0, 0]
