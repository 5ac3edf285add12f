"""Weights between two versions: log-probs that lie on the line from one version's to another's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.rereading import read_as, share_of_gap, with_candidate
from mismatch_probe.diagnosis.scan import BETTER, LEAST, Candidate, Fit, Scan, Window, mean_difference
from mismatch_probe.diagnosis.words import nats, steps_of
from mismatch_probe.run import UNKNOWN_VERSION, Floats, Ints

PAGES = (
    Page(
        "MP213",
        "weights between two versions",
        "The engine holds something between two versions: part of an update, an average, or a version whose checkpoint "
        "is not there.",
        "No version fits, and log-probs on the line between those of two versions do.",
        "A version in between that is saved and fits.",
        "See whether an update can be sampled from before all of its tensors arrived, and whether the engine is given "
        "averaged weights. Save the checkpoints in between to tell.",
    ),
)
_INSIDE = 0.1
"""A place so near to an end is that version."""


@dataclass(frozen=True, eq=False)
class _Between:
    """One step: ``share`` of the way from one candidate to the other.

    ``at`` (n,) are the tokens, ``logprob`` (n,) theirs at that place, by temperature.
    """

    fit: Fit
    ends: tuple[Candidate, Candidate]
    share: float
    gap: float
    certain: bool
    at: Ints
    logprob: dict[int, Floats]


def check_between(evidence: Evidence) -> Result:
    """MP213 at the steps whose best version leaves a gap."""
    scan = evidence.scan
    if scan is None or sum(one.version is not None for one in scan.candidates) < 2:
        return Result(not_testable=(NotTestable(("MP213",), "the run holds fewer than two versions to be between"),))
    fits = evidence.readings
    looked = [one for fit in fits if (one := _look(evidence, scan, fit)) is not None]
    if not any(one.certain for one in looked):
        return Result()
    # Once one step lies between versions, another need only fit better there.
    found = [one for one in looked if one.gap < one.fit.gap]
    strange = [one for one in found if not _expected(evidence, one)]
    stale = np.full(len(evidence.tokens), np.nan)
    for one in found:
        stale[one.at] = one.logprob[scan.declared]
        name = f"{one.share:.0%} of the way from {one.ends[0].name} to {one.ends[1].name}"
        scan = with_candidate(scan, Candidate(name, None, one.ends[0].path), one.at, one.logprob)
    among = np.isin(evidence.step_of_token, [one.fit.step for one in found])
    repaired = replace(read_as(evidence, among, stale, "between versions"), scan=scan)
    return Result((_finding(evidence, strange, [f.step for f in fits]),) if strange else (), evidence=repaired)


def _look(evidence: Evidence, scan: Scan, fit: Fit) -> _Between | None:
    if fit.gap * (1 - BETTER) < LEAST:
        return None
    window = Window(evidence, scan, evidence.step_of_token == fit.step)
    gaps = window.gaps(fit.choice.shift)[1:, fit.choice.temperature]
    versioned = [at for at, one in enumerate(scan.candidates) if one.version is not None and not np.isnan(gaps[at])]
    if len(versioned) < 2:
        return None
    best = min(versioned, key=lambda at: gaps[at])
    ordered = sorted(versioned, key=lambda at: scan.candidates[at].version or 0)
    place = ordered.index(best)
    pairs = [(ordered[at], ordered[at + 1]) for at in (place - 1, place) if 0 <= at < len(ordered) - 1]
    found = [here for pair in pairs if (here := _on_the_way(evidence, scan, fit, window, *pair)) is not None]
    return min(found, key=lambda here: here.gap, default=None)


def _on_the_way(evidence: Evidence, scan: Scan, fit: Fit, window: Window, one: int, other: int) -> _Between | None:
    """The step read between two candidates, places that choose where judged on the other half of the tokens."""
    there, slot = window.source(fit.choice.shift)
    logged = evidence.tokens.sampler[window.at[there]]
    start, end = scan.logprob[[one, other], fit.choice.temperature][:, slot]
    known = ~np.isnan(start) & ~np.isnan(end)
    if known.sum() < 20:
        return None
    half = np.arange(len(slot)) % 2 == 0
    held_out = np.full(len(slot), np.nan)
    for seen in (half, ~half):
        share = _share(start, end, logged, known & seen)
        held_out[~seen] = start[~seen] + share * (end - start)[~seen]
    absolute = capped(held_out - logged)
    before = window.absolute(fit.choice)[there]
    gap, share = float(np.nanmean(absolute)), _share(start, end, logged, known)
    low, _ = mean_difference(before, absolute, window.group[there])
    if not _INSIDE < share < 1 - _INSIDE:
        return None
    certain = gap <= BETTER * fit.gap and fit.gap - gap >= LEAST and low > 0
    ends = scan.candidates[one], scan.candidates[other]
    return _Between(
        fit,
        ends,
        share,
        gap,
        bool(certain),
        scan.tokens[slot],
        {
            place: scan.logprob[one, place, slot]
            + share * (scan.logprob[other, place, slot] - scan.logprob[one, place, slot])
            for place in dict.fromkeys((scan.declared, fit.choice.temperature))
        },
    )


def _share(start: Floats, end: Floats, logged: Floats, among: np.ndarray) -> float:
    """How far from one end to the other the logged values lie, by least squares."""
    way = (end - start)[among]
    size = float((way * way).sum())
    return float((way * (logged - start)[among]).sum() / size) if size > 0 else 0.0


def _expected(evidence: Evidence, one: _Between) -> bool:
    """Whether the claimed version has no checkpoint and lies between those two."""
    claimed = evidence.tokens.claimed[one.at]
    low, high = (end.version or 0 for end in one.ends)
    return bool(((claimed > low) & (claimed < high)).mean() > 0.5)


def _finding(evidence: Evidence, found: list[_Between], every: list[int]) -> Finding:
    worst = max(found, key=lambda one: one.fit.gap - one.gap)
    claims = np.unique(np.concatenate([evidence.tokens.claimed[one.at] for one in found]))
    known = [str(version) for version in claims if version != UNKNOWN_VERSION]
    claimed = f", claimed {known[0] if len(known) == 1 else f'{known[0]} to {known[-1]}'}" if known else ""
    steps = [one.fit.step for one in found]
    before, after = (float(np.mean(values)) for values in ([o.fit.gap for o in found], [o.gap for o in found]))
    return Finding(
        "MP213",
        Severity.ERROR,
        f"{steps_of(steps, every)}: the weights lie between versions{claimed}, at step "
        f"{worst.fit.step} {worst.share:.0%} of the way from {worst.ends[0].name} to {worst.ends[1].name}; mean |D| "
        f"{nats(before)} with the best version falls to {nats(after)}",
        explains=share_of_gap(evidence, {one.fit.step: one.fit.gap - one.gap for one in found}),
        numbers=(Number("share of the way", worst.share), Number("mean |D| as found", worst.gap, "nats")),
        steps=tuple(steps),
    )


CHECKS = (check_between,)
