"""The probe's own noise floor: what a score moves by when only the shape of its batch changes."""

from __future__ import annotations

import numpy as np

from mismatch_probe.stats.intervals import LOG, ClusterIntervals, Interval, group_sums, root_mean
from mismatch_probe.stats.types import Bools, Floats, Ints


def noise_floor(noise: Floats, group: Ints, intervals: ClusterIntervals) -> Interval:
    """Root mean square of the noise, nats, with its interval.

    Args:
        noise: difference between two scores of each token that was scored twice, nats, (n,).
        group: its prompt group, (n,).
        intervals: over prompt groups.
    """
    return intervals.interval(group_sums([np.square(noise)], group, intervals.n_groups), root_mean, LOG)


def floor_top(high: Floats, largest: Floats) -> Floats:
    """Upper end of the floor, nats, (steps,): that of its interval, but no more than the largest difference seen.

    With few prompt groups scored twice the interval is wide without meaning, and no rms exceeds the largest term.

    Args:
        high: upper end of the interval of the floor's rms, nats, (steps,). NaN = null, here and below.
        largest: largest difference, nats, (steps,).
    """
    return np.asarray(np.fmin(high, largest))


def within_floor(rms: Floats, top: Floats) -> Bools:
    """True where a discrepancy of that rms is no larger than the floor: nothing may be concluded from it, (steps,)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(rms <= top)
