"""Prompts that are worse once they were seen before, though no version fits them: states in a cache are older."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.finding import Example, Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.mixed_report import trend
from mismatch_probe.diagnosis.scan import BETTER, LEAST
from mismatch_probe.diagnosis.seen import first_step_of_prompt, seen_before
from mismatch_probe.diagnosis.words import nats, steps_of
from mismatch_probe.run import Bools, Floats

PAGES: tuple[Page, ...] = ()
_GROUPS, _SCORE = 4, 3.0
"""Fewest prompt groups of either kind, and how many standard errors apart their means must be."""


def check_repeats(evidence: Evidence) -> Result:
    """MP207 where repeated prompts are worse than new ones of the same steps, and than they were at first."""
    seen_row = seen_before(evidence)
    seen = seen_row[evidence.tokens.sequence]
    step = evidence.step_of_token
    both = np.intersect1d(step[evidence.usable & seen], step[evidence.usable & ~seen])
    if not len(both):
        reason = "no step holds both prompts of earlier steps and new ones"
        return Result(not_testable=(NotTestable(("MP207",), reason),))
    among = evidence.usable & np.isin(step, both)
    absolute = capped(evidence.discrepancy)
    old, new = _by_group(evidence, absolute, among & seen), _by_group(evidence, absolute, among & ~seen)
    if min(len(old), len(new)) < _GROUPS:
        return Result()
    error = math.sqrt(old.var(ddof=1) / len(old) + new.var(ddof=1) / len(new))
    apart = float(old.mean() - new.mean())
    if new.mean() > BETTER * old.mean() or apart < LEAST or apart < _SCORE * error:
        return Result()
    first = _at_first(evidence, among & seen)
    if not first.any() or evidence.gap(first) > BETTER * evidence.gap(among & seen):
        return Result()
    steps = [int(one) for one in np.unique(step[evidence.usable])]
    mine = [(one, evidence.gap((step == one) & seen)) for one in map(int, both)]
    every = [(one, evidence.gap(step == one)) for one in steps]
    low, high = apart - 1.96 * error, apart + 1.96 * error
    finding = Finding(
        "MP207",
        Severity.ERROR,
        f"no version fits {steps_of(map(int, both), steps)}: responses to prompts of earlier steps are "
        f"{old.mean() / new.mean():.1f} times worse than those to new prompts (mean |D| {nats(float(old.mean()))} "
        f"against {nats(float(new.mean()))}), and than when they were first met ({nats(evidence.gap(first))}), as with "
        f"states of older weights in a prefix cache{trend(mine, every)}",
        explains=float(apart * (among & seen).sum() / (evidence.gap() * evidence.usable.sum())),
        numbers=(Number("mean |D| of repeated prompts less that of new ones", apart, "nats", low, high),),
        steps=tuple(map(int, both)),
        examples=_examples(evidence, absolute, among & seen),
    )
    return Result((finding,), evidence=evidence.without(among & seen, "stale prefix cache"))


def _by_group(evidence: Evidence, values: Floats, chosen: Bools) -> Floats:
    """Means of the prompt groups."""
    _, group = np.unique(evidence.group_of_token[chosen], return_inverse=True)
    means: Floats = np.bincount(group, weights=values[chosen]) / np.bincount(group)
    return means


def _at_first(evidence: Evidence, repeated: Bools) -> Bools:
    """Usable tokens of those prompts at the step that met them first, (m,)."""
    prompts = np.unique(evidence.sequences.prompt[evidence.tokens.sequence[repeated]])
    rows = np.isin(evidence.sequences.prompt, prompts)
    rows &= evidence.sequences.step == first_step_of_prompt(evidence)
    return evidence.usable & rows[evidence.tokens.sequence]


def _examples(evidence: Evidence, absolute: Floats, chosen: Bools) -> tuple[Example, ...]:
    rows = evidence.tokens.sequence
    total = np.bincount(rows[chosen], weights=absolute[chosen], minlength=len(evidence.sequences))
    mean = total / np.maximum(1, np.bincount(rows[chosen], minlength=len(evidence.sequences)))
    first = first_step_of_prompt(evidence)
    return tuple(
        evidence.example_row(int(row), f"prompt first seen at step {first[row]}, mean |D| {nats(float(mean[row]))}")
        for row in np.argsort(-mean, kind="stable")[:6]
    )


CHECKS = (check_repeats,)
