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
    ends = f"rms D {first.rms:.4f} at step {first.step}" + (
        f", {last.rms:.4f} at step {last.step}" if last is not first else ""
    )
    worst = max(known, key=lambda step: math.inf if math.isnan(step.k3) else step.k3)
    widest = max(known, key=lambda step: step.rms)
    text = f"Engine numerics: {ends}; largest KL(mu || pi_s) {worst.k3:.1e} nats, at step {worst.step}."
    reasons = []
    if not worst.k3 <= USUAL_K3:
        reasons.append(f"That is above {USUAL_K3:g}")
    if widest.rms > GROWTH * first.rms:
        reasons.append(f"rms D at step {widest.step} is {widest.rms / max(first.rms, 1e-12):.1f} times the first")
    if reasons:
        text += (
            f" {' and '.join(reasons)}, more than rounding usually explains: look for a sync or logging fault "
            "before you correct for it."
        )
    return text
