"""Looking at a growing sample of prompt groups until the answer is decided, without spoiling its interval.

The looks are fixed beforehand: FIRST groups, then twice as many each time, then all. With K looks the interval of each
is made at confidence 1 - (1 - c) / K, so that all K of them hold together with confidence c (Bonferroni; Dunn 1961),
and with them the one at which sampling stops, whatever made it stop. SAFETY divides the permitted error once more: with
heavy weights an ESS is held less often than its interval says, and stopping picks such moments. How often the interval
at which sampling stops holds the full answer is in docs/benchmarks.md.
"""

from __future__ import annotations

import math

from mismatch_probe.stats.intervals import Interval

FIRST = 8
"""Groups at the first look: of fewer the jackknife's interval for an ESS covers too seldom."""
SAFETY = 5.0


def look_sizes(groups: int, first: int = FIRST) -> tuple[int, ...]:
    """Groups in the sample at each look, ascending; the last is all of them.

    Args:
        groups: of the step.
        first: at the first look.

    Raises:
        ValueError: ``first`` is below 1.
    """
    if first < 1:
        raise ValueError(f"a first look at {first} groups sees nothing: give 1 or more")
    sizes = []
    while first < groups:
        sizes.append(first)
        first *= 2
    return (*sizes, groups) if groups > 0 else ()


def look_confidence(confidence: float, looks: int) -> float:
    """Confidence of each of so many looks, for all of them together to have ``confidence``; one look is no stopping."""
    return confidence if looks < 2 else 1 - (1 - confidence) / (SAFETY * looks)


def why_stop(interval: Interval, threshold: float, target: float) -> str:
    """Why no further look is needed: ``decided``, ``narrow enough``, or "" to go on.

    Args:
        interval: of the judged ESS.
        threshold: of the verdict: decided is an interval that lies on one side of it.
        target: half the width at which an interval is narrow enough.
    """
    if math.isnan(interval.low) or math.isnan(interval.high):
        return ""
    if interval.high < threshold or interval.low > threshold:
        return "decided"
    return "narrow enough" if (interval.high - interval.low) / 2 <= target else ""
