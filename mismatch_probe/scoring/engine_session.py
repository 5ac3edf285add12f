"""A run's steps through the engine: each sampler version in a process of its own, checked before it is used."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mismatch_probe.errors import EngineError
from mismatch_probe.run import Ints, Rollouts
from mismatch_probe.scoring.engine import EngineOptions, EngineProcess, EngineScores, engine_directory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.score import StepScorer

CHECK_TOLERANCE = 2e-3
"""Largest mean |difference|, nats, between float32 log-probs of engine and scorer. A sound pair is some 1e-6 to 1e-4
apart, one whose weights or ids differ 0.1 and more."""
CHECK_ROWS = 8


class EngineSession:
    """Engine log-probs of steps; a context manager. The engine stays up while the next step needs the same weights.

    Before its first use the engine runs once in float32 and is compared with the scorer in float32.

    Args:
        options: how the engine is run.
        scoring: device and temperature of the in-process scorer that it is checked against.
        base: the model below checkpoints that are adapters.
        say: called with what the user must know.
    """

    def __init__(
        self, options: EngineOptions, scoring: ScoringOptions, base: Path | None, say: Callable[[str], None]
    ) -> None:
        self._options, self._base, self._say = options, base, say
        self._scoring = replace(scoring, dtype="float32")
        self._room = tempfile.TemporaryDirectory(prefix="mismatch_probe_weights_")
        self._process: EngineProcess | None = None
        self._path: Path | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._room.cleanup()

    def score(self, rollouts: Rollouts, sampler: Callable[[int], Path | None]) -> EngineScores:
        """The engine's log-prob of every counted token under the version that sampled it.

        Args:
            rollouts: a step's sequences.
            sampler: checkpoint of a sampler version, None where there is none: its tokens stay NaN.

        Raises:
            EngineError: the engine does not run, or its check fails.
            CheckpointError: weights cannot be loaded.
        """
        scores = EngineScores.empty(len(rollouts.response.values), self._options.top_k)
        for version in np.unique(rollouts.sampler_version[rollouts.loss_mask]):
            path = sampler(int(version))
            mine = rollouts.loss_mask & (rollouts.sampler_version == version)
            if path is None:
                continue
            rows = np.unique(rollouts.sequence_of_token[mine])
            part = rollouts.take(rows)
            found = self._running(path, part).score(part.prompt, part.response)
            wanted = part.loss_mask & (part.sampler_version == version)
            scores.put(
                np.flatnonzero(mine),
                EngineScores(found.logprob[wanted], found.top_ids[wanted], found.top_logprob[wanted]),
            )
        return scores

    def _running(self, path: Path, rollouts: Rollouts) -> EngineProcess:
        """The engine with these weights, started if need be."""
        longest = int((rollouts.prompt.lengths + rollouts.response.lengths).max())
        if self._process is not None and self._path == path and self._process.longest >= longest:
            return self._process
        self._stop()
        model = engine_directory(path, self._base, Path(self._room.name), self._scoring.trust_remote_code)
        if not self.facts:
            check = self._check(model, path, rollouts)
        self._process, self._path = EngineProcess(model, self._options, longest), path
        if not self.facts:
            self.facts = {**self._process.facts, "check": check}
        return self._process

    def _check(self, model: Path, path: Path, rollouts: Rollouts) -> dict[str, Any]:
        """Compare engine and scorer, both in float32, on a few sequences.

        Raises:
            EngineError: they differ by more than rounding.
        """
        rows = np.linspace(0, len(rollouts) - 1, min(CHECK_ROWS, len(rollouts))).astype(np.int64)
        part = rollouts.take(np.unique(rows))
        part = replace(part, loss_mask=np.ones_like(part.loss_mask))
        longest = int((part.prompt.lengths + part.response.lengths).max())
        with EngineProcess(model, replace(self._options, dtype="float32", top_k=0), longest) as process:
            found = process.score(part.prompt, part.response).logprob
        half: Ints = np.zeros(len(part), dtype=np.int64)
        expected = StepScorer(self._scoring, base=self._base).score(part, half, path, lambda _: path).stale_logprob
        gap = np.abs(found - expected)
        mean = float(gap.mean())
        if not mean <= CHECK_TOLERANCE:
            raise EngineError(
                f"{path}: engine and scorer differ by {mean:.2g} nats a token in float32 ({len(gap)} tokens), more "
                f"than {CHECK_TOLERANCE:g}: the engine does not run these weights as they are. Use another version of "
                "it, or leave --engine out"
            )
        self._say(
            f"engine check: engine and scorer, both in float32, are {mean:.1e} nats a token apart ({len(gap)} tokens)"
        )
        return {
            "tokens": len(gap),
            "mean_difference": mean,
            "max_difference": float(gap.max()),
            "tolerance": CHECK_TOLERANCE,
        }

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
