"""Which checkpoints a step needs, which of them are there, and what that allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mismatch_probe.checkpoints.describe import Description, describe
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import CLAIMS, Bools, Ints, Rejected, Rollouts, Run
from mismatch_probe.scoring.plan import units
from mismatch_probe.scoring.units import Unit


@dataclass(frozen=True)
class Gaps:
    """How far the weights in use are from those wanted, in updates: 0 is exact, negative is older.

    ``sampler`` maps each sampler version to its gap.
    """

    trainer: int = 0
    sampler: Mapping[int, int] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest gap either way, 0 where all is exact."""
        return max(map(abs, (self.trainer, *self.sampler.values())), default=0)


class StepCheckpoints:
    """The checkpoints of one step.

    ``trainer`` is None when it is absent. ``problems`` says, in words, what could not be read, and ``approximations``
    which weights stand in for others; ``gaps`` holds the same as numbers.

    Args:
        run: where to look.
        rollouts: the step's sequences; their counted tokens name the sampler versions.
        trainer_version: version of the trainer's weights.
        tolerant: note an unreadable checkpoint instead of raising.
        nearest: where a version has no checkpoint, use the one closest to it.

    Raises:
        CheckpointError: a checkpoint is there but its config or headers cannot be read, and ``tolerant`` is off.
    """

    def __init__(
        self, run: Run, rollouts: Rollouts, trainer_version: int, tolerant: bool, nearest: bool = False
    ) -> None:
        self.problems: list[str] = []
        self.approximations: list[str] = []
        self.gaps = Gaps()
        self._base = run.adapter_base
        self._tolerant = tolerant
        self._described: dict[Path, Description] = {}
        self._unreadable: set[Path] = set()
        self.trainer = self._readable(run.trainer_checkpoint(trainer_version))
        versions = np.unique(rollouts.sampler_version[rollouts.loss_mask])
        self._sampler = {int(v): self._readable(run.sampler_checkpoint(int(v))) for v in versions}
        if nearest:
            self._substitute(run, trainer_version)

    @property
    def paths(self) -> list[Path]:
        """Directories in use, each once."""
        return list(self._described)

    @property
    def descriptions(self) -> list[Description]:
        """What they hold."""
        return list(self._described.values())

    @property
    def notes(self) -> list[str]:
        """What a user must know of how they are read."""
        return [note for description in self.descriptions for note in description.notes]

    def sampler(self, version: int) -> Path | None:
        """Checkpoint of a sampler version that occurs in the step, None when it is absent."""
        return self._sampler.get(version)

    def misfits(self, rollouts: Rollouts) -> dict[int, str]:
        """Rows that a checkpoint cannot take, with the reason: ids beyond its head, or longer than its positions."""
        vocab = min((d.vocab_size for d in self.descriptions if d.vocab_size), default=None)
        positions = min((d.max_positions for d in self.descriptions if d.max_positions), default=None)
        reasons = {}
        for row in range(len(rollouts)):
            highest = max(rollouts.prompt[row].max(), rollouts.response[row].max())
            length = len(rollouts.prompt[row]) + len(rollouts.response[row])
            if vocab is not None and highest >= vocab:
                reasons[row] = f"token id {highest} is outside the checkpoint's vocabulary of {vocab}"
            elif positions is not None and length > positions:
                reasons[row] = f"{length} tokens are more than the checkpoint's {positions} positions"
        return reasons

    def units(self, step: int, rollouts: Rollouts, half: Ints, unit_tokens: int, **choices: Bools | None) -> list[Unit]:
        """The step cut into units of scoring; ``choices`` as in ``plan.units``."""
        return units(step, rollouts, half, self.trainer, self.sampler, unit_tokens, **choices)

    def _substitute(self, run: Run, trainer_version: int) -> None:
        """Put the nearest checkpoint in the place of each that is missing.

        Two versions that would get the same weights cannot be told apart: their lag would come out as exactly zero.
        Then the sampler's weights stay, for the discrepancy, and the trainer's are missing.
        """
        exact = {v for v, path in self._sampler.items() if path is not None}
        held = {version: version for version in exact}
        trainer_held = trainer_version if self.trainer is not None else None
        for version in self._sampler:
            found = None if version in exact else run.nearest_checkpoint(version, sampler=True)
            if found is None:
                continue
            if found[0] == trainer_held and version != trainer_version:
                self._cannot_tell("sampler", version, found[0])
                continue
            self._sampler[version] = self._readable(found[1])
            held[version] = found[0]
        found = None if self.trainer is not None else run.nearest_checkpoint(trainer_version)
        trainer_gap = 0
        if found is not None:
            if any(used == found[0] and version != trainer_version for version, used in held.items()):
                self._cannot_tell("trainer", trainer_version, found[0])
            else:
                self.trainer = self._readable(found[1])
                trainer_gap = found[0] - trainer_version
        self.gaps = Gaps(trainer_gap, {version: used - version for version, used in held.items()})
        for who, wanted, gap in (
            *(("sampler", version, gap) for version, gap in sorted(self.gaps.sampler.items())),
            ("trainer", trainer_version, trainer_gap),
        ):
            if gap:
                self.approximations.append(f"approximate: {who} version {wanted} scored at version {wanted + gap}")

    def _cannot_tell(self, who: str, wanted: int, held: int) -> None:
        self.approximations.append(
            f"{who} version {wanted} stays missing: its nearest checkpoint, {held}, is used for another version here"
        )

    def _readable(self, path: Path | None) -> Path | None:
        if path is None or path in self._described:
            return path
        if path in self._unreadable:
            return None
        try:
            self._described[path] = describe(path, self._base)
        except CheckpointError as error:
            if not self._tolerant:
                raise
            self.problems.append(str(error))
            self._unreadable.add(path)
            return None
        return path


