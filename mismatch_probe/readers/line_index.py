"""Where each step's lines lie in JSONL files that hold several steps, so that a step is loaded without the others."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mismatch_probe.readers.files import read_bytes

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """One line: ``number`` counts from 1, ``unfinished`` when it ends the file without a newline."""

    file: Path
    number: int
    start: int
    length: int
    unfinished: bool


def scan(file: Path, cut: Callable[[bytes], int]) -> Iterator[tuple[Line, bytes]]:
    """Each line that is not blank, with its bytes, read one after another.

    ``cut(line)`` says where a second record begins in a line whose first was never finished (a writer that died, and
    one that appended after it), 0 where there is none; the two are yielded apart, under one number.

    Raises:
        BadFileError: the file cannot be read or unpacked.
    """
    with _opened(file) as stream:
        at = 0
        for number, raw in enumerate(stream, 1):
            start, at = at, at + len(raw)
            if start == 0 and raw.startswith(_BOM):
                start, raw = len(_BOM), raw[len(_BOM) :]
            # NUL bytes at the end are a file system's filler after a crash: blank.
            if not raw.strip(b" \t\r\n\0"):
                continue
            unfinished = not raw.endswith(b"\n")
            second = cut(raw)
            if second:
                yield Line(file, number, start, second, True), raw[:second]
            yield Line(file, number, start + second, len(raw) - second, unfinished), raw[second:]


def contents(lines: list[Line]) -> Iterator[tuple[Line, bytes]]:
    """The bytes of lines that ``scan`` found, in the order given; each file is opened once for a run of its lines.

    Raises:
        BadFileError: a file cannot be read or unpacked.
    """
    opened: BinaryIO | None = None
    current: Path | None = None
    try:
        for line in lines:
            if line.file != current or opened is None:
                if opened is not None:
                    opened.close()
                opened, current = _opened(line.file), line.file
            opened.seek(line.start)
            yield line, opened.read(line.length)
    finally:
        if opened is not None:
            opened.close()


def _opened(file: Path) -> BinaryIO:
    """A plain file as it is, so that it is never held as a whole; a packed one has to be."""
    if file.suffix not in (".gz", ".zst"):
        try:
            return file.open("rb")
        except OSError:
            pass  # read_bytes says what is wrong
    return io.BytesIO(read_bytes(file))
