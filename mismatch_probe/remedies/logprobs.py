"""Log-probs of chosen tokens from logits, without another array as large as the logits.

``log_softmax`` writes such an array and keeps it for the backward pass. Here one number a token is kept, its log
normaliser; the backward pass writes the gradient of the logits, which is needed anyway, and nothing else of that size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Bound on the entries of a (tokens, vocabulary) array that is made on the way: 1 MB, so that it stays in cache."""
GPU_CHUNK_ELEMENTS = 1 << 26
"""The same on an accelerator, where starting an operation costs more than memory does."""


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi of one token at each prefix, nats, (...), float32 (float64 where the logits are), with gradient.

    Args:
        logits: (..., V), any floating type; logits[..., t, :] follows the prefix of token_ids[..., t].
        token_ids: (...); what is returned for ids below 0 means nothing.
        temperature: logits are divided by it, as the sampler divided its own.
    """
    return _gather(logits, token_ids[..., None], temperature)[..., 0]


def token_and_head_logprobs(
    logits: Tensor, token_ids: Tensor, head_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log pi of the sampled token, (...), and of the k tokens of a head, (..., k), nats, in one pass over the logits.

    Args:
        logits: (..., V).
        token_ids: (...).
        head_ids: (..., k); -1 where a prefix has fewer than k.
        temperature: logits are divided by it.
    """
    ids = torch.cat([token_ids[..., None], head_ids], dim=-1)
    both = _gather(logits, ids, temperature)
    return both[..., 0], both[..., 1:]


def chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the tokens of (n, V) logits, each of which keeps a (tokens, V) array within the bound."""
    tokens, vocab_size = logits.shape
    width = max(1, (CHUNK_ELEMENTS if logits.device.type == "cpu" else GPU_CHUNK_ELEMENTS) // vocab_size)
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))


def wide(logits: Tensor, temperature: float) -> Tensor:
    """A chunk's logits over the temperature, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def _gather(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1]), ids.clamp(min=0).reshape(-1, ids.shape[-1])
    logprobs: Tensor = _TokenLogprobs.apply(*flat, temperature)  # type: ignore[no-untyped-call]
    return logprobs.reshape(ids.shape)


class _TokenLogprobs(torch.autograd.Function):
    """(n, V) logits and (n, k) ids to (n, k) log-probs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        normaliser: Tensor = _log_normaliser(logits, temperature)
        ctx.save_for_backward(logits, ids, normaliser)
        ctx.temperature = temperature
        return wide(logits.gather(-1, ids), temperature) - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, normaliser = ctx.saved_tensors
        gradient: Tensor = _logits_gradient(logits, ids, normaliser, grads[0], ctx.temperature)
        return gradient, None, None


# Operators of their own: a compiler would unroll the chunks, and so compile anew for every number of tokens.


@torch.library.custom_op(
    "mismatch_probe::log_normaliser", mutates_args=(), schema="(Tensor logits, float temperature) -> Tensor"
)
def _log_normaliser(logits: Tensor, temperature: float) -> Tensor:
    """(n, V) to (n, 1)."""
    out: Tensor = _one_each(logits, temperature)
    for span in chunks(logits):
        out[span] = wide(logits[span], temperature).logsumexp(-1, keepdim=True)
    return out


@_log_normaliser.register_fake
def _one_each(logits: Tensor, temperature: float) -> Tensor:
    return logits.new_empty(logits.shape[0], 1, dtype=torch.promote_types(logits.dtype, torch.float32))


@torch.library.custom_op(
    "mismatch_probe::logits_gradient",
    mutates_args=(),
    schema="(Tensor logits, Tensor ids, Tensor normaliser, Tensor grad, float temperature) -> Tensor",
)
def _logits_gradient(logits: Tensor, ids: Tensor, normaliser: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """sum_j grad_j (e_(id_j) - pi) / temperature, (n, V), from grad (n, k)."""
    grad = grad / temperature
    total = -grad.sum(-1, keepdim=True)
    out = torch.empty_like(logits)
    for span in chunks(logits):
        part = wide(logits[span], temperature)
        # Straight into the gradient; or into the chunk's wider copy, where the logits are narrower than float32.
        into = out[span] if part.dtype == out.dtype else part
        torch.sub(part, normaliser[span], out=into)
        into.exp_().mul_(total[span]).scatter_add_(-1, ids[span], grad[span])
        if into.dtype != out.dtype:
            out[span] = into
    return out


@_logits_gradient.register_fake
def _like_logits(logits: Tensor, ids: Tensor, normaliser: Tensor, grad: Tensor, temperature: float) -> Tensor:
    return torch.empty_like(logits)
