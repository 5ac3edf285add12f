"""Write ``run.toml``, or hold what is declared now against the one that is there."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError, UsageError
from mismatch_probe.log.files import put
from mismatch_probe.readers.settings import read_toml
from mismatch_probe.run import CheckpointPattern


def declare(run_dir: Path, settings: dict[str, Any]) -> int | None:
    """Make ``run.toml`` say ``settings``; what is there and not given stays, comments too.

    Returns:
        ``vocab_size`` as the file declares it.

    Raises:
        UsageError: an unknown key, a value of the wrong kind, or one that differs from the file's.
        OSError: the disk refuses.
    """
    path = run_dir / "run.toml"
    given = {key: _plain(value) for key, value in settings.items() if value is not None}
    text = _completed(path, given)
    if not path.is_file():
        try:
            put(path, partial(_write, text, path))
        except FileExistsError:
            text = _completed(path, given)  # another rank was faster; hold ours against its
    if text != path.read_text(encoding="utf-8"):
        put(path, partial(_write, text, path), replace=True)
    return _check(path, path)


def _write(text: str, path: Path, temporary: Path) -> None:
    temporary.write_text(text, encoding="utf-8")
    _check(temporary, path)


def _check(file: Path, path: Path) -> int | None:
    """Read the file as a reader would, and name it ``path`` where it is wrong."""
    try:
        declared = read_toml(file)
        for key in ("checkpoints", "sampler_checkpoints"):
            if key in declared:
                CheckpointPattern(path.parent, declared[key])
    except (BadFileError, ValueError) as error:
        raise UsageError(f"{path}: {str(error).removeprefix(f'{file}: ')}") from None
    return declared.get("vocab_size")


def _completed(path: Path, given: dict[str, Any]) -> str:
    """The file's text, with what it does not say yet added at its end."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        there = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: not readable as TOML ({error}). Mend the file") from None
    for key, value in given.items():
        if key in there and there[key] != value:
            raise UsageError(
                f"{path}: {key} is {there[key]!r} there and {value!r} here. "
                "Give the run's own value, or write to another run_dir"
            )
    added = "".join(f"{key} = {_toml(key, value)}\n" for key, value in given.items() if key not in there)
    return text + ("\n" if added and text and not text.endswith("\n") else "") + added


def _plain(value: Any) -> Any:
    """numpy scalars, tuples and paths as what TOML holds."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _toml(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml(key, item) for item in value)}]"
    raise UsageError(f"run.toml: {key} cannot be a {type(value).__name__}")
