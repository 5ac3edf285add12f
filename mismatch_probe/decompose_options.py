"""What a user asks of ``decompose``, and where its progress goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mismatch_probe.errors import UsageError
from mismatch_probe.executors.ray import RayOptions
from mismatch_probe.reference import DEFAULT_SEQUENCES
from mismatch_probe.selection import StepSelection
from mismatch_probe.stats.breakdown import DEFAULT_LEVEL, DEFAULT_RATIO, DEFAULT_THRESHOLD
from mismatch_probe.stats.constancy import DEFAULT_MARGIN
from mismatch_probe.stats.corrections import DEFAULT_TARGET
from mismatch_probe.stats.intervals import DEFAULT_METHOD


class Progress(Protocol):
    """Where progress and notices go."""

    def start(self, steps: int) -> None:
        """The number of steps is known."""

    def step(self, index: int, tokens: int) -> None:
        """A step begins; it will forward about ``tokens`` tokens."""

    def tokens(self, count: int) -> None:
        """Tokens went through a network."""

    def notice(self, text: str) -> None:
        """Something the user must know."""


@dataclass(frozen=True)
class DecomposeOptions:
    """Options of ``decompose``; ``dtype`` None means the trainer's own, ``max_tokens`` None what suits the device."""

    steps: StepSelection | None = None
    limit: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None
    max_tokens: int | None = None
    trust_remote_code: bool = False
    level: str = DEFAULT_LEVEL
    threshold: float = DEFAULT_THRESHOLD
    ratio: str = DEFAULT_RATIO
    confidence: float = 0.95
    resamples: int = 2000
    intervals: str = DEFAULT_METHOD
    constancy_margin: float = DEFAULT_MARGIN
    skip_bad_rows: bool = False
    strict: bool = False
    nearest: bool = False
    engine: str | None = None
    engine_dtype: str | None = None
    engine_top_k: int = 0
    engine_set: tuple[str, ...] = ()
    engine_python: Path | None = None
    gradient: bool = True
    gradient_target: str = DEFAULT_TARGET
    clip_eps: float = 0.2
    cache: Path | None = None
    keep_scores: bool = True
    reference: str | None = None
    reference_sequences: int = DEFAULT_SEQUENCES
    fresh_rollouts: int | None = None
    fresh_steps: StepSelection | None = None
    attention: str = "auto"
    head: str = "auto"
    tensor_parallel: int = 1
    cluster: RayOptions | None = None
    target_precision: float | None = None

    def check(self) -> None:
        """Refuse options that contradict one another.

        Raises:
            UsageError: they do.
        """
        if self.target_precision is None:
            return
        rivals = {
            "--limit": self.limit is not None,
            "--fresh-rollouts": self.fresh_rollouts is not None,
            "--engine": self.engine is not None,
            "--executor ray": self.cluster is not None,
            "--tensor-parallel": self.tensor_parallel > 1,
        }
        for name, given in rivals.items():
            if given:
                raise UsageError(f"--target-precision: not with {name}, yet. Drop one of them")
