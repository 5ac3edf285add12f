"""The beginning of a text file, to tell whose it is without reading the rest. Nothing here raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from mismatch_probe.readers.files import parse_json

TEXT_ENDINGS = ("", ".gz", ".zst")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_CHUNK = 1 << 16
_LONGEST = 256 << 20
_BLANK = b" \t\r\n\0"


def first_line(file: Path, limit: int = 1 << 20) -> bytes:
    """The first line that is not blank, at most ``limit`` bytes of it; ``.gz`` and ``.zst`` are unpacked as far.

    b"" where there is none or the file cannot be read.
    """
    read = b""
    try:
        with pa.input_stream(str(file), compression=_COMPRESSION.get(file.suffix)) as stream:
            while len(read) < limit and b"\n" not in read:
                # Doubling: a line of megabytes is not put together out of a thousand copies.
                chunk = bytes(stream.read(max(_CHUNK, len(read))))
                if not chunk:
                    break
                read = (read + chunk).removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
    except (OSError, pa.ArrowException):
        pass
    return read[:limit].partition(b"\n")[0].rstrip(_BLANK)


def first_json(file: Path) -> Any:
    """The JSON value on the first line that is not blank; None where there is none or it is no JSON."""
    try:
        return parse_json(first_line(file, _LONGEST))
    except ValueError:
        return None
