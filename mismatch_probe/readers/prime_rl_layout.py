"""Where a prime-rl run keeps what: dumps, checkpoints and configs below its output directory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.config_files import lookup, read_config, settings_in
from mismatch_probe.readers.files import Row, parse_json, read_bytes
from mismatch_probe.run import CheckpointPattern

Files = dict[int, list[Path]]

_STEP = re.compile(r"step_(\d{1,9})")
_JSONL = r"\.jsonl(?:\.gz|\.zst)?"
_EXPORT = re.compile(r"rank_\d+" + _JSONL)
_TRACES = re.compile(r"traces" + _JSONL)
_TEXT = re.compile(r"train_rollouts" + _JSONL)
_RANK = re.compile(r"rank_\d+\.bin")
_BATCH = re.compile(r"(?:train_)?rollouts\.bin")
_LONGEST_LINE = 256 << 20
_CHECKPOINTS = ("broadcasts/step_{version}", "weights/step_{version}", "checkpoints/step_{version}/weight")
_SHARDED = "checkpoints/step_{version}/trainer"


@dataclass
class Layout:
    """Files of each kind by step; ``flat`` are the exports that hold all steps."""

    root: Path
    exports: Files = field(default_factory=lambda: defaultdict(list))
    flat: list[Path] = field(default_factory=list)
    effective: Files = field(default_factory=lambda: defaultdict(list))
    arrived: Files = field(default_factory=lambda: defaultdict(list))
    evaluation: list[Path] = field(default_factory=list)
    ranks: Files = field(default_factory=lambda: defaultdict(list))
    batches: Files = field(default_factory=lambda: defaultdict(list))
    text: list[Path] = field(default_factory=list)

    def firsts(self) -> dict[str, Path]:
        """The first file of each kind that is there."""
        kinds = {
            "exports": [*self.flat, *_flatten(self.exports)],
            "traces": [*_flatten(self.effective), *_flatten(self.arrived)],
            "ranks": _flatten(self.ranks),
            "batches": _flatten(self.batches),
            "text": self.text,
        }
        return {kind: files[0] for kind, files in kinds.items() if files}


def find(path: Path) -> Layout:
    """What lies below a run directory, or below one of its dump directories, judged by names; nothing is opened.

    Until v0.8 the orchestrator kept its files one level down, in ``run_default``.
    """
    inside = path.name in ("token_exports", "rollouts") and not (path / path.name).is_dir()
    layout = Layout(path.parent if inside else path)
    roots = [path.parent] if inside else [path, *_directories(path, re.compile(r"run_\w+"))]
    for root in roots:
        if not inside or path.name == "token_exports":
            _find_exports(root / "token_exports", layout)
        if not inside or path.name == "rollouts":
            for step, folder in _steps(root / "rollouts"):
                _find_rollouts(step, folder, layout)
    return layout


def runs_below(path: Path) -> list[str]:
    """Names of the runs that share one trainer, where there are several: only the user can choose."""
    folders = _directories(path, re.compile(r"run_\w+"))
    return [folder.name for folder in folders if (folder / "rollouts").is_dir() or (folder / "token_exports").is_dir()]


def first_line(file: Path) -> Row:
    """The first line of a JSONL file as an object; empty where there is none."""
    try:
        if file.suffix != ".jsonl":
            line = read_bytes(file).split(b"\n", 1)[0]
        else:
            with file.open("rb") as stream:
                line = stream.readline(_LONGEST_LINE)
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf").strip())
    except (OSError, ValueError, BadFileError):
        return {}
    return row if isinstance(row, dict) else {}


def found_settings(root: Path) -> tuple[dict[str, tuple[Any, str]], str | None]:
    """What the saved configs say of the settings, and a notice where environments differ in temperature.

    Written to ``configs/`` (JSON, before v0.8.1 TOML), and to ``control/orch.toml`` below ``run_default``.
    """
    found: dict[str, tuple[Any, str]] = {"name": (root.resolve().name, "directory name")}
    notice = None
    folders = [root, *_directories(root, re.compile(r"run_\w+"))]
    names = ("configs/orchestrator.json", "configs/orchestrator.toml", "control/orch.toml")
    more = ("configs/rl.json", "configs/rl.toml", "configs/trainer.json", "configs/trainer.toml")
    for folder in folders:
        for name in (*names, *more):
            file = folder / name
            if not file.is_file():
                continue
            config = read_config(file)
            shown = file.relative_to(root).as_posix()
            part = lookup(config, "orchestrator") or config
            said = settings_in(part, shown, _keys()) | settings_in(config, shown, (("model", "model.name"),))
            found = said | found
            notice = notice or _temperatures(part, shown)
    # Requests are sent with top_p 1 and the engine is started with processed_logprobs, in v0.4.0 and 559b447.
    found.setdefault("top_p", (1.0, "prime-rl's requests"))
    found.setdefault("logprobs_mode", ("processed", "prime-rl's inference server"))
    return found, notice


def checkpoints(layout: Layout, asked: str | None) -> tuple[CheckpointPattern | None, list[str]]:
    """Where the weights lie, and what to say of it.

    Raises:
        ValueError: the asked pattern is none.
    """
    if asked is not None:
        return CheckpointPattern(layout.root, asked), []
    below = ["", *(f"{folder.name}/" for folder in _directories(layout.root, re.compile(r"run_\w+")))]
    patterns = [CheckpointPattern(layout.root, start + kind) for start in below for kind in (*_CHECKPOINTS, _SHARDED)]
    there = [(pattern, versions) for pattern in patterns if (versions := pattern.versions())]
    if not there:
        return None, []
    pattern, versions = there[0]
    said = [f"checkpoints: {pattern.pattern} ({len(versions)} versions)"]
    if len(there) > 1:
        others = ", ".join(other.pattern for other, _ in there[1:])
        said[0] += f"; also there: {others}. Choose one with --set checkpoints=PATTERN"
    if "broadcasts/" in pattern.pattern:
        torn = [str(version) for version in versions if not (pattern.path(version) / "STABLE").is_file()]
        if torn:
            said.append(f"broadcasts: no STABLE in version {', '.join(torn)}: still being written, or cut short")
    return pattern, said


def _find_exports(folder: Path, layout: Layout) -> None:
    layout.flat += _matching(folder, _EXPORT)
    for step, below in _steps(folder):
        there = _matching(below, _EXPORT)
        if there:
            layout.exports[step] += there


def _find_rollouts(step: int, folder: Path, layout: Layout) -> None:
    for subset, files in (("effective", layout.effective), ("all", layout.arrived)):
        traces = _matching(folder / "train" / subset, _TRACES)
        if traces:
            files[step] += traces
        layout.evaluation += _matching(folder / "eval" / subset, _TRACES)
    for pattern, files in ((_RANK, layout.ranks), (_BATCH, layout.batches)):
        there = _matching(folder, pattern)
        if there:
            files[step] += there
    layout.text += _matching(folder, _TEXT)


def _keys() -> tuple[tuple[str, str], ...]:
    keys = [("temperature", f"{place}temperature") for place in ("train.sampling.", "sampling.")]
    for key in ("top_p", "top_k"):
        keys += [(key, f"{place}extra_body.{key}") for place in ("train.sampling.", "sampling.")]
    return (*keys, ("model", "model.name"), ("model", "student.model.name"))


def _temperatures(config: Row, shown: str) -> str | None:
    envs = lookup(config, "train.env") or lookup(config, "env") or lookup(config, "train.source")
    own = {lookup(env, "sampling.temperature") for env in envs} - {None} if _all_objects(envs) else set()
    shared = {lookup(config, "train.sampling.temperature"), lookup(config, "sampling.temperature")} - {None}
    if len(own | shared) > 1:
        values = ", ".join(sorted(map(str, own | shared)))
        return f"{shown}: environments were sampled at several temperatures ({values}); scoring takes one"
    return None


def _all_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _flatten(files: Files) -> list[Path]:
    return [file for step in sorted(files) for file in files[step]]


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for entry in _directories(folder, _STEP):
        yield int(entry.name.removeprefix("step_")), entry


def _directories(folder: Path, name: re.Pattern[str]) -> list[Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [entry for entry in entries if name.fullmatch(entry.name) and entry.is_dir()]


def _matching(folder: Path, name: re.Pattern[str]) -> list[Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [entry for entry in entries if name.fullmatch(entry.name) and entry.is_file()]
