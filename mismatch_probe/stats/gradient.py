"""What each correction does to the update: the policy gradient of the output head, against its on-policy target.

The gradient of the head W, (V, H), is a sum over tokens of A w (e_a - pi) x^T. Only norms and inner products of such
sums are needed, so each side of the outer product may come as a random projection; sums are then formed per prompt
group, which gives the intervals. With whole vectors in place of projections every number is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mismatch_probe.stats.corrections import CORRECTIONS, Bounds, correction_weights, target_log_weights
from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.intervals import LOG, ClusterIntervals, Interval, Scale
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.types import Floats, Ints

MIN_TARGET_ESS = 0.5
"""ESS of the target's weights below which there is no target: its variance has doubled."""
SKETCH_BLOCKS = 8
"""Blocks of projected dimensions that are left out one at a time to measure the projection's error."""
_TOKENS_AT_ONCE = 4096
_TINY = 1e-15
Factor = npt.NDArray[np.floating]
ONE_MINUS = Scale(
    lambda v: np.log(np.maximum(1 - v, _TINY)), lambda x: 1 - math.exp(min(x, math.log(2.0))), increasing=False
)
"""For cosines, which crowd below 1."""


@dataclass(frozen=True, eq=False)
class TokenGradients:
    """Tokens whose gradients are compared, (n,); no entry is null and the tokens of a response stand together.

    ``discrepancy`` and ``lag`` in nats; ``score`` (n, k) are e_a - pi, ``centred`` (n, k) the weighted score less its
    mean under pi_s, ``state`` (n, m) the hidden states, each whole or projected. ``exact``: they are whole.
    """

    discrepancy: Floats
    lag: Floats
    advantage: Floats
    score: Factor
    centred: Factor
    state: Factor
    levels: Levels
    exact: bool


@dataclass(frozen=True, eq=False)
class GradientBias:
    """``values`` and ``intervals`` by column name, NaN = null; ``reasons`` says why something is null."""

    values: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def gradient_bias(tokens: TokenGradients, intervals: ClusterIntervals, bounds: Bounds, target: str) -> GradientBias:
    """Size and cosine of the update under each correction against the on-policy target, and the parts of its bias.

    T is the sum over tokens of A W g, with g = (e_a - pi) x^T and W the weight of ``target``; G that of A w g with the
    correction's weight w. G - T is split at G_s, what the correction would give had pi_s itself drawn the tokens
    (weights to pi_s, and w at D = 0): G_s - T is there with no discrepancy at all, so it is the lag's part, and G - G_s
    the discrepancy's. The two add up to the bias exactly.

    Args:
        tokens: what is compared.
        intervals: over the step's prompt groups.
        bounds: where corrections cut.
        target: one of corrections.TARGETS.
    """
    if not len(tokens.lag):
        return GradientBias(reasons=["gradient: no sequence has D, L and an advantage at all of its tokens"])
    log_ratio = tokens.discrepancy + tokens.lag
    target_ess = ess(_units(target_log_weights(log_ratio, tokens.levels, target), tokens.levels, target))
    values = {"gradient_target_ess": target_ess}
    if target_ess < MIN_TARGET_ESS:
        reason = (
            f"gradient: no on-policy target, the ESS of its {target} weights pi / mu is {target_ess:.3g}, below 1/2"
        )
        return GradientBias(values, reasons=[reason])
    if not tokens.advantage.any():
        return GradientBias(values, reasons=["gradient: every advantage is zero, so there is no update"])
    updates = _updates(tokens, intervals.n_groups, bounds, target)
    if not _finite(updates["target"]):
        return GradientBias(values, reasons=["gradient: its target is beyond float64, log-ratios of hundreds of nats"])
    counts = np.bincount(tokens.levels.group, minlength=intervals.n_groups).astype(np.float64)
    found: dict[str, Interval] = {"gradient_signal": _signal(updates["target"], counts, intervals)}
    errors, lost = [0.0], []
    for name in CORRECTIONS:
        if not all(_finite(updates[part]) for part in (name, f"{name} discrepancy", f"{name} lag")):
            lost.append(name)
            continue
        for column, part, statistic, scale in (
            ("relative_size", name, _size, LOG),
            ("cosine", name, _cosine, ONE_MINUS),
            ("bias_discrepancy", f"{name} discrepancy", _size, LOG),
            ("bias_lag", f"{name} lag", _size, LOG),
        ):
            pair = updates[part], updates["target"]
            sums = np.concatenate([counts[:, None], *(each.reshape(len(counts), -1) for each in pair)], axis=1)
            found[f"gradient_{name}_{column}"] = intervals.interval(sums, statistic, scale)
            errors += [] if tokens.exact else _sketch_errors(pair[0].sum(axis=0), pair[1].sum(axis=0), statistic)
    values["gradient_sketch_error"] = max(errors)
    values["gradient_tokens"] = len(tokens.lag)
    reasons = [
        f"gradient of {name}: zero, so it has no direction"
        for name in CORRECTIONS
        if name not in lost and not updates[name].any()
    ]
    reasons += [f"gradient of {name}: beyond float64, log-ratios of hundreds of nats" for name in lost]
    return GradientBias(values, found, reasons)


def _units(log_weights: Floats, levels: Levels, target: str) -> Floats:
    """One log-weight for each of the target's units: tokens, or sequences whose tokens all have the same."""
    return log_weights[np.unique(levels.sequence, return_index=True)[1]] if target == "sequence" else log_weights


