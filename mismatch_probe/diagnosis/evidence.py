"""What the checks look at: the sequences and tokens of a run beside their rescored log-probs, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mismatch_probe.diagnosis.finding import Example
from mismatch_probe.run import Bools, Floats, Ints, Settings, Strings
from mismatch_probe.stats.intervals import ClusterIntervals, group_sums
from mismatch_probe.stats.intervals import mean as cluster_mean

if TYPE_CHECKING:
    from torch import Tensor

    from mismatch_probe.checkpoints.compare import WeightComparison
    from mismatch_probe.checkpoints.config import Config
    from mismatch_probe.diagnosis.scan import Candidate, Fit, Scan

CAP = 2.0
"""|d| is capped here, in nats, where gaps are compared: one token e^20 off must not hide the others."""


def capped(difference: Floats) -> Floats:
    """|D|, at most CAP each, of the shape of ``difference``."""
    return np.minimum(np.abs(difference), CAP)


@dataclass(frozen=True, eq=False)
class Sequences:
    """One entry a sequence, (n,), over all steps that were read.

    ``group`` and ``prompt`` are numbers: equal where the prompt group (of one step), or the prompt's tokens (of any
    step), are the same. ``first`` is the place of its first token in ``Tokens``, (n + 1,) with the end of the last.
    ``row`` is the 1-based line or row in ``file``. ``prompt_ids`` holds the prompts, one array a sequence.
    """

    step: Ints
    sequence_id: Strings
    group: Ints
    prompt: Ints
    prompt_ids: tuple[Ints, ...]
    first: Ints
    file: Strings
    row: Ints
    reward: Floats
    finish_reason: Strings

    def __len__(self) -> int:
        return len(self.step)

    @property
    def length(self) -> Ints:
        """Response tokens, counted or not, (n,)."""
        return np.diff(self.first)

    @property
    def prompt_length(self) -> Ints:
        """Tokens of the prompt, (n,)."""
        return np.array([len(ids) for ids in self.prompt_ids], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Tokens:
    """One entry a response token, (m,), counted or not, sequence after sequence; nats, NaN = null.

    ``sequence`` is its place in ``Sequences``; ``position`` its place in the response, from 0. ``sampler`` is log mu
    as logged, ``stale`` log pi_s and ``trainer`` log pi as rescored (or as decompose chose them), ``trainer_logged``
    the trainer's own. ``entropy`` is that of pi_s. ``claimed`` and ``trainer_version`` are versions,
    UNKNOWN_VERSION where nobody says.
    """

    sequence: Ints
    position: Ints
    token_id: Ints
    counted: Bools
    sampler: Floats
    stale: Floats
    trainer: Floats
    trainer_logged: Floats
    entropy: Floats
    claimed: Ints
    trainer_version: Ints

    def __len__(self) -> int:
        return len(self.sequence)


class Weights(Protocol):
    """The run's checkpoints, for checks that need more of them than the scans give; every call reads files."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that are there, as in the scan."""

    def heads(self, body: Candidate, heads: Sequence[Candidate], evidence: Evidence, among: Bools) -> Floats:
        """Log-probs at the tokens ``among`` (m,) with one body and each output head in turn, (heads, n), nats."""

    def compare(self, a: Candidate, b: Candidate) -> WeightComparison:
        """The two, tensor by tensor and config field by field; where both are one, equal in all."""

    def tensors(self, candidate: Candidate) -> Mapping[str, Tensor]:
        """Its tensors by Hugging Face name, each read when it is asked for."""

    def config(self, candidate: Candidate) -> Config:
        """Its config.json, None without one."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A run as the checks see it; they give back a copy in which what they explained is taken out.

    ``usable`` (m,) are tokens whose discrepancy is still to be explained: counted, both log-probs known, not yet
    traced to a fault. ``settings`` are as declared. ``versions`` are those of the trainer's checkpoints that are there.
    ``scan`` and ``weights`` are None where there are no weights, ``fits`` is how the scans read each step.
    ``noise_floor`` is the probe's own error, nats rms, NaN unknown. ``temperature`` is the one at which ``stale`` was
    scored. ``applied`` names what was taken out so far, ``unread`` the checkpoints that the scans could not read.
    ``config`` is config.json of the first checkpoint that has one.
    """

    settings: Settings
    sequences: Sequences
    tokens: Tokens
    usable: Bools
    versions: tuple[int, ...] = ()
    noise_floor: float = float("nan")
    temperature: float = 1.0
    applied: tuple[str, ...] = ()
    scan: Scan | None = None
    fits: tuple[Fit, ...] = ()
    weights: Weights | None = None
    unread: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def discrepancy(self) -> Floats:
        """D = log pi_s - log mu of every token, (m,)."""
        return self.tokens.stale - self.tokens.sampler

    @cached_property
    def step_of_token(self) -> Ints:
        """(m,)."""
        return self.sequences.step[self.tokens.sequence]

    @cached_property
    def group_of_token(self) -> Ints:
        """(m,)."""
        return self.sequences.group[self.tokens.sequence]

    @cached_property
    def readings(self) -> tuple[Fit, ...]:
        """The simplest reading of every step that the scan could compare; made once, for all checks that start here."""
        from mismatch_probe.diagnosis.scan import fit_step

        scan = self.scan
        if scan is None:
            return ()
        steps = np.unique(self.step_of_token[scan.tokens])
        return tuple(fit for step in steps if (fit := fit_step(self, scan, int(step))) is not None)

    def gap(self, among: Bools | None = None) -> float:
        """Mean |D| over usable tokens (of ``among`` too where given), each capped at CAP; NaN where there are none."""
        chosen = self.usable if among is None else self.usable & among
        found = capped(self.discrepancy[chosen])
        return float(found.mean()) if len(found) else float("nan")

    def mean(self, values: Floats, among: Bools | None = None) -> tuple[float, float, float]:
        """Mean over usable tokens and the ends of its 95 % interval by prompt groups, NaN where there is one group."""
        chosen = (self.usable if among is None else self.usable & among) & ~np.isnan(values)
        if not chosen.any():
            return float("nan"), float("nan"), float("nan")
        names, group = np.unique(self.group_of_token[chosen], return_inverse=True)
        mean = float(values[chosen].mean())
        if len(names) < 2:
            return mean, float("nan"), float("nan")
        sums = group_sums([values[chosen]], group.astype(np.int64), len(names))
        found = ClusterIntervals(len(names)).interval(sums, cluster_mean)
        return mean, found.low, found.high

    def share(self, among: Bools) -> float:
        """Share of the gap that the usable tokens ``among`` some (m,) carry; 0 where there is no gap."""
        size = capped(self.discrepancy)
        whole = float(size[self.usable].sum())
        return float(size[among & self.usable].sum()) / whole if whole > 0 else 0.0

    def worst(self, among: Bools, most: int = 3) -> Ints:
        """The usable tokens ``among`` some (m,) with the largest |D|, the largest first."""
        places = np.flatnonzero(among & self.usable)
        return places[np.argsort(-np.abs(self.discrepancy[places]), kind="stable")[:most]]

    def without(self, tokens: Bools, why: str) -> Evidence:
        """The evidence without some tokens (m,): they are explained."""
        return replace(self, usable=self.usable & ~tokens, applied=(*self.applied, why))

    def example(self, token: int, note: str = "") -> Example:
        """The place of one token."""
        whole = self.example_row(int(self.tokens.sequence[token]), note)
        return replace(whole, position=int(self.tokens.position[token]))

    def example_row(self, row: int, note: str = "") -> Example:
        """A whole response."""
        return Example(int(self.sequences.step[row]), str(self.sequences.sequence_id[row]), None, note)
