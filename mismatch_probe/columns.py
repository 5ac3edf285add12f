"""What a column of a table is."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """A column: ``interval`` adds ``_ci_low`` and ``_ci_high`` beside it."""

    name: str
    type: pa.DataType
    definition: str
    unit: str = ""
    interval: bool = False
