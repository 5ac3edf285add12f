"""open-instruct's traces: ``{run}_rollouts_{shard}.jsonl``, with ``--save_traces --rollouts_save_path DIR``.

One sequence a line, many steps a file, each file of 10,000 lines or a little more. Steps count from 0: step k trains
version k, and ``{output_dir}_checkpoints/step_N`` holds version N. No sampler version is saved, and not which tokens a
tool wrote. A restarted run appends from its first shard on, so a step that was made again lies in a lower shard, or
later in the same one.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers.files import Row, parse_json
from mismatch_probe.readers.line_index import Line, contents, scan
from mismatch_probe.readers.nearby import find_checkpoints, initial_model
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import Found, meaning_is_settled, settle
from mismatch_probe.readers.sniff import first_line
from mismatch_probe.run import Rollouts, Run, Settings, Step

FORMAT = "open-instruct"
LOOKS_FOR = "*_rollouts_*.jsonl with prompt_tokens, response_tokens and sample_idx"

_FILE = re.compile(r"(.+)_rollouts_(\d+)\.jsonl(?:\.gz|\.zst)?")
_START = re.compile(rb'\{"step": (\d{1,15}), "sample_idx": (\d{1,15}), ')
_KEYS = (b'"sample_idx":', b'"prompt_idx":', b'"prompt_tokens":')

Attempts = dict[tuple[int, int], list[Line]]
"""Lines of one step by (-shard, attempt within its file): the greatest key is the newest."""


def matches(path: Path) -> bool:
    """True when a rollout file's first line has open-instruct's fields."""
    return bool(_runs(_folder(path)))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the directory that the traces were saved to, or the one above its ``rollouts``.

    Raises:
        InputError: it holds the traces of no run, or of several and ``name`` does not say which.
        BadFileError: a line belongs to no step, or a file cannot be read.
    """
    folder = _folder(path)
    runs = _runs(folder)
    if not runs:
        raise InputError(f"{path}: holds no {{run}}_rollouts_*.jsonl of open-instruct. Give rollouts_save_path")
    name = settle(path, options).name if len(runs) > 1 else next(iter(runs))
    if name not in runs:
        raise InputError(f"{path}: holds the traces of {', '.join(runs)}. Choose one with --set name=RUN")
    settings = settle(path, options, _metadata(folder, name))
    checkpoints, found = find_checkpoints(path, settings, _usual_checkpoints(path, folder, name))
    steps = tuple(
        Step(index, _files(attempts), partial(_load, index, attempts, path, settings, options))
        for index, attempts in sorted(_index(runs[name]).items())
    )
    if not steps:
        raise BadFileError(runs[name][0][1], None, "holds no line with a step", "Restore the file from the run")
    notices = (
        "open-instruct saves no trainer log-prob and no sampler version. Keep checkpoints (--save_freq) to score with, "
        "and where the sampler's lag is the same throughout (--async_steps 1, --inflight_updates False) state it with "
        "--set sampler_lag=N",
        *_temperature_notice(settings),
        *found,
    )
    return Run(path, FORMAT, settings, steps, checkpoints, initial=initial_model(settings), notices=notices)


def _folder(path: Path) -> Path:
    return next((folder for folder in (path, path / "rollouts") if _runs(folder)), path)


def _runs(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    """(shard, file) of each run that has traces in the folder, judged by one line of its first file."""
    files: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for entry in sorted(folder.glob("*_rollouts_*.jsonl*")) if folder.is_dir() else ():
        match = _FILE.fullmatch(entry.name)
        if match and entry.is_file():
            files[match.group(1)].append((int(match.group(2)), entry))
    return {name: shards for name, shards in files.items() if any(_is_trace(file) for _, file in shards[:2])}


def _is_trace(file: Path) -> bool:
    line = first_line(file)
    return line.startswith(b"{") and all(key in line for key in _KEYS)


def _metadata(folder: Path, name: str) -> Found:
    """The run's name, and its model from ``{run}_metadata.jsonl``."""
    found: dict[str, tuple[Any, str]] = {"name": (name, "file names")}
    file = folder / f"{name}_metadata.jsonl"
    try:
        row = parse_json(first_line(file))
    except ValueError:
        return found
    model = row.get("model_name") if isinstance(row, Mapping) else None
    if isinstance(model, str) and model != "unknown":
        found["model"] = (model, f"{file.name}: model_name")
    return found


def _temperature_notice(settings: Settings) -> tuple[str, ...]:
    if meaning_is_settled(settings):
        return ()
    return (
        "the traces do not say the temperature, nor whether log-probs are taken after it (open-instruct since "
        "2026-05-13) or before it. Unless it was 1, state both with --set temperature=VALUE and "
        "--set logprobs_mode=processed|raw",
    )


def _usual_checkpoints(path: Path, folder: Path, name: str) -> list[tuple[Path, str]]:
    roots = dict.fromkeys((path, folder, path.parent, folder.parent))
    beside = [entry for root in roots for entry in sorted(root.glob("*_checkpoints")) if entry.is_dir()]
    own = [entry for entry in beside if entry.name.startswith(name)]
    # Directories of other runs may lie beside this one's: without the run's name in it, only a lone one is believed.
    chosen = own or (beside if len(set(beside)) == 1 else [])
    return [(entry, "step_{version}") for entry in chosen]


def _index(shards: list[tuple[int, Path]]) -> dict[int, Attempts]:
    """Lines by step. A line that names none belongs to the step before it, whose loading says what is wrong with it."""
    steps: dict[int, Attempts] = defaultdict(lambda: defaultdict(list))
    for shard, file in shards:
        attempt: dict[int, int] = {}
        step: int | None = None
        stray: list[Line] = []
        for line, data in scan(file, _second_record):
            place = _place(data)
            if place is None:
                stray.append(line)
                continue
            step, sample = place
            # A step is written at once, from sample 0 on: a second sample 0 begins a second attempt.
            attempt[step] = attempt.get(step, -1 if sample == 0 else 0) + (sample == 0)
            steps[step][-shard, attempt[step]] += [*stray, line]
            stray = []
        if step is not None:
            steps[step][-shard, attempt[step]] += stray
    return steps


def _second_record(line: bytes) -> int:
    start = line.rfind(b'{"step": ')
    return start if start > 0 and _START.match(line, start) else 0


def _place(line: bytes) -> tuple[int, int] | None:
    """(step, sample_idx) of a line, by its first bytes where they are as open-instruct writes them."""
    match = _START.match(line)
    if match:
        return int(match.group(1)), int(match.group(2))
    try:
        row = parse_json(line)
        step, sample = row["step"], row["sample_idx"]
    except (ValueError, TypeError, KeyError):
        return None
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in (step, sample))
    return (step, sample) if whole else None


