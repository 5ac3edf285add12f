"""Files that are whole or absent: temporary name, fsync, a link that never overwrites, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

_HOST = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()) or "host"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.\d+\.tmp")
_NUMBER = itertools.count()
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP)


def temporary_name(path: Path) -> Path:
    """Hidden name beside ``path``, never given twice, that says which process is writing."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{next(_NUMBER)}.tmp")


def put(path: Path, write: Callable[[Path], object], *, replace: bool = False) -> None:
    """Let ``write(temporary)`` make the file, then give it its name.

    Raises:
        FileExistsError: ``path`` exists and ``replace`` is false.
        OSError: the disk refused; nothing is left behind.
    """
    temporary = temporary_name(path)
    try:
        write(temporary)
        _sync(temporary)
        if replace:
            temporary.replace(path)
        else:
            _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Some network file systems refuse to sync a directory; the file itself is safe by then.
    with contextlib.suppress(OSError):
        _sync(path.parent)


def clean(folder: Path, mine: Callable[[str], bool]) -> list[str]:
    """Remove unfinished files of processes that are gone; ``mine(name)`` says which final names are this writer's.

    Returns:
        the final names that were never reached.
    """
    removed = []
    for entry in sorted(folder.iterdir()):
        match = _TEMPORARY.fullmatch(entry.name)
        if match and mine(match["name"]) and not (match["host"] == _HOST and _alive(int(match["pid"]))):
            entry.unlink(missing_ok=True)
            removed.append(match["name"])
    return removed


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links: the check and the rename are two steps, and one writer owns the name.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
