"""Faults of the checkpoints that the sampler was given: copies, lost updates, heads, configs, converters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mismatch_probe.checkpoints.compare import State, TensorComparison, WeightComparison
from mismatch_probe.diagnosis.evidence import Evidence, Weights
from mismatch_probe.diagnosis.exported import Exported, not_used
from mismatch_probe.diagnosis.files_pages import PAGES as PAGES
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.rereading import read_as
from mismatch_probe.diagnosis.scan import Scan
from mismatch_probe.diagnosis.tied import tied_head
from mismatch_probe.diagnosis.words import count, listed, nats, percent, steps_of
from mismatch_probe.errors import CheckpointError

_CODES = ("MP208", "MP209", "MP210", "MP211")
_SAME = (State.IDENTICAL, State.SAME_VALUES)
_HEAD = "lm_head.weight"


def check_files(evidence: Evidence) -> Result:
    """Compare what the sampler was given with the trainer's weights of the same version.

    The functions are compared on few tokens, from the scan where it has them; tensors only where those differ.
    """
    scan, weights = evidence.scan, evidence.weights
    if scan is None or weights is None:
        return Result(not_testable=(NotTestable(_CODES, "no sampler log-prob and checkpoint are there together"),))
    try:
        heads = tuple(tied_head(weights))
        exported = Exported(evidence, scan, weights)
        if not exported.versions:
            reason = "the run names no checkpoints of the sampler beside the trainer's (sampler_checkpoints)"
            return Result(heads, (NotTestable(("MP208", "MP209", "MP211"), reason),))
        unused = not_used(evidence, scan)
        named = {finding.code for finding in heads if finding.severity > Severity.INFO}
        report = _Report(evidence, scan, weights, exported, bool(unused))
        findings = (*heads, *(finding for finding in report.findings() if finding.code not in named))
    except CheckpointError as error:
        return Result(not_testable=(NotTestable(_CODES, f"the checkpoints cannot be compared: {error}"),))
    return Result(findings, evidence=_reread(evidence, scan, unused) if unused else None)


class _Report:
    """Where the two sides differ, and how."""

    def __init__(self, evidence: Evidence, scan: Scan, weights: Weights, exported: Exported, unused: bool) -> None:
        self._evidence, self._scan, self._weights, self._exported = evidence, scan, weights, exported
        self._unused = "; the tokens fit the trainer's weights, so the engine did not use these files" if unused else ""

    def findings(self) -> Iterator[Finding]:
        """At most one: the files' first fault."""
        exported = self._exported
        if exported.trained() and exported.stuck() and self._identical():
            yield self._copies()
            return
        differing, lost = exported.differing(), exported.lost()
        if not differing and not lost:
            return
        version = differing[-1] if differing else exported.versions[-1]
        sides = self._compare(("trainer", version), ("sampler", version))
        moved = sides.of(State.CHANGED, State.SHAPE_DIFFERS, State.ONLY_IN_A, State.ONLY_IN_B)
        if not moved and sides.config:
            yield self._configs(sides, differing)
        elif lost and not moved:
            yield self._rounded(sides)
        elif moved:
            yield self._tensors(sides, moved, differing or [version])

    def _compare(self, a: tuple[str, int], b: tuple[str, int]) -> WeightComparison:
        return self._weights.compare(self._exported.candidate(*a), self._exported.candidate(*b))

    def _identical(self) -> bool:
        """Whether the tensors of the sampler's first and last checkpoint are equal."""
        versions = self._exported.versions
        compared = self._compare(("sampler", versions[0]), ("sampler", versions[-1]))
        return len(compared.of(*_SAME)) == len(compared.tensors)

    def _copies(self) -> Finding:
        versions = self._exported.versions
        ours = self._compare(("trainer", versions[0]), ("trainer", versions[-1]))
        moved = len(ours.of(State.CHANGED))
        return self._finding(
            "MP208",
            f"the sampler's checkpoints of versions {versions[0]} to {versions[-1]} are identical to each other (one "
            f"hash for each tensor), while {moved} of {count(len(ours.tensors), 'tensor')} of the trainer's moved",
            versions[1:],
        )

    def _rounded(self, sides: WeightComparison) -> Finding:
        versions, kept = self._exported.versions, self._exported.kept()
        assert kept is not None
        own = self._compare(("sampler", versions[0]), ("sampler", versions[-1]))
        ours = self._compare(("trainer", versions[0]), ("trainer", versions[-1])).of(State.CHANGED)
        trained = {tensor.name for tensor in ours}
        parts = [t.difference for t in own.tensors if t.difference is not None and t.name in trained]
        elements = sum(part.elements for part in parts)
        unchanged = sum(part.unchanged for part in parts) / elements if elements else float("nan")
        rounding = next((t.difference.rounding for t in sides.of(State.ROUNDED) if t.difference), None)
        grid = "bfloat16" if rounding is None else rounding.split("= ")[1].split("(")[0]
        return self._finding(
            "MP209",
            f"the sampler's weights equal the trainer's rounded to {grid}, which erases most of the update: "
            f"{percent(unchanged)} of the elements that the trainer changed are as in version {versions[0]}, and "
            f"{percent(max(0.0, kept.share))} of the movement of log-probs up to version {versions[-1]} arrives",
            versions[1:],
            Severity.ERROR if kept.high < 0.5 else Severity.WARNING,
            (Number("share of the movement that arrives", kept.share, "1", kept.low, kept.high),),
        )

    def _configs(self, sides: WeightComparison, differing: list[int]) -> Finding:
        told = [f"{one.field} {one.value_a or 'absent'} against {one.value_b or 'absent'}" for one in sides.config]
        fields = listed(told, 6)
        return self._finding(
            "MP211",
            f"the trainer's and the sampler's tensors are the same but their configs differ: {fields} (trainer's "
            f"first); log-probs differ by {nats(self._exported.apart(differing[-1]))} on average"
            f"{self._by_position(differing[-1])}",
            differing,
        )

    def _by_position(self, version: int) -> str:
        """Where in the sequence the two differ, early half against late half."""
        exported, sequences = self._exported, self._evidence.sequences
        difference = np.abs(exported.logprob("sampler", version) - exported.logprob("trainer", version))
        tokens = self._evidence.tokens
        place = tokens.position[exported.tokens] + sequences.prompt_length[tokens.sequence[exported.tokens]]
        late = place > np.median(place)
        if not late.any() or late.all():
            return ""
        early_mean, late_mean = float(difference[~late].mean()), float(difference[late].mean())
        grows = "growing with position: " if late_mean > 1.2 * early_mean else ""
        return f", {grows}{nats(early_mean)} in the first half of the positions and {nats(late_mean)} in the second"

    def _tensors(self, sides: WeightComparison, moved: list[TensorComparison], differing: list[int]) -> Finding:
        versions = self._exported.versions
        worst = "; ".join(_line(t) for t in sorted(moved, key=_size)[:5])
        config = [one.field for one in sides.config]
        also = f"; configs differ in {listed(config)}" if config else ""
        own = self._compare(("sampler", versions[0]), ("sampler", versions[-1]))
        stale = [name for name in own.unmoved_families if any(t.family == name for t in moved)]
        if all(tensor.name == _HEAD for tensor in moved):
            how = f"equals that of version {versions[0]} while other tensors moved"
            text = (
                f"the head in the sampler's checkpoints {how if stale else 'differs from the trainer’s'}: {worst}{also}"
            )
            return self._finding("MP210", text, differing)
        if differing[0] > versions[0]:
            which = f"; {listed(stale)} did not move since version {versions[0]}" if stale else ""
            return self._finding(
                "MP206",
                f"the sampler's checkpoints equal the trainer's at version {versions[0]} and differ from version "
                f"{differing[0]} on: {len(moved)} of {count(len(sides.tensors), 'tensor')} differ{which}, most {worst}"
                f"{also}",
                differing,
            )
        return self._finding(
            "MP205",
            f"the sampler's checkpoint differs from the trainer's before any training, at version {versions[0]}: a "
            f"converter or loader, not lag. {len(moved)} of {count(len(sides.tensors), 'tensor')} differ, most {worst}"
            f"{also}",
            differing,
        )

    def _finding(
        self,
        code: str,
        text: str,
        versions: list[int],
        severity: Severity = Severity.ERROR,
        numbers: tuple[Number, ...] = (),
    ) -> Finding:
        tokens, sequences = self._evidence.tokens, self._evidence.sequences
        since = min(versions)
        mine = tokens.counted & (tokens.claimed >= since)
        steps = np.unique(self._evidence.step_of_token[mine])
        rows = len(np.unique(tokens.sequence[mine])) / max(1, len(sequences))
        apart = Number("mean difference of log-probs", self._exported.apart(versions[-1]), "nats")
        where = f"{steps_of(map(int, steps), map(int, np.unique(sequences.step)))}: " if len(steps) else ""
        return Finding(
            code,
            severity,
            f"{where}{text}{self._unused}",
            explains=rows,
            numbers=(apart, *numbers),
            steps=tuple(map(int, steps)),
        )


