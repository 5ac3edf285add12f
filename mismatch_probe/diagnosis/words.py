"""Numbers and lists in the sentences of findings."""

from __future__ import annotations

import math
from collections.abc import Iterable


def nats(value: float) -> str:
    """A log-ratio with three digits: .0072 or 1.45."""
    if math.isnan(value):
        return "unknown"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.2g}"


def percent(share: float) -> str:
    """A share as a percentage, never a false 0 or 100."""
    if math.isnan(share):
        return "unknown"
    if 0 < share < 0.001:
        return "under .1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.0f} %" if share in (0, 1) or share >= 0.1 else f"{100 * share:.1f} %"


def count(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def steps_of(steps: Iterable[int], all_steps: Iterable[int]) -> str:
    """Some of the run's steps: "every step", "step 3", "steps 3 to 7", "steps 1, 4, 9 and 12 more"."""
    mine, every = sorted(set(steps)), sorted(set(all_steps))
    if mine == every and len(every) > 1:
        return "every step"
    if len(mine) == 1:
        return f"step {mine[0]}"
    where = [every.index(step) for step in mine if step in every]
    if len(mine) > 2 and where == list(range(where[0], where[0] + len(mine))):
        return f"steps {mine[0]} to {mine[-1]}"
    return "steps " + listed([str(step) for step in mine])


def listed(names: list[str], most: int = 4) -> str:
    """a, b and c; the rest counted."""
    if len(names) > most:
        return ", ".join(names[: most - 1]) + f" and {len(names) - most + 1} more"
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}"
