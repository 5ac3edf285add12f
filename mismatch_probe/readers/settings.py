"""``run.toml``: what a run declares of itself."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError
from mismatch_probe.run import Settings

_KEYS = tuple(f.name for f in fields(Settings) if f.name != "assumed")
_DECLARED = ("temperature", "top_p", "top_k", "logprobs_mode", "trainer_dtype")
"""Keys whose default is a claim about the run: ``inspect`` marks it as assumed."""


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _token_ids(value: Any) -> bool:
    return _integer(value) or (isinstance(value, list) and all(_integer(item) for item in value))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _number(v) and v > 0, "a number above 0"),
    "top_p": (lambda v: _number(v) and 0 < v <= 1, "a number in (0, 1]"),
    "top_k": (_integer, "an integer (-1 or 0: off)"),
    "logprobs_mode": (lambda v: v in ("processed", "raw"), '"processed" or "raw"'),
    "trainer_dtype": (lambda v: v in ("float64", "float32", "float16", "bfloat16"), "a floating-point dtype by name"),
    "vocab_size": (lambda v: _integer(v) and v > 0, "an integer above 0"),
    "eos_token_id": (_token_ids, "an integer or a list of integers"),
    "pad_token_id": (_integer, "an integer"),
    "max_response_length": (lambda v: _integer(v) and v > 0, "an integer above 0"),
}


def read_settings(path: Path) -> Settings:
    """Read ``run.toml``.

    Raises:
        BadFileError: not TOML, an unknown key (the nearest known one is named) or a value of the wrong kind.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadFileError(path, None, f"not readable as TOML ({error})", "Mend the file") from None
    for key, value in table.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(_KEYS)}"
            raise BadFileError(path, None, f"unknown key {key!r}", remedy)
        fits, expected = _CHECKS.get(key, (lambda v: isinstance(v, str), "a string"))
        if not fits(value):
            raise BadFileError(path, None, f"{key} = {value!r} is not {expected}", "Mend the value")
    if "eos_token_id" in table:
        ids = table["eos_token_id"]
        table["eos_token_id"] = tuple(ids) if isinstance(ids, list) else (ids,)
    for key in ("temperature", "top_p"):
        if key in table:
            table[key] = float(table[key])
    return Settings(**table, assumed=frozenset(key for key in _DECLARED if key not in table))
