"""All checks in their order, each on what the ones before it left unexplained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np

from mismatch_probe.diagnosis import (
    between,
    copies,
    files,
    heads,
    mixed,
    monitoring,
    numerics,
    repeats,
    scans,
    semantics,
    truncation,
    unknown,
    values,
    zeros,
)
from mismatch_probe.diagnosis.buckets import buckets, concentration
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Diagnosis, Finding, NotTestable, Result, or_none

Check = Callable[[Evidence], Result]

FAMILY_MODULES: tuple[ModuleType, ...] = (
    values,
    zeros,
    truncation,
    copies,
    files,
    mixed,
    heads,
    between,
    scans,
    repeats,
    unknown,
    truncation,
    semantics,
    numerics,
    monitoring,
)
"""Modules with PAGES and CHECKS, in the order in which the checks run: what makes numbers meaningless first.

Truncation is looked for twice: the scans would take it for something else, and what they undo can hide it."""
_LARGE = 0.25


def diagnose(
    evidence: Evidence, checks: Sequence[Check] | None = None, last: Callable[[Evidence], Finding] | None = None
) -> Diagnosis:
    """Run the checks and rank what they find: by severity, then by the share of the gap explained, then by order.

    Of causes with a large share, alignment comes before semantics and both before all else: what log-probs are has to
    be right before anybody asks which weights gave them.

    Args:
        evidence: the run.
        checks: those to run, None for all.
        last: one more finding on what the checks left, such as the comparison with a baseline; None for none.
    """
    found: list[Finding] = []
    not_testable: list[NotTestable] = []
    whole = evidence
    for check in checks or [check for module in FAMILY_MODULES for check in module.CHECKS]:
        result = check(evidence)
        # A check gives shares of the gap that it was shown; findings are ranked by those of the whole.
        share = _total(evidence) / _total(whole) if _total(whole) > 0 else 1.0
        found.extend(replace(one, explains=min(1.0, share) * one.explains) for one in result.findings)
        not_testable.extend(result.not_testable)
        evidence = result.evidence or evidence
    if last is not None:
        found.append(last(evidence))
    ranked = sorted(found, key=lambda one: (-one.severity, _stage(one), -round(one.explains, 2)))
    return Diagnosis(
        findings=tuple(ranked),
        not_testable=_merged(not_testable, found),
        gap=or_none(whole.gap()),
        left=or_none(evidence.gap()),
        notes=whole.unread,
        buckets=buckets(whole),
        concentration=concentration(whole),
    )


def _stage(finding: Finding) -> int:
    order = {"MP1": 0, "MP4": 1}
    return order.get(finding.code[:3], 2) if finding.explains >= _LARGE else 2


def _merged(not_testable: list[NotTestable], found: list[Finding]) -> tuple[NotTestable, ...]:
    """One entry a reason; a code that was found was tested."""
    codes_of: dict[str, list[str]] = {}
    reported = {finding.code for finding in found}
    for entry in not_testable:
        codes_of.setdefault(entry.because, []).extend(code for code in entry.codes if code not in reported)
    return tuple(
        NotTestable(tuple(dict.fromkeys(sorted(codes))), because) for because, codes in codes_of.items() if codes
    )


def _total(evidence: Evidence) -> float:
    """Sum of |D| over usable tokens, each at most CAP, nats."""
    gap = evidence.gap()
    return 0.0 if np.isnan(gap) else gap * float((evidence.usable & ~np.isnan(evidence.discrepancy)).sum())
