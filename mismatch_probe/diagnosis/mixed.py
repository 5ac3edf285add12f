"""Several versions at one step, told apart by sequence or inside responses, other than the labels say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.finding import NotTestable, Result
from mismatch_probe.diagnosis.mixed_report import Mixed, MixedReport
from mismatch_probe.diagnosis.paths import find_paths
from mismatch_probe.diagnosis.rereading import read_as
from mismatch_probe.diagnosis.scan import BETTER, LEAST, Fit, Scan, Window, mean_difference
from mismatch_probe.run import Ints

PAGES = (
    Page(
        "MP207",
        "prompts seen before are sampled by older weights",
        "The engine kept the prefix cache over a weight update: a prompt that it met before continues from states of "
        "the weights of that time.",
        "No single version fits a step. Responses to prompts of earlier steps fit older weights, or are far off, while "
        "those to new prompts fit the claimed version.",
        "Repeated prompts that are no worse than new ones, or an engine that runs without a prefix cache.",
        "Reset the prefix cache at every weight update (vLLM: reset_prefix_cache; SGLang: flush_cache).",
        ("NVIDIA-NeMo/RL#4018", "NVIDIA-NeMo/RL#3152"),
    ),
    Page(
        "MP212",
        "versions change inside responses, other than labelled",
        "The engine took new weights while it was writing a response, and the label names one version for all of it, "
        "or changes at another place.",
        "The version scan along each response finds one version up to some token and another from there on.",
        "One version that fits the whole response as well.",
        "Log the version of every token (`sampler_version` as a list), or abort and restart responses at an update.",
        ("areal-project/AReaL#1736",),
    ),
    Page(
        "MP705",
        "staleness is recorded wrongly",
        "The version recorded with the tokens is not the one that sampled them, so staleness that is computed from it "
        "is wrong, while the sampling itself may be in order.",
        "The version scan finds versions that move with the training steps while the recorded one stands still, or "
        "differ both ways from the recorded ones.",
        "A step at which the recorded version fits best though another is found elsewhere.",
        "Record the version that the engine held when it drew each token, and compute staleness from that by token.",
        ("allenai/open-instruct#1616", "areal-project/AReaL#1736"),
    ),
)
_ROWS, _TOKENS = 3, 20
"""Fewest sequences and tokens with another version than the best single one."""
_LITTLE = 0.0005
"""Nats: where the best version of every single token gains less, no path can gain more."""


def check_mixed(evidence: Evidence) -> Result:
    """Look for the version of every sequence, and for changes inside, where no single reading of a step suffices."""
    scan = evidence.scan
    if scan is None:
        return Result(not_testable=(NotTestable(("MP207", "MP212"), "no version can be scanned"),))
    if sum(candidate.version is not None for candidate in scan.candidates) < 2:
        return Result(not_testable=(NotTestable(("MP207", "MP212"), "the run holds one set of weights only"),))
    fits = evidence.readings
    looked = [found for fit in fits if (found := _look(evidence, scan, fit)) is not None and found.differs.any()]
    # Where labels are right, a version that some tokens choose is worse for the others, never better.
    mixed = [one for one in looked if np.nansum((one.before - one.after)[one.differs]) > 0]
    if not mixed or not _believed(evidence, mixed):
        return Result()
    report = MixedReport(evidence, scan, mixed, [fit.step for fit in fits])
    return Result(report.findings(), evidence=_reread(evidence, scan, mixed))


def _believed(evidence: Evidence, mixed: Sequence[Mixed]) -> bool:
    """Whether the tokens with another version fit it much better, beyond sampling error, over all those steps."""
    differs = np.concatenate([one.differs for one in mixed])
    before, after = (np.concatenate([getattr(one, which) for one in mixed])[differs] for which in ("before", "after"))
    at = np.concatenate([one.at for one in mixed])[differs]
    rows = np.unique(evidence.tokens.sequence[at])
    if len(rows) < _ROWS or len(at) < _TOKENS or np.mean(after) > BETTER * np.mean(before):
        return False
    low, _ = mean_difference(before, after, evidence.group_of_token[at])
    return bool(low > 0 and np.mean(before - after) >= LEAST)


def _look(evidence: Evidence, scan: Scan, fit: Fit) -> Mixed | None:
    """The versions along the sequences of one step, read at the temperature and shift that fit it best."""
    window = Window(evidence, scan, evidence.step_of_token == fit.step)
    candidates = np.array([at for at in window.tried if scan.candidates[at].version is not None], dtype=np.int64)
    there, slot = window.source(fit.choice.shift)
    before = window.absolute(fit.choice)[there]
    there_and_known = ~np.isnan(before)
    slot, before = slot[there_and_known], before[there_and_known]
    log_places = window.at[there][there_and_known]
    if len(candidates) < 2 or not len(slot):
        return None
    sampler = evidence.tokens.sampler[log_places]
    named = scan.claimed[slot]
    claimed = np.where(named >= 0, scan.logprob[named, fit.choice.temperature, slot], np.nan)
    others = scan.logprob[candidates, fit.choice.temperature][:, slot]
    difference = np.vstack([claimed[None], others]) - sampler
    absolute = capped(difference)
    if np.mean(before) - np.mean(np.nanmin(absolute, axis=0)) < _LITTLE:
        return None
    found = find_paths(difference, evidence.tokens.sequence[log_places])

    def of(state: Ints) -> Ints:
        return np.where(state > 0, np.concatenate([[-1], candidates])[np.maximum(state, 0)], named)

    single = named if fit.choice.candidate is None else np.full(len(named), fit.choice.candidate)
    after = absolute[np.maximum(found.held_out, 0), np.arange(len(slot))]
    differs = (found.held_out >= 0) & (of(found.held_out) != single) & ~np.isnan(after)
    # A shift moves what is logged: the places are those of the tokens themselves.
    return Mixed(fit, scan.tokens[slot], named, of(found.state), before, after, differs)


def _reread(evidence: Evidence, scan: Scan, mixed: Sequence[Mixed]) -> Evidence:
    """Tokens read under the version found for each; the scan names it, so that later checks start from there."""
    stale = np.full(len(evidence.tokens), np.nan)
    claimed = scan.claimed.copy()
    for one in mixed:
        slot = np.searchsorted(scan.tokens, one.at)
        claimed[slot] = one.candidate
        named = one.candidate >= 0
        stale[one.at[named]] = scan.logprob[one.candidate[named], scan.declared, slot[named]]
    steps = np.isin(evidence.step_of_token, [one.fit.step for one in mixed])
    return replace(read_as(evidence, steps, stale, "versions by sequence"), scan=replace(scan, claimed=claimed))


CHECKS = (check_mixed,)
