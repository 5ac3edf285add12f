"""config.json of a checkpoint, and how two of them differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints.files import read_json
from mismatch_probe.checkpoints.tensors import config_dir
from mismatch_probe.errors import CheckpointError

Config = dict[str, Any] | None


@dataclass(frozen=True)
class ConfigDifference:
    """A field of config.json; ``value_a`` or ``value_b`` is its JSON text, None where the file lacks the field."""

    field: str
    value_a: str | None
    value_b: str | None


def read_config(path: Path, base: Path | None = None) -> Config:
    """config.json of a checkpoint or of its base, None without one.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    try:
        folder = config_dir(path, base)
    except CheckpointError:
        return None
    return read_json(folder / "config.json")


def config_differences(a: Config, b: Config) -> tuple[ConfigDifference, ...]:
    """Fields of unequal value, nested ones with dots in their names; none where a config is absent."""
    if a is None or b is None:
        return ()
    flat_a, flat_b = _flat(a), _flat(b)
    fields = sorted(field for field in {*flat_a, *flat_b} if flat_a.get(field) != flat_b.get(field))
    return tuple(ConfigDifference(field, flat_a.get(field), flat_b.get(field)) for field in fields)


def ties_head(config: Config) -> bool | None:
    """Whether the config says that head and embedding are one tensor; None where it does not say."""
    if config is None:
        return None
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return tied if isinstance(tied, bool) else None


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields.update(_flat(value, f"{prefix}{name}."))
        else:
            fields[prefix + name] = json.dumps(value, ensure_ascii=False)
    return fields
