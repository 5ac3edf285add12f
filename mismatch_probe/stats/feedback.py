"""The feedback loop: does a larger score bias of the lag at one step go with a larger growth of it to the next?

z_k is the log of the bias' total variation at step k: exact at each of the sampler's prefixes, so that it has less
noise than what rests on the sampled tokens. The model is

    z_{k+1} - z_k = a + b z_k + c log(v_{k+1} / v_k) + e

with v the mean version lag, whose growth is the schedule's doing. b > 0: the lag grows the faster the larger it is.
b < 0: a large lag is followed by a smaller one, as happens to anything that fluctuates about a level. b = 0: growth
knows nothing of size. Least squares is biased downwards here, by about -5/n at b = 0 (Dickey and Fuller 1979), and its
usual interval misses the truth far too often. Hansen's grid bootstrap (1999) takes the interval from series that the
model itself makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.stats.trend import Trend
from mismatch_probe.stats.types import Floats

MIN_STEPS = 8
NAME = "lag_feedback"
_SERIES, _GRID, _FAR = 999, 61, 60.0


@dataclass(frozen=True)
class StepBias:
    """``total_variation``: mean of that between pi_s and pi over the step's prefixes, NaN = null. ``version_lag``: mean
    over tokens.
    """

    step: int
    total_variation: float
    version_lag: float
    tokens: int


def feedback(steps: Sequence[StepBias], seed: int = 0, confidence: float = 0.95) -> Trend:
    """``amplifying`` (interval of b above 0), ``damped`` (below 0), ``undecided``, or null.

    The longest stretch of consecutive steps with a lag is used; all steps count as one series.

    Args:
        steps: in any order.
        seed: of the bootstrap; the same seed gives the same interval.
        confidence: of the interval.
    """
    chosen = _longest_stretch(steps)
    base = Trend(NAME, steps=len(chosen), tokens=sum(s.tokens for s in chosen))

    def null(reason: str) -> Trend:
        return replace(base, reason=reason, sentence=f"Does the lag feed on itself? Not answered: {reason}.")

    if len(chosen) < MIN_STEPS:
        return null(f"{len(chosen)} exact steps in a row have a lag, {MIN_STEPS} are needed")
    z = np.log(np.array([s.total_variation for s in chosen]))
    ages = np.array([s.version_lag for s in chosen])
    ageing = np.diff(np.log(ages)) if bool((ages > 0).all()) else np.zeros(len(z) - 1)
    found = _grid_bootstrap(z, ageing - ageing.mean(), seed, confidence)
    if found is None:
        return null("the bias is the same at every step, or follows the version lag exactly")
    b, low, high = found
    answer = "amplifying" if low > 0 else "damped" if high < 0 else "undecided"
    meaning = {
        "amplifying": "the larger, the faster it grows",
        "damped": "after a large one comes a smaller one",
        "undecided": "growth may or may not depend on size",
    }[answer]
    return replace(
        base,
        answer=answer,
        estimate=b,
        low=low,
        high=high,
        sentence=(
            f"Does the lag feed on itself? {answer.capitalize()}, {meaning}: a lag bias larger by 1% goes with "
            f"{b:+.2f}% [{_bound(low)}, {_bound(high)}] more growth to the next step, steps {chosen[0].step} to "
            f"{chosen[-1].step}."
        ),
    )


def _bound(value: float) -> str:
    return f"{value:+.2f}%" if math.isfinite(value) else "unbounded"


def _longest_stretch(steps: Sequence[StepBias]) -> list[StepBias]:
    best: list[StepBias] = []
    current: list[StepBias] = []
    for step in sorted(steps, key=lambda s: s.step):
        if not step.total_variation > 0:
            current = []
            continue
        current = [*current, step] if current and current[-1].step == step.step - 1 else [step]
        if len(current) > len(best):
            best = current
    return best


def _grid_bootstrap(z: Floats, ageing: Floats, seed: int, confidence: float) -> tuple[float, float, float] | None:
    """Least-squares b and the ends of its interval: the b under which the observed t is no extreme one."""
    schedule = bool(np.ptp(ageing) > 1e-9) and len(z) > MIN_STEPS
    extra = ageing[:, None] if schedule else np.empty((len(ageing), 0))
    growth = np.diff(z)
    estimate, error = (float(value[0]) for value in _least_squares(z[None], extra))
    if not (error > 1e-9 and math.isfinite(error)):
        return None
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(growth), size=(_SERIES, len(growth)))
    # Below -2 a series would swing ever wider around its level: not what is asked, and no b to be told from it.
    grid = np.linspace(max(estimate - 8 * error, -2.0), max(estimate + 12 * error, 0.0), _GRID)
    below = np.empty(_GRID)
    design = np.concatenate([np.ones((len(growth), 1)), extra], axis=1)
    for at, b in enumerate(grid):
        rest = growth - b * z[:-1]
        fixed = design @ np.linalg.lstsq(design, rest, rcond=None)[0]
        noise = rest - fixed
        series = np.empty((_SERIES, len(z)))
        series[:, 0] = z[0]
        for k in range(len(growth)):
            moved = series[:, k] * (1 + b) + fixed[k] + noise[draws[:, k]]
            series[:, k + 1] = np.clip(moved, z.min() - _FAR, z.max() + _FAR)
        simulated, errors = _least_squares(series, extra)
        with np.errstate(divide="ignore", invalid="ignore"):
            below[at] = np.mean((simulated - b) / errors <= (estimate - b) / error)
    return estimate, _crossing(grid, below, (1 + confidence) / 2), _crossing(grid, below, (1 - confidence) / 2)


def _crossing(grid: Floats, below: Floats, level: float) -> float:
    """Where ``below``, which falls from 1 to 0, first falls to ``level``; infinite where it does so beyond the grid."""
    at = int(np.argmax(below <= level))
    if below[at] > level:
        return math.inf
    if at == 0:
        return -math.inf
    share = (below[at - 1] - level) / (below[at - 1] - below[at])
    return float(grid[at - 1] + share * (grid[at] - grid[at - 1]))


def _least_squares(series: Floats, extra: Floats) -> tuple[Floats, Floats]:
    """b and its standard error of each series, (S,) from (S, n + 1), beside an intercept and ``extra``, (n, J)."""
    n = series.shape[1] - 1
    basis, _ = np.linalg.qr(np.concatenate([np.ones((n, 1)), extra], axis=1))
    before, growth = series[:, :-1], np.diff(series, axis=1)
    before = before - (before @ basis) @ basis.T
    growth = growth - (growth @ basis) @ basis.T
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.square(before).sum(axis=1)
        b = (before * growth).sum(axis=1) / power
        spread = np.square(growth - b[:, None] * before).sum(axis=1)
        return b, np.sqrt(spread / (n - 2 - extra.shape[1]) / power)
