"""Candidates' log-probs on disk, by content: a scan that is asked again runs nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mismatch_probe.checkpoints.fingerprint import Fingerprints
from mismatch_probe.run import Bools, Floats, Ragged
from mismatch_probe.scoring.cache import entry, environment, read_arrays, write_arrays
from mismatch_probe.scoring.candidates import CandidateScorer, CandidateScores


class KeptCandidates:
    """A ``CandidateScorer`` that keeps what it scored; the key covers weights, tokens, temperatures, settings and code.

    Args:
        scorer: scores what is not kept.
        folder: created when something is put.
        base: the model below checkpoints that are adapters.
    """

    def __init__(self, scorer: CandidateScorer, folder: Path, base: Path | None = None) -> None:
        self._scorer, self._folder = scorer, folder
        self._fingerprints = Fingerprints(folder / "weights.json", base)

    def score(
        self, body: Path, prompt: Ragged, response: Ragged, wanted: Bools, temperatures: Sequence[float]
    ) -> CandidateScores:
        """As ``CandidateScorer.score``.

        Raises:
            CheckpointError: as there.
            OutputError: the folder is full or cannot be written.
        """
        file = self._file([body], prompt, response, wanted, ["score", *temperatures])
        found = None if file is None else read_arrays(file)
        if found is not None and {"logprob", "entropy"} <= set(found):
            return CandidateScores(found["logprob"], found["entropy"])
        scores = self._scorer.score(body, prompt, response, wanted, temperatures)
        if file is not None:
            write_arrays(file, {"logprob": scores.logprob, "entropy": scores.entropy})
        return scores

    def heads(
        self, body: Path, heads: Sequence[Path], prompt: Ragged, response: Ragged, wanted: Bools, temperature: float
    ) -> Floats:
        """As ``CandidateScorer.heads``.

        Raises:
            CheckpointError: as there.
            OutputError: the folder is full or cannot be written.
        """
        file = self._file([body, *heads], prompt, response, wanted, ["heads", temperature])
        found = None if file is None else read_arrays(file)
        if found is not None and "logprob" in found:
            kept: Floats = found["logprob"]
            return kept
        logprob = self._scorer.heads(body, heads, prompt, response, wanted, temperature)
        if file is not None:
            write_arrays(file, {"logprob": logprob})
        return logprob

    def close(self) -> None:
        """Write what was learned of the weights' files."""
        self._fingerprints.close()

    def _file(
        self, weights: Sequence[Path], prompt: Ragged, response: Ragged, wanted: Bools, asked: Sequence[object]
    ) -> Path | None:
        marks = [self._fingerprints.of(path) for path in weights]
        if None in marks:
            return None
        options = self._scorer.options
        facts = {
            **environment(options),
            "scoring": [options.dtype, options.max_tokens, options.chunk_elements, options.attention, options.head],
            "asked": list(asked),
            "weights": marks,
        }
        mark = hashlib.blake2b(json.dumps(facts).encode(), digest_size=20)
        for array in (prompt.offsets, prompt.values, response.offsets, response.values, np.packbits(wanted)):
            mark.update(array.tobytes())
        return entry(self._folder, mark.hexdigest())
