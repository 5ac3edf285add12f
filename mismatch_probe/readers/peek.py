"""The first line of a file, to recognise its format by content without reading the rest."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from mismatch_probe.readers.files import parse_json

TEXT_ENDINGS = ("", ".gz", ".zst")
_LONGEST = 256 << 20


def first_json(file: Path) -> Any:
    """The JSON value on a file's first line that is not blank; ``.gz`` and ``.zst`` are unpacked as far as needed.

    None where the file is empty, cannot be read, or its first line is no JSON: this never raises.
    """
    try:
        for line in _lines(file):
            text = line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n\0")
            if text:
                return parse_json(text)
    except (OSError, ValueError, EOFError):
        pass
    return None


def _lines(file: Path) -> list[bytes]:
    """The first few lines, so that blank ones at the top are passed over."""
    if file.suffix == ".zst":
        import pyarrow as pa

        try:
            with pa.input_stream(str(file), compression="zstd") as stream:
                return _split(stream)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None
    if file.suffix == ".gz":
        with gzip.open(file, "rb") as unpacked:
            return [unpacked.readline(_LONGEST) for _ in range(3)]
    with file.open("rb") as stream:
        return [stream.readline(_LONGEST) for _ in range(3)]


def _split(stream: Any) -> list[bytes]:
    read = b""
    while len(read) < _LONGEST and read.count(b"\n") < 3:
        chunk = stream.read(1 << 16)
        if not chunk:
            break
        read += chunk
    return read.split(b"\n")[:3]
