"""NeMo-RL's training log: ``train_data_step{N}.jsonl``, written by default, one sample a line.

Both log-probs are logged, so the blended log-ratio needs no checkpoint. The files name no weight version, so the ratio
cannot be split. Each value comes wrapped in a list of length 1, right-padded to ``input_lengths``; index 0 of the
log-prob arrays is meaningless. Token ids and masks are written since v0.6.0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import InputError, NothingToJudgeError
from mismatch_probe.readers.files import Row, jsonl_rows
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.run import Rollouts, Run, Step

FORMAT = "nemo-rl"
LOOKS_FOR = "train_data_step*.jsonl with generation_logprobs"

_FILE = re.compile(r"train_data_step(\d+)\.jsonl")


def matches(path: Path) -> bool:
    """True when a step file's first line carries ``generation_logprobs``."""
    folders = _folders(path)
    return bool(folders) and "generation_logprobs" in _first_row(_step_files(folders[0]))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the log directory, or the one ``exp_NNN`` below it.

    Raises:
        InputError: several experiments lie below the directory.
        NothingToJudgeError: the files were written before token ids were logged.
    """
    folders = _folders(path)
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise InputError(f"{path}: needs one experiment with train_data_step*.jsonl, found {names}. Give one of them")
    files = _step_files(folders[0])
    if "token_ids" not in _first_row(files):
        raise NothingToJudgeError(
            f"{folders[0]}: written by NeMo-RL before v0.6.0, without token ids and loss masks, so loss tokens cannot "
            "be told from the rest. Record the run with v0.6.0 or later"
        )
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, options))
        for index, paths in sorted(files.items())
    )
    settings = settle(path, options, {"name": (folders[0].name, "directory name")})
    notices = (
        "NeMo-RL logs both log-probs but no weight version: the total ratio is exact, "
        "its split into discrepancy and lag is not identifiable",
    )
    return Run(path, FORMAT, settings, steps, versions_known=False, notices=notices)


def _folders(path: Path) -> list[Path]:
    candidates = [path, *sorted(entry for entry in path.glob("exp_*") if entry.is_dir())]
    return [folder for folder in candidates if _step_files(folder)]


def _step_files(folder: Path) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = defaultdict(list)
    for entry in sorted(folder.glob("train_data_step*.jsonl")):
        match = _FILE.fullmatch(entry.name)
        if match:
            files[int(match.group(1))].append(entry)
    return files


def _first_row(files: dict[int, list[Path]]) -> Row:
    """The first line of the first file, without reading the rest of it."""
    for paths in files.values():
        try:
            with paths[0].open("rb") as stream:
                row = json.loads(stream.readline())
        except (OSError, ValueError):
            return {}
        return row if isinstance(row, dict) else {}
    return {}


def _load(step: int, files: tuple[Path, ...], root: Path, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, None, options)
    not_computed = zeros = 0
    for file in files:

        def on_bad(number: int, reason: str, file: Path = file) -> None:
            builder.reject(file, number, None, reason)

        for number, line in jsonl_rows(file, partial(builder.torn, file), on_bad if options.skip_bad_rows else None):
            try:
                row = _native(step, number, line)
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


def _native(step: int, number: int, line: Row) -> Row:
    """One line in native field names; arrays are cut to ``input_lengths`` and at the first loss token."""

    def value(key: str, default: Any = None) -> Any:
        item = line.get(key, default)
        return item[0] if isinstance(item, list) and len(item) == 1 else item

    ids = np.asarray(line["token_ids"][0], dtype=np.int64)
    length = int(value("input_lengths", len(ids)))
    arrays: dict[str, Any] = {"token_ids": ids[:length]}
    for key in ("token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages"):
        item = line.get(key)
        if item is None and key in ("token_loss_mask", "generation_logprobs"):
            raise KeyError(key)
        arrays[key] = None if item is None else np.asarray(item[0], dtype=np.float64)[:length]
        if arrays[key] is not None and len(arrays[key]) != len(arrays["token_ids"]):
            raise ValueError(f"{key} has {len(arrays[key])} values for {len(arrays['token_ids'])} tokens")
    mask = arrays["token_loss_mask"] * float(value("sample_loss_mask", 1.0))
    # The first token has no prefix; its log-prob is a filler whatever the mask says.
    mask[:1] = 0.0
    trained = np.flatnonzero(arrays["token_loss_mask"][1:]) + 1
    if not len(trained):
        raise ValueError("token_loss_mask marks no response token")
    start = int(trained[0])
    prompt = arrays["token_ids"][:start]
    prev = arrays["prev_logprobs"]
    if prev is not None and not bool(prev[start:].any()):
        prev = None
    return {
        "sequence_id": f"step{step}-{value('idx', number - 1)}",
        "group_id": f"step{step}-prompt-{hashlib.blake2b(prompt.tobytes(), digest_size=6).hexdigest()}",
        "prompt_ids": prompt,
        "response_ids": arrays["token_ids"][start:],
        "sampler_logprobs": arrays["generation_logprobs"][start:],
        "trainer_logprobs": None if prev is None else prev[start:],
        "loss_mask": (mask[start:] > 0).astype(np.float64),
        "advantages": None if arrays["advantages"] is None else arrays["advantages"][start:],
        # Under dynamic sampling `rewards` is the batch before filtering, and its rows are not these.
        "reward": value("filtered_rewards", value("rewards")),
    }