def set_aside(rollouts: Rollouts, checkpoints: StepCheckpoints, step: int) -> Rollouts:
    """The sequences that the checkpoints can take; the others join the rejected rows, with file, row and reason."""
    misfits = checkpoints.misfits(rollouts)
    if not misfits:
        return rollouts
    refused = tuple(
        Rejected(step, file, number, str(rollouts.sequence_id[row]), misfits[row])
        for row, (file, number) in enumerate(rollouts.origin)
        if row in misfits
    )
    kept = rollouts.take(np.array([row for row in range(len(rollouts)) if row not in misfits], dtype=np.int64))
    return replace(kept, rejected=(*rollouts.rejected, *refused))


def semantic_reasons(run: Run) -> list[str]:
    """What the run's sampling settings do to the meaning of the numbers, in words; empty when nothing."""
    settings = run.settings
    reasons = []
    if settings.logprobs_mode == "raw" and (settings.temperature != 1.0 or settings.truncated_sampling):
        reasons.append(
            f"logged log-probs are raw and sampling was at temperature {settings.temperature:g}, top_p "
            f"{settings.top_p:g}, top_k {settings.top_k}: all log-probs are compared before temperature, and weights "
            "are not those of the distribution that was sampled"
        )
    elif settings.truncated_sampling:
        reasons.append(
            f"sampling was cut (top_p {settings.top_p:g}, top_k {settings.top_k}): the discrepancy holds the "
            "log of the mass that was kept, and mean weights fall below 1 by what was cut"
        )
    if run.trainer_checkpoints is not None and settings.assumed:
        values = ", ".join(f"{key} {getattr(settings, key)}" for key in CLAIMS if key in settings.assumed)
        reasons.append(f"assumed, since nothing states it: {values}. Pass --set KEY=VALUE where it was another")
    if settings.filtered:
        reasons.append(f"rows were dropped before logging ({settings.filtered}): mean weights can differ from 1")
    return reasons
