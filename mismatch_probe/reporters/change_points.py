"""Steps between which the lag's ESS, the prefix KL or the discrepancy jumps, in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mismatch_probe.approximate import approximate
from mismatch_probe.noise import noise_steps
from mismatch_probe.reporters.format import nats
from mismatch_probe.stats.breakdown import Rule
from mismatch_probe.stats.change import Change, find_changes
from mismatch_probe.stats.types import Floats


@dataclass(frozen=True)
class SeriesChange:
    """A jump of one quantity, on its own scale."""

    quantity: str
    before_step: int
    after_step: int
    before: float
    after: float
    rate: float

    @property
    def sentence(self) -> str:
        """Where, from what to what, and how often chance says so."""
        return (
            f"{self.quantity} changes between steps {self.before_step} and {self.after_step}: {nats(self.before)} -> "
            f"{nats(self.after)} (false-alarm rate {self.rate:.2g} a series)."
        )


def series_changes(steps: pd.DataFrame, rule: Rule, rate: float) -> list[SeriesChange]:
    """Jumps of the judged ESS, of prefix KL and of rms D, each looked for where its error is about even.

    Steps that are null, exactly 0 or 1, or approximate are left out, and those where D is within the probe's noise
    floor where it is D that is looked at; with fewer than 8 left nothing is looked for.
    """
    found: list[SeriesChange] = []
    for quantity, column, forward, back in (
        (
            f"{rule.level} ESS of the {rule.ratio}",
            f"ess_{rule.ratio}_{rule.level}",
            _log_minus_log,
            _from_log_minus_log,
        ),
        ("Prefix KL", "prefix_kl_stale_trainer", np.log, math.exp),
        ("rms D", "discrepancy_rms", np.log, math.exp),
    ):
        exact = steps[~approximate(steps, column)]
        with np.errstate(divide="ignore", invalid="ignore"):
            values = forward(exact[column].to_numpy(dtype=np.float64))
        if "discrepancy" in column:
            values = np.where(noise_steps(exact), np.nan, values)
        changes = find_changes(exact["step"].to_numpy(dtype=np.int64), values, rate).changes
        found += [_on_scale(quantity, change, back, rate) for change in changes]
    return found


def _on_scale(quantity: str, change: Change, back: Callable[[float], float], rate: float) -> SeriesChange:
    steps = (change.before_step, change.after_step)
    return SeriesChange(quantity, *steps, back(change.before), back(change.after), rate)


def _log_minus_log(ess: Floats) -> Floats:
    found: Floats = np.log(-np.log(ess))
    return found


def _from_log_minus_log(value: float) -> float:
    return math.exp(-math.exp(value))
