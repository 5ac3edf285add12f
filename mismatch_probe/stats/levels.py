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
    """Discrepancy of one step: rms of D, KL(mu || pi_s) by k3, and the upper end of the probe's noise floor, nats.

    NaN = null. ``within``: D is no larger than the floor, so that nothing may be concluded from it.
    """

    step: int
    rms: float
    k3: float
    floor: float = math.nan

    @property
    def within(self) -> bool:
        """rms D does not stand out of the noise."""
        return self.rms <= self.floor


def discrepancy_sentence(steps: Sequence[StepDiscrepancy]) -> str:
    """Is the discrepancy of a usual size, and does it stay as it is? One or two sentences.

    No warning rests on a step whose discrepancy is within the noise floor.
    """
    known = [step for step in steps if not math.isnan(step.rms)]
    if not known:
        return "Engine numerics could not be judged: the discrepancy is null throughout."
    first, last = known[0], known[-1]
    ends = f"rms D {_nats(first.rms)} at step {first.step}" + (
        f", {_nats(last.rms)} at step {last.step}" if last is not first else ""
    )
    worst = max(known, key=_k3)
    text = f"Engine numerics: {ends}; largest KL(mu || pi_s) {worst.k3:.1e} nats, at step {worst.step}."
    clear = [step for step in known if not step.within]
    if len(clear) < len(known):
        text += (
            f" Within the probe's noise floor at {len(known) - len(clear)} of {len(known)} steps, so no finding there."
        )
    if not clear:
        return text
    reasons = []
    highest = max(clear, key=_k3)
    if not highest.k3 <= USUAL_K3:
        reasons.append(f"{'That' if highest is worst else f'That of step {highest.step}'} is above {USUAL_K3:g}")
    widest = max(clear, key=lambda step: step.rms)
    # What lies below the floor is not known better than that.
    start = first.floor if first.within else first.rms
    if widest.rms > GROWTH * start:
        reasons.append(f"rms D at step {widest.step} is {widest.rms / max(start, 1e-12):.1f} times the first")
    if reasons:
        text += (
            f" {' and '.join(reasons)}, more than rounding usually explains: look for a sync or logging fault "
            "before you correct for it."
        )
    return text


def _k3(step: StepDiscrepancy) -> float:
    return math.inf if math.isnan(step.k3) else step.k3


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
