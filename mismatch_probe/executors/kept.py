"""The score cache as an executor asks it: by unit, with the checkpoints' digests."""

from __future__ import annotations

from pathlib import Path

from mismatch_probe.checkpoints.fingerprint import Fingerprints
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit


class KeptScores:
    """Scores of units that were finished before.

    Args:
        cache: where they are; None keeps nothing.
        base: the model below checkpoints that are adapters.
    """

    def __init__(self, cache: ScoreCache | None, base: Path | None) -> None:
        self._cache = cache
        self._fingerprints = Fingerprints(None if cache is None else cache.folder / "weights.json", base)

    def ahead(self, paths: list[Path]) -> None:
        """Begin to read these checkpoints."""
        self._fingerprints.ahead(paths)

    def file(self, unit: Unit) -> Path | None:
        """Where the unit's scores are kept; None where they are not."""
        if self._cache is None:
            return None
        prints = {path: self._fingerprints.of(path) for path in unit.paths}
        known = {path: found for path, found in prints.items() if found is not None}
        return self._cache.path(unit, known) if len(known) == len(prints) else None

    def get(self, file: Path | None) -> StepScores | None:
        """What is kept in the file."""
        return self._cache.get(file) if self._cache is not None and file is not None else None

    def put(self, file: Path | None, scores: StepScores) -> None:
        """Keep scores.

        Raises:
            OutputError: the folder is full or cannot be written.
        """
        if self._cache is not None and file is not None:
            self._cache.put(file, scores)

    def close(self) -> None:
        """Stop reading checkpoints, and write what was learned."""
        self._fingerprints.close()