def _updates(tokens: TokenGradients, n_groups: int, bounds: Bounds, target: str) -> dict[str, Floats]:
    """Sums over each group, (G, k, m): the target, each correction, and the two parts of its bias."""
    d, lag, advantage = tokens.discrepancy, tokens.lag, tokens.advantage
    with np.errstate(over="ignore", invalid="ignore"):
        on_policy = np.exp(target_log_weights(d + lag, tokens.levels, target))
        to_stale = np.exp(target_log_weights(d, tokens.levels, target))
        weights = correction_weights(d, lag, advantage, tokens.levels, bounds)
        without = correction_weights(np.zeros_like(d), lag, advantage, tokens.levels, bounds)
        terms = {"target": on_policy}
        for name, weight in weights.items():
            stale = to_stale * without[name]
            terms |= {name: weight, f"{name} discrepancy": weight - stale, f"{name} lag": stale - on_policy}
        coefficients = advantage[:, None] * np.stack(list(terms.values()), axis=1)
        # The centred score differs from the plain one in more than a weight: its lag part is a difference of sums.
        centred = np.stack([advantage, advantage * (1 - to_stale)], axis=1)
        pulls = (advantage * to_stale)[:, None], (advantage * (to_stale - on_policy))[:, None]
    place = tokens.state, tokens.levels.group, n_groups
    sums = _group_products(tokens.score, coefficients, *place)
    dlc = _group_products(tokens.centred, centred, *place)
    dlc_lag = _group_products(tokens.centred - tokens.score, pulls[0], *place)
    dlc_lag += _group_products(tokens.score, pulls[1], *place)
    out = {name: sums[:, at] for at, name in enumerate(terms)}
    return out | {"dlc": dlc[:, 0], "dlc discrepancy": dlc[:, 1], "dlc lag": dlc_lag[:, 0]}


def _group_products(left: Factor, coefficients: Floats, right: Factor, group: Ints, n_groups: int) -> Floats:
    """Sums over each group of c left^T right, (G, C, k, m), from (n, k), (n, C) and (n, m)."""
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(n_groups + 1))
    k, count = left.shape[1], coefficients.shape[1]
    out = np.zeros((n_groups, count, k, right.shape[1]))
    # Scaled to 1, so that products in float32 lose nothing to weights of 1e30.
    scale = np.abs(coefficients).max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for g in range(n_groups):
            for start in range(ends[g], ends[g + 1], _TOKENS_AT_ONCE):
                at = order[start : min(start + _TOKENS_AT_ONCE, ends[g + 1])]
                weighted = (coefficients[at] / scale)[:, :, None].astype(left.dtype) * left[at, None, :]
                out[g] += (weighted.reshape(len(at), -1).T @ right[at]).reshape(count, k, -1)
        return np.asarray(out * scale[:, None, None])


def _finite(update: Floats) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(np.square(update).sum()))


def _size(sums: Floats) -> Floats:
    """Length of an update over that of the target, from (count, update, target)."""
    update, target = _halves(sums)
    size: Floats = np.sqrt(np.square(update).sum(-1) / np.square(target).sum(-1))
    return size


def _cosine(sums: Floats) -> Floats:
    """Cosine of an update and the target, from (count, update, target)."""
    update, target = _halves(sums)
    lengths = np.sqrt(np.square(update).sum(-1) * np.square(target).sum(-1))
    cosine: Floats = np.clip((update * target).sum(-1) / lengths, -1.0, 1.0)
    return cosine


def _halves(sums: Floats) -> tuple[Floats, Floats]:
    middle = (sums.shape[-1] + 1) // 2
    return sums[..., 1:middle], sums[..., middle:]


def _signal(target: Floats, counts: Floats, intervals: ClusterIntervals) -> Interval:
    """Share of the target's squared length that is its expectation's and not the draw's, from groups' sums.

    The squared length less what the groups alone put into it, G / (G - 1) (|T|^2 - sum |T_g|^2), has the expectation's
    squared length for its mean; it can be negative.
    """
    flat = target.reshape(len(counts), -1)
    sums = np.concatenate([counts[:, None], (counts > 0)[:, None], np.square(flat).sum(-1)[:, None], flat], axis=1)

    def share(total: Floats) -> Floats:
        groups, own, length = total[..., 1], total[..., 2], np.square(total[..., 3:]).sum(-1)
        return np.where(groups > 1, groups / (groups - 1) * (1 - own / length), np.nan)

    return intervals.interval(sums, share)


def _sketch_errors(update: Floats, target: Floats, statistic: Callable[[Floats], Floats]) -> list[float]:
    """Standard error that the projection alone gives the statistic: jackknife over blocks of either side. Relative to
    the mean of the replicates where that is above 1, as lengths are under giant weights.
    """
    variance = 0.0
    for axis in (0, 1):
        blocks = np.array_split(np.arange(update.shape[axis]), SKETCH_BLOCKS)
        left_out = [
            np.concatenate([[1.0], *(np.delete(each, block, axis).ravel() for each in (update, target))])
            for block in blocks
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.array([float(statistic(sums)) for sums in left_out])
        variance += (
            (SKETCH_BLOCKS - 1)
            / SKETCH_BLOCKS
            * float(np.square(each - each.mean()).sum())
            / max(1.0, each.mean() ** 2)
        )
    return [math.sqrt(variance)]
