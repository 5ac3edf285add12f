"""The discrepancy cut once more, at the engine's own prefill, and its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mismatch_probe.columns import with_ends
from mismatch_probe.run import Floats, Ints, Settings
from mismatch_probe.stats.intervals import IDENTITY, LOG, ClusterIntervals, group_sums, mean, root_mean
from mismatch_probe.stats.ratios import drop_nulls
from mismatch_probe.table_io import nullable

if TYPE_CHECKING:
    from mismatch_probe.scoring.engine import EngineScores


@dataclass(frozen=True, eq=False)
class EngineSplit:
    """Of each counted token, (n,), nats, NaN = null: the engine's log-prob, and the two parts of D.

    ``top_ids`` and ``top_logprob``: the most probable tokens, (n, K); None where they were not asked for.
    ``stands_in``: log mu was logged nowhere in the step, and the engine's log-prob is in its place.
    """

    logprob: Floats
    prefill: Floats
    decode: Floats
    top_ids: Ints | None = None
    top_logprob: Floats | None = None
    stands_in: bool = False

    @classmethod
    def of(cls, scores: EngineScores | None, counted: Any, stale: Floats, logged: Floats) -> EngineSplit:
        """Cut D = log pi_s - log mu at the engine's prefill: (log pi_s - prefill) + (prefill - log mu).

        Args:
            scores: the engine's, of all tokens; None when it was not asked.
            counted: which tokens count, (tokens,).
            stale: log pi_s, (n,).
            logged: log mu as logged, (n,).
        """
        if scores is None:
            null = np.full(len(stale), np.nan)
            return cls(null, null, null)
        engine = scores.logprob[counted]
        top = scores.top_ids.shape[1] > 0
        return cls(
            engine,
            stale - engine,
            engine - logged,
            scores.top_ids[counted] if top else None,
            scores.top_logprob[counted] if top else None,
            bool(np.isnan(logged).all() and not np.isnan(engine).all()),
        )


def engine_row(
    split: EngineSplit, discrepancy: Floats, group: Ints, intervals: ClusterIntervals, partial: bool
) -> dict[str, Any]:
    """Their columns of the steps table.

    Args:
        split: of the step.
        discrepancy: D of its tokens, (n,).
        group: prompt group of each token, (n,).
        intervals: over the step's prompt groups.
        partial: D is not summarised, being known for a part of the step.
    """
    known = int((~np.isnan(split.logprob)).sum())
    row: dict[str, Any] = {"tokens_with_engine": known, "sampler_from_engine": known if split.stands_in else 0}
    if partial or 0 < known < len(split.logprob):
        return row
    for part in ("prefill", "decode"):
        values, of = drop_nulls(getattr(split, part), group)
        both = ~np.isnan(getattr(split, part)) & ~np.isnan(discrepancy)
        products = [getattr(split, part)[both] * discrepancy[both], np.square(discrepancy[both])]
        found = {
            "mean": intervals.interval(group_sums([values], of, intervals.n_groups), mean, IDENTITY),
            "rms": intervals.interval(group_sums([np.square(values)], of, intervals.n_groups), root_mean, LOG),
        }
        if not split.stands_in:
            sums = group_sums(products, group[both], intervals.n_groups)
            found["share"] = intervals.interval(sums, _share, IDENTITY)
        row |= with_ends({f"discrepancy_{part}_{name}": interval for name, interval in found.items()})
    return row


def engine_columns(split: EngineSplit) -> dict[str, pa.Array]:
    """Their columns of the tokens table."""
    columns = {
        "engine_logprob": split.logprob,
        "discrepancy_prefill": split.prefill,
        "discrepancy_decode": split.decode,
    }
    out = {name: nullable(values) for name, values in columns.items()}
    none = np.isnan(split.logprob)
    out["engine_top_ids"] = _lists(split.top_ids, none, pa.int32())
    out["engine_top_logprobs"] = _lists(split.top_logprob, none, pa.float64())
    return out


def engine_reasons(split: EngineSplit, settings: Settings) -> list[str]:
    """What the user must know of them, in words."""
    known = int((~np.isnan(split.logprob)).sum())
    reasons = []
    if split.stands_in:
        reasons.append(
            f"approximate: no sampler log-prob was logged; {known} tokens have the engine's prefill in its place, so D "
            "lacks what decoding adds"
        )
    elif 0 < known < len(split.logprob):
        reasons.append(f"engine split not summarised: the engine scored {known} of {len(split.logprob)} tokens")
    if settings.truncated_sampling and settings.logprobs_mode != "raw" and known and not split.stands_in:
        reasons.append("the engine's prefill is not cut by top_p or top_k: the decode part holds the log of the rest")
    return reasons


def _share(sums: Floats) -> Floats:
    return sums[..., 1] / sums[..., 2]


def _lists(values: Any, none: Any, kind: pa.DataType) -> pa.Array:
    if values is None:
        return pa.nulls(len(none), pa.list_(kind))
    return pa.array([None if null else row for row, null in zip(values.tolist(), none, strict=True)], pa.list_(kind))
