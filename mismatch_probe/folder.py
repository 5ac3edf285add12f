"""The analysis folder: written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from mismatch_probe.errors import InputError, UsageError
from mismatch_probe.table_io import STAGING, output_error, read_rows

DEFAULT_NAME = "mismatch_probe"
_PARTS = ("tokens", "sequences.parquet", "steps.parquet", "places.parquet", "rejected.parquet", "run.json")
_DERIVED = ("plots", "report.html", "findings.json")


def analysis_path(run_dir: Path, output: Path | None) -> Path:
    """Where the analysis of ``run_dir`` lies: ``-o``, else ``RUN_DIR/mismatch_probe``."""
    return output if output is not None else run_dir / DEFAULT_NAME


class Staging:
    """Context that collects new tables beside the old ones and puts them in place at the end.

    Until ``commit`` an earlier analysis is untouched; a failure leaves it as it was.

    Args:
        folder: the analysis folder.
        overwrite: replace an earlier analysis there.

    Raises:
        UsageError: it holds an analysis and ``overwrite`` is off.
        OutputError: it cannot be created or written.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.folder, self.path = folder, folder / STAGING
        if not overwrite and any((folder / part).exists() for part in _PARTS):
            raise UsageError(f"{folder}: holds an analysis already. Pass --overwrite, or another folder with -o")

    def __enter__(self) -> Staging:
        self._created = not self.folder.exists()
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
        except OSError as error:
            raise output_error(self.folder, error) from None
        return self

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
        """Replace the earlier analysis, and remove what was drawn from it."""
        try:
            for name in (*_PARTS, *_DERIVED):
                _remove(self.folder / name)
            for part in self.path.iterdir():
                os.replace(part, self.folder / part.name)
        except OSError as error:
            raise output_error(self.folder, error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._created and kind is not None:
            # Only an empty folder goes: whatever else came into it meanwhile is not ours.
            try:
                self.folder.rmdir()
            except OSError:
                return


@dataclass(frozen=True)
class Analysis:
    """What ``decompose`` wrote: the steps table and the record of how it was made."""

    folder: Path
    steps: pd.DataFrame
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.record["run"]["name"])

    def tokens(self, columns: list[str], steps: list[int] | None = None) -> pd.DataFrame:
        """Columns of the tokens table, with ``step``; all steps by default.

        Raises:
            InputError: a part cannot be read.
        """
        frames = []
        for step in self.steps["step"] if steps is None else steps:
            part = self.folder / "tokens" / f"step={step}" / "part-0.parquet"
            if part.exists():
                frame = read_rows(part).select(columns).to_pandas()
                frames.append(frame.assign(step=int(step)))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*columns, "step"])


def open_analysis(run_dir: Path, output: Path | None) -> Analysis:
    """Read an analysis folder.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    folder = analysis_path(run_dir, output)
    steps = folder / "steps.parquet"
    if not steps.is_file():
        raise InputError(f"{folder}: no analysis here. Run: mismatch-probe decompose {run_dir}")
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder / 'run.json'}: not readable ({error}). Run decompose again with --overwrite"
        ) from None
    return Analysis(folder, read_rows(steps).to_pandas(), record)


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
