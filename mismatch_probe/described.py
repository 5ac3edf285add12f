"""What a step is like, beside its weights: how stale, how long, how rewarded, and how near to what was logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_probe.run import UNKNOWN_VERSION
from mismatch_probe.stats.intervals import LOG, ClusterIntervals, Interval, group_sums, mean, root_mean
from mismatch_probe.stats.ratios import drop_nulls

if TYPE_CHECKING:
    from mismatch_probe.assemble import StepData


def step_means(data: StepData, intervals: ClusterIntervals) -> dict[str, Interval]:
    """Means of version lag, response length and reward, and the rms of logged minus rescored log pi, by column name."""
    rollouts, levels, size = data.rollouts, data.levels, intervals.n_groups
    versions = rollouts.sampler_version[data.counted]
    unknown = (versions == UNKNOWN_VERSION) | (data.trainer_version == UNKNOWN_VERSION)
    lengths = np.bincount(levels.sequence, minlength=len(rollouts)).astype(np.float64)
    logged = rollouts.trainer_logprob[data.counted]
    gap = np.where(data.trainer_rescored, logged - data.trainer, np.nan)
    values = {
        "version_lag_mean": (np.where(unknown, np.nan, data.trainer_version - versions), levels.group),
        "response_length_mean": (lengths, levels.group_of_sequence),
        "reward_mean": (rollouts.reward, levels.group_of_sequence),
    }
    found = {}
    for name, (each, of) in values.items():
        known, group = drop_nulls(each, of)
        found[name] = intervals.interval(group_sums([known], group, size), mean)
    known, group = drop_nulls(gap, levels.group)
    found["logged_trainer_gap_rms"] = intervals.interval(group_sums([np.square(known)], group, size), root_mean, LOG)
    return found
