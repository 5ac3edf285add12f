"""What ``run.json`` says: everything needed to know what was compared with what."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mismatch_probe import __version__
from mismatch_probe.run import Run, Step
from mismatch_probe.scoring.network import ScoringOptions


def record(
    run: Run,
    steps: Sequence[Step],
    options: Mapping[str, Any],
    scoring: ScoringOptions,
    checkpoints: Mapping[str, str],
    rejected_rows: int,
    notices: Sequence[str],
) -> dict[str, Any]:
    """The content of ``run.json``.

    Args:
        run: what was read.
        steps: those that were analysed.
        options: of ``decompose``, by name.
        scoring: how tokens were scored.
        checkpoints: digest of each checkpoint, by path.
        rejected_rows: how many rows were set aside.
        notices: what the user was told.
    """
    settings = {key: value for key, value in asdict(run.settings).items() if key != "sources"}
    analysed = {step.index for step in steps}
    return {
        "schema_version": 1,
        "run": {"name": run_name(run), "format": run.format, "settings": settings},
        "sources": dict(sorted(run.settings.sources.items())),
        "assumed": sorted(run.settings.assumed),
        "versions": {
            "mismatch-probe": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "numpy", "pyarrow")},
        },
        "options": dict(options),
        "scoring": asdict(scoring) | {"device": str(scoring.torch_device())},
        "steps": [step.index for step in steps],
        "steps_left_out": [step.index for step in run.steps if step.index not in analysed],
        "files": {
            relative(file, run.path): _file_digest(file)
            for file in dict.fromkeys(file for step in steps for file in step.files)
        },
        "checkpoints": dict(checkpoints),
        "rejected_rows": rejected_rows,
        "notices": [*run.notices, *notices],
    }


def run_name(run: Run) -> str:
    """Name of the run: what it says, else that of its directory."""
    return run.settings.name or run.path.resolve().name


def relative(path: Path, root: Path) -> str:
    """A path as the record names it: below the run directory, else by its last part."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
