"""One field of a row -> the array or value that is kept, or a Misfit that says why it is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatch_probe.run import Bools, Floats, Ints


class Misfit(Exception):
    """Why one row does not fit."""


def _array(value: Any, key: str) -> Floats:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise Misfit(f"{key} holds values that are not numbers") from None
    return array


def integers(value: Any, key: str) -> Ints:
    """Integers of a flat list or array, (n,), in any signed dtype."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.ndim == 1:
        return value
    # Ids written as text, or true and false in their place, are a writer's mistake even where they look like numbers.
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds == {int} and min(value) > -(2**53) and max(value) < 2**53:
            return np.array(value, dtype=np.int64)
    else:
        kinds = {type(item) for item in np.asarray(value).ravel()[:1].tolist()}
    if kinds & {bool, str}:
        raise Misfit(f"{key} holds values that are not integers")
    array = _array(value, key)
    if array.ndim != 1:
        raise Misfit(f"{key} is not a flat list")
    # 2^53: beyond it a float64 no longer holds every integer, and no id is that large.
    if not bool((np.isfinite(array) & (array == np.floor(array)) & (np.abs(array) < 2**53)).all()):
        raise Misfit(f"{key} holds values that are not integers")
    return array.astype(np.int64)


def floats(value: Any, key: str, length: int, scalar: bool = False) -> Floats | None:
    """Numbers, (length,), NaN = null; None where the field is absent. With ``scalar`` one number stands for all."""
    if value is None:
        return None
    array = _array(value, key)
    if scalar and array.ndim == 0:
        return np.full(length, float(array))
    if array.ndim != 1:
        raise Misfit(f"{key} is not a flat list")
    if len(array) != length:
        raise Misfit(f"{key} has {len(array)} values for {length} response tokens")
    return array


def mask_of(value: Any, length: int) -> Bools | None:
    """A mask of 0 and 1, (length,), as booleans; None where it is absent."""
    if isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (length,):
        return value
    mask = floats(value, "loss_mask", length)
    if mask is None:
        return None
    ones: Bools = mask == 1.0
    if not bool((ones | (mask == 0.0)).all()):
        raise Misfit("loss_mask holds values other than 0 and 1")
    return ones


def versions_of(value: Any, length: int) -> Ints | None:
    """A version for each token, (length,), from one or from as many; None where they are absent."""
    if value is None:
        return None
    versions = integers(np.atleast_1d(value) if np.ndim(value) == 0 else value, "sampler_version")
    if len(versions) == 1 and np.ndim(value) == 0:
        versions = np.repeat(versions, length)
    if len(versions) != length:
        raise Misfit(f"sampler_version has {len(versions)} values for {length} response tokens")
    if versions.min() < 0:
        raise Misfit(f"sampler_version holds the negative version {versions.min()}")
    return versions


def reward_of(value: Any) -> float:
    """A reward that is no number (a table of parts, say) is null: nothing but its mean is ever taken from it."""
    return float(value) if isinstance(value, int | float) else math.nan


def name_of(value: Any, key: str) -> str:
    """An id as text that can be written as UTF-8."""
    name = str(value)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Misfit(f"{key} is not valid text") from None
    return name
