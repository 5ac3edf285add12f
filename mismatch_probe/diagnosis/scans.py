"""Version, temperature and shift: what the scans say of every step, as one finding each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity, or_none
from mismatch_probe.diagnosis.origins import is_base, label_stands_still, stranger_of, twins
from mismatch_probe.diagnosis.scan import Candidate, Fit, Scan, unshifted
from mismatch_probe.diagnosis.words import listed, nats, steps_of

PAGES = (
    Page(
        "MP101",
        "log-probs are shifted against tokens",
        "Each log-prob belongs to the token before or after the one that it is logged with.",
        "With the log shifted by one or two places |D| falls to the level of a healthy run.",
        "A row whose logged log-prob equals the rescored one at its own place.",
        "Align log-probs with the tokens that they belong to: the log-prob of token t comes from the logits at t - 1. "
        "Look where one side drops the first or the last token.",
        ("modelscope/ms-swift#8196", "modelscope/ms-swift#8427"),
    ),
    Page(
        "MP201",
        "version labels are offset",
        "The sampler held version v + c where the log says v, by the same c at every step.",
        "The version scan has its minimum at the claimed version plus a constant.",
        "One step at which the claimed version fits best.",
        "Correct the labels in the dump: see which update the framework's counter means, before or after step k.",
        ("PrimeIntellect-ai/prime-rl#2896",),
    ),
    Page(
        "MP202",
        "the sampler holds older weights than claimed",
        "The engine sampled from a version that is not the one logged with the tokens: a synchronisation was lost, or "
        "weights were loaded again from disk.",
        "The version scan has a sharp minimum at another version than the claimed one, not by a constant offset.",
        "Reloading the claimed weights into the engine leaves the gap as it was.",
        "Mend the weight synchronisation before any correction. After a sleep or a reload, check that the engine holds "
        "what was sent (a checksum of a few tensors).",
        ("huggingface/trl#5312", "huggingface/trl#5355", "allenai/open-instruct#1616"),
    ),
    Page(
        "MP204",
        "the sampler holds a model that is no version of this run",
        "The engine sampled from a reference, base or teacher model.",
        "The scan has its minimum at a checkpoint that is not one of the run's versions.",
        "Log-probs of the claimed version that fit better than that model's.",
        "Find out which weights were published to the engine last: on resume the actor must come after the reference.",
        ("THUDM/slime#1695", "THUDM/slime#2380", "verl-project/verl#3516"),
    ),
    Page(
        "MP214",
        "the adapter is not applied",
        "The engine sampled from the base model: the adapter was not sent to it yet, or none of its modules was bound.",
        "The version scan has its minimum at the base model without an adapter, at the first step or at all of them.",
        "Log-probs of base and adapter that fit better than those of the base alone.",
        "Send the adapter before the first rollout and after every wake-up; check the engine's log for modules that it "
        "left out, and compare one response with and without the adapter.",
        ("verl-project/verl#3541", "verl-project/verl#3516"),
    ),
    Page(
        "MP401",
        "log-probs at another temperature than declared",
        "The logged log-probs are those of logits divided by another temperature than the run declares.",
        "The temperature scan has its minimum away from the declared one. Raw log-probs under a temperature also make "
        "the mean of D positive or the mean weight differ from 1, which no lag can.",
        "The within-prefix slope of log mu on log pi_s is the declared one.",
        "Log processed log-probs (vLLM: logprobs_mode=processed_logprobs), or divide the trainer's logits by the "
        "sampling temperature; declare which with `--set temperature=...` and `--set logprobs_mode=raw|processed`.",
        ("huggingface/trl#4159", "verl-project/verl#4162"),
    ),
)
_VERSIONS = ("MP201", "MP202", "MP204", "MP214", "MP705")


def check_scans(evidence: Evidence) -> Result:
    """Read every step in the simplest way that explains it, and say where that is not as claimed."""
    scan = evidence.scan
    if scan is None:
        return Result(not_testable=(NotTestable((*_VERSIONS, "MP401", "MP101"), _why_none(evidence)),))
    fits = evidence.readings
    repaired = evidence
    for fit in fits:
        repaired = _apply(repaired, scan, fit)
    report = _Report(fits, scan, evidence)
    findings = (*report.shifts(), *report.temperatures(), *report.versions())
    untested = []
    if len(scan.candidates) < 2:
        untested.append(NotTestable(_VERSIONS, "the run holds one set of weights only"))
    return Result(findings, tuple(untested), replace(repaired, fits=fits))


def _why_none(evidence: Evidence) -> str:
    if not evidence.versions:
        return "no checkpoint is there, so no version can be tried"
    return "no sampler log-prob is there to compare with"


def _apply(evidence: Evidence, scan: Scan, fit: Fit) -> Evidence:
    """The evidence read as the fit says, at its step; what another version cannot tell is no longer usable."""
    choice = fit.choice
    if not choice.changes(scan.declared):
        return evidence
    total, mine = len(evidence.tokens), evidence.step_of_token == fit.step
    stale = evidence.tokens.stale
    if choice.candidate is not None or choice.temperature != scan.declared:
        found = (
            scan.spread_claimed(total, choice.temperature)
            if choice.candidate is None
            else scan.spread(total, choice.candidate, choice.temperature)
        )
        stale = np.where(mine, found, stale)
    sampler = unshifted(evidence, choice.shift, mine) if choice.shift else evidence.tokens.sampler
    usable = evidence.usable & ~(mine & (np.isnan(stale) | np.isnan(sampler)))
    tokens = replace(evidence.tokens, stale=stale, sampler=sampler)
    return replace(evidence, tokens=tokens, usable=usable)


class _Report:
    """The fits of all steps, told as one finding a cause."""

    def __init__(self, fits: Sequence[Fit], scan: Scan, evidence: Evidence) -> None:
        self._fits, self._scan, self._evidence = fits, scan, evidence
        self._steps = [fit.step for fit in fits]

    def shifts(self) -> Iterable[Finding]:
        """MP101, one for each shift."""
        for shift in sorted({fit.choice.shift for fit in self._fits} - {0}):
            fits = [fit for fit in self._fits if fit.choice.shift == shift]
            whose = "next" if shift > 0 else "previous"
            far = "" if abs(shift) == 1 else " but one"
            yield self._finding(
                "MP101",
                fits,
                f"the log-probs logged at {self._where(fits)} belong to the {whose} token{far}: mean |D| is "
                f"{self._before(fits)} as logged and {self._after(fits)} at shift {shift:+d}",
            )

    def temperatures(self) -> Iterable[Finding]:
        """MP401, one for each temperature."""
        scan, settings = self._scan, self._evidence.settings
        for at in sorted({fit.choice.temperature for fit in self._fits} - {scan.declared}):
            fits = [fit for fit in self._fits if fit.choice.temperature == at]
            found, declared = scan.temperatures[at], scan.temperatures[scan.declared]
            raw = found == 1.0 and settings.temperature == declared
            hint = ", as raw log-probs would" if raw else ""
            yield self._finding(
                "MP401",
                fits,
                f"best temperature {found:g}, declared {declared:g}: at {self._where(fits)} the logged log-probs fit "
                f"logits divided by {found:g}{hint}; mean |D| {self._before(fits)} falls to {self._after(fits)}",
            )

    def versions(self) -> Iterable[Finding]:
        """MP201, MP202, MP204, MP214 and MP705."""
        found = [fit for fit in self._fits if fit.choice.candidate is not None]
        claimed = {fit.step: self._claimed(fit) for fit in self._fits}
        numbers = sorted({fit.choice.candidate for fit in found if fit.choice.candidate is not None})
        strangers = {
            number: stranger_of(self._scan, self._evidence.weights, self._fits, number, claimed) for number in numbers
        }
        for stranger in sorted({number for number in strangers.values() if number is not None}):
            fits = [fit for fit in found if strangers[fit.choice.candidate or 0] == stranger]
            yield self._stranger(fits, stranger)
        versioned = [fit for fit in found if strangers[fit.choice.candidate or 0] is None]
        if versioned:
            yield self._older(versioned)

    def _stranger(self, fits: list[Fit], stranger: int) -> Finding:
        model = self._scan.candidates[stranger]
        equal = [self._scan.candidates[twin] for twin in twins(self._scan, self._evidence.weights, stranger)]
        alike = [f"version {twin.version}" for twin in equal if twin.version is not None]
        name = f"{model.name} (equal to {listed(alike)})" if alike else model.name
        fall = f"mean |D| {self._before(fits)} falls to {self._after(fits)}"
        if is_base(model):
            adapter = f"the adapter of version {self._claims(fits)}"
            return self._finding("MP214", fits, f"{self._where(fits)}: the tokens fit {name} without {adapter}; {fall}")
        text = f"{self._where(fits)}: the tokens were sampled by {name}, not by version {self._claims(fits)}; {fall}"
        return self._finding("MP204", fits, text)

    def _older(self, fits: list[Fit]) -> Finding:
        offsets = {fit.step: (self._candidate(fit).version or 0) - self._claimed(fit) for fit in fits}
        others = f" ({nats(min(fit.gap_others for fit in fits))} or more at any other)"
        fall = f"mean |D| {self._before(fits)} falls to {self._after(fits)}{others}"
        # From one step on, or everywhere: a sync that was lost once leaves a growing offset instead.
        lasting = self._steps[self._steps.index(fits[0].step) :] == [fit.step for fit in fits]
        if len(set(offsets.values())) == 1 and len(fits) > 1 and lasting:
            offset = next(iter(offsets.values()))
            text = f"{self._where(fits)} best matches version = label {offset:+d}: labels are offset by it; {fall}"
            return self._finding("MP201", fits, text)
        held = sorted({self._candidate(fit).version or 0 for fit in fits})
        by_step = sorted((fit.step, self._claimed(fit), self._candidate(fit).version or 0) for fit in fits)
        if label_stands_still(*(np.array(column) for column in list(zip(*by_step, strict=True))[1:])):
            return self._finding("MP705", fits, self._frozen_label(fits, fall))
        which = f"version {held[0]}" if len(held) == 1 else f"versions {held[0]} to {held[-1]}"
        text = f"{self._where(fits)}: the engine really sampled from {which}, claimed {self._claims(fits)}; {fall}"
        return self._finding("MP202", fits, text)

    def _frozen_label(self, fits: list[Fit], fall: str) -> str:
        """What staleness is by the record and by what was found, over the counted tokens of those steps."""
        tokens = self._evidence.tokens
        mine = tokens.counted & np.isin(self._evidence.step_of_token, [fit.step for fit in fits])
        recorded = (tokens.trainer_version - tokens.claimed)[mine & (tokens.trainer_version >= 0)]
        held = {fit.step: self._candidate(fit).version or 0 for fit in fits}
        found = np.array([held[int(step)] for step in self._evidence.step_of_token[mine]])
        inferred = (tokens.trainer_version[mine] - found)[tokens.trainer_version[mine] >= 0]
        versions = sorted(held.values())
        text = (
            f"{self._where(fits)}: recorded version {self._claims(fits)}, inferred {versions[0]} to {versions[-1]}, so "
            f"the label stands still while the sampler moves; {fall}"
        )
        if not len(recorded):
            return text
        parts = (f"{v.min()} / {v.mean():.3g} / {v.max()}" for v in (recorded, inferred))
        return text + "; staleness a token (min / mean / max) {} as recorded, {} as inferred".format(*parts)

    def _finding(self, code: str, fits: Sequence[Fit], summary: str) -> Finding:
        worst = max(fits, key=lambda fit: fit.gap_claimed - fit.gap)
        gone = sum((fit.gap_claimed - fit.gap) * fit.tokens for fit in fits)
        all_of_it = sum(fit.gap_claimed * fit.tokens for fit in self._fits)
        return Finding(
            code,
            Severity.ERROR,
            summary,
            explains=float(gone / all_of_it) if all_of_it > 0 else 0.0,
            numbers=(
                Number("mean |D| as claimed", worst.gap_claimed, "nats"),
                Number("mean |D| as found", worst.gap, "nats"),
                Number("difference", worst.gap_claimed - worst.gap, "nats", or_none(worst.low), or_none(worst.high)),
            ),
            steps=tuple(fit.step for fit in fits),
        )

    def _candidate(self, fit: Fit) -> Candidate:
        assert fit.choice.candidate is not None
        return self._scan.candidates[fit.choice.candidate]

    def _claimed(self, fit: Fit) -> int:
        """The version that most of the step's counted tokens claim."""
        tokens = self._evidence.tokens
        mine = tokens.claimed[(self._evidence.step_of_token == fit.step) & tokens.counted]
        versions, counts = np.unique(mine, return_counts=True)
        return int(versions[counts.argmax()])

    def _claims(self, fits: Sequence[Fit]) -> str:
        claims = sorted({self._claimed(fit) for fit in fits})
        return f"{claims[0]}" if len(claims) == 1 else f"{claims[0]} to {claims[-1]}"

    def _where(self, fits: Sequence[Fit]) -> str:
        return steps_of([fit.step for fit in fits], self._steps)

    @staticmethod
    def _before(fits: Sequence[Fit]) -> str:
        return nats(float(np.average([f.gap_claimed for f in fits], weights=[f.tokens for f in fits])))

    @staticmethod
    def _after(fits: Sequence[Fit]) -> str:
        return nats(float(np.average([f.gap for f in fits], weights=[f.tokens for f in fits])))


CHECKS = (check_scans,)
