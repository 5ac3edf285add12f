"""Where tinker-cookbook's capture lies, and its records by iteration: a JSONL file or a SQLite store, read only."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers.files import parse_json
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.stored_lines import Line, scan, values

Record = dict[str, Any]
"""One ``kind == "sample"`` record: scope, prompt_tokens, samples, sampling_params, model_path, ..."""

# The writer escapes quotes inside strings, so this matches a key only.
_ITERATION = re.compile(rb'"iteration":\s*(\d{1,9})\b')
_REPAIR = "Restore the file, or stop the program that is writing it and try again"
_SCOPE = ("run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx", "purpose")
_COLUMNS = (*_SCOPE, "sampling_session_id", "seq_id", "sample_idx", "policy_version", "prompt_tokens", "sampled_tokens",
            "logprobs", "metadata")  # fmt: skip
_JSON = ("prompt_tokens", "sampled_tokens", "logprobs", "metadata")


class Source(Protocol):
    """Records by iteration; None stands for those that name none."""

    files: tuple[Path]
    iterations: list[int | None]

    def records(self, iteration: int | None, builder: RowBuilder) -> Iterator[tuple[Path, int, Record]]:
        """(file, line or cursor, record) of one iteration; what cannot be parsed goes to the builder."""

    def first(self) -> Record:
        """Some record, for the settings that it holds; {} where there is none."""


class JsonlSource:
    """``capture/sample.jsonl``, one record a line."""

    def __init__(self, file: Path, options: ReadOptions) -> None:
        self.files, self._options = (file,), options
        self._lines: dict[int | None, list[Line]] = defaultdict(list)
        for line, text in scan(file):
            match = _ITERATION.search(text)
            self._lines[int(match.group(1)) if match else None].append(line)
        self.iterations: list[int | None] = sorted(
            self._lines, key=lambda iteration: -1 if iteration is None else iteration
        )

    def records(self, iteration: int | None, builder: RowBuilder) -> Iterator[tuple[Path, int, Record]]:
        """See Source."""
        for line, record in values(self._lines[iteration], builder, self._options):
            if isinstance(record, dict):
                yield line.file, line.number, record
            else:
                builder.reject(line.file, line.number, None, "not a capture record")

    def first(self) -> Record:
        """See Source."""
        for _, text in scan(self.files[0]):
            try:
                record = parse_json(text)
            except ValueError:
                continue
            if isinstance(record, dict):
                return record
        return {}


class SqliteSource:
    """``capture.sqlite``, table ``wire_rows``, one row a sampled sequence; several runs may share it.

    Raises:
        BadFileError: not a capture store.
        InputError: it holds several runs and ``run`` names none of them.
    """

    def __init__(self, file: Path, run: str) -> None:
        self.files, self._file = (file,), file
        with self._open() as connection:
            runs = [_text(row[0]) for row in connection.execute("SELECT DISTINCT run_id FROM wire_rows")]
            if len(runs) > 1 and run not in runs:
                shown = ", ".join(sorted(runs)[:8])
                raise InputError(f"{file}: holds {len(runs)} runs ({shown}). Choose one with --set name=RUN_ID")
            self.run = run if run in runs else runs[0] if runs else ""
            found = connection.execute("SELECT DISTINCT iteration FROM wire_rows WHERE run_id = ?", (self.run,))
            iterations = [row[0] for row in found]
        self.iterations: list[int | None] = sorted(
            (at if isinstance(at, int) and at >= 0 else None for at in iterations),
            key=lambda at: -1 if at is None else at,
        )

    def records(self, iteration: int | None, builder: RowBuilder) -> Iterator[tuple[Path, int, Record]]:
        """See Source."""
        where = "iteration IS NULL" if iteration is None else "iteration = ?"
        query = f"SELECT cursor, {', '.join(_COLUMNS)} FROM wire_rows WHERE run_id = ? AND {where} ORDER BY cursor"
        with self._open() as connection:
            for cursor, *cells in connection.execute(query, (self.run, *(() if iteration is None else (iteration,)))):
                try:
                    yield self._file, int(cursor), _record(dict(zip(_COLUMNS, cells, strict=True)))
                except (ValueError, TypeError) as error:
                    builder.reject(self._file, int(cursor), None, f"not a capture row ({error})")

    def first(self) -> Record:
        """See Source."""
        builder = RowBuilder(0, self._file.parent, None, ReadOptions())
        return next((record for at in self.iterations for _, _, record in self.records(at, builder)), {})

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection that cannot write; a store whose log is empty is opened so that not even a lock is taken."""
        log = self._file.with_name(self._file.name + "-wal")
        quiet = "" if log.is_file() and log.stat().st_size else "&immutable=1"
        try:
            connection = sqlite3.connect(f"file:{quote(str(self._file.resolve()))}?mode=ro{quiet}", uri=True)
            try:
                connection.text_factory = bytes
                connection.execute("PRAGMA trusted_schema = OFF")
                kind = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = 'wire_rows'").fetchone()
                # A view or a virtual table could compute without end.
                if kind is None or _text(kind[0]) != "table" or not _text(kind[1]).upper().startswith("CREATE TABLE"):
                    raise BadFileError(
                        self._file, None, "has no table wire_rows", "Give tinker-cookbook's capture store"
                    )
                yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise BadFileError(self._file, None, f"not a readable capture store ({error})", _REPAIR) from None


def is_store(file: Path) -> bool:
    """True for a SQLite file with a table ``wire_rows``."""
    try:
        with file.open("rb") as stream:
            if not stream.read(16).startswith(b"SQLite format 3"):
                return False
        SqliteSource(file, "")
    except (OSError, BadFileError):
        return False
    except InputError:
        pass
    return True


def _record(cells: Record) -> Record:
    """One row in the shape of a JSONL record."""
    parsed = {key: parse_json(cells[key]) if isinstance(cells[key], bytes) else None for key in _JSON}
    plain = {
        key: _text(value) if isinstance(value, bytes) else value for key, value in cells.items() if key not in _JSON
    }
    metadata = parsed["metadata"] if isinstance(parsed["metadata"], dict) else {}
    sample = {
        "tokens": parsed["sampled_tokens"],
        "logprobs": parsed["logprobs"],
        "stop_reason": metadata.get("stop_reason"),
        "sample_idx": plain["sample_idx"],
    }
    return {
        "kind": "sample",
        "scope": {key: plain[key] for key in _SCOPE},
        "sampling_session_id": plain["sampling_session_id"],
        "seq_id": plain["seq_id"],
        "model_path": plain["policy_version"],
        "sampling_params": metadata.get("sampling_params"),
        "prompt_tokens": parsed["prompt_tokens"],
        "samples": [sample],
        "status": metadata.get("status", "ok"),
    }


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
