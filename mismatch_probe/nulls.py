"""Why a column of the steps table is null, where no other reason of the step says it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mismatch_probe.tables import STEPS

PREFIX = "null"
_RULES = (
    (r"pareto_k_(.*)", r"ess_\1", "fewer than 25 weights, or those of the tail tie"),
    (r"second_moment_(.*)", r"ess_\1", "beyond float64"),
    (r"ess_(.*)_bias", r"ess_\1", "one prompt group cannot be resampled"),
    (
        r"bias_(.*)_(?:norm|noise|split_half_cosine)",
        r"bias_\1_tv",
        "a half of the prompt groups is empty, or its mean vector is 0 or beyond float64",
    ),
    (
        r"bias_(.*)_cosine_previous",
        r"bias_\1_tv",
        "no mean vector of some length, within float64, both here and at the step before",
    ),
    (r"version_lag_.*", "step", "the version of the sampler or the trainer is unknown"),
    (r"reward_mean.*", "step", "no reward is logged"),
    (r"logged_trainer_gap_.*", "step", "no token has log pi both logged and rescored"),
    (r"noise_floor_(?:rms|max).*", "step", "no token was scored twice"),
    (r"clip_.*", "gradient_advantages", "no token of that kind"),
    (r"gradient_signal.*", "gradient_none_cosine", "one prompt group cannot tell expectation from draw"),
    (r"error_correlation", "error_engine_rms", "one side has no error"),
    (r"error_share_.*", "error_engine_rms", "neither side has an error"),
)
"""Pattern of the column, the column that is known where this is the reason, and the reason in words."""


def null_reasons(row: Mapping[str, Any]) -> list[str]:
    """Reasons for nulls that the step's data explain, each naming its columns; ``row`` is the step's, NaN = null.

    Columns that are null for a reason that stands in the row already (no log-probs, no checkpoint, no target), and
    those of an option that was not asked for, are left to it.
    """
    if not row["tokens"]:
        return []
    found: dict[str, list[str]] = {}
    names = [
        f"{column.name}{end}" for column in STEPS for end in ("", "_ci_low", "_ci_high")[: 1 + 2 * column.interval]
    ]
    for name in names:
        if not _null(row.get(name)):
            continue
        for pattern, known, reason in _RULES:
            match = re.fullmatch(pattern, name)
            if match and not _null(row.get(match.expand(known))):
                found.setdefault(reason, []).append(name)
    return [f"{PREFIX}: {reason}: {', '.join(sorted(names))}" for reason, names in found.items()]


def _null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
