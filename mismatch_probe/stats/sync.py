"""How often a sampler must be synchronised: ESS against version lag, and a replay of resynchronisation.

What a run shows at a version lag is taken for what it would show at that lag at any other step. Nothing in one
recording can test that; a policy that is updated on better data may move more or less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LagEss:
    """ESS of the lag ratio at one step, in (0, 1], with its interval (NaN = null), at a version lag in updates."""

    step: int
    version_lag: int
    ess: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Interval:
    """The longest sync interval, in updates: ``updates``, and the ends that the intervals of the ESS allow.

    ``updates`` N means that the sampler gets new weights before every Nth update, so that the lag runs from 0 to N - 1.
    None as an end: the run never reached it, so the true one is that of ``longest_seen`` or more.
    """

    updates: int | None
    low: int | None
    high: int | None
    longest_seen: int


@dataclass(frozen=True)
class ReplayedStep:
    """One step of the replay: the recorded version lag, the lag that would have been left, and its ESS."""

    step: int
    recorded_lag: int
    lag: int
    ess: float
    resync: bool


def ess_by_lag(steps: Sequence[LagEss]) -> dict[int, LagEss]:
    """Median ESS, and medians of its interval's ends, at each version lag that occurs, ascending."""
    found: dict[int, LagEss] = {}
    for lag in sorted({step.version_lag for step in steps}):
        same = [step for step in steps if step.version_lag == lag]
        ess, low, high = (float(np.median([getattr(step, name) for step in same])) for name in ("ess", "low", "high"))
        found[lag] = LagEss(same[0].step, lag, ess, low, high)
    return found


def longest_interval(steps: Sequence[LagEss], threshold: float) -> Interval | None:
    """The longest sync interval at which the ESS stays at or above the threshold; None without a step.

    Args:
        steps: judged steps, in any order.
        threshold: of the ESS.
    """
    curve = ess_by_lag(steps)
    if not curve:
        return None
    longest = max(curve) + 1

    def holds(name: str) -> int | None:
        """First version lag at which it no longer does: the interval in updates. None: it always does."""
        # An unknown end fails nothing, and proves nothing: the estimate stands in.
        values = {lag: getattr(one, name) for lag, one in curve.items()}
        known = {lag: curve[lag].ess if math.isnan(value) else value for lag, value in values.items()}
        failing = [lag for lag, value in known.items() if value < threshold]
        if not failing:
            return None
        before = [lag for lag in known if lag < failing[0]]
        return before[-1] + 1 if before else 0

    return Interval(holds("ess"), holds("low"), holds("high"), longest)


def replay(steps: Sequence[LagEss], threshold: float) -> list[ReplayedStep]:
    """What resynchronising whenever the ESS falls below the threshold would have done to the recorded lag.

    After a resync the lag starts at 0 and grows by one an update, never beyond the recorded one. Its ESS is the
    recorded one while nothing was changed, then the median at that version lag, or at the next larger one recorded.

    Args:
        steps: judged steps, ascending.
        threshold: of the ESS.
    """
    curve = ess_by_lag(steps)
    out: list[ReplayedStep] = []
    since: int | None = None
    for one in steps:
        lag = one.version_lag if since is None else min(one.version_lag, one.step - since)
        changed = lag != one.version_lag
        ess = curve[min(seen for seen in curve if seen >= lag)].ess if changed else one.ess
        resync = ess < threshold and lag > 0
        out.append(ReplayedStep(one.step, one.version_lag, lag, ess, resync))
        if resync:
            since = one.step + 1
    return out
