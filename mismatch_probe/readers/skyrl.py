"""SkyRL's training batches: ``dumped_data/global_step_N_training_input.pkl``, with ``trainer.dump_data_batch=true``.

One pickled ``TrainingInputBatch`` a step, written after the advantages and before the update. Steps count from 1: step
N trains version N - 1, and ``global_step_N/policy`` holds version N. The batch names no sampler version. Response
fields are R wide and belong to the last R columns of ``sequences``, whichever side the padding is on: all of it on the
left since 2026-03-18, before that the responses' on the right.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers.nearby import find_checkpoints, initial_model
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.padded import prompt_name, response_span
from mismatch_probe.readers.pickles import first_global
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import meaning_is_settled, settle
from mismatch_probe.readers.skyrl_batch import Batch, load_batch
from mismatch_probe.run import Rollouts, Run, Settings, Step

FORMAT = "skyrl"
LOOKS_FOR = "global_step_*_training_input.pkl with a pickled TrainingInputBatch"

_FILE = re.compile(r"global_step_(\d+)_training_input\.pkl")
_BATCH = re.compile(r"(.*\.)?training_batch\.(_rebuild_tensor_batch|TrainingInputBatch)")
_HEAD = 4096


def matches(path: Path) -> bool:
    """True when the first step file is a pickle of SkyRL's batch class."""
    files = _step_files(_folder(path))
    first = next(iter(files.values()))[0] if files else None
    return first is not None and _BATCH.fullmatch(_first_global(first)) is not None


def read(path: Path, options: ReadOptions) -> Run:
    """Read the dump directory, or the one below ``trainer.export_path``.

    Raises:
        InputError: there are no step files.
    """
    folder = _folder(path)
    files = _step_files(folder)
    if not files:
        raise InputError(
            f"{path}: holds no global_step_N_training_input.pkl. Give trainer.export_path or its dumped_data"
        )
    settings = settle(path, options)
    export = folder.parent
    usual = [(export, "global_step_{version}/policy"), (path, "global_step_{version}/policy")]
    usual += [(root / name, "global_step_{version}/policy") for root in (path, export) for name in ("ckpts", "exports")]
    checkpoints, found = find_checkpoints(path, settings, usual)
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, settings, options))
        for index, paths in sorted(files.items())
    )
    notices = (
        "SkyRL's batch names no sampler version. Where the engine got new weights before every step, pass "
        "--set sampler_lag=0; under fully_async the lag differs from sequence to sequence and is not in the dump",
        "rewards are removed before SkyRL dumps the batch: null here",
        *_temperature_notice(settings),
        *found,
    )
    return Run(
        path, FORMAT, settings, steps, checkpoints, first_version=-1, initial=initial_model(settings), notices=notices
    )


def _temperature_notice(settings: Settings) -> tuple[str, ...]:
    if meaning_is_settled(settings):
        return ()
    return (
        "SkyRL divides the trainer's logits by the temperature and leaves vLLM's logprobs_mode alone, which returns "
        "log-probs before temperature. Unless sampling was at temperature 1, or engine_init_kwargs set the mode, "
        "logged ones are not comparable: state both with --set temperature=VALUE and --set logprobs_mode=raw|processed",
    )


def _folder(path: Path) -> Path:
    candidates = (path, path / "dumped_data", path / "exports" / "dumped_data")
    return next((folder for folder in candidates if _step_files(folder)), path)


def _step_files(folder: Path) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = defaultdict(list)
    for entry in sorted(folder.glob("global_step_*_training_input.pkl")) if folder.is_dir() else ():
        match = _FILE.fullmatch(entry.name)
        if match and entry.is_file():
            files[int(match.group(1))].append(entry)
    return files


