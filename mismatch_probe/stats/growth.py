"""How the lag grows with the number of updates that the sampler is behind: as a random walk, or as a drift.

If each update moves a token's log-prob by an independent amount, E[L^2] is proportional to the version lag; if all move
it the same way, to its square. The exponent k of E[L^2] ~ lag^k tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.stats.intervals import group_sums
from mismatch_probe.stats.log_slopes import log_slopes
from mismatch_probe.stats.trend import Trend
from mismatch_probe.stats.types import Floats, Ints

LINEAR, QUADRATIC = 1.0, 2.0
MIN_LAGS = 3
NAME = "lag_growth"


@dataclass(frozen=True, eq=False)
class StepLag:
    """One step's sums over prompt groups and version lags: ``versions`` (K,); tokens and L^2, (G, K) each."""

    step: int
    versions: Ints
    counts: Floats
    squares: Floats


def step_lag(step: int, lag: Floats, version_lag: Ints, group: Ints, n_groups: int) -> StepLag:
    """Sums of one step. Tokens of lag 0 and below are left out: there L is 0 by definition, and log 0 has no place.

    Args:
        step: its number.
        lag: L, nats, (n,). NaN = null.
        version_lag: trainer version minus sampler version of each token, (n,).
        group: prompt group of each token, 0..G-1, (n,).
        n_groups: G.
    """
    used = ~np.isnan(lag) & (version_lag > 0)
    versions, at = np.unique(version_lag[used], return_inverse=True)
    kinds = len(versions)
    cell = group[used] * kinds + at
    sums = group_sums([np.square(lag[used])], cell, n_groups * kinds).reshape(n_groups, kinds, 2)
    return StepLag(step, versions, sums[..., 0], sums[..., 1])


def lag_growth(steps: Sequence[StepLag], confidence: float = 0.95) -> Trend:
    """Exponent of E[L^2] in the version lag: ``linear``, ``quadratic``, ``undecided``, or null.

    ``linear``: its interval holds 1 and not 2; ``quadratic``: 2 and not 1; ``undecided``: both, or neither.

    Args:
        steps: sums of steps, in any order.
        confidence: of the interval.
    """
    steps = sorted((s for s in steps if s.counts.any()), key=lambda s: s.step)
    tokens = int(sum(s.counts.sum() for s in steps))
    lags = np.unique(np.concatenate([s.versions for s in steps])) if steps else np.empty(0)
    base = Trend(NAME, steps=len(steps), tokens=tokens)

    def null(reason: str) -> Trend:
        return replace(base, reason=reason, sentence=f"Does the lag walk or drift? Not answered: {reason}.")

    if len(lags) < MIN_LAGS:
        return null(f"exact steps hold {len(lags)} different version lags above 0, {MIN_LAGS} are needed")
    counts = np.concatenate([s.counts.ravel() for s in steps])
    squares = np.concatenate([s.squares.ravel() for s in steps])
    version = np.concatenate([np.tile(s.versions, len(s.counts)) for s in steps])
    at = np.repeat([s.step for s in steps], [s.counts.size for s in steps])
    starts = np.cumsum([0, *(len(s.counts) for s in steps)])
    cluster = np.concatenate(
        [
            start + np.repeat(np.arange(len(s.counts)), s.counts.shape[1])
            for s, start in zip(steps, starts, strict=False)
        ]
    )
    keep = counts > 0
    if not squares[keep].any():
        return null("L is 0 at every token")
    found = log_slopes(
        counts[keep],
        squares[keep],
        np.zeros(int(keep.sum()), dtype=np.int64),
        np.log(version[keep])[:, None],
        [(labels[keep], 2) for labels in (cluster, at, version)],
    )
    exponent = found[0]
    low, high = exponent.value - exponent.reach(confidence), exponent.value + exponent.reach(confidence)
    holds = {name: low <= k <= high for name, k in (("linear", LINEAR), ("quadratic", QUADRATIC))}
    answer = next((name for name in holds if holds[name]), "undecided") if sum(holds.values()) == 1 else "undecided"
    return replace(
        base,
        answer=answer,
        estimate=exponent.value,
        low=low,
        high=high,
        sentence=(
            f"Does the lag walk or drift? {answer.capitalize()}: E[L^2] grows as the version lag to the power "
            f"{exponent.value:.2f} [{low:.2f}, {high:.2f}] over lags {lags[0]} to {lags[-1]}. 1 is a random walk, 2 a "
            f"steady drift{'; it is neither' if not any(holds.values()) else ''}."
        ),
    )
