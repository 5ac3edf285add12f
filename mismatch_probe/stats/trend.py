"""An answer about a whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Trend:
    """One question, answered from all steps; NaN = null.

    ``answer`` is "" where there is none, and ``reason`` says why. ``low`` and ``high`` are the ends of the interval of
    ``estimate``; ``margin`` is what it was held against. ``tokens`` counts those used, ``excluded`` those left out of
    them; ``steps`` those that had any. ``sentence`` says all of it in words.
    """

    name: str
    answer: str = ""
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    per_step: float = math.nan
    steps: int = 0
    tokens: int = 0
    excluded: int = 0
    reason: str = ""
    sentence: str = ""