def _files(attempts: Attempts) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(line.file for lines in attempts.values() for line in lines))


def _load(step: int, attempts: Attempts, root: Path, settings: Settings, options: ReadOptions) -> Rollouts:
    builder = RowBuilder(step, root, settings.vocab_size, options)
    newest = max(attempts)
    unlogged = tools = 0
    for line, data in contents(attempts[newest]):
        row = _parsed(builder, line, data, options)
        if row is None:
            continue
        try:
            native = _native(row, step)
        except _SetAside as reason:
            tools += reason.tools
            builder.reject(line.file, line.number, f"step{step}-{row.get('sample_idx')}", str(reason))
            continue
        unlogged += native["sampler_logprobs"] is None
        builder.add(native, line.file, line.number)
    superseded, copies = _older(attempts)
    for text in _said(superseded, copies, unlogged, tools):
        builder.notice(f"step {step}: {text}")
    return builder.build()


def _older(attempts: Attempts) -> tuple[int, int]:
    """Lines of earlier attempts that differ from the newest one's, and those that are copies of them."""
    *earlier, newest = sorted(attempts)
    older = [line for key in earlier for line in attempts[key]]
    if not older:
        return 0, 0
    kept = {_digest(data) for _, data in contents(attempts[newest])}
    copies = sum(_digest(data) in kept for _, data in contents(older))
    return len(older) - copies, copies


def _parsed(builder: RowBuilder, line: Line, data: bytes, options: ReadOptions) -> Row | None:
    """The object on a line, None where it was torn or is set aside."""
    try:
        row = parse_json(data.strip(b" \t\r\n\0"))
        if not isinstance(row, dict):
            raise ValueError(f"a JSON {type(row).__name__} where an object was expected")
    except ValueError as error:
        reason = f"not valid JSON ({str(error).splitlines()[0]})"
    else:
        return row
    if line.unfinished:
        builder.torn(line.file, line.number, reason)
    elif options.skip_bad_rows:
        builder.reject(line.file, line.number, None, reason)
    else:
        remedy = "Restore the file, or pass --skip-bad-rows to analyse the rest"
        raise BadFileError(line.file, line.number, reason, remedy)
    return None


class _SetAside(Exception):
    """Why a sequence is not analysed; ``tools`` when it called some."""

    def __init__(self, reason: str, tools: bool = False) -> None:
        super().__init__(reason)
        self.tools = tools


def _native(row: Row, step: int) -> Row:
    """One line in native field names."""
    info = row.get("request_info")
    if isinstance(info, dict) and (info.get("tool_calleds") or info.get("num_calls")):
        reason = "it called tools, and open-instruct does not save which of its tokens they wrote"
        raise _SetAside(f"{reason}: those would count as sampled", tools=True)
    logprobs = row.get("logprobs")
    # Where nothing was sampled, open-instruct puts an EOS with the log-prob NaN.
    if isinstance(logprobs, list) and len(logprobs) == 1 and isinstance(logprobs[0], float) and math.isnan(logprobs[0]):
        raise _SetAside("the response is empty: open-instruct put an EOS in its place, with no log-prob")
    return {
        "sequence_id": f"step{step}-{row.get('sample_idx')}",
        "group_id": None if row.get("prompt_idx") is None else f"step{step}-{row['prompt_idx']}",
        "prompt_ids": row.get("prompt_tokens"),
        "response_ids": row.get("response_tokens"),
        "sampler_logprobs": logprobs,
        "advantages": row.get("advantage"),
        "reward": row.get("reward"),
        "finish_reason": row.get("finish_reason"),
    }


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data.strip(b" \t\r\n\0"), digest_size=16).digest()


def _said(superseded: int, copies: int, unlogged: int, tools: int) -> list[str]:
    said = []
    if copies:
        said.append(f"{copies} rows are exact copies of others and count once")
    if superseded:
        said.append(f"made again after a restart: the last rows count, {superseded} of earlier attempts are left out")
    if unlogged:
        said.append(f"logprobs is null in {unlogged} rows, so their sampler log-probs are unknown")
    if tools:
        said.append(
            f"{tools} sequences called tools and are set aside: open-instruct keeps the mask of tool tokens to itself. "
            "For these, write the native layout from a hook that has GenerationResult.masks"
        )
    return said
