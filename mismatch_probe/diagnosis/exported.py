"""The checkpoints that the sampler was given against the trainer's of the same version: functions first, then files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence, Weights
from mismatch_probe.diagnosis.fine import WIDE
from mismatch_probe.diagnosis.scan import BETTER, LEAST, Candidate, Scan
from mismatch_probe.run import Floats, Ints
from mismatch_probe.stats.intervals import ClusterIntervals, group_sums
from mismatch_probe.stats.types import Floats as Sums

TOKENS, FEW = 256, 64
"""Tokens on which the checkpoints are compared; FEW where the scan did not score all of them there."""
_VERSIONS = 8
_KEPT = 0.8
"""An update arrives where at least this share of it does."""
_STUCK = 0.02
"""Checkpoints that move by less than this share of the trainer's movement may be copies: their tensors tell."""
_MOVED = 1e-5
"""Nats: a trainer whose log-probs moved less did not train."""


@dataclass(frozen=True)
class Kept:
    """The share of the trainer's movement that the sampler's checkpoints made too, and its 95 % interval."""

    share: float
    low: float
    high: float


class Exported:
    """Both sides' log-probs of a few tokens, by version.

    ``versions`` are those that both sides have: all of them, or the first two, a middle one and the last.
    """

    def __init__(self, evidence: Evidence, scan: Scan, weights: Weights) -> None:
        self._evidence, self._scan, self._weights = evidence, scan, weights
        self._side = {
            whose: {c.version: c for c in weights.candidates if c.whose == whose and c.version is not None}
            for whose in ("sampler", "trainer")
        }
        common = sorted(set(self._side["sampler"]) & set(self._side["trainer"]))
        if len(common) > _VERSIONS:
            common = sorted({common[0], common[1], common[len(common) // 2], common[-1]})
        self.versions: list[int] = common
        self._found: dict[Candidate, Floats] = {}

    def candidate(self, whose: str, version: int) -> Candidate:
        """One side's checkpoint."""
        return self._side[whose][version]

    @cached_property
    def tokens(self) -> Ints:
        """Whole sequences of the first and the last step, places in ``Evidence.tokens``."""
        evidence, scan = self._evidence, self._scan
        most = TOKENS if len(scan.candidates) <= _VERSIONS else FEW
        step = evidence.step_of_token[scan.tokens]
        kept = []
        for one in dict.fromkeys((int(step.min()), int(step.max()))):
            mine = scan.tokens[step == one]
            sequence = evidence.tokens.sequence[mine]
            ends = np.append(np.flatnonzero(np.diff(sequence)) + 1, len(mine))
            kept.append(mine[: int(ends[min(len(ends) - 1, int(np.searchsorted(ends, most // 2)))])])
        return np.concatenate(kept)

    def logprob(self, whose: str, version: int) -> Floats:
        """Log-probs of the tokens under one side's checkpoint, (n,)."""
        candidate = self.candidate(whose, version)
        if candidate not in self._found:
            at = self._scan.candidates.index(candidate)
            found = self._scan.logprob[at, self._scan.declared, np.searchsorted(self._scan.tokens, self.tokens)]
            if np.isnan(found).any():
                among = np.zeros(len(self._evidence.tokens), dtype=np.bool_)
                among[self.tokens] = True
                found = self._weights.heads(candidate, [candidate], self._evidence, among)[0]
            self._found[candidate] = found
        return self._found[candidate]

    def apart(self, version: int) -> float:
        """Mean |log-prob difference| between the two sides at one version, nats."""
        return float(np.abs(self.logprob("sampler", version) - self.logprob("trainer", version)).mean())

    def differing(self) -> list[int]:
        """Versions at which the two sides are further apart than rounding, or much further than at the first."""
        first = self.apart(self.versions[0])
        return [v for v in self.versions if (gap := self.apart(v)) > WIDE or (gap > 2 * first and gap > LEAST)]

    def trained(self) -> bool:
        """Whether the trainer's weights moved."""
        return float(np.abs(self._movement("trainer")).mean()) > _MOVED

    def stuck(self) -> bool:
        """Whether the sampler's checkpoints give the same log-probs at every version, rounding aside."""
        first, moved = self.logprob("sampler", self.versions[0]), float(np.abs(self._movement("trainer")).mean())
        others = (self.logprob("sampler", version) for version in self.versions[1:])
        return len(self.versions) > 1 and all(float(np.abs(one - first).mean()) < _STUCK * moved for one in others)

    def kept(self) -> Kept | None:
        """How much of the trainer's movement arrived: the slope of one side's on the other's, by prompt groups."""
        if len(self.versions) < 2 or not self.trained():
            return None
        ours, theirs = self._movement("sampler"), self._movement("trainer")
        _, group = np.unique(self._evidence.group_of_token[self.tokens], return_inverse=True)
        groups = int(group.max()) + 1
        sums = group_sums([ours * theirs, theirs * theirs], group.astype(np.int64), groups)
        found = ClusterIntervals(groups).interval(sums, _slope)
        return Kept(found.value, found.low, found.high)

    def lost(self) -> bool:
        """Whether less of an update arrived than should, beyond sampling error."""
        found = self.kept()
        return found is not None and (found.high < _KEPT if not np.isnan(found.high) else found.share < _KEPT / 2)

    def _movement(self, whose: str) -> Floats:
        return self.logprob(whose, self.versions[-1]) - self.logprob(whose, self.versions[0])


def _slope(sums: Sums) -> Sums:
    return sums[..., 1] / sums[..., 2]


def not_used(evidence: Evidence, scan: Scan) -> dict[int, int]:
    """Sampler's checkpoints that fit their tokens worse than the trainer's of that version, where one is much worse.

    Returns:
        The place of the trainer's among the candidates by that of the sampler's.
    """
    sampler = evidence.tokens.sampler[scan.tokens]
    usable = evidence.usable[scan.tokens]
    found: dict[int, int] = {}
    much = False
    for at, candidate in enumerate(scan.candidates):
        mine = (scan.claimed == at) & usable
        if candidate.whose != "sampler" or not mine.any():
            continue
        other = _of_trainer(scan.candidates, candidate.version)
        if other is None:
            continue
        gaps = [np.abs(scan.logprob[one, scan.declared, mine] - sampler[mine]) for one in (at, other)]
        known = ~np.isnan(gaps[1])
        if known.any() and (theirs := gaps[1][known].mean()) < (ours := gaps[0][known].mean()):
            found[at] = other
            much = much or (theirs <= BETTER * ours and ours - theirs >= LEAST)
    return found if much else {}


def _of_trainer(candidates: Sequence[Candidate], version: int | None) -> int | None:
    return next((at for at, one in enumerate(candidates) if one.whose == "trainer" and one.version == version), None)
