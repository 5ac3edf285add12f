"""tinker-cookbook's capture: ``PREFIX/capture/sample.jsonl`` or the store ``capture.sqlite``.

One record a request: prompt tokens, and tokens and log-probs of each sample. A turn of a conversation is a request of
its own, so each is a sequence here: what the environment said stands in the prompt of the next. Step and group come
from the scope that the training script opens around its calls (``iteration``, ``group_idx``).

Versions. ``model_path`` names the weights that sampled. It is a version where the run's ``checkpoints.jsonl`` lists it
(its ``batch``, the updates made before it was saved), or where its last part ends in a number, as ``.../000012`` does.
Samplers made without a saved checkpoint have no path, and their version is unknown. Iteration k trains version k. The
weights are remote: download them and say where they are with ``checkpoints`` in run.toml.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers.files import jsonl_rows
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import Found, declared_checkpoints, settle
from mismatch_probe.readers.sniff import TEXT_ENDINGS, first_json
from mismatch_probe.readers.tinker_store import JsonlSource, Record, Source, SqliteSource, is_store
from mismatch_probe.run import Rollouts, Run, Settings, Step

FORMAT = "tinker"
LOOKS_FOR = "capture/sample.jsonl or capture.sqlite of tinker-cookbook"

_NUMBER = re.compile(r"(?:^|[/_-])(\d{1,9})$")
_ABOUT = ("scope", "model_path", "sampling_session_id", "sampling_params")
_PARAMETERS = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("max_response_length", "max_tokens"),
)


def matches(path: Path) -> bool:
    """True when a capture, or a summary of rollouts, has tinker-cookbook's keys."""
    return _sample_file(path) is not None or _store(path) is not None or _has_summaries(path)


def read(path: Path, options: ReadOptions) -> Run:
    """Read the run's log directory, or its ``capture``.

    Raises:
        BadFileError: the store cannot be read.
        InputError: the store holds several runs.
        NothingToJudgeError: there are summaries only, or no record names its iteration.
    """
    file, store = _sample_file(path), _store(path)
    if file is None and store is None:
        raise NothingToJudgeError(
            f"{path}: tinker-cookbook's rollout summaries hold lengths and rewards, no tokens and no log-probs, so "
            "nothing can be compared. Wrap the training in tinker_cookbook.capture: with capture_to_store(run_id, "
            "data_dir=DIR), or instrument_tinker(CaptureExporter(JsonlFileSink(LocalStorage(DIR)))), and open "
            "capture(iteration=i, group_idx=g, traj_idx=t, split='train') around the sampling calls"
        )
    declared = settle(path, options)
    source: Source
    source = JsonlSource(file, options) if file is not None else SqliteSource(store or path, declared.name)
    settings = settle(path, options, _found(source))
    steps = [iteration for iteration in source.iterations if iteration is not None]
    if not steps:
        raise NothingToJudgeError(
            f"{source.files[0]}: no record names its iteration, so steps cannot be told apart. Open "
            "capture(iteration=i, group_idx=g, traj_idx=t, split='train') around the sampling calls"
        )
    notices = []
    if None in source.iterations:
        notices.append("records outside an iteration's scope are left unread")
    versions = _checkpoint_batches(path)
    return Run(
        path,
        FORMAT,
        settings,
        tuple(
            Step(step, source.files, partial(_load, step, source, path, settings, options, versions)) for step in steps
        ),
        trainer_checkpoints=declared_checkpoints(path, settings),
        notices=tuple(notices),
    )


def _sample_file(path: Path) -> Path | None:
    for folder in (path / "capture", path):
        for ending in TEXT_ENDINGS:
            first = first_json(folder / f"sample.jsonl{ending}")
            if isinstance(first, dict) and first.get("kind") == "sample" and {"scope", "num_samples"} & set(first):
                return folder / f"sample.jsonl{ending}"
    return None


def _store(path: Path) -> Path | None:
    return next((file for file in sorted(path.glob("*.sqlite")) if is_store(file)), None)


def _has_summaries(path: Path) -> bool:
    file = next(iter(sorted(path.glob("iteration_*/*_rollout_summaries.jsonl"))), None)
    first = first_json(file) if file else None
    return isinstance(first, dict) and {"schema_version", "steps", "sampling_client_step"} <= set(first)


def _found(source: Source) -> Found:
    record = source.first()
    parameters = record.get("sampling_params")
    if not isinstance(parameters, dict):
        return {}
    where = f"{source.files[0].name}: sampling_params of the first record"
    return {
        key: (parameters[name], f"{where}, {name}")
        for key, name in _PARAMETERS
        if isinstance(parameters.get(name), int | float) and not isinstance(parameters.get(name), bool)
    }


