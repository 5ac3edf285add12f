"""Weights that no checkpoint of the run shows: what is left when version, head, temperature and shift are tried."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity, or_none
from mismatch_probe.diagnosis.rereading import share_of_gap
from mismatch_probe.diagnosis.words import nats, steps_of
from mismatch_probe.run import Bools

PAGES: tuple[Page, ...] = ()
_LARGE = 0.1
"""Mean |D|, nats, that no kernel or precision gives a dense model: fp8 caches reach .05, usual bfloat16 .014."""
_RISE, _RISEN = 4.0, 0.03
"""A step is far off too where it is so many times what the steps before are, and so many nats."""
_BROAD, _GROUPS, _OF_MEAN = 0.25, 0.8, 0.4
"""Wrong weights move most tokens: the median |D| is at least _BROAD of the mean, most groups are near it."""
_HONEST = 0.25
"""Log-probs of another real distribution have mean D near -mean D^2 / 2, noise in the log has 0: the least share."""
_REPEATS, _SCATTER = 5, 0.3


def check_unknown(evidence: Evidence) -> Result:
    """MP205 or MP206 by elimination: a large gap on most tokens that behaves as that of other weights."""
    steps = [int(step) for step in np.unique(evidence.step_of_token[evidence.usable])]
    if not evidence.fits or not steps:
        reason = "no step was compared with its checkpoint, so nothing can be eliminated"
        return Result(not_testable=(NotTestable(("MP205", "MP206"), reason),))
    gaps = {step: evidence.gap(evidence.step_of_token == step) for step in steps}
    far = [step for step in steps if _far(step, gaps)]
    if not far or not _in_one_piece(far, steps):
        return Result()
    among = np.isin(evidence.step_of_token, far)
    if not (_broad(evidence, among) and _honest(evidence, among) and not _scattered(evidence, among)):
        return Result()
    return Result((_finding(evidence, gaps, far, steps),), evidence=evidence.without(among, "unknown weights"))


def _far(step: int, gaps: dict[int, float]) -> bool:
    before = [gap for other, gap in gaps.items() if other < step]
    # Where one step is far off by itself, half of that will do for another.
    large = gaps[step] > (_LARGE / 2 if max(gaps.values()) > _LARGE else _LARGE)
    return large or (bool(before) and gaps[step] > max(_RISEN, _RISE * min(before)))


def _in_one_piece(far: list[int], steps: list[int]) -> bool:
    """From some step on, nine in ten of those that follow."""
    after = [step for step in steps if step >= far[0]]
    return len(far) >= 0.9 * len(after)


def _broad(evidence: Evidence, among: Bools) -> bool:
    chosen = evidence.usable & among
    absolute = capped(evidence.discrepancy[chosen])
    _, group = np.unique(evidence.group_of_token[chosen], return_inverse=True)
    of_group = np.bincount(group, weights=absolute) / np.bincount(group)
    near = (of_group > _OF_MEAN * absolute.mean()).mean()
    return bool(np.median(absolute) > _BROAD * absolute.mean() and near >= _GROUPS)


def _honest(evidence: Evidence, among: Bools) -> bool:
    """Whether mean D is negative beyond sampling error, by as much as between two distributions."""
    chosen = evidence.usable & among
    difference = np.clip(evidence.discrepancy, -20.0, 20.0)
    mean, _, high = evidence.mean(difference, among)
    size = min(float(np.square(difference[chosen]).mean()) / 2, float(np.abs(difference[chosen]).mean()))
    return not high >= 0 and -mean >= _HONEST * size


def _scattered(evidence: Evidence, among: Bools) -> bool:
    """Whether equal first tokens of one prompt got log-probs that differ about as much as D: noise, not weights."""
    tokens = evidence.tokens
    chosen = np.flatnonzero(evidence.usable & among & (tokens.position == 0))
    key = np.stack([evidence.group_of_token[chosen], tokens.token_id[chosen], tokens.claimed[chosen]])
    _, number, size = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    repeated = size[number] > 1
    if repeated.sum() < _REPEATS:
        return False
    logged = tokens.sampler[chosen]
    centre = np.bincount(number, weights=logged) / size
    return bool(np.abs(logged - centre[number])[repeated].mean() > _SCATTER * evidence.gap(among))


def _finding(evidence: Evidence, gaps: dict[int, float], far: list[int], steps: list[int]) -> Finding:
    among = np.isin(evidence.step_of_token, far)
    mean, low, high = evidence.mean(capped(evidence.discrepancy), among)
    before = [gaps[step] for step in steps if step < far[0]]
    code = "MP206" if before else "MP205"
    trained = evidence.tokens.trainer_version[evidence.step_of_token == steps[0]]
    untrained = bool((trained == 0).all())
    if before:
        when = (
            f"steps before {steps_of([far[0]], steps)} are clean (mean |D| {nats(float(np.mean(before)))}), from it on"
        )
        what = "no version fits"
    elif untrained:
        when, what = (
            "the mismatch is there before training, at step 0",
            "a converter or loader, not lag; no version fits",
        )
    else:
        when, what = f"from the first step that is here ({steps[0]}) on", "no version fits"
    others = min((fit.gap_others for fit in evidence.fits if fit.step in far), default=math.nan)
    nearest = "" if math.isnan(others) else f", {nats(others)} or more at any other version"
    return Finding(
        code,
        Severity.ERROR,
        f"{when} {what}: mean |D| {nats(mean)} with the claimed weights{nearest}, where bfloat16 on both sides gives "
        f".014; heads, temperatures and shifts were tried{_nowhere(evidence, among)}{_growth(evidence, among)}",
        explains=share_of_gap(evidence, {step: gaps[step] for step in far}),
        numbers=(
            Number("mean |D|", mean, "nats", or_none(low), or_none(high)),
            Number("mean D", float(evidence.discrepancy[evidence.usable & among].mean()), "nats"),
        ),
        steps=tuple(far),
    )


def _nowhere(evidence: Evidence, among: Bools) -> str:
    """Whether the tokens are less likely than chance under the claimed weights."""
    vocabulary = evidence.settings.vocab_size
    if vocabulary is None:
        return ""
    median, uniform = float(np.median(evidence.tokens.stale[evidence.usable & among])), -math.log(vocabulary)
    if median >= uniform:
        return ""
    return (
        f"; the tokens are not from any known version: their median log pi is {nats(median)}, less than a uniform "
        f"choice would have ({nats(uniform)}), so the engine's base weights may be lost"
    )


def _growth(evidence: Evidence, among: Bools) -> str:
    """Whether |D| grows with the place in the sequence."""
    chosen = evidence.usable & among
    tokens = evidence.tokens
    place = (tokens.position + evidence.sequences.prompt_length[tokens.sequence])[chosen]
    absolute = capped(evidence.discrepancy[chosen])
    late = place > np.median(place)
    if not late.any() or late.all() or absolute[late].mean() < 1.5 * absolute[~late].mean():
        return ""
    return (
        f"; it grows with position ({nats(float(absolute[~late].mean()))} in the first half, "
        f"{nats(float(absolute[late].mean()))} in the second): compare rope settings first"
    )


CHECKS = (check_unknown,)
