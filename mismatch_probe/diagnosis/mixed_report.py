"""What the versions found along sequences mean: one finding a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Example, Finding, Number, Severity
from mismatch_probe.diagnosis.rereading import share_of_gap
from mismatch_probe.diagnosis.scan import Fit, Scan
from mismatch_probe.diagnosis.seen import first_step_of_prompt, seen_before
from mismatch_probe.diagnosis.words import count, nats, percent, steps_of
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints

_ASSOCIATED = 0.5
"""Least difference between repeated and new prompts in the share of responses that older weights sampled."""


@dataclass(frozen=True, eq=False)
class Mixed:
    """The versions along the sequences of one step.

    (n,) each: ``at`` places of scanned tokens, ``claimed`` and ``candidate`` what is named and what was found,
    ``before`` capped |D| under the step's best single reading, ``after`` under the version that the other tokens of the
    sequence choose, and ``differs`` where these are two.
    """

    fit: Fit
    at: Ints
    claimed: Ints
    candidate: Ints
    before: Floats
    after: Floats
    differs: Bools

    @property
    def gap(self) -> float:
        """Mean capped |D| as found, on tokens that did not choose the version."""
        return float(np.nanmean(np.where(self.differs, self.after, self.before)))


class MixedReport:
    """All mixed steps, told as one finding a cause."""

    def __init__(self, evidence: Evidence, scan: Scan, mixed: Sequence[Mixed], steps: Sequence[int]) -> None:
        self._evidence, self._mixed, self._steps = evidence, mixed, list(steps)
        version = np.array([UNKNOWN_VERSION if c.version is None else c.version for c in scan.candidates])
        self.at = np.concatenate([one.at for one in mixed])
        self.sequence = evidence.tokens.sequence[self.at]
        self.found = version[np.concatenate([one.candidate for one in mixed])]
        self.claimed = evidence.tokens.claimed[self.at]
        self.before = np.concatenate([one.before for one in mixed])

    def findings(self) -> tuple[Finding, ...]:
        """MP212 where versions change inside responses, else MP207, MP202 or MP705."""
        rows, number = np.unique(self.sequence, return_inverse=True)
        wrong = np.bincount(number, weights=self.found != self.claimed) > 0
        inside = self._changes(self.found) & ~self._changes(self.claimed)
        if inside[wrong].mean() > 0.5:
            return (self._in_flight(rows, inside),)
        older = np.bincount(number, weights=self.found < self.claimed) / np.bincount(number) > 0.5
        newer = np.bincount(number, weights=self.found > self.claimed) / np.bincount(number) > 0.5
        seen = seen_before(self._evidence)[rows]
        if older[seen].any() and (~seen).any() and older[seen].mean() - older[~seen].mean() > _ASSOCIATED:
            return (self._cached(rows, older, seen),)
        return (self._wrong_rows(rows, older, newer),)

    def _changes(self, version: Ints) -> Bools:
        """Sequences in which the version changes, in the order of their numbers."""
        _, number = np.unique(self.sequence, return_inverse=True)
        change = (np.diff(version) != 0) & (np.diff(number) == 0)
        return np.bincount(number[1:], weights=change, minlength=int(number.max()) + 1) > 0

    def _in_flight(self, rows: Ints, inside: Bools) -> Finding:
        examples = []
        for row in rows[inside][:6]:
            mine = self.sequence == row
            at, version = self.at[mine], self.found[mine]
            change = np.flatnonzero(np.diff(version)) + 1
            parts = "; ".join(
                f"version {version[k]} from token {self._evidence.tokens.position[at[k]]}" for k in (0, *change)
            )
            examples.append(self._evidence.example(int(at[change[0]]), f"{parts}; labelled {self._label(mine)}"))
        return self._finding(
            "MP212",
            f"versions change inside responses other than labelled: {inside.sum()} of {count(len(rows), 'response')} "
            f"at {self._where()} start under one version and go on under another, for instance {examples[0].note}",
            examples,
        )

    def _cached(self, rows: Ints, older: Bools, seen: Bools) -> Finding:
        evidence = self._evidence
        first = first_step_of_prompt(evidence)[rows]
        _, number = np.unique(self.sequence, return_inverse=True)
        behind = np.bincount(number, weights=self.claimed - self.found) / np.bincount(number)
        gap = np.bincount(number, weights=self.before) / np.bincount(number)
        step = evidence.sequences.step[rows]
        mine = [(int(at), float(gap[(step == at) & older].mean())) for at in np.unique(step[older])]
        text = (
            f"no single version fits {self._where()}: {percent(float(older[seen].mean()))} of the responses to prompts "
            f"of earlier steps were sampled by weights {_span(behind[seen & older])} older than claimed, against "
            f"{percent(float(older[~seen].mean()))} of those to new prompts; their mean |D| is "
            f"{nats(float(gap[seen & older].mean()))} against {nats(float(gap[~seen].mean()))}"
        )
        text += trend(mine, self._all())
        order = np.argsort(-np.where(older, behind, -1), kind="stable")[:6]
        examples = [
            evidence.example_row(
                int(rows[k]), f"prompt first seen at step {first[k]}, sampled {behind[k]:.0f} versions ago"
            )
            for k in order
            if older[k]
        ]
        return self._finding("MP207", text, examples)

    def _all(self) -> list[tuple[int, float]]:
        """Mean |D| of every step."""
        step = self._evidence.step_of_token
        return [(at, self._evidence.gap(step == at)) for at in self._steps]

    def _wrong_rows(self, rows: Ints, older: Bools, newer: Bools) -> Finding:
        wrong = older | newer
        held = np.unique(self.found[self.found != self.claimed])
        which = f"version {held[0]}" if len(held) == 1 else f"versions {held[0]} to {held[-1]}"
        code, how = ("MP202", "older than labelled") if not newer.any() else ("MP705", "other than labelled")
        examples = [
            self._evidence.example_row(
                int(row), f"labelled {self._label(mine)}, version {_most(self.found[mine])} fits"
            )
            for row in rows[wrong][:6]
            for mine in (self.sequence == row,)
        ]
        return self._finding(
            code,
            f"{wrong.sum()} of {count(len(rows), 'response')} at {self._where()} were sampled by versions {how} "
            f"({which}), the others as labelled",
            examples,
        )

    def _finding(self, code: str, text: str, examples: Sequence[Example]) -> Finding:
        worst = max(self._mixed, key=lambda one: one.fit.gap - one.gap)
        before = float(np.mean([one.fit.gap for one in self._mixed]))
        after = float(np.mean([one.gap for one in self._mixed]))
        return Finding(
            code,
            Severity.ERROR,
            f"{text}; mean |D| {nats(before)} with the best single version falls to {nats(after)}",
            explains=share_of_gap(self._evidence, {m.fit.step: m.fit.gap_claimed - m.gap for m in self._mixed}),
            numbers=(
                Number("mean |D| with the best single version", worst.fit.gap, "nats"),
                Number("mean |D| as found, on tokens that did not choose the version", worst.gap, "nats"),
            ),
            steps=tuple(one.fit.step for one in self._mixed),
            examples=tuple(examples),
        )

    def _where(self) -> str:
        return steps_of([one.fit.step for one in self._mixed], self._steps)

    def _label(self, mine: Bools) -> str:
        named = np.unique(self.claimed[mine])
        return " and ".join("unknown" if one == UNKNOWN_VERSION else str(one) for one in named)


def _most(versions: Ints) -> int:
    names, counts = np.unique(versions, return_counts=True)
    return int(names[counts.argmax()])


def _span(behind: Floats) -> str:
    low, high = round(float(behind.min())), round(float(behind.max()))
    return count(low, "version") if low == high else f"{low} to {high} versions"


def trend(mine: list[tuple[int, float]], every: list[tuple[int, float]]) -> str:
    """How the gap of repeated prompts moves, and where it goes away again."""
    text = ""
    if len(mine) > 1 and mine[-1][1] > 1.2 * mine[0][1]:
        text = f"; it grows from {nats(mine[0][1])} at step {mine[0][0]} to {nats(mine[-1][1])} at step {mine[-1][0]}"
    after = [step for step, gap in every if step > mine[-1][0] and gap < 0.5 * mine[-1][1]]
    return text + (f", and drops at step {after[0]}, as after a restart" if after else "")
