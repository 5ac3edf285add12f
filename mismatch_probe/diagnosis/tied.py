"""Tied output heads in checkpoint files: left out and re-tied, or kept beside the embedding and not equal to it."""

from __future__ import annotations

from collections.abc import Iterator

from mismatch_probe.checkpoints.config import ties_head
from mismatch_probe.checkpoints.names import input_embedding
from mismatch_probe.diagnosis.evidence import Weights
from mismatch_probe.diagnosis.finding import Finding, Severity
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.words import nats

_HEAD = "lm_head.weight"


def tied_head(weights: Weights) -> Iterator[Finding]:
    """What the last checkpoint of each side says of its head: headers, and two tensors where both are there."""
    numbered = [c for c in weights.candidates if c.version is not None]
    sides = {whose: [c for c in numbered if c.whose == whose] for whose in {c.whose for c in numbered}}
    for whose in sorted(sides):
        held = sorted(sides[whose], key=lambda c: c.version or 0)
        yield from _of_side(weights, whose, held[0], held[-1], sides.get("trainer", []))


def _of_side(
    weights: Weights, whose: str, first: Candidate, last: Candidate, trainers: list[Candidate]
) -> Iterator[Finding]:
    tensors = weights.tensors(last)
    embedding = input_embedding(tensors)
    if not ties_head(weights.config(last)) or embedding is None:
        return
    if _HEAD in tensors:
        head, words = tensors[_HEAD], tensors[embedding]
        if head.shape != words.shape or bool((head.double() != words.double()).any()):
            stale = ""
            if first.path != last.path and _HEAD in (then := weights.tensors(first)):
                same = then[_HEAD].shape == head.shape and bool((then[_HEAD].double() == head.double()).all())
                stale = f", and equals the head of version {first.version} while other tensors moved" if same else ""
            largest = float((head.double() - words.double()).abs().max()) if head.shape == words.shape else float("nan")
            yield Finding(
                "MP210",
                Severity.ERROR,
                f"{last.name}: {_HEAD} is in the file and differs from {embedding} (by up to {nats(largest)}) though "
                f"config.json ties them{stale}: programs that load the file differ in which of the two they use",
                explains=1.0,
            )
        return
    theirs = [c for c in trainers if c.version == last.version]
    if whose == "sampler" and theirs and _HEAD in weights.tensors(theirs[0]):
        yield Finding(
            "MP210",
            Severity.INFO,
            f"{last.name}: {_HEAD} is absent and config.json ties it, so {embedding} is the head again: in order",
        )
