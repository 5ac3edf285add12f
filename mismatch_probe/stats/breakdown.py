"""Where importance weighting breaks down: the ESS of the lag ratio below a threshold, as a test and not at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

RATIOS = ("lag", "discrepancy", "total")
LEVELS = ("token", "sequence", "prompt")
DEFAULT_RATIO = "lag"
DEFAULT_LEVEL = "sequence"
DEFAULT_THRESHOLD = 0.5
DEFAULT_LASTING = 3
"""Consecutive judged steps in breakdown that make it a lasting one."""


class Status(StrEnum):
    """What a step's ESS says of the threshold.

    ``breakdown``: its whole interval lies below. ``warning``: the interval straddles it. ``ok``: none of it is below.
    ``unjudged``: the ESS is null, has no interval to judge by, or is that of a discrepancy within the probe's noise
    floor. ``approximate``: it is that of neighbouring weights, so nothing is declared on it.
    """

    OK = "ok"
    WARNING = "warning"
    BREAKDOWN = "breakdown"
    UNJUDGED = "unjudged"
    APPROXIMATE = "approximate"


@dataclass(frozen=True)
class Rule:
    """What is a breakdown: ESS of ``ratio`` at ``level`` below ``threshold``; ``lasting`` steps of it make it last."""

    level: str = DEFAULT_LEVEL
    threshold: float = DEFAULT_THRESHOLD
    ratio: str = DEFAULT_RATIO
    lasting: int = DEFAULT_LASTING

    @property
    def quantity(self) -> str:
        """The ESS that is judged, in words."""
        return f"the {self.level} ESS of the {self.ratio if self.ratio == 'lag' else f'{self.ratio} ratio'}"


@dataclass(frozen=True)
class StepEss:
    """ESS of one step's n weights with its interval; NaN = null.

    ``within_floor``: the weights are those of a discrepancy that is no larger than the probe's own noise.
    """

    step: int
    value: float
    low: float
    high: float
    n: float = math.inf
    approximate: bool = False
    within_floor: bool = False

    def status(self, threshold: float) -> Status:
        """Compare the interval with the threshold."""
        if math.isnan(self.value):
            return Status.UNJUDGED
        if self.approximate:
            return Status.APPROXIMATE
        if math.isnan(self.low) or self.within_floor:
            return Status.UNJUDGED
        if self.high < threshold:
            return Status.BREAKDOWN
        return Status.WARNING if self.low < threshold else Status.OK


@dataclass(frozen=True)
class Breakdown:
    """Breakdowns of a run: ``first`` step, and ``lasting``, the first of the steps from which it does not recover
    within ``min_length`` judged steps; None where there is none. ``steps`` counts all steps in breakdown.
    """

    first: StepEss | None
    lasting: StepEss | None
    steps: int
    min_length: int


def find_breakdown(steps: Sequence[StepEss], rule: Rule) -> Breakdown:
    """The first step in breakdown, and the first of ``rule.lasting`` judged steps in a row that all are.

    Steps that cannot be judged are passed over: they neither begin, continue nor end a row.
    """
    judged = [(step, step.status(rule.threshold)) for step in steps]
    judged = [pair for pair in judged if pair[1] not in (Status.UNJUDGED, Status.APPROXIMATE)]
    broken = [step for step, status in judged if status is Status.BREAKDOWN]
    lasting, row = None, 0
    for at, (_, status) in enumerate(judged):
        row = row + 1 if status is Status.BREAKDOWN else 0
        if row == rule.lasting:
            lasting = judged[at - rule.lasting + 1][0]
            break
    return Breakdown(broken[0] if broken else None, lasting, len(broken), rule.lasting)


def verdict(steps: Sequence[StepEss], rule: Rule) -> str:
    """In words: does importance weighting hold, where did it stop, and for how long?"""
    known = [step for step in steps if not math.isnan(step.value)]
    what, threshold = rule.quantity, rule.threshold
    if not known:
        return f"Could not be judged at any step: {what} is null throughout."
    statuses = [step.status(threshold) for step in steps]
    judged = [
        step
        for step, status in zip(steps, statuses, strict=True)
        if status not in (Status.UNJUDGED, Status.APPROXIMATE)
    ]
    if not judged and Status.APPROXIMATE in statuses:
        return f"No verdict: {what} is approximate at every step, where neighbouring weights stand in."
    if not judged and any(step.within_floor for step in known):
        return f"No verdict: {what} is within the probe's noise floor, so it is not the engine's."
    if not judged:
        return f"No verdict: {what} has no interval at any step, since each holds one prompt group."
    left = len(steps) - len(judged)
    unjudged = f" {left} of {_steps(len(steps))} could not be judged." if left else ""
    found = find_breakdown(steps, rule)
    doubtful = statuses.count(Status.WARNING)
    if found.first is None:
        return _holds(judged, what, threshold, doubtful) + unjudged
    return _breaks(found, judged, what, threshold, doubtful) + unjudged


def _holds(judged: list[StepEss], what: str, threshold: float, doubtful: int) -> str:
    lowest = min(judged, key=lambda step: step.value)
    where = f"(lowest {_with_interval(lowest)} at step {lowest.step})"
    if doubtful:
        return (
            f"No breakdown is proven, and it is not ruled out: the interval of {what} reaches below {threshold:g} at "
            f"{doubtful} of {_steps(len(judged))} judged {where}."
        )
    all_judged = f"{'all ' * (len(judged) > 1)}{_steps(len(judged))} judged"
    return f"Importance weighting holds: {what} stays above {threshold:g} at {all_judged} {where}."


def _breaks(found: Breakdown, judged: list[StepEss], what: str, threshold: float, doubtful: int) -> str:
    assert found.first is not None
    count = f"{found.steps} of {_steps(len(judged))} judged {'is' if found.steps == 1 else 'are'} in breakdown"
    count += f", {doubtful} more {'is' if doubtful == 1 else 'are'} in doubt." if doubtful else "."
    if found.lasting is None:
        length = f"no {found.min_length} judged steps in a row" if len(judged) > 1 else "the only step judged"
        return (
            f"Importance weighting breaks down at step {found.first.step}: {what} falls to "
            f"{_with_interval(found.first)}, all of it below {threshold:g}. It is not shown to last ({length}); {count}"
        )
    before = ""
    if found.first.step != found.lasting.step:
        before = f" A first bad step was {found.first.step}, at {_with_interval(found.first)}."
    return (
        f"Importance weighting breaks down at step {found.lasting.step} and stays broken: {what} falls to "
        f"{_with_interval(found.lasting)}, all of it below {threshold:g}, for {found.min_length} judged steps in a row "
        f"or more; {count}{before}"
    )


def _with_interval(step: StepEss) -> str:
    ends = "" if math.isnan(step.low) else f" [{step.low:.3f}, {step.high:.3f}]"
    # Below 5/n the plug-in estimate is biased upwards beyond use.
    if step.value < 5 / step.n and step.n > 10:
        return f"below {5 / step.n:.3f} (5/n)"
    return f"{step.value:.3f}{ends}" + (f" (of only {step.n:g} units)" if step.n <= 10 else "")


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
