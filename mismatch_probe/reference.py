"""Whose error it is: a sample of each step's responses, scored at the sampler's weights in a wider dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch_probe.assemble import Judgement, StepData
from mismatch_probe.columns import with_ends
from mismatch_probe.errors import UsageError
from mismatch_probe.executors.plan import Executor
from mismatch_probe.planning import StepPlan
from mismatch_probe.run import Rollouts, Step
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.plan import units
from mismatch_probe.scoring.units import Unit
from mismatch_probe.stats.attribution import attribute, spread_sample
from mismatch_probe.stats.intervals import interval_reasons

WIDE = ("float32", "float64")
DEFAULT_SEQUENCES = 16


def reference_options(scoring: ScoringOptions, dtype: str) -> ScoringOptions:
    """How the reference is scored.

    Raises:
        UsageError: the dtype is no reference for what is scored, or not on this device.
    """
    if dtype not in WIDE:
        raise UsageError(f"--reference {dtype}: unknown. Use {' or '.join(WIDE)}")
    if dtype == "float64" and scoring.torch_device().type != "cpu":
        raise UsageError("--reference float64: on a CPU only. Pass --device cpu, or --reference float32")
    if scoring.dtype == "float64" and dtype != "float64":
        raise UsageError(f"--reference {dtype}: narrower than float64, in which the run is scored")
    return replace(scoring, dtype=dtype, attention="auto", head="auto")  # kernels for halves are none for wide ones


@dataclass(frozen=True, eq=False)
class SamplePlan:
    """The sample of one step: its responses, which rows of the step they are, and the units to score."""

    step: Step
    rows: np.ndarray
    rollouts: Rollouts
    units: list[Unit]

    @property
    def tokens(self) -> int:
        """Response tokens, counted or not."""
        return len(self.rollouts.response.values)


class Reference:
    """Scores samples and attributes the discrepancy.

    Args:
        scoring: how the run is scored.
        dtype: of the reference, wider.
        sequences: responses a step.
        executor: scores in that dtype.
        judgement: how intervals are made, and the seed of the sample.
    """

    def __init__(
        self, scoring: ScoringOptions, dtype: str, sequences: int, executor: Executor, judgement: Judgement
    ) -> None:
        self._scoring, self._dtype, self._sequences = scoring, dtype, sequences
        self._executor, self._judgement = executor, judgement

    def row(self, plan: StepPlan, data: StepData) -> tuple[dict[str, Any], list[str]]:
        """Columns of the steps table, and why they are null."""
        values: dict[str, Any] = {"reference_dtype": self._dtype}
        if self._dtype == self._scoring.dtype:
            wider = "; --reference float64 on a CPU looks below it" if self._dtype == "float32" else ""
            return values, [
                f"reference: the run is scored in {self._dtype} already, so the trainer's error is 0 by construction "
                f"and all of D the engine's{wider}"
            ]
        judgement = self._judgement
        # A sequence can tell something where one of its tokens has a discrepancy that a checkpoint gave.
        told = ~np.isnan(data.sampler) & data.stale_rescored
        usable = np.bincount(data.levels.sequence[told], minlength=len(data.rollouts)) > 0
        if not usable.any():
            lacking = "log pi_s is not rescored" if not data.stale_rescored.any() else "no sampler log-probs"
            return values, [f"reference: {lacking}"]
        group = data.levels.group_of_sequence
        rows = spread_sample(usable, group, self._sequences, [judgement.seed, data.step, 3])
        sample = self._plan(plan, rows)
        ((_, scores),) = self._executor.run([sample])
        reference = np.full(len(data.counted), np.nan)
        reference[data.rollouts.response.places(rows)] = scores.stale_logprob
        found = attribute(
            data.sampler,
            np.where(data.stale_rescored, data.stale, np.nan),
            reference[data.counted],
            data.levels.sequence,
            data.levels.group,
            judgement.over(data.levels.n_groups),
        )
        values |= {"reference_sequences": found.sequences, "reference_tokens": found.tokens}
        values |= with_ends(found.intervals)
        if not found.tokens:
            return values, ["reference: its network gives no number at any token of the sample"]
        return values, interval_reasons(found.intervals)

    def _plan(self, plan: StepPlan, rows: np.ndarray) -> SamplePlan:
        rollouts = plan.rollouts.take(rows)
        half = np.zeros(len(rollouts), dtype=np.int64)
        cut = units(plan.step.index, rollouts, half, None, plan.checkpoints.sampler, self._scoring.unit_tokens)
        return SamplePlan(plan.step, rows, rollouts, [replace(unit, noise=0) for unit in cut])
