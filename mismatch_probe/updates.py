"""A joined step -> its numbers on the update: the head's gradient under each correction, and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_probe.assemble import Judgement, StepData, split_is_partial
from mismatch_probe.columns import with_ends
from mismatch_probe.run import Bools, Floats, Rollouts
from mismatch_probe.stats.clipping import sign_skew
from mismatch_probe.stats.corrections import DEFAULT_TARGET, Bounds
from mismatch_probe.stats.gradient import GradientBias, TokenGradients, gradient_bias
from mismatch_probe.stats.intervals import ClusterIntervals, interval_reasons
from mismatch_probe.stats.ratios import Levels, sequence_sums

MAX_TOKENS = 1 << 16
"""Tokens a step whose gradients are kept; beyond, whole prompt groups are drawn by seed. Some 50 MB of factors."""


@dataclass(frozen=True)
class UpdateOptions:
    """``gradient``: compare gradients at all. ``target`` is one of corrections.TARGETS, ``clip`` PPO's epsilon."""

    gradient: bool = True
    target: str = DEFAULT_TARGET
    clip: float = 0.2


def chosen_tokens(rollouts: Rollouts, seed: int, step: int, most: int = MAX_TOKENS) -> Bools:
    """Counted tokens whose gradients are compared: all, or those of whole prompt groups drawn by seed, (tokens,)."""
    counted = rollouts.loss_mask
    if counted.sum() <= most:
        return counted
    group = rollouts.group_of_sequence[rollouts.sequence_of_token]
    size = np.bincount(group, weights=counted)
    order = np.random.default_rng([seed, step, 1]).permutation(len(size))
    taken = order[: max(1, int((np.cumsum(size[order]) <= most).sum()))]
    return np.asarray(counted & np.isin(group, taken))


def advantages(rollouts: Rollouts) -> tuple[Floats, str | None]:
    """Advantage of each counted token, (n,), NaN = null, and where it comes from: ``logged``, or the reward less the
    mean over its prompt group, or None for neither.
    """
    counted = rollouts.loss_mask
    if not np.isnan(rollouts.advantage[counted]).all():
        return rollouts.advantage[counted], "logged"
    known, group = ~np.isnan(rollouts.reward), rollouts.group_of_sequence
    if not known.any():
        return rollouts.advantage[counted], None
    total = np.bincount(group[known], weights=rollouts.reward[known], minlength=int(group.max()) + 1)
    count = np.bincount(group[known], minlength=len(total))
    centred = rollouts.reward - (total / np.maximum(count, 1))[group]
    return centred[rollouts.sequence_of_token[counted]], "reward - group mean"


def update_row(data: StepData, judgement: Judgement, options: UpdateOptions) -> tuple[dict[str, Any], list[str]]:
    """Columns of the steps table on the update, and reasons for those that are null or of limited meaning."""
    if np.isnan(data.split.lag).all() or split_is_partial(data):
        return {}, []  # the step's own reasons say why there is no lag
    advantage, source = advantages(data.rollouts)
    if source is None:
        return {}, ["gradient, clipping: neither advantages nor rewards are known"]
    intervals = judgement.over(data.levels.n_groups)
    reasons = []
    if source != "logged":
        reasons.append("gradient, clipping: no advantages are logged, reward minus group mean stands in")
    found = dict(sign_skew(data.split, advantage, data.levels, intervals, options.clip))
    values: dict[str, Any] = {"gradient_advantages": source}
    if options.gradient:
        compared = _gradient(data, advantage, intervals, options)
        found |= compared.intervals
        values |= compared.values
        reasons += compared.reasons
    return values | with_ends(found), reasons + interval_reasons(found)


def _gradient(data: StepData, advantage: Floats, intervals: ClusterIntervals, options: UpdateOptions) -> GradientBias:
    factors = data.scores.factors
    if np.isnan(data.split.discrepancy).all():
        return GradientBias()
    if factors is None:
        return GradientBias(reasons=["gradient: log pi is not rescored, or its head caps its logits"])
    wanted, split = factors.wanted[data.counted], data.split
    whole = sequence_sums(split.discrepancy + split.lag + np.where(wanted, advantage, np.nan), data.levels)
    keep = np.isfinite(whole)[data.levels.sequence]
    rows = (np.cumsum(wanted) - 1)[keep]
    tokens = TokenGradients(
        discrepancy=split.discrepancy[keep],
        lag=split.lag[keep],
        advantage=advantage[keep],
        score=factors.score[rows],
        centred=factors.centred[rows],
        state=factors.state[rows],
        levels=Levels(data.levels.sequence[keep], data.levels.group_of_sequence),
        exact=factors.exact,
    )
    compared = gradient_bias(tokens, intervals, Bounds(clip=options.clip), options.target)
    left = int((~keep).sum())
    if left and len(tokens.lag):
        compared.reasons.append(
            f"gradient: {left} of {len(keep)} tokens left out, of sequences with a null or beyond {MAX_TOKENS} tokens"
        )
    return compared
