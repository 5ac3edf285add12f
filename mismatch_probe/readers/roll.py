"""ROLL's rollout dump: ``{dump_dir}/train/step_%06d.pkl``, with ``rollout_mock.enable=true rollout_mock.mode=dump``.

One pickled ``DataProto`` a step, saved when its rollouts have been collected, before any trainer log-prob. Steps count
from 0: step k trains version k, and ``checkpoint-k``, saved after that update, holds version k + 1. ``infer_logprobs``
is (rows, T - 1): the value of token t is at t - 1. ROLL's text log (``rollout_dump_dir``) holds no tokens, and is
answered with what to record instead.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers.config_files import settings_in
from mismatch_probe.readers.files import read_bytes
from mismatch_probe.readers.nearby import find_checkpoints, initial_model
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.padded import Array, prompt_name, response_span
from mismatch_probe.readers.pickles import REPAIR, Stub, first_global, load_pickle, plain
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import Found, meaning_is_settled, settle
from mismatch_probe.readers.sniff import first_line
from mismatch_probe.readers.tensor_dicts import load_tensor_dict
from mismatch_probe.readers.torch_archive import PASSED_OVER
from mismatch_probe.run import Rollouts, Run, Settings, Step

FORMAT = "roll"
LOOKS_FOR = "train/step_*.pkl with ROLL's DataProto, or rollout_dump_data.step_*.jsonl"

_FILE = re.compile(r"step_(\d+)\.pkl")
_CLASS = "roll.distributed.scheduler.protocol.DataProto"
_HEAD = 4096
_LONGEST_LINE = 64 << 20
_COLUMN = re.compile(rb'"global_step":\s*\[')


def matches(path: Path) -> bool:
    """True when the first step file is a pickle of ROLL's DataProto, or a text log is a table with ROLL's steps."""
    return bool(_step_files(_folder(path))) or _is_text_log(path)


def read(path: Path, options: ReadOptions) -> Run:
    """Read the dump directory, its ``train`` directory, or the run directory above it.

    Raises:
        NothingToJudgeError: only the text log is there.
        InputError: nothing is.
    """
    folder = _folder(path)
    files = _step_files(folder)
    if not files and _is_text_log(path):
        raise NothingToJudgeError(
            f"{path}: ROLL's rollout_dump_dir holds decoded text without special tokens, no token ids and no "
            "log-probs, so neither the sampler's nor the trainer's probability of any token can be known. Record the "
            "run with rollout_mock.enable=true rollout_mock.mode=dump rollout_mock.dump_dir=DIR, and give that DIR"
        )
    if not files:
        raise InputError(f"{path}: holds no train/step_*.pkl of ROLL. Give rollout_mock.dump_dir")
    settings = settle(path, options, _generation_config(files))
    checkpoints, found = find_checkpoints(path, settings, _usual_checkpoints(path, folder), ahead=1)
    steps = tuple(
        Step(index, tuple(paths), partial(_load, index, tuple(paths), path, settings, options))
        for index, paths in sorted(files.items())
    )
    notices = (
        "ROLL's dump names no sampler version and, being saved before that pass, no trainer log-prob. With "
        "async_generation_ratio=0 pass --set sampler_lag=0, and keep checkpoints (save_steps) to score with; "
        "checkpoint-N holds version N + 1",
        *_temperature_notice(settings),
        *found,
    )
    return Run(path, FORMAT, settings, steps, checkpoints, initial=initial_model(settings), notices=notices)


def _generation_config(files: dict[int, list[Path]]) -> Found:
    """Temperature, top_p and top_k, where the first batch carries the engine's settings (runs of the RLVR pipeline)."""
    file = next(iter(files.values()))[0]
    try:
        meta = _state(file)[-1]
    except BadFileError:
        return {}  # loading the step says what is wrong with it
    if not isinstance(meta, dict):
        return {}
    return settings_in(
        meta, file.name, ((key, f"generation_config.{key}") for key in ("temperature", "top_p", "top_k"))
    )


