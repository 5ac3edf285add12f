"""What a run declares of itself: options, ``run.toml``, the framework's own config files, in that order."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError, UsageError
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.run import CheckpointPattern, Settings

KEYS = tuple(f.name for f in fields(Settings) if f.name != "sources")

Found = Mapping[str, tuple[Any, str]]
"""Settings by key, each with where it was found: {"temperature": (0.7, "config.yaml: policy.temperature")}."""


def settle(path: Path, options: ReadOptions, found: Found | None = None) -> Settings:
    """Settings of the run directory ``path``.

    An option (``--set KEY=VALUE``) wins over ``run.toml``, and that over ``found``, what the framework's own files say.
    What nobody says keeps its default and is listed in ``Settings.assumed``.

    Raises:
        BadFileError: ``run.toml``, or a value in ``found``, is wrong.
        UsageError: an option is.
    """
    values, sources = {}, {}
    for key, (value, where) in (found or {}).items():
        try:
            values[key] = checked(key, value)
        except ValueError as error:
            raise BadFileError(where, None, str(error), f"Override it with --set {key}=VALUE") from None
        sources[key] = where
    toml = path / "run.toml"
    if toml.is_file():
        declared = read_toml(toml)
        values |= declared
        sources |= dict.fromkeys(declared, "run.toml")
    options_given = _parse(options.overrides)
    values |= options_given
    sources |= dict.fromkeys(options_given, "--set")
    return Settings(**values, sources=sources)


def declared_checkpoints(path: Path, settings: Settings) -> CheckpointPattern | None:
    """Where ``checkpoints`` says the weights are, None where nobody declared it."""
    return CheckpointPattern(path, settings.checkpoints) if settings.checkpoints else None


def read_toml(path: Path) -> dict[str, Any]:
    """Read ``run.toml``.

    Raises:
        BadFileError: not TOML, an unknown key (the nearest known one is named) or a value of the wrong kind.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise BadFileError(path, None, f"not readable as TOML ({error})", "Mend the file") from None
    for key in table:
        if key not in KEYS:
            raise BadFileError(path, None, f"unknown key {key!r}", _nearest(key))
    try:
        return {key: checked(key, value) for key, value in table.items()}
    except ValueError as error:
        raise BadFileError(path, None, str(error), "Mend the value") from None


def meaning_is_settled(settings: Settings) -> bool:
    """True when it is known what logged log-probs are of: temperature is stated as 1, or it and the mode are."""
    stated = {"temperature", "logprobs_mode"} & set(settings.sources)
    return len(stated) == 2 or ("temperature" in stated and settings.temperature == 1.0)


def checked(key: str, value: Any) -> Any:
    """The value of one key in the form that Settings holds.

    Raises:
        ValueError: it is of the wrong kind; the text says what is expected.
    """
    fits, expected = _CHECKS.get(key, (lambda v: isinstance(v, str), "a string"))
    if not fits(value):
        raise ValueError(f"{key} = {value!r} is not {expected}")
    if key == "about":
        return tuple(value)
    if key == "eos_token_id":
        return tuple(value) if isinstance(value, list) else (value,)
    return float(value) if key in ("temperature", "top_p") else value


def _parse(overrides: tuple[str, ...]) -> dict[str, Any]:
    values = {}
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or key not in KEYS:
            raise UsageError(f"--set {text}: {'unknown key' if equals else 'not KEY=VALUE'}. {_nearest(key)}")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw.strip()  # a bare word is a string
        try:
            values[key] = checked(key, value)
        except ValueError as error:
            raise UsageError(f"--set {text}: {error}") from None
    return values


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(KEYS)}"


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _token_ids(value: Any) -> bool:
    return _integer(value) or (isinstance(value, list) and all(_integer(item) for item in value))


def _pattern(value: Any) -> bool:
    try:
        CheckpointPattern(Path(), value)
    except (TypeError, ValueError):
        return False
    return True


_PATTERN = "a path that holds {version} once, as in 'checkpoints/step_{version:06d}'"
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
    "checkpoints": (_pattern, _PATTERN),
    "sampler_checkpoints": (_pattern, _PATTERN),
    "sampler_lag": (lambda v: _integer(v) and v >= 0, "an integer, 0 or more"),
    "sampler_dtype": (
        lambda v: v in ("float32", "float16", "bfloat16", "fp8", "int8", "fp4"),
        "float32, float16, bfloat16, fp8, int8 or fp4",
    ),
    "about": (lambda v: isinstance(v, list | tuple) and all(isinstance(item, str) for item in v), "a list of strings"),
    "group_size": (lambda v: _integer(v) and v > 0, "an integer above 0"),
}
