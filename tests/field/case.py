"""One field report as a test: the smallest input that shows it, a stronger one, and the weakest still found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.field.base import codes, find

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
    """Write the run, diagnose it, and demand the right code first.

    Raises:
        AssertionError: another code is first, or one that should be named is not.
    """
    variant.build(path)
    diagnosis = find(path)
    named = codes(diagnosis, least=case.least)
    told = "\n".join(f"{f.code} {f.severity.name} {f.explains:.2f} {f.summary}" for f in diagnosis.findings)
    assert named, f"nothing found\n{told}"
    assert named[0] == case.code, told
    assert set(case.also) <= set(named), told
