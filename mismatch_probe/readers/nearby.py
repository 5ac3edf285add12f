"""Checkpoints that lie near a dump: where the run declares them, else where the framework puts them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mismatch_probe.run import CheckpointPattern, Settings


def find_checkpoints(
    path: Path, settings: Settings, usual: Iterable[tuple[Path, str]], ahead: int = 0
) -> tuple[CheckpointPattern | None, tuple[str, ...]]:
    """The trainer's checkpoints, and a notice that says where they were found when nobody declared them.

    Args:
        path: run directory, which a declared pattern starts from.
        usual: (directory, pattern) pairs to try in turn; the first that has checkpoints wins.
        ahead: how many updates more than its number a checkpoint holds.
    """
    if settings.checkpoints is not None:
        return CheckpointPattern(path, settings.checkpoints, ahead), ()
    for root, text in usual:
        pattern = CheckpointPattern(root, text, ahead)
        versions = pattern.versions()
        if versions:
            range_ = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
            said = f"checkpoints found at {root / text}, versions {range_}; name others with --set checkpoints=PATTERN"
            return pattern, (said,)
    return None, ()


def initial_model(settings: Settings) -> Path | None:
    """Directory of the model that training began with, where ``model`` names one that exists."""
    folder = Path(settings.model) if settings.model else None
    return folder if folder is not None and folder.is_dir() else None