def _temperature_notice(settings: Settings) -> tuple[str, ...]:
    if meaning_is_settled(settings):
        return ()
    return (
        "ROLL leaves vLLM's logprobs_mode alone, which returns log-probs before temperature, and the dump does not say "
        "which engine sampled. Unless sampling was at temperature 1, state --set temperature=VALUE and "
        "--set logprobs_mode=raw|processed",
    )


def _usual_checkpoints(path: Path, folder: Path) -> list[tuple[Path, str]]:
    roots = dict.fromkeys((path, folder.parent, folder.parent.parent))
    workers = [worker for root in roots for worker in sorted(root.glob("actor_train-0*")) if worker.is_dir()]
    return [(root, "checkpoint-{version}") for root in (*workers, *roots)]


def _folder(path: Path) -> Path:
    candidates = (path, path / "train", path / "rollout_mock_dumps" / "train")
    return next((folder for folder in candidates if _step_files(folder)), path)


def _step_files(folder: Path) -> dict[int, list[Path]]:
    """Step files by step; none when the first of them is not ROLL's."""
    files: dict[int, list[Path]] = defaultdict(list)
    for entry in sorted(folder.glob("step_*.pkl")) if folder.is_dir() else ():
        match = _FILE.fullmatch(entry.name)
        if match and entry.is_file():
            if not files and not _is_data_proto(entry):
                return {}
            files[int(match.group(1))].append(entry)
    return files


