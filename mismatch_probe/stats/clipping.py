"""What clipping the lag ratio does to tokens of positive and of negative advantage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mismatch_probe.stats.corrections import ppo_clips
from mismatch_probe.stats.intervals import IDENTITY, ClusterIntervals, Interval, Scale, group_sums, mean
from mismatch_probe.stats.ratios import Levels, Split
from mismatch_probe.stats.types import Bools, Floats


def sign_skew(
    split: Split, advantage: Floats, levels: Levels, intervals: ClusterIntervals, clip: float
) -> dict[str, Interval]:
    """Who is clipped, which way, and because of what; by column name.

    ``clip_share_positive`` and ``clip_share_negative``: share of the tokens with A > 0 (A < 0) whose lag ratio is
    outside [1 - clip, 1 + clip]. ``clip_skew``: mean of sign(A) d over those of both signs, nats: what is clipped
    leans towards rewarded tokens that grew where it is positive. ``clip_flips``: share of the tokens with A != 0 for
    which PPO's clip decides otherwise on pi / mu than on pi / pi_s, so that D alone turns it.

    Args:
        split: D, L and d, (n,), NaN = null and left out.
        advantage: A, (n,), NaN = null.
        levels: which group each token belongs to.
        intervals: over prompt groups.
        clip: epsilon, in (0, 1).
    """
    outside = (split.lag > math.log1p(clip)) | (split.lag < math.log1p(-clip))
    lag_known, both_known = ~np.isnan(split.lag), ~np.isnan(split.log_ratio) & ~np.isnan(split.lag)
    turned = ppo_clips(split.lag, advantage, clip) != ppo_clips(split.log_ratio, advantage, clip)
    signed = ~np.isnan(advantage) & (advantage != 0)

    def over(chosen: Bools, values: Floats, scale: Scale) -> Interval:
        sums = group_sums([values[chosen]], levels.group[chosen], intervals.n_groups)
        return intervals.interval(sums, mean, scale)

    share = replace(IDENTITY, least=0.0)
    return {
        "clip_share_positive": over(lag_known & (advantage > 0), outside.astype(np.float64), share),
        "clip_share_negative": over(lag_known & (advantage < 0), outside.astype(np.float64), share),
        "clip_skew": over(both_known & outside & signed, np.sign(advantage) * split.log_ratio, IDENTITY),
        "clip_flips": over(both_known & signed, turned.astype(np.float64), share),
    }
