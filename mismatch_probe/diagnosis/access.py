"""The checkpoints of a run, opened when a check asks for more than the scans give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from mismatch_probe.checkpoints.compare import WeightComparison, compare_checkpoints
from mismatch_probe.checkpoints.config import Config, read_config
from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.scored import as_sequences
from mismatch_probe.run import Bools, Floats, Ragged


class HeadScorer(Protocol):
    """What runs one body under several heads: ``CandidateScorer``, or one that keeps what it scored."""

    def heads(
        self, body: Path, heads: Sequence[Path], prompt: Ragged, response: Ragged, wanted: Bools, temperature: float
    ) -> Floats:
        """Log-probs at the wanted tokens, (heads, n), nats."""


class RunWeights:
    """``Weights`` of one run.

    Args:
        candidates: its checkpoints.
        scorer: runs their bodies under one another's heads.
        base: the model below checkpoints that are adapters.
    """

    def __init__(self, candidates: Sequence[Candidate], scorer: HeadScorer, base: Path | None) -> None:
        self._candidates, self._scorer, self._base = tuple(candidates), scorer, base
        self._compared: dict[tuple[Path, Path], WeightComparison] = {}

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that are there, as in the scan."""
        return self._candidates

    def heads(self, body: Candidate, heads: Sequence[Candidate], evidence: Evidence, among: Bools) -> Floats:
        """Log-probs at the tokens ``among`` (m,) with one body and each output head in turn, (heads, n), nats.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in shape.
        """
        if not among.any():
            return np.zeros((len(heads), 0))
        prompt, response, wanted = as_sequences(evidence, among, among)
        return self._scorer.heads(
            body.path, [head.path for head in heads], prompt, response, wanted, evidence.temperature
        )

    def compare(self, a: Candidate, b: Candidate) -> WeightComparison:
        """The two, tensor by tensor and config field by field.

        Raises:
            CheckpointError: one of them cannot be read.
        """
        pair = (a.path, b.path)
        if pair not in self._compared:
            self._compared[pair] = compare_checkpoints(a.path, b.path, self._base)
        return self._compared[pair]

    def tensors(self, candidate: Candidate) -> Mapping[str, Tensor]:
        """Its tensors by Hugging Face name, each read when it is asked for.

        Raises:
            CheckpointError: it cannot be read.
        """
        return open_tensors(candidate.path, self._base)

    def config(self, candidate: Candidate) -> Config:
        """Its config.json, None without one.

        Raises:
            CheckpointError: it is no JSON object.
        """
        return read_config(candidate.path, self._base)
