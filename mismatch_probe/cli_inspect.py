"""``inspect --weights``: two checkpoints of a run, or any two."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.progress import Progress

from mismatch_probe.checkpoints.compare import COMPARABLE, compare_checkpoints
from mismatch_probe.cli_options import DataFormat
from mismatch_probe.errors import CheckpointError, ExitCode
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.reporters import weights as reporter
from mismatch_probe.reporters.format import ranges
from mismatch_probe.reporters.terminal import stderr, stdout
from mismatch_probe.run import Run

_VERSION = re.compile(r"(?:(trainer|sampler):)?(\d+)")


def run_inspect_weights(
    run_dir: Path, run_format: str | None, overrides: tuple[str, ...], weights: tuple[str, str], format: DataFormat
) -> int:
    """Compare two checkpoints and print; each is a path, or a version of the run: 7, trainer:7 or sampler:7."""
    versions = [_VERSION.fullmatch(text) for text in weights]
    run = open_run(run_dir, ReadOptions(overrides=overrides), run_format) if any(versions) else None
    a, b = (
        Path(text) if run is None or version is None else _checkpoint(run, version[1] or "trainer", int(version[2]))
        for text, version in zip(weights, versions, strict=True)
    )
    console = stderr()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("comparing", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = compare_checkpoints(a, b, None if run is None else run.adapter_base, show)
    if format is DataFormat.json:
        sys.stdout.write(reporter.as_json(found) + "\n")
    else:
        reporter.print_text(found, stdout())
    return ExitCode.OK if found.of(*COMPARABLE) else ExitCode.NOTHING_TO_JUDGE


def _checkpoint(run: Run, whose: str, version: int) -> Path:
    pattern = run.trainer_checkpoints
    if whose == "sampler" and run.sampler_checkpoints is not None:
        pattern = run.sampler_checkpoints
    path = run.trainer_checkpoint(version) if whose == "trainer" else run.sampler_checkpoint(version)
    if path is None:
        there = ranges(pattern.versions()) if pattern is not None else ""
        raise CheckpointError(
            f"{run.path}: no {whose} checkpoint of version {version}. "
            f"{f'There are versions {there}' if there else 'The run holds none'}; a path can be given instead"
        )
    return path
