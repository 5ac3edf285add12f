"""The tokens a loss is computed on: padded (B, T), or packed with an index of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token-mean", "sequence-mean", "sequence-sum", "sum", "none"]
Ratio = Literal["total", "lag", "discrepancy"]


def sequence_index(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Which packed sequence each token belongs to, (tokens,) int64.

    Args:
        cu_seqlens: where sequences start, and the end of the last, (S + 1,), as variable-length attention takes them.
        tokens: how many there are in all; those after the last sequence count to it and are to be masked.
    """
    places = torch.arange(tokens, device=cu_seqlens.device)
    index = torch.searchsorted(cu_seqlens.to(torch.int64), places, right=True) - 1
    return index.clamp(max=len(cu_seqlens) - 2)


@dataclass(frozen=True, eq=False)
class Batch:
    """What was recorded about the tokens of an update. Log-probs are in nats and of the tokens that were sampled.

    Tokens are padded, (B, T), one row a sequence; or packed, (N,) or (1, N), and then ``sequence`` is needed for all
    that looks at whole sequences.

    Args:
        sampler_logprobs: log mu, as the engine logged them.
        advantages: A, one a token, or one a sequence: (B,), (B, 1) or (S,).
        stale_logprobs: log pi_s, the trainer's network at the weights that sampled. None: those are the current
            weights, so the lag is 0 everywhere.
        mask: True for tokens that count; None for all. What other tokens hold, NaN included, has no effect.
        sequence: packed only: the index of each token's sequence, 0..S-1; see ``sequence_index``.
        n_sequences: packed only: S.

    Raises:
        ValueError: shapes that do not fit each other.
    """

    sampler_logprobs: Tensor
    advantages: Tensor
    stale_logprobs: Tensor | None = None
    mask: Tensor | None = None
    sequence: Tensor | None = None
    n_sequences: int | None = None

    def __post_init__(self) -> None:
        shape = self.sampler_logprobs.shape
        for name in ("stale_logprobs", "mask", "sequence"):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"{name} is {tuple(value.shape)}, sampler_logprobs {tuple(shape)}: give the same shape"
                )
        if (self.sequence is None) != (self.n_sequences is None):
            raise ValueError("sequence and n_sequences go together: give both for packed tokens, neither for padded")
        given = self.advantages.shape
        rows = (self.n_sequences,) if self.sequence is not None else tuple(shape[:1])
        if given != shape and given not in (rows, (*rows, 1)):
            raise ValueError(f"advantages are {tuple(given)}: give one a token, {tuple(shape)}, or a sequence, {rows}")

    def terms(self, logprobs: Tensor) -> Terms:
        """The log-ratios' parts beside the trainer's log-probs, in float32 or wider; 0 at tokens that do not count.

        Args:
            logprobs: log pi, with gradient, of the shape of ``sampler_logprobs``.

        Raises:
            ValueError: another shape.
        """
        if logprobs.shape != self.sampler_logprobs.shape:
            shape = tuple(self.sampler_logprobs.shape)
            raise ValueError(f"logprobs are {tuple(logprobs.shape)}, sampler_logprobs {shape}: give the same shape")
        dtype = torch.promote_types(logprobs.dtype, torch.float32)
        mask = torch.ones_like(logprobs, dtype=torch.bool) if self.mask is None else self.mask.to(torch.bool)
        given = logprobs, self.sampler_logprobs, self.stale_logprobs, self._token_advantages(logprobs)
        trainer, sampler, old, advantage = (
            logprobs if values is None else torch.where(mask, values.to(dtype), 0.0) for values in given
        )
        now = trainer.detach()
        stale = now if self.stale_logprobs is None else old
        return Terms(trainer, stale - sampler, now - stale, advantage, mask, self)

    def _token_advantages(self, logprobs: Tensor) -> Tensor:
        if self.advantages.shape == logprobs.shape:
            return self.advantages
        return self.spread(self.advantages.reshape(-1))

    def sums(self, values: Tensor) -> Tensor:
        """Sum of (tokens) over each sequence, (S,).

        Raises:
            ValueError: flat tokens without ``sequence``.
        """
        if self.sequence is not None and self.n_sequences is not None:
            zeros = torch.zeros(self.n_sequences, dtype=values.dtype, device=values.device)
            return zeros.index_add(0, self.sequence.reshape(-1), values.reshape(-1))
        if values.dim() != 2:
            raise ValueError("whole sequences are needed: give padded tokens, (B, T), or sequence and n_sequences")
        return values.sum(dim=-1)

    def spread(self, values: Tensor) -> Tensor:
        """Values of sequences, (S,), at each of their tokens."""
        if self.sequence is not None:
            return values[self.sequence]
        return values[:, None].expand(self.sampler_logprobs.shape)


@dataclass(frozen=True, eq=False)
class Terms:
    """Per counted token, in nats: ``trainer`` log pi with gradient, ``discrepancy`` D, ``lag`` L (both without), the
    advantage A; ``mask`` says which count. D + L is the log-ratio log pi - log mu.
    """

    trainer: Tensor
    discrepancy: Tensor
    lag: Tensor
    advantage: Tensor
    mask: Tensor
    batch: Batch

    def log_ratio(self, ratio: Ratio) -> Tensor:
        """log pi / mu (``total``), log pi / pi_s (``lag``) or log pi_s / mu (``discrepancy``).

        Raises:
            ValueError: another name.
        """
        if ratio == "total":
            return self.discrepancy + self.lag
        if ratio == "lag":
            return self.lag
        if ratio == "discrepancy":
            return self.discrepancy
        raise ValueError(f"ratio {ratio!r} is none of total, lag, discrepancy")

    def lengths(self) -> Tensor:
        """Counted tokens of each sequence, at least 1, (S,)."""
        return self.batch.sums(self.mask.to(self.trainer.dtype)).clamp(min=1.0)

    def loss(self, score: Tensor, reduction: Reduction) -> Tensor:
        """-A times a score, reduced.

        ``token-mean``: over all counted tokens. ``sequence-mean``: over sequences of the mean over their tokens.
        ``sequence-sum``: over sequences of the sum over their tokens, the unbiased one. ``sum``: over tokens.
        ``none``: not reduced, 0 at tokens that do not count. Sequences without a counted token are left out.

        Args:
            score: w log pi(a) of each token, or what stands in for it, with gradient.
            reduction: one of the above.

        Raises:
            ValueError: another reduction.
        """
        losses = torch.where(self.mask, -self.advantage * score, 0.0)
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        if reduction == "token-mean":
            return losses.sum() / self.mask.sum().clamp(min=1)
        if reduction not in ("sequence-mean", "sequence-sum"):
            raise ValueError(f"reduction {reduction!r} is none of token-mean, sequence-mean, sequence-sum, sum, none")
        sums = self.batch.sums(losses)
        present = self.batch.sums(self.mask.to(losses.dtype)).gt(0).sum().clamp(min=1)
        return (sums / self.lengths() if reduction == "sequence-mean" else sums).sum() / present
