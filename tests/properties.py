"""Which public names of the statistics have a property test, and the arrays that such tests draw."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import is_hypothesis_test
from hypothesis import strategies as st

from mismatch_probe import stats
from mismatch_probe.stats.ratios import Levels

Test = TypeVar("Test", bound=Callable[..., Any])
COVERED: dict[str, list[str]] = {}
"""Public name, module and all -> property tests of it."""


def name_of(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def covers(*things: Any) -> Callable[[Test], Test]:
    """Enter a property test as one of these functions and classes. It stands above ``given``."""

    def enter(test: Test) -> Test:
        assert is_hypothesis_test(test), f"{test.__name__} draws no examples"
        for thing in things:
            COVERED.setdefault(name_of(thing), []).append(test.__name__)
        return test

    return enter


def public_names() -> set[str]:
    """Every function and class that a module of ``stats`` defines without an underscore."""
    names = set()
    for found in pkgutil.walk_packages(stats.__path__, f"{stats.__name__}."):
        module = importlib.import_module(found.name)
        for name, thing in vars(module).items():
            if not name.startswith("_") and callable(thing) and getattr(thing, "__module__", "") == module.__name__:
                names.add(name_of(thing))
    return names


SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([0.0, 1e-6, 0.01, 0.3, 3.0, 100.0, 1e4])
"""Sizes of log-ratios, nats: from none to where weights have no float64."""


class Case:
    """Tokens of a step, drawn by seed: log-ratios of some scale with nulls, their sequences and prompt groups."""

    def __init__(self, seed: int, scale: float = 0.3, nulls: float = 0.1) -> None:
        self.rng = np.random.default_rng(seed)
        groups = int(self.rng.integers(2, 7))
        self.group_of_sequence = np.repeat(np.arange(groups), self.rng.integers(1, 5, size=groups))
        lengths = self.rng.integers(1, 7, size=len(self.group_of_sequence))
        self.sequence = np.repeat(np.arange(len(lengths)), lengths)
        self.n, self.groups = len(self.sequence), groups
        self.scale, self.nulls = scale, nulls
        self.x = self.values()

    def values(self) -> np.ndarray:
        """Another value a token."""
        x = self.scale * self.rng.uniform(-1, 1, size=self.n)
        x[self.rng.random(self.n) < self.nulls] = np.nan
        return x

    @property
    def levels(self) -> Levels:
        return Levels(self.sequence, self.group_of_sequence)

    @property
    def group(self) -> np.ndarray:
        return self.group_of_sequence[self.sequence]

    def order(self) -> np.ndarray:
        """A permutation of the tokens."""
        return self.rng.permutation(self.n)

    def renamed(self) -> np.ndarray:
        """New numbers for the groups: ``renamed()[old]``."""
        return self.rng.permutation(self.groups)


def same(one: Any, other: Any, rel: float = 1e-9, absolute: float = 1e-12) -> bool:
    """Equal to rounding; null where null."""
    return bool(np.allclose(one, other, rtol=rel, atol=absolute, equal_nan=True))
