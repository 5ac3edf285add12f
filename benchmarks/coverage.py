"""How often 95 % intervals hold the truth, by method, with correlated tokens and the group counts that steps have.

Run: python -m benchmarks.coverage [TRIALS]. Groups of 8 responses of 20 tokens; log-ratios are normal, a twentieth of
their variance shared by the group and a twentieth by the response, so the truth of every statistic is known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from mismatch_probe.stats.ess import ess_from_sums
from mismatch_probe.stats.intervals import (
    IDENTITY,
    LOG,
    LOG_MINUS_LOG,
    METHODS,
    ClusterIntervals,
    Scale,
    Statistic,
    group_sums,
    mean,
    root_mean,
)
from mismatch_probe.stats.types import Floats

GROUPS = (8, 16, 32, 64)
RESPONSES, TOKENS, SHARED = 8, 20, 0.1
Case = tuple[float, bool, Callable[[Floats], list[Floats]], Statistic, Scale, Callable[[float], float]]


def sequence_variance(variance: float) -> float:
    """Variance of the sum over a response."""
    return TOKENS * variance * (1 - SHARED) + TOKENS**2 * variance * SHARED


CASES: dict[str, Case] = {
    "mean": (0.1, False, lambda x: [x], mean, IDENTITY, lambda v: 0.0),
    "rms": (0.1, False, lambda x: [x**2], root_mean, LOG, math.sqrt),
    "k3": (0.1, False, lambda x: [np.expm1(x) - x], mean, LOG, lambda v: math.expm1(v / 2)),
    "token ESS, .78": (
        *(0.5, False, lambda x: [np.exp(x), np.exp(2 * x)]),
        *(ess_from_sums, LOG_MINUS_LOG, lambda v: math.exp(-v)),
    ),
    "sequence ESS, .75": (
        *(0.07, True, lambda x: [np.exp(x), np.exp(2 * x)]),
        *(ess_from_sums, LOG_MINUS_LOG, lambda v: math.exp(-sequence_variance(v))),
    ),
    "sequence ESS, .31": (
        *(0.14, True, lambda x: [np.exp(x), np.exp(2 * x)]),
        *(ess_from_sums, LOG_MINUS_LOG, lambda v: math.exp(-sequence_variance(v))),
    ),
}


def main() -> None:
    """Print one line a statistic and number of groups."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    sys.stdout.write(f"{'statistic':<20}{'groups':>7}" + "".join(f"{method:>12}" for method in METHODS) + "\n")
    for name, (spread, by_sequence, columns, statistic, scale, truth) in CASES.items():
        for groups in GROUPS:
            rng = np.random.default_rng(groups)
            held = dict.fromkeys(METHODS, 0)
            for trial in range(trials):
                x = drawn(groups, spread, rng)
                values = x.sum(axis=2) if by_sequence else x
                group = np.repeat(np.arange(groups), values[0].size)
                sums = group_sums(columns(values.ravel()), group, groups)
                for method in METHODS:
                    made = ClusterIntervals(groups, trial, 1000, method=method).interval(sums, statistic, scale)
                    held[method] += made.low <= truth(spread**2) <= made.high
            line = "".join(f"{held[method] / trials:>12.3f}" for method in METHODS)
            sys.stdout.write(f"{name:<20}{groups:>7}{line}\n")


def drawn(groups: int, spread: float, rng: np.random.Generator) -> Floats:
    """Log-ratios, (groups, RESPONSES, TOKENS)."""
    own, shared = math.sqrt(1 - SHARED), math.sqrt(SHARED / 2)
    x = own * rng.normal(size=(groups, RESPONSES, TOKENS))
    x += shared * rng.normal(size=(groups, 1, 1)) + shared * rng.normal(size=(groups, RESPONSES, 1))
    return spread * x


if __name__ == "__main__":
    main()