def _checkpoint_batches(path: Path) -> dict[str, int]:
    """Sampler path -> updates made before it was saved, from the run's ``checkpoints.jsonl``."""
    batches: dict[str, int] = {}
    for file in (path / "checkpoints.jsonl", path.parent / "checkpoints.jsonl" if path.name == "capture" else None):
        if file is None or not file.is_file():
            continue
        for _, row in jsonl_rows(file, lambda *_: None, lambda *_: None):
            if isinstance(row.get("sampler_path"), str) and isinstance(row.get("batch"), int):
                batches[row["sampler_path"]] = row["batch"]
    return batches


def _load(
    step: int, source: Source, root: Path, settings: Settings, options: ReadOptions, versions: dict[str, int]
) -> Rollouts:
    builder = RowBuilder(step, root, settings.vocab_size, options)
    kept: list[tuple[int, Path, int, Record, list[Record]]] = []
    left = failed = 0
    for file, number, record in source.records(step, builder):
        scope = record.get("scope")
        if not isinstance(scope, dict):
            builder.reject(file, number, None, "not a capture record: it has no scope")
        elif scope.get("split") not in (None, "train") or scope.get("purpose") in ("eval", "test"):
            left += 1
        elif record.get("status") != "ok":
            failed += 1
        else:
            attempt = scope.get("run_attempt")
            about = {key: record.get(key) for key in _ABOUT}
            try:
                rows = _rows(record, number, versions)
            except ValueError as error:
                builder.reject(file, number, None, f"not a capture record: {error}")
                continue
            kept.append((attempt if isinstance(attempt, int) else 0, file, number, about, rows))
    attempts = {entry[0] for entry in kept}
    last = [entry for entry in kept if entry[0] == max(attempts)]
    for _, file, number, _, rows in last:
        for row in rows:
            builder.add(row, file, number)
    _say(builder, step, [about for _, _, _, about, _ in last], settings, versions)
    for count, what in (
        (left, "requests of another split or purpose (evaluations) are left out"),
        (failed, "requests failed or were cancelled and hold no tokens"),
        (len(kept) - len(last), "requests of an earlier run_attempt are left out: the last one counts"),
    ):
        if count:
            builder.notice(f"step {step}: {count} {what}")
    return builder.build()


def _rows(record: Record, number: int, versions: dict[str, int]) -> list[Record]:
    """The samples of one request, in arrays: the lists that were parsed are many times their size."""
    samples, group = record.get("samples"), record["scope"].get("group_idx")
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("samples is no list of objects")
    request = f"{record.get('sampling_session_id')}/{record.get('seq_id')}"
    prompt = _integers(record.get("prompt_tokens"))
    return [
        {
            "sequence_id": f"{number if record.get('seq_id') is None else request}/{sample.get('sample_idx', at)}",
            # Without a group index, the samples of one request are the only ones known to share a prompt.
            "group_id": f"group-{group}" if group is not None else f"request-{request}-{number}",
            "prompt_ids": prompt,
            "response_ids": _integers(sample.get("tokens")),
            "sampler_logprobs": _floats(sample.get("logprobs")),
            "sampler_version": _version(record, versions),
            "finish_reason": sample.get("stop_reason"),
        }
        for at, sample in enumerate(samples)
    ]


def _integers(value: Any) -> Any:
    """A list of integers as an array; anything else as it is, to be refused by name."""
    try:
        array = np.asarray(value) if isinstance(value, list) else None
    except (ValueError, OverflowError):
        return value
    return array if array is not None and array.dtype.kind == "i" and array.ndim == 1 else value


def _floats(value: Any) -> Any:
    """A list of numbers and nulls as an array; anything else as it is, to be refused by name."""
    try:
        return np.asarray(value, dtype=np.float64) if isinstance(value, list) else value
    except (ValueError, TypeError, OverflowError):
        return value


def _version(record: Record, versions: dict[str, int]) -> int | None:
    path = record.get("model_path")
    if not isinstance(path, str):
        return None
    match = _NUMBER.search(path)
    return versions.get(path, int(match.group(1)) if match else None)


def _say(builder: RowBuilder, step: int, records: list[Record], settings: Settings, versions: dict[str, int]) -> None:
    unknown = sum(_version(record, versions) is None for record in records)
    if unknown:
        sessions = len({str(record.get("sampling_session_id")) for record in records})
        builder.notice(
            f"step {step}: {unknown} requests name no weights by number, in {sessions} sampling sessions: samplers "
            "made without a saved checkpoint have no model_path. In synchronous training --set sampler_lag=0 says it"
        )
    if any(record["scope"].get("group_idx") is None for record in records):
        builder.notice(f"step {step}: no group_idx in some or all scopes: only samples of one request are a group")
    parameters = [record["sampling_params"] for record in records if isinstance(record["sampling_params"], dict)]
    heats = {str(given.get("temperature")) for given in parameters}
    if len(heats) > 1:
        shown = ", ".join(sorted(heats))
        builder.notice(
            f"step {step}: requests differ in temperature ({shown}); all are scored at {settings.scoring_temperature:g}"
        )
