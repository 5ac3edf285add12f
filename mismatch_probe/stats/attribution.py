"""Whose error the discrepancy is: engine and trainer, each against the same network in a wider dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    ClusterIntervals,
    Interval,
    Scale,
    Statistic,
    group_sums,
    mean,
    root_mean,
)
from mismatch_probe.stats.types import Bools, Floats, Ints

_COUNT, _ENGINE, _TRAINER, _BOTH = range(4)
"""Columns of the sums: tokens, e_e^2, e_t^2, e_e e_t."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """``intervals`` by name, see ``attribute``; ``tokens`` and ``sequences`` that they rest on."""

    intervals: dict[str, Interval] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0


def attribute(
    sampler: Floats, stale: Floats, reference: Floats, sequence: Ints, group: Ints, intervals: ClusterIntervals
) -> Attribution:
    """Split the mean square of D between the engine's error, the trainer's and what they have in common.

    With r = log pi_s in the wider dtype, e_t = log pi_s - r is the trainer's error and e_e = log mu - r the engine's.
    D = e_t - e_e, so mean D^2 = mean e_e^2 + mean e_t^2 - 2 mean e_e e_t, exactly. Moments are about zero: an error's
    mean is part of the error.

    ``error_engine_rms``, ``error_trainer_rms`` (nats); ``error_covariance``, mean e_e e_t (nats^2);
    ``error_correlation``, it over both rms; ``error_share_engine``, ``_trainer`` and ``_covariance``: the three terms
    over mean D^2, which add up to 1. The last is negative where both err the same way.

    Args:
        sampler: log mu of the sampled tokens, nats, (n,). NaN = null, here and below.
        stale: log pi_s as the run is scored, nats, (n,).
        reference: log pi_s in the wider dtype, nats, (n,).
        sequence: response that each token belongs to, (n,).
        group: its prompt group, 0..G-1, (n,).
        intervals: over prompt groups.

    Returns:
        Without ``intervals`` where no token has all three.
    """
    known = ~(np.isnan(sampler) | np.isnan(stale) | np.isnan(reference))
    if not known.any():
        return Attribution()
    engine, trainer = (sampler - reference)[known], (stale - reference)[known]
    sums = group_sums([np.square(engine), np.square(trainer), engine * trainer], group[known], intervals.n_groups)
    terms: dict[str, tuple[Statistic, Scale]] = {
        "error_engine_rms": (_column(_ENGINE, root_mean), LOG),
        "error_trainer_rms": (_column(_TRAINER, root_mean), LOG),
        "error_covariance": (_column(_BOTH, mean), IDENTITY),
        "error_correlation": (_correlation, IDENTITY),
        "error_share_engine": (lambda s: s[..., _ENGINE] / _square(s), IDENTITY),
        "error_share_trainer": (lambda s: s[..., _TRAINER] / _square(s), IDENTITY),
        "error_share_covariance": (lambda s: -2 * s[..., _BOTH] / _square(s), IDENTITY),
    }
    found = {name: intervals.interval(sums, statistic, scale) for name, (statistic, scale) in terms.items()}
    return Attribution(found, int(known.sum()), len(np.unique(sequence[known])))


def spread_sample(usable: Bools, group: Ints, size: int, seed: list[int]) -> Ints:
    """Rows of a sample spread over prompt groups: one row of every group before a second of any, (at most size,).

    Args:
        usable: rows that may be taken, (n,).
        group: prompt group of each row, (n,).
        size: rows wanted.
        seed: the same seed gives the same rows.
    """
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(usable))
    turn = np.zeros(len(rows), dtype=np.int64)
    seen: dict[int, int] = {}
    for at, row in enumerate(rows):
        turn[at] = seen.get(int(group[row]), 0)
        seen[int(group[row])] = int(turn[at]) + 1
    return np.sort(rows[np.argsort(turn, kind="stable")][:size])


def attribution_sentence(found: list[dict[str, float]], dtype: str, usual: float = 0.1) -> str:
    """Whose error it is over the run, in one line, from the steps' columns (NaN = null); "" where none is known.

    Mean squares are averaged over steps by tokens. ``usual``: share of mean D^2 below which a side is called small.
    """
    known = [step for step in found if not math.isnan(step["error_engine_rms"])]
    tokens = sum(step["reference_tokens"] for step in known)
    if not tokens:
        return ""

    def total(value: str, power: int) -> float:
        return sum(step[value] ** power * step["reference_tokens"] for step in known) / tokens

    engine, trainer, both = total("error_engine_rms", 2), total("error_trainer_rms", 2), total("error_covariance", 1)
    square = engine + trainer - 2 * both
    if not square > 0:
        return f"Whose error, against {dtype}: neither side differs from it."
    covariance = 0.0 - round(2 * both / square, 2)  # no -0%
    shares = f"{engine / square:.0%} engine, {trainer / square:.0%} trainer, {covariance:.0%} covariance"
    if trainer < usual * square:
        whose = "the engine's"
    elif engine < usual * square:
        whose = "the trainer's"
    else:
        whose = "both sides'"
    return (
        f"Whose error: {whose}. Against {dtype}, rms {math.sqrt(engine):.2g} engine, {math.sqrt(trainer):.2g} trainer, "
        f"correlation {both / math.sqrt(engine * trainer) if engine * trainer else 0.0:.2f}; of mean D^2 {shares} "
        f"({int(tokens):,} tokens)."
    )


def _column(column: int, statistic: Statistic) -> Statistic:
    return lambda sums: statistic(np.stack([sums[..., _COUNT], sums[..., column]], axis=-1))


def _square(sums: Floats) -> Floats:
    """Sum of D^2."""
    return np.asarray(sums[..., _ENGINE] + sums[..., _TRAINER] - 2 * sums[..., _BOTH])


def _correlation(sums: Floats) -> Floats:
    return np.asarray(sums[..., _BOTH] / np.sqrt(sums[..., _ENGINE] * sums[..., _TRAINER]))
