"""What an executor is given and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mismatch_probe.errors import CheckpointError
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit


class Plan(Protocol):
    """A step to be scored: its units, and how many response tokens it has."""

    @property
    def units(self) -> list[Unit]:
        """What is to be scored."""

    @property
    def tokens(self) -> int:
        """Response tokens, counted or not."""


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class Callbacks:
    """Whom an executor tells what.

    ``on_plan``: a plan's scoring begins. ``on_tokens``: so many tokens went through a network, or were found in the
    cache. ``on_notice``: something the user must know. ``on_unusable``: a checkpoint cannot be loaded and counts as
    absent; None raises the error.
    """

    on_plan: Callable[[Any], None] = lambda _: None
    on_tokens: Callable[[int], None] = lambda _: None
    on_notice: Callable[[str], None] = lambda _: None
    on_unusable: Callable[[CheckpointError], None] | None = None


class Executor(Protocol):
    """Scores plans."""

    def run(self, plans: Iterable[P]) -> Iterator[tuple[P, StepScores]]:
        """Scores of each plan, in the order given; plans are taken one ahead.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in vocabulary.
            OutputError: the score cache cannot be written.
            UsageError: the device's memory does not hold the smallest pass.
        """
