"""Classes under a framework's own names, so that a test can pickle as the framework does without having it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def named(qualified: str, value: Any) -> Iterator[Any]:
    """``value`` (a class or function) importable as ``qualified`` ("package.module.name") while the block runs."""
    module, _, name = qualified.rpartition(".")
    value.__module__, value.__qualname__, value.__name__ = module, name, name
    parts = module.split(".")
    made = [".".join(parts[: n + 1]) for n in range(len(parts)) if ".".join(parts[: n + 1]) not in sys.modules]
    for part in made:
        sys.modules[part] = types.ModuleType(part)
    before = getattr(sys.modules[module], name, None)
    setattr(sys.modules[module], name, value)
    try:
        yield value
    finally:
        setattr(sys.modules[module], name, before)
        for part in made:
            del sys.modules[part]


class TouchesAFile:
    """A pickle of this creates ``path`` when its code is run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
