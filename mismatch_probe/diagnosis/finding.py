"""What a check says: a finding with its evidence, or why it could not look."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_probe.diagnosis.evidence import Evidence


def or_none(value: float) -> float | None:
    """The value, None for NaN: what a finding says of a number that is not known."""
    return None if math.isnan(value) else float(value)


class Severity(IntEnum):
    """How much a finding matters; larger is worse.

    ERROR: log-probs or weights are not what they are said to be, so corrections act on wrong numbers. WARNING: usable,
    with a bias or a loss that should be known. INFO: explains a number, asks for nothing.
    """

    INFO = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Number:
    """One piece of evidence: ``name`` in words, ``value`` in ``unit``, and its 95 % interval where there is one."""

    name: str
    value: float
    unit: str = "1"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Example:
    """A place that shows a finding best; ``position`` None means the whole response, ``sequence_id`` None the step."""

    step: int
    sequence_id: str | None = None
    position: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """One cause.

    ``code`` names its page in the catalogue. ``summary`` is one sentence with the decisive numbers. ``explains`` is the
    share of the run's gap (mean |d| over counted tokens, each capped at 2 nats) that goes when the cause is taken out,
    or, where no gap is measured, the share of rows concerned; it ranks findings of one severity. ``steps`` are those
    concerned, empty for the whole run. ``refuted_by`` and ``remedy`` stand in for the catalogue's where a finding can
    say it more closely.
    """

    code: str
    severity: Severity
    summary: str
    explains: float = 0.0
    numbers: tuple[Number, ...] = ()
    steps: tuple[int, ...] = ()
    examples: tuple[Example, ...] = ()
    refuted_by: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Bucket:
    """The gap of some tokens: those whose ``bucket`` (position, finish reason, ...) is at this ``level``.

    ``mean_abs`` is mean |D|, each capped at 2 nats, ``mean`` that of D, both in nats, with 95 % intervals by prompt
    groups; None where a level holds one group.
    """

    bucket: str
    level: str
    tokens: int
    mean_abs: float | None
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None


@dataclass(frozen=True)
class NotTestable:
    """A kind of fault that cannot be seen in this run: the ``codes`` concerned, and why."""

    codes: tuple[str, ...]
    because: str


@dataclass(frozen=True, eq=False)
class Result:
    """What one check gives: findings, what it could not test, and the evidence with the found cause taken out.

    ``evidence`` None means that nothing was taken out.
    """

    findings: tuple[Finding, ...] = ()
    not_testable: tuple[NotTestable, ...] = ()
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a run, the first the most important, and what could not be tested.

    ``gap`` is the mean |d| over counted tokens, nats, None where no token could be compared, and ``left`` what remains
    of it when every found cause is taken out. ``buckets`` say where the gap as logged lives, ``concentration`` how few
    tokens and sequences hold how much of it.
    """

    findings: tuple[Finding, ...]
    not_testable: tuple[NotTestable, ...]
    gap: float | None = None
    left: float | None = None
    notes: tuple[str, ...] = field(default=())
    buckets: tuple[Bucket, ...] = ()
    concentration: tuple[Number, ...] = ()

    @property
    def worst(self) -> Severity | None:
        """The highest severity found."""
        return max((finding.severity for finding in self.findings), default=None)
