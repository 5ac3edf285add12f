"""Where verl's dumps lie, by name; whether they are verl's is judged by their content elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatch_probe.readers.files import parse_json, read_bytes
from mismatch_probe.readers.verl_rows import Dump

_FOLDER = re.compile(r"GBS\d+_N(\d+)_in\d+_out\d+")
_SINGLE = re.compile(r".*_GBS\d+__N(\d+)")
_NUMBER = re.compile(r"[0-9]{1,9}")
_GENERATION = re.compile(r"genstep_([0-9]{1,9})")
_TEXT = re.compile(r"([0-9]{1,9})\.jsonl(?:\.gz|\.zst)?")
_TEXT_KEYS = {"input", "output", "score", "step"}
_FIRST_LINE = 1 << 24


def dump_folders(path: Path) -> list[Path]:
    """Directories with dump files: the given one, and those named ``GBS*`` up to three levels below it."""
    below = (entry for depth in ("", "*/", "*/*/") for entry in sorted(path.glob(f"{depth}GBS*_N*_in*_out*")))
    singles = sorted({entry.parent for depth in ("", "*/") for entry in path.glob(f"{depth}*_GBS*__N*")})
    candidates = [path, *(entry for entry in below if _FOLDER.fullmatch(entry.name)), *singles]
    return [folder for folder in dict.fromkeys(candidates) if dumps_in(folder)]


def dumps_in(folder: Path) -> list[Dump]:
    """Dump files of one directory, by step and part."""
    named = _FOLDER.fullmatch(folder.name)
    size = int(named.group(1)) or None if named else None
    trained = _recorded_steps(folder)
    found: list[Dump] = []
    for entry in _entries(folder):
        single, generation = _SINGLE.fullmatch(entry.name), _GENERATION.fullmatch(entry.name)
        if entry.is_file() and single:
            found.append(Dump(1, entry, "dp", group_size=int(single.group(1)) or None))
        elif entry.is_dir() and _NUMBER.fullmatch(entry.name):
            found += _dumps_of_step(entry, size)
        elif entry.is_dir() and generation and (entry / "gen_batch.dp").is_file():
            part = int(generation.group(1))
            step = _meta(entry, "global_steps", trained.get(part, part))
            found.append(Dump(step, entry / "gen_batch.dp", "dp", part, size, (entry / "meta.json").is_file()))
    return sorted(found, key=lambda dump: (dump.step, dump.part or 0, dump.file))


def text_files(path: Path) -> list[Path]:
    """Files ``{step}.jsonl`` of a text dump, here or one level below, when the first one's first line is verl's."""
    for depth in ("", "*/"):
        files = [entry for entry in sorted(path.glob(f"{depth}*.jsonl*")) if _TEXT.fullmatch(entry.name)]
        if any(_is_text(file) for file in files[:3]):
            return files
    return []


def _entries(folder: Path) -> list[Path]:
    """What lies in a directory; nothing where it cannot be looked into."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _dumps_of_step(entry: Path, size: int | None) -> Iterator[Dump]:
    step = int(entry.name)
    inner = [child for child in _entries(entry) if child.is_dir() and _NUMBER.fullmatch(child.name)]
    parts = [(int(child.name), child) for child in inner]
    tq = [(part, child / "tq_batch.pt") for part, child in [(0, entry), *parts] if (child / "tq_batch.pt").is_file()]
    for part, file in tq:
        yield Dump(step, file, "tq", part, size, (file.parent / "meta.json").is_file())
    file = entry / "gen_batch.dp"
    if not tq and file.is_file():
        yield Dump(step, file, "dp", None, size, (entry / "meta.json").is_file())


def _meta(folder: Path, key: str, default: int) -> int:
    try:
        meta: Any = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError, RecursionError):
        return default
    value = meta.get(key) if isinstance(meta, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _recorded_steps(folder: Path) -> dict[int, int]:
    """Training step of each generation, from ``train_step__gen_step.txt``; other lines are passed over."""
    try:
        lines = (folder / "train_step__gen_step.txt").read_text().splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.split() for line in lines)
    return {int(pair[1]): int(pair[0]) for pair in pairs if len(pair) == 2 and all(map(_NUMBER.fullmatch, pair))}


def _is_text(file: Path) -> bool:
    try:
        if file.suffix == ".jsonl":
            with file.open("rb") as stream:
                line = stream.readline(_FIRST_LINE)
        else:
            line = read_bytes(file).split(b"\n", 1)[0]
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except Exception:
        return False  # whatever is in there, it is not a text dump that can be named
    return isinstance(row, dict) and set(row) >= _TEXT_KEYS and isinstance(row["input"], str)