def _is_data_proto(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return first_global(stream.read(_HEAD)) == _CLASS
    except OSError:
        return False


def _is_text_log(path: Path) -> bool:
    for file in sorted(path.glob("rollout_dump_data.step_*.jsonl*")) if path.is_dir() else ():
        line = first_line(file, _LONGEST_LINE)
        # Agentic runs choose their columns; this one is in every log, a list as all of them are.
        return line.startswith(b"{") and _COLUMN.search(line) is not None
    return False


def _load(step: int, files: tuple[Path, ...], root: Path, settings: Settings, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, settings.vocab_size, options)
    for file in files:
        try:
            tensors, objects = _load_batch(file)
        except BadFileError as error:
            if not options.skip_bad_rows:
                raise
            builder.reject(file, 0, None, str(error))
            continue
        _add_rows(builder, tensors, objects, step, file, settings)
    return builder.build()


def _load_batch(file: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """(tensors, object columns) of one DataProto."""
    state = _state(file)
    tensors = load_tensor_dict(state[0].data, file)
    _check_shapes(tensors, file)
    return tensors, plain(state[1]) if isinstance(state[1], dict) else {}


def _state(file: Path) -> tuple[Any, ...]:
    """What a DataProto is pickled as: (archive, objects, meta), with a remote part before meta since 2026-06-18."""
    loaded = load_pickle(read_bytes(file), file, _is_inert, {**PASSED_OVER, ("_io", "BytesIO"): _Buffer})
    state = loaded.state if isinstance(loaded, Stub) else None
    if not isinstance(state, tuple) or len(state) not in (3, 4) or not isinstance(state[0], _Buffer):
        raise BadFileError(file, None, "not a DataProto that is understood", REPAIR)
    return state


def _check_shapes(tensors: dict[str, Array], file: Path) -> None:
    shape = tensors["input_ids"].shape if "input_ids" in tensors else ()
    if len(shape) != 2 or not shape[1]:
        raise BadFileError(file, None, f"input_ids is missing or has shape {shape}", REPAIR)
    one_less = (shape[0], shape[1] - 1)
    wanted = {"attention_mask": shape, "response_mask": shape, "infer_logprobs": one_less, "old_log_probs": one_less}
    for name, expected in wanted.items():
        found = tensors[name].shape if name in tensors else None
        if found != expected and (found is not None or name.endswith("_mask")):
            raise BadFileError(file, None, f"{name} has shape {found} where {expected} was expected", REPAIR)
    if "scores" in tensors and tensors["scores"].shape[:1] != shape[:1]:
        raise BadFileError(file, None, f"scores has shape {tensors['scores'].shape} for {shape[0]} rows", REPAIR)


def _is_inert(name: str) -> bool:
    """ROLL's own classes, and the images that multi-modal prompts hold in an object column."""
    return name.startswith(("roll.", "PIL."))


class _Buffer(Stub):
    """``io.BytesIO`` as pickled: its state is (bytes, position, attributes)."""

    @property
    def data(self) -> bytes:
        """What was in it."""
        return bytes(self.state[0]) if self.state else b""


def _add_rows(
    builder: RowBuilder, tensors: dict[str, Array], objects: dict[str, Any], step: int, file: Path, settings: Settings
) -> None:
    rows = len(tensors["input_ids"])
    said = []
    sampler = _shifted(tensors.get("infer_logprobs"))
    if sampler is None:
        said.append("no infer_logprobs: set actor_infer.generating_args.logprobs=0 to have them (null leaves them out)")
    trainer, why = _trainer(tensors, sampler)
    said += [why] if why else []
    groups, how = _groups(tensors, objects, rows, settings)
    said += [how] if how else []
    columns = {"sampler_logprobs": sampler, "trainer_logprobs": trainer}
    for row in range(rows):
        name = f"step{step}-{row}"
        try:
            native = _native(tensors, columns, row)
        except ValueError as error:
            builder.reject(file, row + 1, name, f"not a ROLL sequence: {error}")
            continue
        group = prompt_name(step, native["prompt_ids"]) if groups is None else f"step{step}-{groups[row]}"
        builder.add({"sequence_id": name, "group_id": group, **native}, file, row + 1)
    for text in said:
        builder.notice(f"step {step}: {text}")


def _shifted(values: Array | None) -> Array | None:
    """(rows, T - 1) log-probs as (rows, T): column t is token t's, and the first has none."""
    if values is None:
        return None
    return np.concatenate([np.full((len(values), 1), np.nan, dtype=np.float32), values], axis=1)


def _trainer(tensors: dict[str, Array], sampler: Array | None) -> tuple[Array | None, str]:
    """``old_log_probs`` where a batch has them and they are the trainer's own, and why not otherwise."""
    trainer = _shifted(tensors.get("old_log_probs"))
    if trainer is None:
        return None, ""
    counted = tensors["response_mask"] != 0
    if not bool(trainer[counted].any()):
        return None, "old_log_probs is 0.0 throughout, as without enable_old_logprobs_recompute: not computed"
    if sampler is not None and bool((trainer[counted] == sampler[counted]).all()):
        return None, "old_log_probs copies infer_logprobs: set enable_old_logprobs_recompute=true to have the trainer's"
    return trainer, ""


def _groups(
    tensors: dict[str, Array], objects: dict[str, Any], rows: int, settings: Settings
) -> tuple[list[str] | None, str]:
    """A group name for each row, None where equal prompts must do, and how they were told, "" when by the dump."""
    for column in (objects.get("traj_group_id"), tensors.get("prompt_id"), objects.get("prompt_id")):
        if isinstance(column, np.ndarray) and column.shape[:1] == (rows,) and column.size == rows:
            return [str(name) for name in column.reshape(-1).tolist()], ""
    if settings.group_size is not None:
        return [str(row // settings.group_size) for row in range(rows)], "groups are consecutive rows (group_size)"
    return None, "the batch names no groups: sequences with equal prompt tokens form one"


def _native(tensors: dict[str, Array], columns: dict[str, Array | None], row: int) -> dict[str, Any]:
    """One row in native field names."""
    mask = tensors["response_mask"][row] != 0
    first, start, end = response_span(tensors["attention_mask"][row], mask)
    ids = tensors["input_ids"][row]
    logged = {name: None if values is None else values[row, start:end] for name, values in columns.items()}
    return {
        "prompt_ids": ids[first:start],
        "response_ids": ids[start:end],
        **logged,
        "loss_mask": mask[start:end].astype(np.float64),
        # One score a sequence, or one a token with the episode's at its end.
        "reward": float(np.sum(tensors["scores"][row])) if "scores" in tensors else None,
    }
