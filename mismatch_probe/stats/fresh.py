"""The full KL from fresh responses of the trainer: its own prefixes, no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.intervals import LOG, ClusterIntervals, Interval, group_sums, mean
from mismatch_probe.stats.ratios import Levels, drop_nulls, sequence_sums
from mismatch_probe.stats.types import Floats, Ints


def fresh_kl(
    trainer_stale: Floats,
    stale_trainer: Floats,
    levels: Levels,
    prefix: Floats,
    prefix_group: Ints,
    intervals: ClusterIntervals,
) -> dict[str, Interval]:
    """Full KL on responses that the trainer itself drew, beside prefix KL on the recorded ones to the same prompts.

    The KL at each prefix is exact over the vocabulary, and the prefixes are the trainer's, so their mean is the full
    KL without any weight: unbiased, also where the recorded responses never went. What it can miss is what the trainer
    does in fewer than some 3 of n responses.

    ``full_kl_fresh_trainer_stale``: KL(pi || pi_s), nats a token, over the trainer's prefixes;
    ``full_kl_fresh_stale_trainer``: the other direction, KL(pi_s || pi), over the same prefixes;
    ``full_kl_fresh_sequence_trainer_stale``: KL(pi || pi_s) of whole responses, by the chain rule the mean of the sums;
    ``full_kl_fresh_prefix_trainer_stale``: KL(pi || pi_s) over the recorded prefixes of the same prompts;
    ``full_kl_fresh_ratio``: the first over the last, prompts paired.

    Args:
        trainer_stale: KL(pi || pi_s) at the prefix of each fresh token, nats, (n,). NaN = null, here and below.
        stale_trainer: KL(pi_s || pi), nats, (n,).
        levels: which fresh response and prompt group each token belongs to.
        prefix: KL(pi || pi_s) at the recorded prefixes, nats, (m,).
        prefix_group: prompt group of each, numbered as in ``levels``, (m,).
        intervals: over prompt groups.
    """
    size = intervals.n_groups
    per_sequence = sequence_sums(trainer_stale, levels)
    means = {
        "full_kl_fresh_trainer_stale": (trainer_stale, levels.group),
        "full_kl_fresh_stale_trainer": (stale_trainer, levels.group),
        "full_kl_fresh_sequence_trainer_stale": (per_sequence, levels.group_of_sequence),
        "full_kl_fresh_prefix_trainer_stale": (prefix, prefix_group),
    }
    sums = {name: group_sums([known[0]], known[1], size) for name, known in _known(means).items()}
    found = {name: intervals.interval(columns, mean, LOG) for name, columns in sums.items()}
    # A prompt counts in the ratio where both sides have it.
    pair = [sums[f"full_kl_fresh_{name}trainer_stale"] for name in ("", "prefix_")]
    both = (pair[0][:, 0] > 0) & (pair[1][:, 0] > 0)
    joined = np.concatenate(pair, axis=1) * both[:, None]
    found["full_kl_fresh_ratio"] = intervals.interval(joined, _ratio, LOG)
    return found


@dataclass(frozen=True)
class StepFresh:
    """One step's full KL(pi || pi_s) on fresh responses, prefix KL on the same prompts, and their ratio; NaN = null."""

    step: int
    full: float
    low: float
    high: float
    prefix: float
    ratio: float
    ratio_low: float
    ratio_high: float


def fresh_sentence(steps: Sequence[StepFresh], confidence: float) -> str:
    """What the full KL says against prefix KL over the run, in words; "" where no step has one."""
    known = [step for step in steps if not math.isnan(step.full)]
    if not known:
        return ""
    last = known[-1]
    text = f"Full KL on fresh responses of the trainer: {_at(last)}."
    compared = [step for step in known if not math.isnan(step.ratio)]
    if not compared:
        return text
    widest = max(compared, key=lambda step: abs(math.log(step.ratio)) if step.ratio > 0 else math.inf)
    if widest is not last:
        text += f" Farthest apart at {_at(widest)}."
    judged = [step for step in compared if not math.isnan(step.ratio_low)]
    above = sum(step.ratio_low > 1 for step in judged)
    below = sum(step.ratio_high < 1 for step in judged)
    return (
        f"{text} Prefix KL is too small at {above} and too large at {below} of {len(judged)} steps judged "
        f"({confidence:.0%} intervals of the ratio)."
    )


def _at(step: StepFresh) -> str:
    ends = "" if math.isnan(step.low) else f" [{step.low:.3g}, {step.high:.3g}]"
    ratio_ends = "" if math.isnan(step.ratio_low) else f" [{step.ratio_low:.2f}, {step.ratio_high:.2f}]"
    times = "" if math.isnan(step.ratio) else f", {step.ratio:.2f}{ratio_ends} times prefix KL {step.prefix:.3g}"
    return f"step {step.step} KL(pi || pi_s) {step.full:.3g}{ends} nats a token{times}"


def _known(parts: dict[str, tuple[Floats, Ints]]) -> dict[str, tuple[Floats, Ints]]:
    return {name: drop_nulls(values, group) for name, (values, group) in parts.items()}


def _ratio(sums: Floats) -> Floats:
    """Mean over mean, from (count, sum, other count, other sum)."""
    found: Floats = (sums[..., 1] / sums[..., 0]) / (sums[..., 3] / sums[..., 2])
    return found
