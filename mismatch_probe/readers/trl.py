"""TRL's completions table: ``OUTPUT_DIR/completions/completions_{step:05d}.parquet`` (``log_completions=True``).

TRL writes text. The table is complete, and read here, when the run also logged ``completion_ids``, ``prompt_ids`` and
the engine's log-probs as extra columns. Else it is recognised and answered with what is missing.

Steps and versions, as of trl 1.16.0: the file is written after the update, so step N holds what update N trained on,
and update N turns version N - 1 into version N, saved as ``checkpoint-N``. The engine gets the trainer's weights before
every generation, and generates once in E = steps_per_generation x num_iterations micro-batches: by default that is once
an update, and version N - 1 sampled step N. With a larger E the same batch stands in several files and was sampled by
an older version: a ``sampler_version`` column names it, else the saved ``training_args.bin`` implies it, as
long as training was not resumed. An evaluation at step N appends its rows to the same table, drops as many training
rows and writes the file again: rows that version N sampled in step N are such rows.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.settings import declared_checkpoints, settle
from mismatch_probe.readers.trl_rows import IDS, PROMPTS, load
from mismatch_probe.run import CheckpointPattern, Run, Settings, Step

FORMAT = "trl"
LOOKS_FOR = "completions/completions_*.parquet with step, prompt, completion and advantage"

_FILE = re.compile(r"completions_(\d+)\.parquet")
_TABLE = {"step", "prompt", "completion", "advantage"}
_ARGS = "training_args.bin"
_OURS = ("trl.", "transformers.", "accelerate.", "peft.", "torch.device", "torch.dtype", "__main__.")
_KEYS = (
    *(("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k")),
    *(("group_size", "num_generations"), ("max_response_length", "max_completion_length")),
)


def matches(path: Path) -> bool:
    """True when the first table has the columns that TRL writes."""
    files = _files(path)
    return bool(files) and set(_columns(files[min(files)])) >= _TABLE


def read(path: Path, options: ReadOptions) -> Run:
    """Read the output directory, or its ``completions``.

    Raises:
        NothingToJudgeError: no table holds token ids.
        BadFileError: ``training_args.bin`` cannot be read, or holds what TRL does not put there.
    """
    files = _files(path)
    complete = [file for file in files.values() if _has_ids(_columns(file))]
    if not complete:
        raise NothingToJudgeError(
            f"{path}: TRL's completions tables hold decoded text, without token ids and the engine's log-probs. Text "
            "does not give the tokens back (special tokens are dropped, and one text has many tokenisations), so "
            "neither D nor the lag can be computed. Keep log_completions=True, set use_vllm=True, and override "
            "GRPOTrainer._generate to pass prompt_ids, completion_ids and the log-probs it returns to "
            "self._log_completion_extra as columns prompt_ids, completion_ids and sampler_logprobs, with "
            "self.state.global_step as sampler_version: docs/frameworks.md has the ten lines. A reward function's "
            "log_extra does it too, where it knows them"
        )
    home = path.parent if path.name == "completions" else path
    arguments, where = _arguments(home)
    settings = settle(path, options, _found(arguments, where))
    notices = ["a TRL file holds only the last generation batch before it was logged: with logging_steps above 1 the "
               "updates between are not there"]  # fmt: skip
    notices += _notices(arguments)
    return Run(
        path,
        FORMAT,
        settings,
        tuple(
            Step(
                index, (file,), partial(load, index, file, path, settings, options, _sampler_version(index, arguments))
            )
            for index, file in sorted(files.items())
        ),
        trainer_checkpoints=_checkpoints(path, home, settings, notices),
        first_version=-1,
        initial=_initial(path, settings),
        notices=tuple(notices),
    )


def _files(path: Path) -> dict[int, Path]:
    for folder in (path / "completions", path):
        found = [(_FILE.fullmatch(file.name), file) for file in sorted(folder.glob("completions_*.parquet"))]
        files = {int(match.group(1)): file for match, file in found if match}
        if files:
            return files
    return {}


def _columns(file: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(file).names)
    except (pa.ArrowException, OSError):
        return []


def _has_ids(columns: list[str]) -> bool:
    return bool(set(columns) & set(IDS)) and bool(set(columns) & set(PROMPTS))


def _arguments(home: Path) -> tuple[dict[str, Any], str]:
    """The GRPOConfig that the run saved with its weights, and the file's name; empty where none is there."""
    from mismatch_probe.readers.torch_archive import load_torch

    for file in (home / _ARGS, *sorted(home.glob(f"checkpoint-*/{_ARGS}"))):
        if file.is_file():
            state = getattr(load_torch(file, file, lambda name: name.startswith(_OURS)), "state", None)
            return (state if isinstance(state, dict) else {}), file.relative_to(home).as_posix()
    return {}, ""


def _found(arguments: dict[str, Any], where: str) -> dict[str, tuple[Any, str]]:
    found = {
        key: (arguments[name], f"{where}: {name}")
        for key, name in _KEYS
        if isinstance(arguments.get(name), int | float)
    }
    if arguments.get("use_vllm") is True:
        found["logprobs_mode"] = ("processed", f"{where}: use_vllm, which TRL starts with processed_logprobs")
    return found


def _notices(arguments: dict[str, Any]) -> list[str]:
    notices = []
    strategy = getattr(arguments.get("eval_strategy"), "args", ("no",))
    if strategy and strategy[0] != "no":
        notices.append(
            "an evaluation writes its rows over training rows of the same file; they are told by a sampler_version "
            "column only"
        )
    every, updates = _every(arguments)
    if every and updates and every > updates:
        notices.append(
            f"TRL generates once for {every / updates:g} updates here, so the same batch stands in several files, and "
            "each update trained on a part of it that the table does not name"
        )
    return notices


def _every(arguments: dict[str, Any]) -> tuple[int | None, int | None]:
    """Micro-batches from one generation to the next, and in one update; None where the run does not say."""
    values = [arguments.get(key) for key in ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")]
    if not all(isinstance(value, int) and 0 < value < 2**31 for value in values):
        return None, None
    return values[0] * values[1], values[2]  # type: ignore[operator]


def _sampler_version(step: int, arguments: dict[str, Any]) -> int | None:
    """Version that sampled step ``step`` by the saved arguments, where no column says it.

    The last generation before the end of update N began at the largest multiple of E below N x micro-batches.
    """
    every, updates = _every(arguments)
    if every is None or updates is None or step < 1:
        return None
    return ((step * updates - 1) // every * every) // updates


def _checkpoints(path: Path, home: Path, settings: Settings, notices: list[str]) -> CheckpointPattern:
    declared = declared_checkpoints(path, settings)
    if declared is not None:
        return declared
    pattern = CheckpointPattern(home, "checkpoint-{version}")
    if pattern.versions():
        notices.append("checkpoints: checkpoint-N beside completions/, the weights after N updates")
    return pattern


def _initial(path: Path, settings: Settings) -> Path | None:
    """Version 0 is never a checkpoint: it is the model that was given to the trainer, where it is a directory."""
    if not settings.model:
        return None
    return next((place for place in (path / settings.model, Path(settings.model)) if place.is_dir()), None)
