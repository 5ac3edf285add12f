"""Where importance weighting breaks down: the ESS of the lag ratio below a threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

RATIOS = ("lag", "discrepancy", "total")
LEVELS = ("token", "sequence", "prompt")
DEFAULT_LEVEL = "sequence"
DEFAULT_THRESHOLD = 0.5


class Status(StrEnum):
    """What a step's ESS says.

    ``breakdown``: below the threshold. ``borderline``: not below it, but the interval reaches below.
    ``unjudged``: the ESS is null. ``approximate``: it is that of neighbouring weights, so nothing is declared on it.
    """

    OK = "ok"
    BORDERLINE = "borderline"
    BREAKDOWN = "breakdown"
    UNJUDGED = "unjudged"
    APPROXIMATE = "approximate"


@dataclass(frozen=True)
class StepEss:
    """ESS of one step's n weights with its interval; NaN = null."""

    step: int
    value: float
    low: float
    high: float
    n: float = math.inf
    approximate: bool = False

    def status(self, threshold: float) -> Status:
        """Compare with the threshold."""
        if math.isnan(self.value):
            return Status.UNJUDGED
        if self.approximate:
            return Status.APPROXIMATE
        if self.value < threshold:
            return Status.BREAKDOWN
        return Status.BORDERLINE if self.low < threshold else Status.OK


def first_breakdown(steps: Iterable[StepEss], threshold: float) -> StepEss | None:
    """The first step below the threshold."""
    return next((step for step in steps if step.status(threshold) is Status.BREAKDOWN), None)


def verdict(steps: Sequence[StepEss], level: str, threshold: float) -> str:
    """One sentence: does importance weighting of the lag hold, and where did it stop?"""
    known = [step for step in steps if not math.isnan(step.value)]
    judged = [step for step in known if not step.approximate]
    if known and not judged:
        return "The ESS of the lag is approximate at every step: neighbouring weights stand in, so no verdict is given."
    if not judged:
        return "The ESS of the lag could not be judged at any step: the lag is null throughout."
    unjudged = f" {len(steps) - len(judged)} of {_steps(len(steps))} could not be judged." * (len(judged) < len(steps))
    what = f"the {level} ESS of the lag"
    first = first_breakdown(judged, threshold)
    all_judged = f"{'all ' * (len(judged) > 1)}{_steps(len(judged))} judged"
    if first is None:
        lowest = min(judged, key=lambda step: step.value)
        straddling = sum(step.status(threshold) is Status.BORDERLINE for step in judged)
        doubt = f" At {_steps(straddling)} the interval reaches below it." * bool(straddling)
        return (
            f"Importance weighting holds: {what} stays at or above {threshold:g} at {all_judged} "
            f"(lowest {_with_interval(lowest)} at step {lowest.step}).{doubt}{unjudged}"
        )
    below = sum(step.value < threshold for step in judged)
    sure = "its interval lies below it as well" if first.high < threshold else "its interval still reaches above it"
    if math.isnan(first.high):
        sure = "it has no interval"
    return (
        f"Importance weighting breaks down at step {first.step}: {what} falls to {_with_interval(first)}, below "
        f"{threshold:g} ({sure}); {below} of {_steps(len(judged))} judged {'is' if below == 1 else 'are'} below."
        f"{unjudged}"
    )


def _with_interval(step: StepEss) -> str:
    ends = "" if math.isnan(step.low) else f" [{step.low:.3f}, {step.high:.3f}]"
    # Below 5/n the plug-in estimate is biased upwards beyond use.
    if step.value < 5 / step.n and step.n > 10:
        return f"below {5 / step.n:.3f} (5/n)"
    return f"{step.value:.3f}{ends}" + (f" (of only {step.n:g} units)" if step.n <= 10 else "")


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
