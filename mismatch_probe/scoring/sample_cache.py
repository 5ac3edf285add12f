"""Fresh responses on disk, by content: drawing them again would take long and give the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.checkpoints.fingerprint import Fingerprints
from mismatch_probe.run import Ragged, Rollouts
from mismatch_probe.scoring.cache import entry, environment, read_arrays, write_arrays
from mismatch_probe.scoring.sample import Sampling, rollouts_of, sample_fresh


class KeptSamples:
    """``sample_fresh`` that keeps what it drew in a folder; the key covers weights, prompts, settings, seed and code.

    Args:
        folder: created when something is put.
        base: the model below checkpoints that are adapters.
    """

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        self._folder = folder
        self._fingerprints = Fingerprints(folder / "weights.json", base)

    def __call__(self, checkpoint: Path, prompts: Ragged, settings: Sampling, n: int, seed: Sequence[int]) -> Rollouts:
        """As ``sample_fresh``.

        Raises:
            CheckpointError: as there.
            OutputError: the folder is full or cannot be written.
        """
        fingerprint = self._fingerprints.of(checkpoint)
        file = None if fingerprint is None else self._file(fingerprint, prompts, settings, n, seed)
        found = None if file is None else read_arrays(file)
        if found is None or not {"values", "offsets", "logprob", "stopped"} <= set(found):
            drawn = sample_fresh(checkpoint, prompts, settings, n, seed)
            if file is not None:
                write_arrays(file, _arrays(drawn))
            return drawn
        return rollouts_of(prompts, n, Ragged(found["values"], found["offsets"]), found["logprob"], found["stopped"])

    def _file(self, fingerprint: str, prompts: Ragged, settings: Sampling, n: int, seed: Sequence[int]) -> Path:
        scoring = settings.scoring
        facts: dict[str, Any] = {
            **environment(scoring),
            "scoring": [scoring.dtype, scoring.max_tokens, scoring.chunk_elements],
            "sampling": [settings.temperature, settings.top_p, settings.top_k, settings.longest, settings.eos],
            "draws": [n, list(seed)],
            "weights": fingerprint,
        }
        mark = hashlib.blake2b(json.dumps(facts).encode(), digest_size=20)
        mark.update(prompts.offsets.tobytes() + prompts.values.tobytes())
        return entry(self._folder, mark.hexdigest())


def _arrays(drawn: Rollouts) -> dict[str, np.ndarray]:
    return {
        "values": drawn.response.values,
        "offsets": drawn.response.offsets,
        "logprob": drawn.sampler_logprob,
        "stopped": np.array([reason == "stop" for reason in drawn.finish_reason]),
    }
