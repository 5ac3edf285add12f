"""The trainer: one GRPO update a step, in float32, with no importance correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import load_model, response_logprobs, save_model


@dataclass(frozen=True)
class StepResult:
    """What the trainer knew in one step: ``logprobs`` are its own, from before the update."""

    logprobs: list[list[float]]
    advantages: list[float]


def group_advantages(rewards: Sequence[float], group_size: int) -> np.ndarray:
    """Reward minus its group's mean, over the group's standard deviation; 0 where all rewards agree."""
    grouped = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    centred = grouped - grouped.mean(1, keepdims=True)
    return (centred / (grouped.std(1, keepdims=True) + 1e-6)).reshape(-1)


class Trainer:
    """Holds the current weights. ``version`` counts the updates since the supervised start."""

    def __init__(self, start: Path, learning_rate: float) -> None:
        # Two threads, fixed: the sum order of a float32 product depends on it.
        torch.set_num_threads(2)
        self.version = 0
        # Eval mode is right for training here: the network has no dropout, and the mode should not be a difference
        # between trainer and engine.
        self._model = load_model(start)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95))

    def save(self, folder: Path) -> None:
        """Write the current version."""
        save_model(self._model, folder)

    def step(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rewards: Sequence[float],
        group_size: int,
    ) -> StepResult:
        """Score the batch, then make the update that turns version k into k + 1."""
        advantages = torch.tensor(group_advantages(rewards, group_size), dtype=torch.float32)
        values, mask = response_logprobs(self._model, prompts, responses)
        loss = -(advantages[:, None] * values * mask).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.version += 1
        logprobs = [row[kept].tolist() for row, kept in zip(values.detach(), mask, strict=True)]
        return StepResult(logprobs, advantages.tolist())
