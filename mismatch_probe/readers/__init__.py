"""Readers: any framework's run directory -> Run. One module a framework, recognised by content.

A reader is a module with ``FORMAT``, ``matches(path) -> bool`` and ``read(path, options) -> Run``. It never imports
scoring or stats.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from mismatch_probe.errors import InputError, UsageError
from mismatch_probe.readers import (
    native,
    nemo_rl,
    open_instruct,
    pipeline_rl,
    prime_rl,
    roll,
    skyrl,
    slime,
    text_only,
    tinker,
    trl,
    verl,
)
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.run import UNKNOWN_VERSION, Rollouts, Run, Step

__all__ = ["FORMATS", "ReadOptions", "Reader", "open_run"]


class Reader(Protocol):
    """What a reader module offers."""

    FORMAT: str
    LOOKS_FOR: str

    def matches(self, path: Path) -> bool:
        """True when the directory holds this format, judged by content."""

    def read(self, path: Path, options: ReadOptions) -> Run:
        """Understand the directory; rollouts are loaded later, step by step."""


_TEXT_ONLY = (text_only.SWIFT, text_only.AREAL, text_only.RLLM)
_READERS: tuple[Reader, ...] = (
    *(native, nemo_rl, slime, prime_rl, verl, skyrl, pipeline_rl, open_instruct, roll, tinker, trl),
    *_TEXT_ONLY,
)
FORMATS = tuple(reader.FORMAT for reader in _READERS)


def open_run(path: Path, options: ReadOptions | None = None, format: str | None = None) -> Run:
    """Find the reader of a run directory and read it.

    Raises:
        UsageError: ``format`` is not one of FORMATS, or several readers match.
        InputError: there is no such directory, or no reader knows what is in it.
    """
    options = options or ReadOptions()
    if not path.is_dir():
        raise InputError(f"{path}: no such run directory. Give the directory that holds run.toml or the step files")
    if format is not None:
        chosen = [reader for reader in _READERS if format == reader.FORMAT]
        if not chosen:
            raise UsageError(f"--run-format {format}: unknown; known are {', '.join(FORMATS)}")
    else:
        chosen = [reader for reader in _READERS if reader.matches(path)]
        if not chosen and (path / "run.toml").is_file():
            chosen = [native]
    if not chosen:
        looked = "; ".join(f"{reader.FORMAT}: {reader.LOOKS_FOR}" for reader in _READERS)
        raise InputError(f"{path}: no run found. Looked for {looked}")
    if len(chosen) > 1:
        names = " and ".join(reader.FORMAT for reader in chosen)
        raise UsageError(f"{path}: matches {names}. Choose one with --run-format")
    run = chosen[0].read(path, options)
    return _with_versions(replace(run, adapter_base=_adapter_base(run)))


def _adapter_base(run: Run) -> Path | None:
    """The directory that ``adapter_base`` names, else ``model``'s where that is one: relative to the run, or absolute.

    Raises:
        InputError: there is no such directory.
    """
    base = run.settings.adapter_base
    if base is not None:
        if not (run.path / base).exists():
            where = run.settings.sources["adapter_base"]
            raise InputError(f"{where}: adapter_base: no {run.path / base}. Name the base model's directory")
        return run.path / base
    model = run.path / run.settings.model
    return model if run.settings.model and (model / "config.json").is_file() else run.adapter_base


def _with_versions(run: Run) -> Run:
    """Steps whose sampler versions the dump does not name get them from ``sampler_lag``, where that is declared.

    A step that names some is left as it is: what is null there was sampled across an update, or is otherwise unclear.
    """
    lag = run.settings.sampler_lag
    if lag is None:
        return run
    known = replace(run, versions_known=True)

    def load(step: Step) -> Rollouts:
        rollouts, version = step.load(), known.trainer_version(step.index) - lag
        unknown = rollouts.sampler_version == UNKNOWN_VERSION
        if version < 0 or not len(unknown) or not unknown.all():
            return rollouts
        said = f"step {step.index}: the dump names no sampler version; {version} by sampler_lag = {lag} ({source})"
        versions = np.where(unknown, version, rollouts.sampler_version)
        return replace(rollouts, sampler_version=versions, notices=(*rollouts.notices, said))

    source = run.settings.sources["sampler_lag"]
    return replace(known, steps=tuple(replace(step, load=partial(load, step)) for step in run.steps))
