"""The native layout: ``run.toml``, ``rollouts/step_*.parquet|jsonl`` and ``checkpoints/step_*``."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path

from mismatch_probe.errors import InputError
from mismatch_probe.readers.files import jsonl_rows, parquet_rows
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.run import CheckpointPattern, Rollouts, Run, Step

FORMAT = "native"
LOOKS_FOR = "run.toml, or rollouts/step_*.parquet or .jsonl"

_STEP_FILE = re.compile(r"step_(\d+)(?:_rank_\d+)?\.(?:parquet|jsonl(?:\.gz|\.zst)?)")


def matches(path: Path) -> bool:
    """True for a directory with step files under ``rollouts/``."""
    return bool(_step_files(path))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the layout.

    Raises:
        BadFileError: ``run.toml`` is wrong.
        InputError: there are no step files.
    """
    settings = settle(path, options)
    files = _step_files(path)
    if not files:
        raise InputError(f"{path}: rollouts/ holds no step_*.parquet or step_*.jsonl. Write one file a step there")
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, settings.vocab_size, options))
        for index, paths in sorted(files.items())
    )
    strangers = sorted(entry.name for entry in (path / "rollouts").iterdir() if not _STEP_FILE.fullmatch(entry.name))
    notices = (f"rollouts/: not step files, left unread: {', '.join(strangers)}",) if strangers else ()
    trainer = CheckpointPattern(path, settings.checkpoints or "checkpoints/step_{version:06d}")
    sampler = CheckpointPattern(path, settings.sampler_checkpoints) if settings.sampler_checkpoints else None
    return Run(path, FORMAT, settings, steps, trainer, sampler, notices=notices)


def _step_files(path: Path) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = defaultdict(list)
    folder = path / "rollouts"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP_FILE.fullmatch(entry.name)
        if match:
            files[int(match.group(1))].append(entry)
    return files


def _load(step: int, files: tuple[Path, ...], root: Path, vocab_size: int | None, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, vocab_size, options)
    for file in files:
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
