"""Questions about a whole run: sums are kept step by step, and answered at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_probe.assemble import StepData, split_is_partial
from mismatch_probe.run import UNKNOWN_VERSION
from mismatch_probe.stats.constancy import DEFAULT_MARGIN, StepDisplacement, constancy, step_displacement
from mismatch_probe.stats.feedback import StepBias, feedback
from mismatch_probe.stats.growth import StepLag, lag_growth, step_lag
from mismatch_probe.stats.summary import Summary
from mismatch_probe.stats.trend import Trend


class RunTrends:
    """Sums of the steps so far: by prompt group and bin, or version lag. No token is kept.

    Args:
        margin: of the constancy test, above 0.
        confidence: of the intervals.
        seed: of the feedback's bootstrap.
    """

    def __init__(self, margin: float = DEFAULT_MARGIN, confidence: float = 0.95, seed: int = 0) -> None:
        self._margin, self._confidence, self._seed = margin, confidence, seed
        self._displacements: list[StepDisplacement] = []
        self._lags: list[StepLag] = []
        self._biases: list[StepBias] = []

    def add(self, data: StepData, summary: Summary) -> None:
        """Take in one step. Approximate ones, and those whose split is known in part, are passed over."""
        if data.gap > 0 or data.engine.stands_in or split_is_partial(data) or not len(data.stale):
            return
        group, n_groups = data.levels.group, data.levels.n_groups
        entropy = data.scores.entropy_stale[data.counted]
        self._displacements.append(step_displacement(data.step, data.sampler, data.stale, entropy, group, n_groups))
        versions = data.rollouts.sampler_version[data.counted]
        known = (versions != UNKNOWN_VERSION) & (data.trainer_version != UNKNOWN_VERSION)
        behind = np.where(known, data.trainer_version - versions, 0)
        self._lags.append(step_lag(data.step, data.split.lag, behind, group, n_groups))
        age = float(behind.mean()) if known.all() else float("nan")
        self._biases.append(StepBias(data.step, summary.intervals["bias_lag_tv"].value, age, len(behind)))

    def answers(self) -> tuple[Trend, ...]:
        """The three answers."""
        return (
            constancy(self._displacements, self._margin, self._confidence),
            lag_growth(self._lags, self._confidence),
            feedback(self._biases, self._seed, self._confidence),
        )

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the trends table."""
        return [
            {
                "name": trend.name,
                "answer": trend.answer or None,
                "estimate": trend.estimate,
                "ci_low": trend.low,
                "ci_high": trend.high,
                "margin": trend.margin,
                "per_step": trend.per_step,
                "steps": trend.steps,
                "tokens": trend.tokens,
                "excluded": trend.excluded,
                "reason": trend.reason or None,
                "sentence": trend.sentence,
            }
            for trend in self.answers()
        ]
