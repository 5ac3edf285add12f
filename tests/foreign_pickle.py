"""Classes that stand for a framework's, and one that means harm: importable, so that pickle can name them."""

from __future__ import annotations

import os


class Batch:
    def __init__(self, batch: dict) -> None:
        self.batch = batch


class ListOf(list):
    pass


class Touch:
    """Unpickling it for real creates a directory."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> object:
        return os.mkdir, (self.target,)
