"""The config files that frameworks save with a run: YAML, TOML or JSON, looked up by dotted path."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError

_MISSING = object()
_LARGEST = 16 << 20


def read_config(file: Path) -> dict[str, Any]:
    """Read one config file; its suffix says what it is.

    Raises:
        BadFileError: it cannot be parsed, or it is no table.
    """
    try:
        if file.stat().st_size > _LARGEST:
            raise ValueError("larger than any config")
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".toml":
            table: Any = tomllib.loads(text)
        elif file.suffix == ".json":
            table = json.loads(text)
        else:
            import yaml

            # The safe loader builds plain values only, whatever tags the file carries.
            table = _yaml(yaml, text)
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadFileError(file, None, f"cannot be parsed ({reason})", "Restore it, or move it away") from None
    if not isinstance(table, dict):
        raise BadFileError(file, None, "holds no table of keys", "Restore it, or move it away")
    return table


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """Value at ``a.b.c``, None where a part is absent or the value is null."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part, _MISSING)
        if value is _MISSING:
            return None
    return value


def settings_in(config: Mapping[str, Any], name: str, keys: Iterable[tuple[str, str]]) -> dict[str, tuple[Any, str]]:
    """What a config says of our settings: (key, dotted path) pairs, the first path that has a value wins.

    Returns:
        {key: (value, "NAME: dotted.path")}, as ``settle`` takes it; keys without a value are left out.
    """
    found: dict[str, tuple[Any, str]] = {}
    for key, dotted in keys:
        value = lookup(config, dotted)
        if value is not None and key not in found:
            found[key] = (value, f"{name}: {dotted}")
    return found


def _yaml(yaml: Any, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None
