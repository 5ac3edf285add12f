"""What a Megatron checkpoint near the dump says of a slime run: its arguments, and where the checkpoints are.

slime writes no config file. Megatron saves all arguments, slime's among them, into each checkpoint's ``common.pt``.
Checkpoint N, of Megatron or of ``--save-hf``, holds the weights after rollout N: version N + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.pickles import Stub, plain
from mismatch_probe.readers.torch_archive import load_torch
from mismatch_probe.run import CheckpointPattern

_ITERATION = re.compile(r"iter_(\d{7})")
_MODULES = ("argparse.Namespace", "megatron.", "slime.", "torch.", "pathlib.", "enum.", "transformer_engine.")
_SETTINGS = (
    ("temperature", "rollout_temperature"),
    ("top_p", "rollout_top_p"),
    ("top_k", "rollout_top_k"),
    ("group_size", "n_samples_per_prompt"),
    ("model", "hf_checkpoint"),
    ("max_response_length", "rollout_max_response_len"),
    ("filtered", "dynamic_sampling_filter_path"),
)


@dataclass(frozen=True)
class Arguments:
    """slime's arguments as a checkpoint holds them; empty where none was found. ``source`` names the file."""

    values: Mapping[str, Any]
    source: str = ""

    def get(self, name: str) -> Any:
        """One argument, None where it is unknown."""
        return self.values.get(name)

    def integer(self, name: str) -> int | None:
        """One argument where it is a positive integer, else None."""
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def settings(self) -> dict[str, tuple[Any, str]]:
        """Those that are settings of ours, each with its source, as ``settle`` takes them."""
        found = {
            key: (self.values[name], f"{self.source}: {name}")
            for key, name in _SETTINGS
            if self.values.get(name) is not None
        }
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if self.values.get(name) is True:
                found["trainer_dtype"] = (dtype, f"{self.source}: {name}")
        return found


def read_arguments(path: Path, root: Path) -> tuple[Arguments, str]:
    """Arguments from the newest checkpoint near ``root`` (see ``_near``), and a notice, "" when there is none."""
    files = [file for folder in _near(path, root) for file in sorted(folder.glob("iter_*/common.pt"))]
    if not files:
        return Arguments({}), ""
    file = max(files, key=lambda file: file.parent.name)
    try:
        state = load_torch(file, file, lambda name: name.startswith(_MODULES))
    except BadFileError as error:
        return Arguments({}), f"the run's arguments cannot be read: {error}"
    arguments = state.get("args") if isinstance(state, dict) else None
    values = arguments.state if isinstance(arguments, Stub) else None
    if not isinstance(values, dict):
        return Arguments({}), f"{file}: holds no arguments, so settings are not taken from it"
    source = f"{file.parent.parent.name}/{file.parent.name}/{file.name}"
    return Arguments({str(key): plain(value) for key, value in values.items()}, source), ""


def find_checkpoints(path: Path, root: Path, arguments: Arguments) -> tuple[CheckpointPattern | None, str]:
    """Checkpoints near the dump, Hugging Face before Megatron's, and a notice that says where they were found."""
    for folder, pattern in _candidates(list(_near(path, root)), arguments):
        try:
            checkpoints = CheckpointPattern(folder, pattern, ahead=1)
        except ValueError:
            continue
        count = len(checkpoints.versions())
        if count:
            return checkpoints, (
                f"{count} checkpoints found at {folder.name}/{pattern}; the number in the name is the rollout that "
                "ended with those weights. Version 0, with which training began, is not among them: --set model=DIR. "
                "Another place: --set checkpoints=PATTERN"
            )
    return None, ""


def _candidates(folders: list[Path], arguments: Arguments) -> Iterable[tuple[Path, str]]:
    saved = arguments.get("save_hf")
    if isinstance(saved, str) and "{rollout_id" in saved:
        # The run may have been moved: look for the end of its path, never for the path itself.
        parts = Path(saved.replace("{rollout_id", "{version")).parts
        first = next(index for index, part in enumerate(parts) if "{version" in part)
        if ".." not in parts:
            yield from (
                (folder, "/".join(parts[at:])) for folder in folders for at in range(first, max(first - 3, 0), -1)
            )
    for folder in folders:
        if any(entry.name.isdigit() and (entry / "config.json").is_file() for entry in folder.iterdir()):
            yield folder, "{version}"
    for folder in folders:
        if any(_ITERATION.fullmatch(entry.name) for entry in folder.iterdir()):
            yield folder, "iter_{version:07d}"


def _near(path: Path, root: Path) -> Iterable[Path]:
    """The run directory and the folders in it; beside the dump's own folder where that is what was given."""
    top = path.parent if root == path and path.parent != path else path
    folders = [path] if top == path else [path, top]
    yield from folders
    for folder in dict.fromkeys((path, top)):
        try:
            yield from sorted(
                entry for entry in folder.iterdir() if entry.is_dir() and entry not in folders and entry.name[0] != "."
            )
        except OSError:
            continue
