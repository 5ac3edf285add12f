"""The gate: documented checks on the steps table, each with its worst step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from mismatch_probe.approximate import approximate
from mismatch_probe.config import Thresholds
from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.noise import WITHIN, noise_steps

_FLOOR = ("noise_floor_rms", "noise_floor_rms_ci_high", "noise_floor_max")


class Outcome(StrEnum):
    """What came of a check. ``unjudged``: the quantity is null at every step."""

    PASSED = "passed"
    FAILED = "failed"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class Check:
    """One check and its worst step; ``value`` is NaN when unjudged.

    A check of the discrepancy has the worst step's ``noise_floor_rms``, nats, and counts the steps at which the
    discrepancy is within the probe's noise floor: those never fail it.
    """

    name: str
    outcome: Outcome
    threshold: float
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    step: int | None = None
    first_failing_step: int | None = None
    steps: int = 0
    steps_judged: int = 0
    steps_failing: int = 0
    noise_floor_rms: float = math.nan
    steps_within_noise_floor: int = 0

    def sentence(self) -> str:
        """The check in words."""
        if self.outcome is Outcome.UNJUDGED:
            return (
                f"{self.name}: not judged, null or approximate at all {self.steps} steps "
                "(see reasons in steps.parquet); "
                "switch it off if that is expected"
            )
        ends = "" if math.isnan(self.low) else f" [{self.low:.4g}, {self.high:.4g}]"
        worst = f"worst {self.value:.4g}{ends} at step {self.step}, threshold {self.threshold:g}"
        null = self.steps - self.steps_judged
        judged = f"{self.steps_judged} steps judged" + (f", {null} null or approximate" if null else "")
        if not math.isnan(self.noise_floor_rms):
            judged += f"; noise floor at step {self.step}: {self.noise_floor_rms:.2g} nats rms"
        if self.steps_within_noise_floor:
            judged += f"; {WITHIN} at {self.steps_within_noise_floor} steps, which fail nothing"
        if self.outcome is Outcome.PASSED:
            return f"{self.name}: {worst}, {judged}"
        return (
            f"{self.name}: {worst}; {self.steps_failing} steps fail, first at step {self.first_failing_step}; {judged}"
        )


def run_checks(steps: pd.DataFrame, thresholds: Thresholds) -> list[Check]:
    """Judge the steps table.

    Raises:
        NothingToJudgeError: no check is switched on.
    """
    checks = []
    if thresholds.min_ess is not None:
        column = f"ess_lag_{thresholds.ess_level}"
        limit = thresholds.min_ess
        checks.append(_check("min-ess", steps, column, limit, lambda value: value < limit, lowest_is_worst=True))
    for name, column, maximum in (
        ("max-discrepancy-k3", "discrepancy_k3", thresholds.max_discrepancy_k3),
        ("max-prefix-kl", "prefix_kl_stale_trainer", thresholds.max_prefix_kl),
        ("max-bias-tv (lag)", "bias_lag_tv", thresholds.max_bias_tv),
        ("max-bias-tv (discrepancy)", "bias_discrepancy_tv", thresholds.max_bias_tv),
    ):
        if maximum is not None:
            checks.append(_check(name, steps, column, maximum, _above(maximum)))
    if thresholds.max_mass_error is not None:
        checks.append(
            _check(
                "max-mass-error",
                _mass_errors(steps),
                "error",
                thresholds.max_mass_error,
                _above(thresholds.max_mass_error),
            )
        )
    if not checks:
        raise NothingToJudgeError("no check is switched on. Give at least one threshold")
    return checks


def _above(maximum: float) -> Callable[[pd.Series], pd.Series]:
    return lambda value: value > maximum


def _mass_errors(steps: pd.DataFrame) -> pd.DataFrame:
    """|mean e^D - 1| where its interval excludes 0, else 0: sampling error alone must not fail a run."""
    column = "discrepancy_mean_weight"
    excess = steps[column] - 1
    low, high = steps[f"{column}_ci_low"] - 1, steps[f"{column}_ci_high"] - 1
    error = excess.abs().where((low > 0) | (high < 0) | excess.isna(), 0.0)
    return pd.DataFrame(
        {
            "step": steps["step"],
            "error": error,
            "error_ci_low": math.nan,
            "error_ci_high": math.nan,
            **{name: steps[name] for name in ("nearest_gap_max", "sampler_from_engine", "discrepancy_rms", *_FLOOR)},
        }
    )


def _check(
    name: str,
    steps: pd.DataFrame,
    column: str,
    threshold: float,
    fails: Callable[[pd.Series], pd.Series],
    lowest_is_worst: bool = False,
) -> Check:
    # What is approximate passes nothing and fails nothing.
    judged = steps[steps[column].notna() & ~approximate(steps, column)]
    if judged.empty:
        return Check(name, Outcome.UNJUDGED, threshold, steps=len(steps))
    of_discrepancy = "discrepancy" in column or column == "error"
    noise = noise_steps(judged) if of_discrepancy else np.zeros(len(judged), dtype=np.bool_)
    failing = judged[fails(judged[column]) & ~noise]
    # The worst is one that may fail, where there is one.
    order = judged.assign(noise=noise).sort_values(["noise", column, "step"], ascending=[True, lowest_is_worst, True])
    worst = order.iloc[0]
    return Check(
        name=name,
        outcome=Outcome.PASSED if failing.empty else Outcome.FAILED,
        threshold=threshold,
        value=float(worst[column]),
        low=float(worst[f"{column}_ci_low"]),
        high=float(worst[f"{column}_ci_high"]),
        step=int(worst["step"]),
        first_failing_step=None if failing.empty else int(failing["step"].iloc[0]),
        steps=len(steps),
        steps_judged=len(judged),
        steps_failing=len(failing),
        noise_floor_rms=float(worst["noise_floor_rms"]) if of_discrepancy else math.nan,
        steps_within_noise_floor=int(noise.sum()),
    )
