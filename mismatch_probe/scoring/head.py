"""Reduction over the vocabulary: from hidden states to log-probs, entropies, KL, total variation and bias.

Tokens are cut into chunks whose logits are at most ``chunk_elements``, and a chunk's vocabulary into tiles that stay in
the caches. Logits are float32 (float64 for float64 weights). Differences between the networks are taken before
anything is summed, and all sums over the vocabulary are float64: KL divergences of 1e-6 nats survive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.scoring.network import Network
from mismatch_probe.scoring.sketch import Factors, HeadSketch, Running

_TILE_ELEMENTS = 1 << 18
"""Entries of a (tokens, tile of the vocabulary) array: 1 MiB of float32 on a CPU."""


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
    ``same_top`` is 1 where both give their largest probability to the same token, else 0, (n,).
    ``bias_sum`` sums the vectors pi_s - pi over the prefixes of each half of the prompt groups, (2, V).
    ``factors`` are those of the head's gradient, where a sketch was given.
    """

    stale: TokenScores
    trainer: TokenScores
    kl_stale_trainer: Tensor
    kl_trainer_stale: Tensor
    total_variation: Tensor
    same_top: Tensor
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
    scores = empty_scores(hidden)
    factors = None if sketch is None else sketch.empty(hidden)
    buffer = _buffer(network, len(token_ids), chunk_elements)
    for span in _chunks(len(token_ids), network.vocab_size, chunk_elements):
        one = _Reduction(network, hidden[span], token_ids[span], temperature, buffer)
        for tile in one.tiles:
            one.shifted(tile)
            one.add(tile)
        one.put(scores, span)
        if sketch is not None and factors is not None:
            running = Running(sketch, one.logits)
            for tile in one.tiles:
                running.add(tile, None, one.probabilities(tile))
            running.put(factors, span, token_ids[span], hidden[span], None)
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
    token_ids, half = token_ids.to(stale[1].device), half.to(stale[1].device)
    pair = empty_pair(stale, trainer, sketch)
    buffers = tuple(_buffer(network, len(token_ids), chunk_elements) for network, _ in (stale, trainer))
    for span in _chunks(len(token_ids), stale[0].vocab_size, chunk_elements):
        s, t = (
            _Reduction(network, states[span], token_ids[span], temperature, buffer)
            for (network, states), buffer in zip((stale, trainer), buffers, strict=True)
        )
        running = None if sketch is None else Running(sketch, t.logits)
        _compare_chunk(pair, span, s, t, half[span], running)
        if running is not None and pair.factors is not None:
            ratio = (pair.trainer.logprob[span] - pair.stale.logprob[span]).exp()
            running.put(pair.factors, span, token_ids[span], trainer[1][span], ratio)
    return pair


def _compare_chunk(
    pair: PairScores, span: slice, s: _Reduction, t: _Reduction, half: Tensor, running: Running | None
) -> None:
    """Fill the tokens of one chunk."""
    under_s, under_t = (torch.zeros_like(s.mass) for _ in range(2))
    for tile in s.tiles:
        gap = s.shifted(tile) - t.shifted(tile)
        under_s += _sum(s.add(tile) * gap)
        under_t += _sum(t.add(tile) * gap)
    s.put(pair.stale, span)
    t.put(pair.trainer, span)
    offset = s.mass.log() - t.mass.log()
    kl = (under_s / s.mass - offset).clamp_min_(0.0)
    pair.kl_stale_trainer[span] = kl
    pair.kl_trainer_stale[span] = (offset - under_t / t.mass).clamp_min_(0.0)
    pair.same_top[span] = torch.where(kl.isnan(), torch.nan, (s.best == t.best).double())
    halves = torch.stack([half == 0, half == 1]).to(s.logits.dtype)
    variation = torch.zeros_like(s.mass)
    for tile in s.tiles:
        p_s, p_t = s.probabilities(tile), t.probabilities(tile)
        if running is not None:
            running.add(tile, p_s, p_t)
        # A token whose networks give NaN would spoil the sum of all others.
        difference = p_s.sub_(p_t).nan_to_num_(0.0, 0.0, 0.0)
        pair.bias_sum[:, tile] += halves @ difference
        variation += _sum(difference.abs_())
    pair.total_variation[span] = torch.where(kl.isnan(), torch.nan, 0.5 * variation)