def _first_global(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return first_global(stream.read(_HEAD))
    except OSError:
        return ""


def _load(step: int, files: tuple[Path, ...], root: Path, settings: Settings, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, settings.vocab_size, options)
    for file in files:
        try:
            batch = load_batch(file)
        except BadFileError as error:
            if not options.skip_bad_rows:
                raise
            builder.reject(file, 0, None, str(error))
            continue
        _add_rows(builder, batch, step, file, settings)
    return builder.build()


def _add_rows(builder: RowBuilder, batch: Batch, step: int, file: Path, settings: Settings) -> None:
    groups, how = _groups(batch, step, settings)
    appended = 0
    for row in range(batch.rows):
        try:
            native = _native(batch, row)
        except ValueError as error:
            builder.reject(file, row + 1, f"step{step}-{row}", f"not a SkyRL sequence: {error}")
            continue
        appended += _without_appended_eos(native, settings.eos_token_id)
        group = groups[row] if groups is not None else prompt_name(step, native["prompt_ids"])
        builder.add({"sequence_id": f"step{step}-{row}", "group_id": group, **native}, file, row + 1)
    for text in _said(batch, how, appended):
        builder.notice(f"step {step}: {text}")


def _native(batch: Batch, row: int) -> dict[str, Any]:
    """One row in native field names."""
    width, before = batch.response_mask.shape[1], batch.sequences.shape[1] - batch.response_mask.shape[1]
    inside = batch.response_mask[row]
    response = np.zeros(before + width, dtype=bool)
    response[before:] = inside != 0
    first, start, end = response_span(batch.attention_mask[row], response)
    if int(response.sum()) != end - start:
        raise ValueError("response_mask has gaps, or real tokens follow the response")
    columns = slice(start - before, end - before)

    def cut(field: np.ndarray[Any, Any] | None) -> Any:
        return None if field is None else field[row, columns]

    return {
        "prompt_ids": batch.sequences[row, first:start],
        "response_ids": batch.sequences[row, start:end],
        "sampler_logprobs": cut(batch.rollout_logprobs),
        "trainer_logprobs": cut(batch.action_log_probs),
        "loss_mask": (cut(batch.loss_mask) > 0).astype(np.float64),
        "advantages": cut(batch.advantages),
    }


def _without_appended_eos(native: dict[str, Any], eos: tuple[int, ...]) -> int:
    """Null the log-prob of an EOS that SkyRL appended itself, which it logs as exactly 0.0; 1 when there was one."""
    sampler = native["sampler_logprobs"]
    if sampler is None or sampler[-1] != 0.0 or not native["loss_mask"][-1]:
        return 0
    if eos and int(native["response_ids"][-1]) not in eos:
        return 0
    sampler = sampler.astype(np.float64)
    sampler[-1] = np.nan
    native["sampler_logprobs"] = sampler
    return 1


def _groups(batch: Batch, step: int, settings: Settings) -> tuple[list[str] | None, str]:
    """A group name for each row, None where equal prompts must do, and how groups were told, "" when by the dump."""
    if batch.groups is not None:
        return [f"step{step}-{name}" for name in batch.groups], ""
    if settings.group_size is not None:
        names = [f"step{step}-{row // settings.group_size}" for row in range(batch.rows)]
        return names, f"groups are {settings.group_size} consecutive rows (group_size)"
    return None, "the batch names no groups: sequences with equal prompt tokens form one"


def _said(batch: Batch, how: str, appended: int) -> list[str]:
    said = [how] if how else []
    if batch.padding_rows:
        said.append(f"{batch.padding_rows} rows that only fill the batch up (copies of the first one) are left out")
    if batch.rollout_logprobs is None:
        said.append("no rollout_logprobs: set generator.sampling_params.logprobs=1 (0 before 2026-03) to have them")
    if batch.action_log_probs is None:
        reason = "is all 0.0, taken as not computed" if batch.zero_trainer else "is null"
        said.append(
            f"action_log_probs {reason}. SkyRL skips that pass for losses that use only rollout log-probs: set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type to have it computed, or keep checkpoints"
        )
    if appended:
        said.append(
            f"{appended} responses end in a loss token with rollout_logprobs exactly 0.0, which SkyRL writes for an "
            "EOS that it appends and nobody sampled; taken as null"
        )
    return said
