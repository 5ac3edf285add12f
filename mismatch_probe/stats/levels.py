"""Reference levels: what the engine's numerics usually cost, and a sentence on a run's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USUAL_K3 = 3e-3
"""KL(mu || pi_s), k3, nats a token. A bfloat16 dense model on both sides measured 6e-4 to 1e-3 in published studies of
Qwen3-1.7B and 8B; above 3e-3 something else than rounding is likely."""
GROWTH = 3.0
"""A discrepancy that grows by this factor in rms is no fixed numerical error."""


@dataclass(frozen=True)
class StepDiscrepancy:
    """Discrepancy of one step: rms of D and KL(mu || pi_s) by k3, nats; NaN = null."""

    step: int
    rms: float
    k3: float


def discrepancy_sentence(steps: Sequence[StepDiscrepancy]) -> str:
    """Is the discrepancy of a usual size, and does it stay as it is? One or two sentences."""
    known = [step for step in steps if not math.isnan(step.rms)]
    if not known:
        return "Engine numerics could not be judged: the discrepancy is null throughout."
    first, last = known[0], known[-1]
    worst = max(known, key=lambda step: step.k3)
    ends = f"rms D {first.rms:.4f} at step {first.step}" + (
        f", {last.rms:.4f} at step {last.step}" if last is not first else ""
    )
    text = f"Engine numerics: {ends}; largest KL(mu || pi_s) {worst.k3:.1e} nats, at step {worst.step}."
    grown = first.rms > 0 and worst.rms > GROWTH * first.rms and worst.rms > 0
    if worst.k3 > USUAL_K3 or grown:
        why = f"above {USUAL_K3:g}" if worst.k3 > USUAL_K3 else f"{worst.rms / first.rms:.1f} times the first"
        text += (
            f" That is {why}, more than rounding usually explains: look for a sync or logging fault "
            "before you correct for it."
        )
    return text
