"""How a ratio is clipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mismatch_probe.stats.corrections import Bounds

DEFAULTS = Bounds()
"""Where corrections cut unless told otherwise: the bounds that the analysis of a run uses."""


@dataclass(frozen=True)
class RatioClip:
    """A weight f(r) of a ratio r = e^x that is bounded, at least on one side.

    ``truncate``: max(low, min(r, high)), as truncated importance sampling does (Ionides 2008). ``mask``: r inside
    [low, high], else 0, as IcePop does. ``ppo``: 0 where PPO's objective is flat, r > high and A > 0, or r < low and
    A < 0, else r (Schulman et al. 2017): not bounded where A < 0.

    Args:
        kind: one of the three.
        low, high: ratios.

    Raises:
        ValueError: an unknown kind, or bounds that are not 0 <= low <= 1 <= high, so that f(1) = 1.
    """

    kind: Literal["truncate", "mask", "ppo"] = "truncate"
    low: float = 0.0
    high: float = DEFAULTS.cap

    def __post_init__(self) -> None:
        if self.kind not in ("truncate", "mask", "ppo"):
            raise ValueError(f"clip kind {self.kind!r} is none of truncate, mask, ppo")
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"clip bounds are {self.low:g} and {self.high:g}: give 0 <= low <= 1 <= high")

    @classmethod
    def ppo(cls, clip: float = DEFAULTS.clip) -> RatioClip:
        """PPO's range, 1 - clip to 1 + clip."""
        return cls("ppo", 1 - clip, 1 + clip)

    @classmethod
    def unclipped(cls) -> RatioClip:
        """f(r) = r."""
        return cls("truncate", 0.0, math.inf)

    def weight(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """f(e^x), of the shape of x and without gradient.

        Args:
            log_ratio: x, nats.
            advantage: A, of a shape that x broadcasts with; only ``ppo`` looks at it.
        """
        x = log_ratio.detach()
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (self.low, self.high))
        if self.kind == "truncate":
            return x.clamp(low, high).exp()
        if self.kind == "mask":
            cut = (x < low) | (x > high)
        else:
            cut = ((x > high) & (advantage > 0)) | ((x < low) & (advantage < 0))
        return torch.where(cut, -math.inf, x).exp()
