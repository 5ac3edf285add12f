"""Where the checkpoints of a run lie, by version."""

from __future__ import annotations

import re
from pathlib import Path


class CheckpointPattern:
    """A path with ``{version}`` (``{version:06d}``) in it, below the run directory.

    A framework that saves after the update of step N, counted from 0, under the name N, is one ``ahead``: its
    directory N holds version N + 1.

    Raises:
        ValueError: the pattern holds no ``{version}`` or another field.
    """

    def __init__(self, root: Path, pattern: str, ahead: int = 0) -> None:
        self.root, self.pattern, self.ahead = root, pattern, ahead
        if len(re.findall(r"[{}]", pattern)) != 2 or not re.search(r"\{version(:\d*d?)?\}", pattern):
            raise ValueError(f"{pattern!r} must hold {{version}} once, as in 'checkpoints/step_{{version:06d}}'")

    def path(self, version: int) -> Path:
        """Where the weights of ``version`` belong, whether or not they are there."""
        return self.root / self.pattern.format(version=version - self.ahead)

    def versions(self) -> list[int]:
        """Versions whose directory or file exists, ascending."""
        glob = re.sub(r"\{version[^}]*\}", "*", self.pattern)
        matcher = re.compile(re.sub(r"\\\{version[^}]*\\\}", r"(\\d+)", re.escape(self.pattern)) + "$")
        found = (matcher.search(path.as_posix()) for path in self._matching(glob))
        return sorted(int(match.group(1)) + self.ahead for match in found if match)

    def _matching(self, glob: str) -> list[Path]:
        pattern = Path(glob)
        if pattern.is_absolute():
            return list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
        return list(self.root.glob(glob))
