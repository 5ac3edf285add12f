"""Digest of a checkpoint's whole content, which is read ahead of the scoring that will need it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mismatch_probe.checkpoints import peft
from mismatch_probe.checkpoints.describe import SETTINGS_FILES, weight_files
from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.checkpoints.tensors import config_dir
from mismatch_probe.errors import MismatchProbeError

_BLOCK = 1 << 22
_SETTLED = 3.0
"""Seconds after which a file that has not changed is taken as written: clocks of file systems are coarse."""


class Fingerprints:
    """Digests of checkpoints by directory; each is read once, in a thread, so that its files are in the page cache when
    they are loaded.

    Args:
        memo: file that remembers digests of files that have not changed since (size, times, inode); None for none.
        base: the model below checkpoints that are adapters.
    """

    def __init__(self, memo: Path | None = None, base: Path | None = None) -> None:
        self._memo, self._base = memo, base
        self._known = _read_memo(memo)
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "checkpoint-reader")
        self._digests: dict[Path, Future[str]] = {}
        self._closed = threading.Event()

    def ahead(self, paths: list[Path]) -> None:
        """Begin to read these checkpoints, in the order given."""
        if self._closed.is_set():
            self._closed = threading.Event()
        for path in paths:
            if path not in self._digests:
                self._digests[path] = self._reader.submit(self._digest, path)

    def of(self, path: Path) -> str | None:
        """Digest of the configuration and of every byte of the weights, hexadecimal; None where it cannot be read."""
        self.ahead([path])
        try:
            return self._digests[path].result()
        # What is wrong with it is said when it is loaded.
        except (OSError, MismatchProbeError):
            return None

    def close(self) -> None:
        """Stop reading, and write what was learned; asked again it begins to read again."""
        self._closed.set()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._reader = ThreadPoolExecutor(1, "checkpoint-reader")
        self._digests = {path: found for path, found in self._digests.items() if found.done() and not found.cancelled()}
        if self._memo is not None:
            part = self._memo.with_name(f".{self._memo.name}.{os.getpid()}")
            with self._lock:
                text = json.dumps(self._known, sort_keys=True)
            try:
                part.write_text(text)
                os.replace(part, self._memo)
            except OSError:  # the next run reads the files again
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)

    def _digest(self, path: Path) -> str:
        layout, root = find(path)
        mark = hashlib.blake2b(digest_size=20)
        roots = [root]
        if layout is Layout.PEFT:
            roots.append(find(peft.base_of(root, self._base))[1])
        for folder in roots:
            for settings in (folder / name for name in SETTINGS_FILES):
                mark.update(settings.read_bytes() if settings.is_file() else b"-")
            for file in weight_files(folder):
                mark.update(f"{file.name}:{self._file(file)}".encode())
        if layout is not Layout.GGUF:
            # The configuration may lie outside the weights' folder, and code of the model's own beside it.
            described = config_dir(path, self._base)
            for file in (
                described / "config.json",
                *sorted(described.glob("*.py")),
                *sorted(root.glob("*.index.json")),
            ):
                mark.update(file.name.encode() + file.read_bytes() if file.is_file() else b"-")
        return mark.hexdigest()

    def _file(self, file: Path) -> str:
        stat = file.stat()
        facts = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"
        key = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        with self._lock:
            if key in self._known:
                return self._known[key]
        mark = hashlib.blake2b(digest_size=20)
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                mark.update(block)
                # The interpreter waits for its threads: a file of many gigabytes must not hold up its end.
                if self._closed.is_set():
                    raise InterruptedError(f"{file}: nobody waits for its digest any more")
        after = file.stat()
        settled = time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED and after.st_ctime_ns == stat.st_ctime_ns
        if settled:
            with self._lock:
                self._known[key] = mark.hexdigest()
        return mark.hexdigest()


def _read_memo(memo: Path | None) -> dict[str, str]:
    try:
        found = json.loads(memo.read_text()) if memo is not None else {}
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
