"""The beginning of a text file, for telling whose it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


def first_line(file: Path, limit: int = 1 << 20) -> bytes:
    """The first line that is not blank, at most ``limit`` bytes of it; b"" where there is none or it cannot be read."""
    try:
        with pa.input_stream(str(file), compression=_COMPRESSION.get(file.suffix)) as stream:
            head = bytes(stream.read(limit))
    except (OSError, pa.ArrowException):
        return b""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0].rstrip()
