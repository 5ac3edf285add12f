"""The probe's noise floor as the reports read it from the steps table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mismatch_probe.reporters.format import nats
from mismatch_probe.stats.floor import floor_top, within_floor
from mismatch_probe.stats.types import Bools, Floats

WITHIN = "within the probe's noise floor"


def floor_tops(steps: pd.DataFrame) -> Floats:
    """Upper end of each step's floor, nats, (steps,); NaN where no token was scored twice."""
    high, largest = (steps[f"noise_floor_{name}"].to_numpy(dtype=np.float64) for name in ("rms_ci_high", "max"))
    return floor_top(high, largest)


def noise_steps(steps: pd.DataFrame) -> Bools:
    """Steps whose discrepancy is no larger than the floor: it is never called a finding, (steps,)."""
    return within_floor(steps["discrepancy_rms"].to_numpy(dtype=np.float64), floor_tops(steps))


def floor_sentence(steps: pd.DataFrame) -> str:
    """The floor in words; "" where no token was scored twice."""
    tokens = steps["noise_floor_tokens"].to_numpy(dtype=np.float64)
    rms = steps["noise_floor_rms"].to_numpy(dtype=np.float64)
    if not tokens.sum():
        return ""
    whole = float(np.sqrt(np.nansum(np.square(rms) * tokens) / tokens.sum()))
    largest = float(steps["noise_floor_max"].max())
    return (
        f"The probe's noise floor (batch shape alone): {nats(whole)} nats rms, at most {nats(largest)} "
        f"({int(tokens.sum()):,} tokens)."
    )
