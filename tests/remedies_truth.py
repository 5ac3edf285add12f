"""A world of two tokens a response over four words, in float64, whose expectations are finite sums.

Three policies are tables of logits, one row a prefix: the root, then each first token. ``drawn`` gives the probability
of each response under the sampler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mismatch_probe.remedies import Batch

WORDS = 4
LENGTH = 2
RESPONSES = list(itertools.product(range(WORDS), repeat=LENGTH))


@dataclass
class World:
    """Logits (1 + WORDS, WORDS) of the trainer, the stale trainer and the sampler; advantage of each token."""

    trainer: Tensor
    stale: Tensor
    sampler: Tensor
    advantages: Tensor

    def rows(self, logits: Tensor) -> Tensor:
        """Log-probs over the words at each token of each response, (16, 2, 4)."""
        prefixes = torch.tensor([[0, 1 + first] for first, _ in RESPONSES])
        return logits.log_softmax(-1)[prefixes]

    def at_tokens(self, logits: Tensor) -> Tensor:
        return self.rows(logits).gather(-1, torch.tensor(RESPONSES)[..., None])[..., 0]

    def drawn(self) -> Tensor:
        """Probability of each response under the sampler, (16,)."""
        return self.at_tokens(self.sampler).sum(-1).exp()

    def batch(self) -> Batch:
        return Batch(self.at_tokens(self.sampler), self.advantages, self.at_tokens(self.stale))


def world(seed: int = 0, discrepancy: float = 0.4, lag: float = 0.7, *, per_token: bool = True) -> World:
    """Random policies; ``discrepancy`` and ``lag`` are standard deviations of logits."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    stale = make(1 + WORDS, WORDS)
    sampler = stale + discrepancy * make(1 + WORDS, WORDS)
    trainer = stale + lag * make(1 + WORDS, WORDS)
    advantages = make(len(RESPONSES), LENGTH if per_token else 1).expand(-1, LENGTH).contiguous()
    return World(trainer.requires_grad_(), stale, sampler, advantages)


def on_policy(seed: int = 0) -> World:
    made = world(seed)
    same = made.trainer.detach()
    return replace(made, stale=same.clone(), sampler=same.clone())


def gradient_of(loss: Tensor, parameter: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, parameter)
    return found


def summed_scores(made: World, weights: Tensor, means: Tensor | None = None) -> Tensor:
    """-sum over responses of mu(response) sum_t A_t (w_t (e_a - pi) - m_t), by loops, (1 + WORDS, WORDS).

    ``weights`` (16, 2); ``means`` m in logit space, (16, 2, 4).
    """
    out = torch.zeros(1 + WORDS, WORDS, dtype=torch.float64)
    pi = made.trainer.detach().softmax(-1)
    for at, response in enumerate(RESPONSES):
        for t, word in enumerate(response):
            row = 0 if t == 0 else 1 + response[0]
            score = -pi[row].clone()
            score[word] += 1
            update = weights[at, t] * score
            if means is not None:
                update = update - means[at, t]
            out[row] -= made.drawn()[at] * made.advantages[at, t] * update
    return out
