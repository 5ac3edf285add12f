"""NeMo-RL's training log: ``train_data_step{N}.jsonl``, written by default, one sample a line.

Both log-probs are logged, so the blended log-ratio needs no checkpoint. Step N (counted from 1) trains the weights
after N - 1 updates, and checkpoint ``step_N`` holds those after N. The files name no weight version: in synchronous
training, which a checkpoint's ``config.yaml`` tells, the sampler has the trainer's weights; else ``sampler_lag`` must
be declared for the ratio to be split. Each value comes wrapped in a list of length 1, right-padded to
``input_lengths``; index 0 of the log-prob arrays is meaningless. Token ids and masks are written since v0.6.0.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mismatch_probe.errors import InputError
from mismatch_probe.readers.config_files import read_config, settings_in
from mismatch_probe.readers.files import Row, jsonl_rows, read_bytes
from mismatch_probe.readers.nemo_rl_rows import native_row, native_row_without_ids
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.run import CheckpointPattern, Rollouts, Run, Settings, Step

FORMAT = "nemo-rl"
LOOKS_FOR = "train_data_step*.jsonl with generation_logprobs"

_FILE = re.compile(r"train_data_step(\d+)\.jsonl(?:\.gz|\.zst)?")
_EXPERIMENT = re.compile(r"exp_(\d+)")
_KEYS = (
    ("temperature", "policy.generation.temperature"),
    ("top_p", "policy.generation.top_p"),
    ("top_k", "policy.generation.top_k"),
    ("logprobs_mode", "policy.generation.vllm_cfg.logprobs_mode"),
    ("trainer_dtype", "policy.precision"),
    ("model", "policy.model_name"),
)
_ASYNC = "grpo.async_grpo.enabled"


def matches(path: Path) -> bool:
    """True when a step file's first line carries ``generation_logprobs``."""
    folders = _folders(path)
    return bool(folders) and "generation_logprobs" in _first_row(_step_files(folders[0]))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the log directory, or the ``exp_NNN`` below it: several where each resumes the one before.

    Raises:
        InputError: several experiments lie below the directory that are not one run.
        BadFileError: run.toml or a checkpoint's config.yaml is wrong.
    """
    folders = _folders(path)
    files, notices = _joined(path, folders)
    old = "token_ids" not in _first_row(files)
    config = _config(path)
    settings = settle(path, options, {"name": (folders[-1].name, "directory name"), **_found(path, config)})
    checkpoints = None if old else _checkpoints(path, settings, config)
    if settings.sampler_lag is None:
        notices.append(
            "NeMo-RL logs both log-probs but no weight version: the total ratio is exact, its split into discrepancy "
            "and lag is not identifiable. Where the sampler is N updates behind, pass --set sampler_lag=N"
        )
    if old:
        notices.append(
            "written by NeMo-RL before v0.6.0, without token ids and masks: nothing can be re-scored, and tokens count "
            "where generation_logprobs is not 0.0. Record with v0.6.0 or later for the rest"
        )
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, settings.vocab_size, options, old))
        for index, paths in sorted(files.items())
    )
    initial = Path(settings.model) if settings.model and (Path(settings.model) / "config.json").is_file() else None
    return Run(
        path,
        FORMAT,
        settings,
        steps,
        checkpoints,
        first_version=-1,
        initial=initial,
        notices=tuple(notices),
    )


def _folders(path: Path) -> list[Path]:
    candidates = [path, *sorted(entry for entry in path.glob("exp_*") if entry.is_dir())]
    candidates += sorted(entry for entry in path.glob("*/exp_*") if entry.is_dir())
    return [folder for folder in candidates if _step_files(folder)]


def _joined(path: Path, folders: list[Path]) -> tuple[dict[int, list[Path]], list[str]]:
    """Files by step; an experiment that begins where an earlier one ended or broke off replaces its later steps."""
    files = _step_files(folders[0])
    notices = []
    for before, folder in pairwise(folders):
        more = _step_files(folder)
        first, last = min(more), max(files)
        if folder.parent != before.parent or not 1 < first <= last + 1:
            names = ", ".join(entry.relative_to(path).as_posix() for entry in folders)
            raise InputError(
                f"{path}: needs one experiment with train_data_step*.jsonl, found {names}. Give one of them"
            )
        again = sorted(step for step in files if step >= first)
        files = {step: paths for step, paths in files.items() if step < first} | more
        notices.append(
            f"{folder.name} resumes {before.name} at step {first}"
            + (f"; {len(again)} steps that were trained twice count as in {folder.name}" if again else "")
        )
    return files, notices


def _step_files(folder: Path) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = defaultdict(list)
    for entry in sorted(folder.glob("train_data_step*.jsonl*")):
        match = _FILE.fullmatch(entry.name)
        if match:
            files[int(match.group(1))].append(entry)
    return files


def _first_row(files: dict[int, list[Path]]) -> Row:
    """The first line of the first file, without reading the rest of it where it is not packed."""
    for paths in files.values():
        try:
            if paths[0].suffix == ".jsonl":
                with paths[0].open("rb") as stream:
                    line = stream.readline()
            else:
                line = read_bytes(paths[0]).partition(b"\n")[0]
            row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except (OSError, ValueError, InputError):
            continue
        return row if isinstance(row, dict) else {}
    return {}


def _config(path: Path) -> Path | None:
    """``config.yaml`` of a checkpoint below the directory: each step_N holds the same one."""
    found = (
        entry
        for depth in ("", "*/", "*/*/")
        for entry in sorted(path.glob(f"{depth}step_*/config.yaml"))
        if (entry.parent / "policy").is_dir() or (entry.parent / "training_info.json").is_file()
    )
    return next(found, None)


def _found(path: Path, config: Path | None) -> dict[str, tuple[Any, str]]:
    if config is None:
        return {}
    table = read_config(config)
    name = config.relative_to(path).as_posix()
    found = settings_in(table, name, (*_KEYS, ("async", _ASYNC)))
    mode = found.get("logprobs_mode")
    if mode is not None:
        found["logprobs_mode"] = (str(mode[0]).removesuffix("_logprobs"), mode[1])
    asynchronous = found.pop("async", None)
    if asynchronous is not None and asynchronous[0] is False:
        found["sampler_lag"] = (0, asynchronous[1])
    # An interpolation that the writer left unresolved says nothing.
    return {key: item for key, item in found.items() if "${" not in str(item[0])}


def _checkpoints(path: Path, settings: Settings, config: Path | None) -> CheckpointPattern | None:
    if settings.checkpoints is not None:
        return CheckpointPattern(path, settings.checkpoints)
    if config is None:
        return None
    weights = config.parent / "policy" / "weights"
    inner = [entry for entry in (weights / "model", *sorted(weights.glob("iter_*"))) if entry.is_dir()]
    below = (inner[0] if inner else weights).relative_to(config.parent).as_posix()
    folder = config.parent.parent.relative_to(path).as_posix()
    return CheckpointPattern(path, f"{folder}/step_{{version}}/{below}".removeprefix("./"))


def _load(
    step: int, files: tuple[Path, ...], root: Path, vocab_size: int | None, options: ReadOptions, old: bool
) -> Rollouts:
    builder = RowBuilder(step, root, vocab_size, options, ids_known=not old)
    convert = native_row_without_ids if old else native_row
    not_computed = zeros = 0
    for file in files:

        def on_bad(number: int, reason: str, file: Path = file) -> None:
            builder.reject(file, number, None, reason)

        for number, line in jsonl_rows(file, partial(builder.torn, file), on_bad if options.skip_bad_rows else None):
            try:
                row = convert(step, number, line)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                builder.reject(file, number, None, f"not a NeMo-RL sample: {error}")
                continue
            not_computed += row["trainer_logprobs"] is None
            zeros += int(((row["sampler_logprobs"] == 0.0) & (row["loss_mask"] > 0)).sum())
            builder.add(row, file, number)
    if not_computed:
        builder.notice(
            f"step {step}: prev_logprobs is all 0.0 in {not_computed} rows, which NeMo-RL writes when it skips that "
            "pass; taken as absent. Set loss_fn.force_on_policy_ratio=false to have it computed"
        )
    if zeros:
        builder.notice(
            f"step {step}: generation_logprobs is exactly 0.0 at {zeros} loss tokens: a probability that rounds to 1, "
            "or NeMo-RL's filler where the engine returned none; kept as logged"
        )
    return builder.build()
