"""The native layout: ``run.toml``, ``rollouts/step_*.parquet|jsonl`` and ``checkpoints/step_*``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mismatch_probe.errors import InputError
from mismatch_probe.readers.files import jsonl_rows, parquet_rows
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.readers.step_files import StepName, last_attempts, list_step_files, set_aside
from mismatch_probe.run import CheckpointPattern, Rollouts, Run, Step

FORMAT = "native"
LOOKS_FOR = "run.toml, or rollouts/step_*.parquet or .jsonl"


def matches(path: Path) -> bool:
    """True for a directory with step files under ``rollouts/``."""
    return bool(list_step_files(path / "rollouts"))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the layout.

    Raises:
        BadFileError: ``run.toml`` is wrong.
        InputError: there are no step files.
    """
    settings = settle(path, options)
    files, notices = last_attempts(list_step_files(path / "rollouts"))
    if not files:
        raise InputError(f"{path}: rollouts/ holds no step_*.parquet or step_*.jsonl. Write one file a step there")
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, settings.vocab_size, options))
        for index, paths in sorted(files.items())
    )
    # A name that starts with a dot is a file that a writer has not finished.
    names = (entry.name for entry in (path / "rollouts").iterdir() if not entry.name.startswith("."))
    strangers = sorted(name for name in names if not StepName.parse(name))
    if strangers:
        notices.append(f"rollouts/: not step files, left unread: {', '.join(strangers)}")
    trainer = CheckpointPattern(path, settings.checkpoints or "checkpoints/step_{version:06d}")
    sampler = CheckpointPattern(path, settings.sampler_checkpoints) if settings.sampler_checkpoints else None
    return Run(path, FORMAT, settings, steps, trainer, sampler, notices=tuple(notices))


def _load(step: int, files: tuple[Path, ...], root: Path, vocab_size: int | None, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, vocab_size, options)
    for file in files:
        for sequence_id, reason in set_aside(file):
            builder.reject(file, 0, sequence_id, f"not written: {reason}")
        on_bad = partial(_set_aside, builder, file) if options.skip_bad_rows else None
        if file.suffix == ".parquet":
            rows = parquet_rows(file, on_bad)
        else:
            rows = jsonl_rows(file, partial(builder.torn, file), on_bad)
        for number, row in rows:
            builder.add(row, file, number)
    return builder.build()


def _set_aside(builder: RowBuilder, file: Path, number: int, reason: str) -> None:
    builder.reject(file, number, None, reason)
