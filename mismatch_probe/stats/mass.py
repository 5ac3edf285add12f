"""The mass audit in words: are the logged log-probs those of the distribution that sampled?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST = 2e-3
"""A mean weight this near to 1 is nobody's fault, however narrow its interval."""
CHANCE = 0.01
"""A violation is said when chance alone gives as many in fewer runs than this."""


@dataclass(frozen=True)
class StepMass:
    """Mean of e^D over a step's tokens with its interval; NaN = null.

    ``within_floor``: D is no larger than the probe's own noise, and so is what its mean weight misses 1 by.
    """

    step: int
    value: float
    low: float
    high: float
    within_floor: bool = False

    @property
    def violates(self) -> bool:
        """The interval lies on one side of 1, and not just, and D stands out of the noise."""
        return not self.within_floor and (self.high < 1 or self.low > 1) and abs(self.value - 1) > SMALLEST


def mass_sentence(steps: Sequence[StepMass], confidence: float) -> str:
    """What the mean weights e^D of all steps say together.

    E_mu[e^D] = 1 where mu is what sampled and covers pi_s. Of many intervals some miss 1 by chance: as many must that
    chance would bring them about in fewer than CHANCE of all healthy runs.

    Args:
        steps: one entry a step.
        confidence: coverage of the intervals, in (0, 1).
    """
    judged = [step for step in steps if not math.isnan(step.low)]
    if not judged:
        return "Mass audit: not judged, the mean of e^D has no interval at any step."
    broken = [step for step in judged if step.violates]
    if not broken or at_least(len(broken), len(judged), 1 - confidence) >= CHANCE:
        return ""
    worst = max(broken, key=lambda step: abs(step.value - 1))
    meaning = (
        "below 1: what was sampled from lacks mass that pi_s has there (top-p, top-k, a mask), or the logged log-probs "
        "are too high"
        if worst.value < 1
        else "above 1: the logged log-probs are lower than those that sampled (another temperature, raw against "
        "processed, shifted labels)"
    )
    return (
        f"Mass audit fails at {len(broken)} of {len(judged)} steps judged: the mean of e^D is {worst.value:.4f} "
        f"[{worst.low:.4f}, {worst.high:.4f}] at step {worst.step}, {meaning}."
    )


def at_least(count: int, trials: int, p: float) -> float:
    """P(X >= count) of a binomial X with ``trials`` draws of probability ``p``."""
    terms = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
        for k in range(count, trials + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))