class _Reduction:
    """One network at one chunk: its logits, which turn tile by tile into what exp makes of them, and sums over them.

    With m the largest logit of a row, ``mass`` is sum exp(z - m), (n,) float64, and ``best`` where m lies.
    """

    def __init__(self, network: Network, hidden: Tensor, token_ids: Tensor, temperature: float, buffer: Tensor) -> None:
        self.logits = network.logits(hidden, buffer[: len(hidden)])
        if temperature != 1.0:
            self.logits /= temperature
        self._most, best = self.logits.max(dim=-1, keepdim=True)
        self.best = best[:, 0]
        self._own = (self.logits.gather(-1, token_ids[:, None]) - self._most)[:, 0].double()
        self.mass = torch.zeros_like(self._own)
        self._weighted = torch.zeros_like(self._own)
        count, vocab_size = self.logits.shape
        width = vocab_size if self.logits.is_cuda else max(256, _TILE_ELEMENTS // max(1, count))
        self.tiles = [slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)]

    def shifted(self, tile: slice) -> Tensor:
        """z - m of one tile, (n, w), in place of its logits: first of all."""
        return self.logits[:, tile].sub_(self._most)

    def add(self, tile: slice) -> Tensor:
        """Take one tile into the sums; gives exp(z - m), (n, w), which takes the place of its logits."""
        logits = self.logits[:, tile]
        raised = logits.exp()
        self.mass += _sum(raised)
        self._weighted += _sum(logits.mul_(raised))
        return logits.copy_(raised)

    def put(self, scores: TokenScores, span: slice) -> None:
        """Log-probs and entropies, once every tile is in the sums."""
        log_mass = self.mass.log()
        scores.logprob[span] = self._own - log_mass
        scores.entropy[span] = log_mass - self._weighted / self.mass

    def probabilities(self, tile: slice) -> Tensor:
        """p of one tile, (n, w), once every tile is in the sums; in place, so once a tile."""
        return self.logits[:, tile].mul_(self.mass.reciprocal()[:, None].to(self.logits.dtype))


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=-1, dtype=torch.float64)


def _chunks(tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    width = max(1, chunk_elements // vocab_size)
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))


def _buffer(network: Network, tokens: int, chunk_elements: int) -> Tensor:
    """Where the logits of every chunk go in turn: pages that are used already are not asked of the system again."""
    rows = min(tokens, max(1, chunk_elements // network.vocab_size))
    return torch.empty(rows, network.vocab_size, dtype=network.logits_dtype, device=network.weight.device)


def empty_scores(hidden: Tensor) -> TokenScores:
    """Scores to be filled, for as many tokens as there are hidden states, (n, H)."""
    return TokenScores(*_empty(2, hidden))


def empty_pair(stale: tuple[Network, Tensor], trainer: tuple[Network, Tensor], sketch: HeadSketch | None) -> PairScores:
    """Scores to be filled, and a bias of zero; arguments as in ``compare``."""
    hidden = stale[1]
    kl_st, kl_ts, variation, same_top = _empty(4, hidden)
    return PairScores(
        stale=empty_scores(hidden),
        trainer=empty_scores(hidden),
        kl_stale_trainer=kl_st,
        kl_trainer_stale=kl_ts,
        total_variation=variation,
        same_top=same_top,
        bias_sum=torch.zeros(2, stale[0].vocab_size, dtype=torch.float64, device=hidden.device),
        factors=None if sketch is None else sketch.empty(trainer[1]),
    )


def _empty(count: int, like: Tensor) -> list[Tensor]:
    return [torch.empty(len(like), dtype=torch.float64, device=like.device) for _ in range(count)]
