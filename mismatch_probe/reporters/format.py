"""How numbers look."""

from __future__ import annotations

import json
import math
from typing import Any

NULL = "-"


def nats(value: float) -> str:
    """A log-ratio or divergence in at most eight characters."""
    if _null(value):
        return NULL
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.1e}"


def share(value: float, n: float = math.inf) -> str:
    """An ESS: three decimals, enough to tell 0.499 from 0.500, and never a false 0 or 1.

    Below 5/n the plug-in estimate is biased upwards beyond use: only the bound is shown. Of ten units or fewer any
    value is that, and marked ~.
    """
    if _null(value):
        return NULL
    if n <= 10 and value < 1:
        return f"~{share(value)}"
    if value < 5 / n:
        return f"<{share(5 / n)}"
    if value == 1:
        return "1"
    if value < 0.0005:
        return "<.001"
    return ">.999" if value > 0.9995 else f"{value:.3f}".removeprefix("0")


def with_interval(value: float, low: float, high: float, n: float = math.inf) -> str:
    """An ESS of n weights with its interval."""
    return share(value, n) if _null(low) else f"{share(value, n)} [{share(low, n)}, {share(high)}]"


def to_json(content: Any) -> str:
    """JSON with NaN as null."""
    return json.dumps(_without_nan(content), indent=2, ensure_ascii=False, allow_nan=False)


def duration(seconds: float) -> str:
    """A rough time: 8 s, 3 min, 2.1 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes as kB, MB or GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def ranges(numbers: list[int]) -> str:
    """Ascending integers, runs of one stride joined: 0-3, 7, 10-40:10."""
    parts = []
    at = 0
    while at < len(numbers):
        stride = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == stride:
            end += 1
        if end - at < (1 if stride == 1 else 2):
            end = at
        every = f":{stride}" if stride > 1 else ""
        parts.append(f"{numbers[at]}-{numbers[end]}{every}" if end > at else f"{numbers[at]}")
        at = end + 1
    return ", ".join(parts)


def _null(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
