"""Rollouts and scores of one step, joined, and its row of the steps table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_probe.columns import with_ends
from mismatch_probe.described import step_means
from mismatch_probe.engine_split import EngineSplit, engine_row
from mismatch_probe.resolve import Gaps
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints, Rollouts
from mismatch_probe.stats.breakdown import Rule, StepEss
from mismatch_probe.stats.floor import floor_top, noise_floor, within_floor
from mismatch_probe.stats.intervals import DEFAULT_METHOD, ClusterIntervals
from mismatch_probe.stats.ratios import Levels, Split, split
from mismatch_probe.stats.summary import BiasVectors, Summary, summarise
from mismatch_probe.stats.terms import StepTokens

if TYPE_CHECKING:
    from mismatch_probe.scoring.engine import EngineScores
    from mismatch_probe.scoring.scores import StepScores


@dataclass(frozen=True, eq=False)
class Judgement:
    """How breakdown is judged: level, threshold, and how the intervals are made."""

    rule: Rule
    confidence: float
    resamples: int
    seed: int
    intervals: str = DEFAULT_METHOD

    def over(self, n_groups: int) -> ClusterIntervals:
        """Intervals over so many prompt groups."""
        return ClusterIntervals(n_groups, self.seed, self.resamples, self.confidence, self.intervals)


@dataclass(frozen=True, eq=False)
class StepData:
    """One step, joined: arrays over its counted tokens, (n,), nats, NaN = null."""

    step: int
    trainer_version: int
    rollouts: Rollouts
    scores: StepScores
    counted: Bools
    levels: Levels
    half: Ints
    sampler: Floats
    stale: Floats
    trainer: Floats
    trainer_rescored: Bools
    stale_rescored: Bools
    trainer_nearest: Bools
    stale_nearest: Bools
    gap: int
    split: Split
    engine: EngineSplit


def halves(rollouts: Rollouts) -> Ints:
    """0 or 1 for each sequence, by prompt group: neighbours in the order of group ids fall into different halves."""
    return rollouts.group_of_sequence % 2


def join(
    step: int,
    rollouts: Rollouts,
    scores: StepScores,
    trainer_version: int,
    one_lineage: bool,
    gaps: Gaps | None = None,
    engine: EngineScores | None = None,
    half: Ints | None = None,
) -> StepData:
    """Choose each log-prob's source and split.

    log pi is rescored where there is a checkpoint, else as logged. log pi_s is rescored; without a checkpoint it is
    log pi where sampler and trainer hold the same version. log mu is as logged, or the engine's where none is.

    Args:
        step: step number.
        rollouts: its sequences.
        scores: their rescored values.
        trainer_version: version of the trainer's weights, or UNKNOWN_VERSION.
        one_lineage: sampler and trainer versions name the same checkpoints.
        gaps: which weights are those of a neighbouring version, None for none.
        engine: its log-probs, None when it was not asked.
        half: 0 or 1 for each sequence, by prompt group, (n,); None for ``halves``.
    """
    gaps = gaps or Gaps()
    counted = rollouts.loss_mask
    rescored, logged = scores.trainer_logprob[counted], rollouts.trainer_logprob[counted]
    # One source for a step: where a network gave NaN, a logged value in its place would mix two programs.
    trainer = logged if np.isnan(rescored).all() else rescored
    stale = scores.stale_logprob[counted]
    versions = rollouts.sampler_version[counted]
    same = (versions == trainer_version) & (trainer_version != UNKNOWN_VERSION) & one_lineage
    stale_rescored = ~np.isnan(stale)
    stale = np.where(np.isnan(stale) & same, trainer, stale)
    sampler = rollouts.sampler_logprob[counted]
    again = EngineSplit.of(engine, counted, stale, sampler)
    sampler = again.logprob if again.stands_in else sampler
    return StepData(
        step=step,
        trainer_version=trainer_version,
        rollouts=rollouts,
        scores=scores,
        counted=counted,
        levels=Levels(rollouts.sequence_of_token[counted], rollouts.group_of_sequence),
        half=(halves(rollouts) if half is None else half)[rollouts.sequence_of_token[counted]],
        sampler=sampler,
        stale=stale,
        trainer=trainer,
        trainer_rescored=~np.isnan(rescored),
        stale_rescored=stale_rescored,
        trainer_nearest=~np.isnan(rescored) & (gaps.trainer != 0),
        stale_nearest=np.isin(versions, [version for version, gap in gaps.sampler.items() if gap]) & ~np.isnan(stale),
        gap=gaps.largest,
        split=split(sampler, stale, trainer),
        engine=again,
    )


def step_row(
    data: StepData, judgement: Judgement, previous: BiasVectors, extra_reasons: Iterable[str]
) -> tuple[dict[str, Any], Summary]:
    """The step's row of the steps table, and the summary it was taken from."""
    intervals = judgement.over(data.levels.n_groups)
    summary = summarise(_step_tokens(data), intervals, previous)
    rule = judgement.rule
    approximate = data.gap > 0 or (data.engine.stands_in and rule.ratio != "lag")
    ess = summary.intervals[f"ess_{rule.ratio}_{rule.level}"]
    noise = _noise(data, intervals)
    means = step_means(data, intervals)
    judged = StepEss(
        data.step,
        ess.value,
        ess.low,
        ess.high,
        approximate=approximate,
        within_floor=rule.ratio == "discrepancy" and _is_noise(summary.intervals["discrepancy_rms"].value, noise),
    )
    row = {
        "step": data.step,
        **_counts(data),
        **with_ends(summary.intervals),
        **summary.values,
        **engine_row(data.engine, data.split.discrepancy, data.levels.group, intervals, split_is_partial(data)),
        **noise,
        **with_ends(means),
        "breakdown_level": rule.level,
        "breakdown_ratio": rule.ratio,
        "breakdown_threshold": rule.threshold,
        "breakdown_probability": ess.share_below(rule.threshold),
        "status": str(judged.status(rule.threshold)),
        "reasons": [*_null_reasons(data, summary), *extra_reasons],
    }
    return row, summary


