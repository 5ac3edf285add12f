"""Exceptions and exit codes.

    MismatchProbeError            one line: what, where, how to put it right
    ├── UsageError            2   a wrong option, configuration key or combination of them
    ├── InputError            2   the run or the analysis cannot be read
    │   ├── BadFileError      2   a file that cannot be parsed, or a row that --strict refuses
    │   └── CheckpointError   2   weights that cannot be loaded as they are
    ├── OutputError           2   the output folder cannot be written
    ├── EngineError           2   the inference engine does not run, or does not give the model's log-probs
    └── NothingToJudgeError   5   everything was read and nothing could be compared

Any other exception is a fault of the program (exit code 3).
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

_LONGEST = 700


class ExitCode(IntEnum):
    """What the process returns; stable, for scripts and CI."""

    OK = 0
    GATE_FAILED = 1
    USAGE = 2
    INTERNAL = 3
    NOTHING_TO_JUDGE = 5
    INTERRUPTED = 130


class MismatchProbeError(Exception):
    """Base of all errors that a user can put right; the text is shown as one line."""

    exit_code = ExitCode.USAGE


class UsageError(MismatchProbeError):
    """A wrong option, configuration key, or combination of them."""


class InputError(MismatchProbeError):
    """The run directory or the analysis folder cannot be read."""


class BadFileError(InputError):
    """A file that cannot be parsed, or a row refused under --strict.

    Args:
        file: the file, as the user would name it.
        row: 1-based line or row, None when the whole file is meant.
        reason: what is wrong.
        remedy: what the user can do.
    """

    def __init__(self, file: Path | str, row: int | None, reason: str, remedy: str) -> None:
        self.reason = reason
        where = f"{file}" if row is None else f"{file}, row {row}"
        super().__init__(f"{where}: {reason}. {remedy}")


class CheckpointError(InputError):
    """Weights that cannot be loaded as they are on disk.

    Names in a damaged file can be anything: the text is kept to one printable line, long ones cut in the middle.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_one_line(text))


class EngineError(MismatchProbeError):
    """The inference engine does not run, or its log-probs are not those of the model; kept to one line."""

    def __init__(self, text: str) -> None:
        super().__init__(_one_line(text))


class OutputError(MismatchProbeError):
    """The output folder cannot be written."""


class NothingToJudgeError(MismatchProbeError):
    """Everything was read, and there was nothing to compare."""

    exit_code = ExitCode.NOTHING_TO_JUDGE


def _one_line(text: str) -> str:
    """Text that others had a hand in, printable and of bounded length, cut in the middle."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 250]} ... {line[-245:]}"


def in_a_line(error: BaseException) -> str:
    """Kind and first line of an exception that is not one of ours."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
