"""The analysis folder: written whole or not at all, and read back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import pyarrow.compute as pc

from mismatch_probe.errors import InputError, UsageError
from mismatch_probe.table_io import STAGING, output_error, read_rows
from mismatch_probe.tables import STEPS

DEFAULT_NAME = "mismatch_probe"
SCORES = "scores"
"""Folder inside the analysis folder where finished scores are kept from one decompose to the next."""
_PARTS = (
    "tokens",
    "sequences.parquet",
    "steps.parquet",
    "places.parquet",
    "trends.parquet",
    "rejected.parquet",
    "run.json",
)
_LEAVING, _ASIDE, _DONE = "leaving", "earlier", "replaced"
"""Where an earlier analysis goes: while its parts are set aside one by one, while the new ones come in, and after."""
_DERIVED = ("plots", "report.html", "findings.json")


def analysis_path(run_dir: Path, output: Path | None) -> Path:
    """Where the analysis of ``run_dir`` lies: ``-o``, else ``RUN_DIR/mismatch_probe``."""
    return output if output is not None else run_dir / DEFAULT_NAME


def has_analysis(folder: Path) -> bool:
    """True where an analysis lies, put back in place if a kill left it aside."""
    _heal(folder)
    return (folder / "steps.parquet").is_file()


class Staging:
    """Context that collects new tables beside the old ones and puts them in place at the end.

    Until ``commit`` an earlier analysis is untouched, and a failure leaves it as it was.

    Args:
        folder: the analysis folder.
        overwrite: replace an earlier analysis there.

    Raises:
        UsageError: it holds an analysis and ``overwrite`` is off, or another process writes to it.
        OutputError: it cannot be created or written.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.folder, self.path = folder, folder / STAGING
        self._replaces = any((folder / part).exists() for part in _PARTS)
        if self._replaces and not overwrite:
            raise UsageError(f"{folder}: holds an analysis already. Pass --overwrite, or another folder with -o")

    def __enter__(self) -> Staging:
        self._created = not self.folder.exists()
        try:
            self._open()
        except BaseException:
            # Not the other process's staging: that one is locked and in use.
            if self._owned:
                self._close(failed=True)
            raise
        return self

    def _open(self) -> None:
        self._owned = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise output_error(self.folder, error) from None
        try:
            # Freed by the system when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no locks: then two commands in one folder are the user's to avoid.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._lock.close()
                raise UsageError(f"{self.folder}: another decompose is writing here. Wait, or choose -o") from None
        self._owned = True
        _restore(self.folder)
        for leftover in self.path.iterdir():
            if leftover.name != "lock":
                _remove(leftover)

    def write_json(self, name: str, content: Any) -> None:
        """Write one JSON file, keys sorted.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            (self.path / name).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise output_error(self.path / name, error) from None

    def commit(self) -> None:
        """Replace the earlier analysis, and put away what was drawn from it; whatever goes wrong is undone.

        Raises:
            OutputError: the folder cannot be written.
        """
        # Renames take no time: an interrupt can wait for the last of them.
        waiting = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            self._swap()
        except OSError as error:
            raise output_error(self.folder, error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, waiting)

    def _swap(self) -> None:
        """Three states, each entered by one rename, so that a kill at any moment leaves what can be told and undone."""
        try:
            (self.path / _LEAVING).mkdir()
            # plots/ and report.html are ours only where an analysis of ours lies beside them.
            for name in (*_PARTS, *_DERIVED) if self._replaces else ():
                if (self.folder / name).exists():
                    os.replace(self.folder / name, self.path / _LEAVING / name)
            os.replace(self.path / _LEAVING, self.path / _ASIDE)
            for name in _PARTS:
                os.replace(self.path / name, self.folder / name)
            os.replace(self.path / _ASIDE, self.path / _DONE)
        except BaseException:
            _restore(self.folder)
            raise
        _remove(self.path / _DONE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        # What could not be put back stays where the next command finds it.
        if not _is_cut(self.folder):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if self._created and failed:
            # Only an empty folder goes: whatever else came into it meanwhile is not ours.
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _is_cut(folder: Path) -> bool:
    """True while a commit is under way, or where one never ended (a kill, a power cut)."""
    return any((folder / STAGING / state).is_dir() for state in (_LEAVING, _ASIDE))


def _restore(folder: Path) -> None:
    """Undo a commit that never ended; can itself be cut off anywhere and begun again."""
    leaving, aside = (folder / STAGING / state for state in (_LEAVING, _ASIDE))
    if aside.is_dir():
        for name in (*_PARTS, *(part.name for part in aside.iterdir())):
            _remove(folder / name)
        os.replace(aside, leaving)
    if leaving.is_dir():
        for part in leaving.iterdir():
            os.replace(part, folder / part.name)
        leaving.rmdir()


def _heal(folder: Path) -> None:
    """Put back what a killed commit set aside, unless a commit is under way."""
    if not _is_cut(folder):
        return
    # Where it cannot be mended (a read-only folder, a commit at work) what is there is read as it is.
    with contextlib.suppress(OSError), (folder / STAGING / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _restore(folder)


@dataclass(frozen=True)
class Analysis:
    """What ``decompose`` wrote: the steps table, a row a question about the run, and the record of how it was made."""

    folder: Path
    steps: pd.DataFrame
    trends: list[dict[str, Any]]
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.record["run"]["name"])

    def tokens(self, columns: list[str]) -> pd.DataFrame:
        """Columns of the tokens table, with ``step``, of all steps.

        Raises:
            InputError: a part cannot be read.
        """
        frames = [self.tokens_of(int(step), columns).assign(step=int(step)) for step in self.steps["step"]]
        filled = [frame for frame in frames if len(frame)]
        return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=[*columns, "step"])

    def tokens_of(self, step: int, columns: list[str]) -> pd.DataFrame:
        """Columns of one step's tokens, in the order of the table; empty where it has none.

        Raises:
            InputError: its part cannot be read.
        """
        part = self.folder / "tokens" / f"step={step}" / "part-0.parquet"
        return read_rows(part).select(columns).to_pandas() if part.exists() else pd.DataFrame(columns=columns)

    def sequences_of(self, step: int) -> dict[str, dict[str, Any]]:
        """Facts about each sequence of a step by its name: tokens, version, reward, finish reason; None = null.

        Raises:
            InputError: the table cannot be read.
        """
        names = {"tokens": "tokens", "sampler_version_min": "version", "reward": "reward", "finish_reason": "finish"}
        table = read_rows(self.folder / "sequences.parquet")
        rows = table.filter(pc.equal(table["step"], step)).to_pylist()
        return {str(row["sequence_id"]): {shown: row[name] for name, shown in names.items()} for row in rows}


def open_analysis(run_dir: Path, output: Path | None) -> Analysis:
    """Read an analysis folder.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    folder = analysis_path(run_dir, output)
    steps = folder / "steps.parquet"
    if not has_analysis(folder):
        where = "" if output is None else f" -o {output}"
        raise InputError(f"{folder}: no analysis here. Run: mismatch-probe decompose {run_dir}{where}")
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not {"run", "options", "scoring"} <= set(record):
            raise ValueError("its keys are not those of a run.json")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{folder / 'run.json'}: not readable ({error}). Run decompose again with --overwrite"
        ) from None
    table = read_rows(steps)
    absent = [column.name for column in STEPS if column.name not in table.column_names]
    if absent:
        raise InputError(
            f"{steps}: no column {absent[0]}, so another version of mismatch-probe wrote it. Run decompose again with "
            "--overwrite"
        )
    trends = read_rows(folder / "trends.parquet").to_pylist()
    return Analysis(folder, table.to_pandas(), trends, record)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a finished file (a picture, a page) in one step.

    Raises:
        OutputError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise output_error(path, error) from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
