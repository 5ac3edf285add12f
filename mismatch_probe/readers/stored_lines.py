"""Lines of large JSONL files by where they lie: a step's lines are read again when it is loaded, never held."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.files import parse_json, read_bytes
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder

# NUL bytes are a file system's filler after a crash.
_BLANK = b" \t\r\n\0"


class Line(NamedTuple):
    """One line: its file, 1-based number, byte offset and length; ``torn`` says why a last line is unfinished."""

    file: Path
    number: int
    start: int
    length: int
    torn: str = ""


def scan(file: Path) -> Iterator[tuple[Line, bytes]]:
    """Every line that is not blank, with its text.

    Raises:
        BadFileError: the file cannot be read or unpacked.
    """
    with _open(file) as stream:
        start = 0
        for number, raw in enumerate(stream, 1):
            text = raw.removeprefix(b"\xef\xbb\xbf").strip(_BLANK)
            if text:
                # A writer that was killed leaves its last line unfinished: cut short and without a newline.
                torn = "" if raw.endswith(b"\n") else _why_bad(text)
                yield Line(file, number, start, len(raw), torn), text
            start += len(raw)


def values(lines: list[Line], builder: RowBuilder, options: ReadOptions) -> Iterator[tuple[Line, Any]]:
    """Parse the lines of one step; torn and bad ones go to the builder.

    Raises:
        BadFileError: a line that is no JSON and not torn, unless ``skip_bad_rows`` is set.
    """
    for file in dict.fromkeys(line.file for line in lines):
        with _open(file) as stream:
            for line in lines:
                if line.file != file:
                    continue
                if line.torn:
                    builder.torn(file, line.number, line.torn)
                    continue
                stream.seek(line.start)
                text = stream.read(line.length).removeprefix(b"\xef\xbb\xbf").strip(_BLANK)
                try:
                    value = parse_json(text)
                except ValueError as error:
                    reason = f"not valid JSON ({str(error).splitlines()[0]})"
                    if not options.skip_bad_rows:
                        remedy = "Restore the file, or pass --skip-bad-rows to analyse the rest"
                        raise BadFileError(file, line.number, reason, remedy) from None
                    builder.reject(file, line.number, None, reason)
                else:
                    yield line, value


def _open(file: Path) -> io.BufferedIOBase:
    try:
        return io.BytesIO(read_bytes(file)) if file.suffix in (".gz", ".zst") else file.open("rb")
    except OSError as error:
        raise BadFileError(file, None, f"cannot be read ({error})", "Restore it, or check its permissions") from None


def _why_bad(text: bytes) -> str:
    try:
        parse_json(text)
    except ValueError as error:
        return f"not valid JSON ({str(error).splitlines()[0]})"
    return ""
