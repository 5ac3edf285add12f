"""One field report as a test: the smallest input that shows it, a stronger one, and the weakest still found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.diagnosis.words import nats
from tests.field.base import codes, find

RESULTS = Path(__file__).with_name("results.json")
"""What every variant gave when the tests last wrote it: see ``record``."""
RECORD = "RECORD_FIELD_RESULTS"

Build = Callable[[Path], object]
"""Writes a run directory."""


@dataclass(frozen=True)
class Variant:
    """One input: what is planted, in words, and what writes it."""

    words: str
    build: Build


@dataclass(frozen=True)
class Case:
    """A report: its ``number`` in the list of sources, a ``title``, and the ``code`` that must come first.

    ``source`` is "owner/name#number". ``weaker`` is the weakest input at which it must still be found. ``also`` are
    codes that must be named too, where one input holds two faults; ``least`` is the severity from which findings count.
    """

    number: int
    title: str
    source: str
    code: str
    smallest: Variant
    stronger: Variant
    weaker: Variant
    also: tuple[str, ...] = ()
    least: int = 1

    def variants(self) -> tuple[tuple[str, Variant], ...]:
        """All three by name."""
        return ("smallest", self.smallest), ("stronger", self.stronger), ("weaker", self.weaker)


def judge(case: Case, variant: Variant, path: Path) -> None:
    """Write the run, diagnose it, and demand the right code first, and the result that the page shows.

    Raises:
        AssertionError: another code is first, one that should be named is not, or the page shows another result.
    """
    variant.build(path)
    diagnosis = find(path)
    named = codes(diagnosis, least=case.least)
    told = "\n".join(f"{f.code} {f.severity.name} {f.explains:.2f} {f.summary}" for f in diagnosis.findings)
    assert named, f"nothing found\n{told}"
    assert named[0] == case.code, told
    assert set(case.also) <= set(named), told
    record(case, variant, outcome(named, diagnosis))


def outcome(named: list[str], diagnosis: Diagnosis) -> str:
    """Codes in their order, and mean |D| before and after their causes are taken out."""
    first = ", ".join(dict.fromkeys(named))
    if diagnosis.gap is None:
        return first
    left = "nothing left" if diagnosis.left is None else nats(diagnosis.left)
    return f"{first} ({nats(diagnosis.gap)}, then {left})"


def record(case: Case, variant: Variant, found: str) -> None:
    """Compare with what is kept; with the environment variable RECORD set, keep it (in one process: ``-n 0``)."""
    name = next(name for name, one in case.variants() if one is variant)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    key = f"{case.number} {case.title}: {name}"
    if os.environ.get(RECORD):
        RESULTS.write_text(json.dumps({**kept, key: found}, indent=1, sort_keys=True) + "\n")
    else:
        assert kept.get(key) == found, f"docs/findings.md is out of date: set {RECORD}=1, run tests/field with -n 0"