def split_is_partial(data: StepData) -> bool:
    """True when pi_s is known for tokens of some versions only, or a network gave NaN at some tokens.

    The tokens that are known are then no sample of the step: summarised, they would say that the lag is small because
    the tokens with a large one are unknown.
    """
    return _some(~np.isnan(data.stale)) or _some(data.trainer_rescored)


def _some(known: Bools) -> bool:
    return bool(known.any() and not known.all())


def _step_tokens(data: StepData) -> StepTokens:
    scores, counted = data.scores, data.counted
    tokens = StepTokens(
        split=data.split,
        levels=data.levels,
        half=data.half,
        token_id=data.rollouts.response.values[counted],
        kl_stale_trainer=scores.kl_stale_trainer[counted],
        kl_trainer_stale=scores.kl_trainer_stale[counted],
        total_variation=scores.total_variation[counted],
        same_top=scores.same_top[counted],
        entropy_stale=scores.entropy_stale[counted],
        entropy_trainer=scores.entropy_trainer[counted],
        bias_lag_sums=scores.bias_lag_sum,
        bias_lag_tokens=scores.bias_lag_tokens,
    )
    if not split_is_partial(data):
        return tokens
    null = np.full(len(data.stale), np.nan)
    return replace(
        tokens,
        split=Split(null, null, null if _some(data.trainer_rescored) else data.split.log_ratio),
        kl_stale_trainer=null,
        kl_trainer_stale=null,
        total_variation=null,
        same_top=null,
        entropy_stale=null,
        entropy_trainer=null,
        bias_lag_sums=None,
    )


def _counts(data: StepData) -> dict[str, Any]:
    rollouts, counted = data.rollouts, data.counted
    versions = rollouts.sampler_version[counted]
    known = (versions != UNKNOWN_VERSION) & (data.trainer_version != UNKNOWN_VERSION)
    lags = (data.trainer_version - versions)[known]
    return {
        "sequences": len(rollouts),
        "groups": data.levels.n_groups,
        "tokens": int(counted.sum()),
        "tokens_with_discrepancy": int((~np.isnan(data.split.discrepancy)).sum()),
        "tokens_with_lag": int((~np.isnan(data.split.lag)).sum()),
        "rejected": len(rollouts.rejected),
        "nearest_gap_max": data.gap,
        "version_lag_max": float(lags.max()) if len(lags) else math.nan,
    }


def _noise(data: StepData, intervals: ClusterIntervals) -> dict[str, Any]:
    noise = data.scores.noise
    group = data.levels.group_of_sequence[data.rollouts.sequence_of_token[data.scores.noise_place]]
    floor = noise_floor(noise, group, intervals)
    logged = data.rollouts.trainer_logprob[data.counted]
    gap = (logged - data.trainer)[data.trainer_rescored & ~np.isnan(logged)]
    return {
        "noise_floor_rms": floor.value,
        "noise_floor_rms_ci_low": floor.low,
        "noise_floor_rms_ci_high": floor.high,
        "noise_floor_max": float(np.abs(noise).max()) if len(noise) else math.nan,
        "noise_floor_tokens": len(noise),
        "logged_trainer_gap_max": float(np.abs(gap).max()) if len(gap) else math.nan,
    }


def _is_noise(rms: float, noise: dict[str, Any]) -> bool:
    """True for a discrepancy no larger than the probe's own noise."""
    top = floor_top(noise["noise_floor_rms_ci_high"], noise["noise_floor_max"])
    return bool(within_floor(np.array(rms), top))


def _null_reasons(data: StepData, summary: Summary) -> list[str]:
    total = int(data.counted.sum())
    if not total:
        return ["no counted token"]
    reasons = [f"{what}: {n} of {total} tokens" for what, n in sorted(data.scores.reasons.items())]
    unsampled = int(np.isnan(data.sampler).sum())
    if unsampled:
        reasons.append(f"no sampler log-prob: {unsampled} of {total} tokens have no discrepancy and no log-ratio")
    if split_is_partial(data):
        known = int((~np.isnan(data.split.lag)).sum())
        reasons.append(
            f"split not summarised: lag known for {known} of {total} tokens, which are no sample of all of them"
        )
    lag_from_log = int((data.stale_rescored & ~data.trainer_rescored & ~np.isnan(data.trainer)).sum())
    if lag_from_log:
        reasons.append(
            f"log pi as logged, pi_s rescored: the lag of {lag_from_log} tokens holds the trainer's numerics as well"
        )
    if summary.bias.lag is not None and not summary.bias.lag.any():
        reasons.append("lag bias is zero, so it has no direction and no cosine")
    return reasons + summary.reasons
