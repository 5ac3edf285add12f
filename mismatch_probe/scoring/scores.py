"""What scoring gives for the tokens of a step or of one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.run import Floats, Ints
from mismatch_probe.scoring.sketch import StepFactors

GIVES_NO_NUMBER = "gives no number (NaN weights or overflow)"
"""End of the reason of tokens at which a network gave NaN."""
COLUMNS = (
    *("stale_logprob", "trainer_logprob", "entropy_stale", "entropy_trainer"),
    *("kl_stale_trainer", "kl_trainer_stale", "total_variation", "same_top"),
)


@dataclass(eq=False)
class StepScores:
    """Rescored values of each response token, nats, (tokens,) float64; NaN where not counted or not scored.

    ``same_top`` is 1 where pi_s and pi have the same most probable token, else 0.
    ``bias_lag_sum`` sums pi_s - pi over the tokens of each half of the prompt groups, (2, V), and
    ``bias_lag_tokens`` counts them, (2,); None where no token had both. ``noise`` holds the difference between the
    log-probs of the same tokens scored in a batch and alone, and ``noise_place`` which tokens those are. ``reasons``
    says, with token counts, what was not scored.
    ``factors`` are those of the head's gradient, where they were wanted.
    """

    tokens: int
    stale_logprob: Floats = field(init=False)
    trainer_logprob: Floats = field(init=False)
    entropy_stale: Floats = field(init=False)
    entropy_trainer: Floats = field(init=False)
    kl_stale_trainer: Floats = field(init=False)
    kl_trainer_stale: Floats = field(init=False)
    total_variation: Floats = field(init=False)
    same_top: Floats = field(init=False)
    bias_lag_sum: Floats | None = None
    bias_lag_tokens: Ints = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    noise: Floats = field(default_factory=lambda: np.zeros(0))
    noise_place: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reasons: dict[str, int] = field(default_factory=dict)
    factors: StepFactors | None = None

    def __post_init__(self) -> None:
        for name in COLUMNS:
            setattr(self, name, np.full(self.tokens, np.nan))

    def add_bias(self, bias_sum: Floats, tokens: Ints) -> None:
        """Add sums of pi_s - pi, (2, V), over so many tokens of either half, (2,)."""
        self.bias_lag_sum = bias_sum if self.bias_lag_sum is None else self.bias_lag_sum + bias_sum
        self.bias_lag_tokens += tokens

    def count(self, reason: str, tokens: int) -> None:
        """Note that so many tokens were not scored, and why."""
        if tokens:
            self.reasons[reason] = self.reasons.get(reason, 0) + tokens


def joined(tokens: int, parts: Sequence[tuple[Ints, StepScores]]) -> StepScores:
    """Scores of a step from those of its units, each with the places of its tokens among the step's ``tokens``."""
    whole = StepScores(tokens)
    for place, part in parts:
        for name in COLUMNS:
            getattr(whole, name)[place] = getattr(part, name)
        if part.bias_lag_sum is not None:
            whole.add_bias(part.bias_lag_sum, part.bias_lag_tokens)
        for reason, count in part.reasons.items():
            whole.count(reason, count)
    whole.noise = np.concatenate([whole.noise, *(part.noise for _, part in parts)])
    whole.noise_place = np.concatenate([whole.noise_place, *(place[part.noise_place] for place, part in parts)])
    factors = [(place, part.factors) for place, part in parts if part.factors is not None]
    if factors:
        whole.factors = StepFactors.joined(tokens, factors)
    return whole