def _size(tensor: TensorComparison) -> float:
    """Missing and misshapen tensors first, then by the largest difference."""
    return -np.inf if tensor.difference is None or tensor.difference.largest is None else -tensor.difference.largest


def _line(tensor: TensorComparison) -> str:
    shape = "x".join(map(str, (tensor.a or tensor.b).shape)) if tensor.a or tensor.b else "?"  # type: ignore[union-attr]
    if tensor.difference is None or tensor.difference.largest is None:
        return f"{tensor.name} ({shape}) {tensor.state.value.replace('_', ' ')}"
    return f"{tensor.name} ({shape}) by up to {nats(tensor.difference.largest)}"


def _reread(evidence: Evidence, scan: Scan, unused: dict[int, int]) -> Evidence:
    """Tokens of files that the engine did not use, read under the trainer's weights of that version."""
    claimed = scan.claimed.copy()
    for ours, theirs in unused.items():
        claimed[scan.claimed == ours] = theirs
    stale = np.full(len(evidence.tokens), np.nan)
    known = claimed >= 0
    stale[scan.tokens[known]] = scan.logprob[claimed[known], scan.declared, known]
    versions = [version for ours in unused if (version := scan.candidates[ours].version) is not None]
    mine = np.isin(evidence.tokens.claimed, versions)
    return replace(read_as(evidence, mine, stale, "the sampler's files"), scan=replace(scan, claimed=claimed))


CHECKS = (check_files,)
