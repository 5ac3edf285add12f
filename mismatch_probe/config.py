"""Thresholds from ``mismatch-probe.toml`` or ``[tool.mismatch-probe]``, nearest folder first."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError, UsageError
from mismatch_probe.stats.breakdown import DEFAULT_LEVEL, DEFAULT_THRESHOLD, LEVELS


@dataclass(frozen=True)
class Thresholds:
    """What the gate checks; None switches a check off.

    ``min_ess``: lowest ESS of the lag at ``ess_level``, at any step. ``max_discrepancy_k3``: highest k3 of D,
    nats. ``max_prefix_kl``: highest prefix KL(pi_s || pi), nats. ``max_mass_error``: largest |mean e^D - 1| whose
    interval excludes 0. ``max_bias_tv``: highest score bias of the lag or the discrepancy.
    """

    ess_level: str = DEFAULT_LEVEL
    min_ess: float | None = DEFAULT_THRESHOLD
    max_discrepancy_k3: float | None = 0.02
    max_prefix_kl: float | None = None
    max_mass_error: float | None = None
    max_bias_tv: float | None = None


KEYS = tuple(field.name for field in fields(Thresholds))


def load_thresholds(start: Path, config: Path | None, given: dict[str, Any]) -> tuple[Thresholds, str]:
    """Thresholds and where the file's part came from; options win over the file, the file over the defaults.

    Args:
        start: folder from which parents are searched.
        config: a file named by the user, instead of the search.
        given: options by key; None = not given.

    Raises:
        BadFileError: the file cannot be parsed, or has an unknown key or a wrong value.
        UsageError: an option has a wrong value.
    """
    file, table = (config, _table(config)) if config is not None else _search(start)
    for key, value in table.items():
        assert file is not None
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(KEYS)}"
            raise BadFileError(file, None, f"unknown key {key!r}", remedy)
        problem = _problem(key, value)
        if problem:
            raise BadFileError(file, None, f"{key} = {value!r} {problem}", "Mend the value")
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        problem = _problem(key, value)
        if problem:
            raise UsageError(f"--{key.replace('_', '-')} {value}: {problem}")
    thresholds = replace(Thresholds(), **{key: _off(value) for key, value in {**table, **chosen}.items()})
    return thresholds, "defaults" if file is None else str(file)


def _off(value: Any) -> Any:
    """``false`` in a file switches a check off."""
    return None if value is False else value


def _problem(key: str, value: Any) -> str:
    if key == "ess_level":
        return "" if value in LEVELS else f"is not one of {', '.join(LEVELS)}"
    if value is False:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return "is not a finite number of at least 0 (or false: off)"
    return "is above 1, which no ESS reaches" if key == "min_ess" and value > 1 else ""


def _search(start: Path) -> tuple[Path | None, dict[str, Any]]:
    folder = start.resolve()
    for parent in (folder, *folder.parents):
        own = parent / "mismatch-probe.toml"
        if own.is_file():
            return own, _table(own)
        project = parent / "pyproject.toml"
        if project.is_file() and "mismatch-probe" in _section(_parse(project), "tool"):
            return project, _table(project)
    return None, {}


def _table(file: Path) -> dict[str, Any]:
    table = _parse(file)
    return _section(_section(table, "tool"), "mismatch-probe") if file.name == "pyproject.toml" else table


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name, {})
    return section if isinstance(section, dict) else {name: section}


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--config {file}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadFileError(file, None, f"not readable as TOML ({error})", "Mend the file") from None
