"""What a worker of a cluster does, without Ray: scores units with networks that stay loaded, and says how it went."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from mismatch_probe.errors import CheckpointError, MismatchProbeError, UsageError
from mismatch_probe.scoring.cache import code_digest
from mismatch_probe.scoring.memory import in_memory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit


@dataclass(frozen=True)
class Setup:
    """What every worker is told: how to score, and what it must have in common with the process that asks.

    ``tolerant``: a checkpoint that cannot be loaded counts as absent. ``device`` is the kind of device and ``code`` the
    digest of the scoring code there.
    """

    options: ScoringOptions
    base: Path | None
    tolerant: bool
    device: str
    code: str


@dataclass
class Outcome:
    """Scores of a unit, or the error; tokens that went through networks, notices, unusable checkpoints of the unit."""

    scores: StepScores | None = None
    error: MismatchProbeError | None = None
    tokens: int = 0
    notices: list[str] = field(default_factory=list)
    unusable: dict[Path, str] = field(default_factory=dict)


class Worker:
    """Scores units one after another.

    Args:
        setup: see there.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._outcome = Outcome()
        self._unusable: dict[Path, str] = {}
        options = replace(setup.options, device=setup.device)
        said = self._say_unusable if setup.tolerant else None
        self._networks = Networks(options, setup.base, 2, said, self._say)
        self._scorer = UnitScorer(options, self._networks, self._count)

    def check(self) -> str | None:
        """Why this worker's scores would not be those of the process that asks; None where they would."""
        here = socket.gethostname()
        if code_digest() != self._setup.code:
            return f"{here} has another version of mismatch-probe. Install the same on every node"
        try:
            self._scorer.options.torch_device()
        except UsageError as error:
            return f"worker on {here}: {error}. Run the command where the device is of the workers' kind"
        return None

    def score(self, unit: Unit, present: list[Path]) -> Outcome:
        """Score a unit; ``present`` are paths that the process that asks can see."""
        self._outcome = Outcome()
        try:
            for path in present:
                if not path.exists():
                    raise UsageError(
                        f"{path} is not there on {socket.gethostname()}, a node of the Ray cluster. Checkpoints are "
                        "read by path: mount the run's folder at the same place on every node"
                    )
            self._outcome.scores = in_memory(self._scorer, self._networks, lambda: self._scorer.score(unit), self._say)
        except MismatchProbeError as error:
            # Not every error survives pickling as it is.
            kind = CheckpointError if isinstance(error, CheckpointError) else UsageError
            self._outcome.error = kind(str(error))
        lost = self._networks.unusable
        self._outcome.unusable = {path: self._unusable[path] for path in unit.paths if path in lost}
        return self._outcome

    def _say(self, text: str) -> None:
        self._outcome.notices.append(text)

    def _count(self, tokens: int) -> None:
        self._outcome.tokens += tokens

    def _say_unusable(self, error: CheckpointError) -> None:
        # Networks marks the path as unusable just before it calls.
        for path in self._networks.unusable - self._unusable.keys():
            self._unusable[path] = str(error)
