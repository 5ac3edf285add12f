"""What a column of a table is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from mismatch_probe.stats.intervals import Interval


@dataclass(frozen=True)
class Column:
    """A column: ``interval`` adds ``_ci_low`` and ``_ci_high`` beside it."""

    name: str
    type: pa.DataType
    definition: str
    unit: str = ""
    interval: bool = False


def with_ends(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    """Values by column name, each with the ends of its interval beside it."""
    row: dict[str, Any] = {}
    for name, interval in intervals.items():
        row |= {name: interval.value, f"{name}_ci_low": interval.low, f"{name}_ci_high": interval.high}
    return row
