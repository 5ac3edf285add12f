"""Rows of TRL's completions table in native field names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.readers.files import parquet_rows, parse_json
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.run import Floats, Ints, Rollouts, Settings

IDS = ("completion_ids", "sampler_completion_ids")
PROMPTS = ("prompt_ids", "sampler_prompt_ids", "prompt_token_ids")
LOGPROBS = ("sampler_logprobs", "logprobs", "sampling_logprobs", "sampling_per_token_logps")
_VERSIONS = ("sampler_version", "global_step")
_MASKS = ("tool_mask", "env_mask", "completion_mask", "loss_mask")
_PROMPT_MASK, _TRAINER = "prompt_mask", "old_per_token_logps"
_TEXT = ("prompt", "completion")
_EXTRA = {*IDS, *PROMPTS, *LOGPROBS, *_VERSIONS, *_MASKS, _PROMPT_MASK, _TRAINER, "advantage"}

Row = dict[str, Any]


def load(
    step: int, file: Path, root: Path, settings: Settings, options: ReadOptions, implied_version: int | None
) -> Rollouts:
    """One table; ``implied_version`` sampled the rows that do not name theirs."""
    builder = RowBuilder(step, root, settings.vocab_size, options)

    def on_bad(number: int, reason: str) -> None:
        builder.reject(file, number, None, reason)

    rows: dict[int, Row] = {}
    for number, cells in parquet_rows(file, on_bad if options.skip_bad_rows else None, _TEXT):
        try:
            rows[number] = _native(cells, step, implied_version) | {"rewards": _rewards(cells)}
        except (ValueError, TypeError, OverflowError) as error:
            builder.reject(file, number, None, str(error))
    names = _reward_names(list(rows.values()), builder, step)
    groups = _groups(rows, settings.group_size, builder, step)
    for number, row in rows.items():
        row["reward"] = row["rewards"].get(names[0]) if len(names) == 1 else None
        builder.add({**row, "sequence_id": f"step{step}-{number}", "group_id": groups[number]}, file, number)
    _say(builder, step, list(rows.values()))
    return builder.build()


def _native(cells: Mapping[str, Any], step: int, implied_version: int | None) -> Row:
    if cells.get("step") != step:
        raise ValueError(f"its step column says {cells.get('step')}, the file's name {step}")
    ids, prompt = _integers(cells, IDS), _integers(cells, PROMPTS)
    if ids is None or prompt is None:
        raise ValueError("no token ids: completion_ids or prompt_ids is missing or null")
    there = _floats(cells, _PROMPT_MASK)
    if there is not None:
        prompt = prompt[there[: len(prompt)] > 0]
    mask: Floats | None = None
    for key in _MASKS:
        part = _floats(cells, key)
        if part is not None and len(part) != len(ids):
            raise ValueError(f"{key} has {len(part)} values for {len(ids)} tokens")
        mask = part if mask is None else mask if part is None else mask * part
    named = next((cells[key] for key in _VERSIONS if _is_integer(cells.get(key))), None)
    version = implied_version if named is None else int(named)
    if version is not None and version >= step > 0:
        raise ValueError(f"sampled by version {version}, which step {step} only made: a row of an evaluation")
    logprobs = next((value for key in LOGPROBS if (value := _floats(cells, key)) is not None), None)
    trainer = _floats(cells, _TRAINER)
    return {
        "prompt_ids": prompt,
        "response_ids": ids,
        "sampler_logprobs": logprobs,
        # Computed when the batch was sampled, with the weights of that moment.
        "trainer_logprobs": trainer if version == step - 1 else None,
        "stale_trainer": trainer is not None and version != step - 1,
        "loss_mask": mask,
        "sampler_version": version,
        "advantages": cells.get("advantage"),
    }


def _rewards(cells: Mapping[str, Any]) -> dict[str, float]:
    """The reward columns: TRL writes them after step and text, and before the extra ones."""
    found = {}
    for name in cells:
        if name == "step":
            continue
        if name in _EXTRA:
            break
        if isinstance(cells[name], int | float):
            found[name] = float(cells[name])
    return found


def _reward_names(rows: list[Row], builder: RowBuilder, step: int) -> list[str]:
    """Reward columns that are anything but 0 and null; their weights are not logged, so several do not add up."""
    names = dict.fromkeys(name for row in rows for name, value in row["rewards"].items() if value and value == value)
    if not names:
        names = dict.fromkeys(name for row in rows for name in row["rewards"])
    if len(names) > 1:
        builder.notice(
            f"step {step}: reward is null: several columns ({', '.join(names)}), whose weights are not there"
        )
    return list(names)


def _groups(rows: dict[int, Row], size: int | None, builder: RowBuilder, step: int) -> dict[int, str]:
    """Group of each row: ``size`` rows in a row share a prompt, counted from the last, as the oldest are dropped."""
    prompts = {number: row["prompt_ids"].tobytes() for number, row in rows.items()}
    if size:
        groups = {number: f"step{step}-{(max(rows) - number) // size}" for number in rows}
        first: dict[str, bytes] = {}
        if all(first.setdefault(groups[number], prompts[number]) == prompts[number] for number in rows):
            return groups
    reason = f"{size} rows in a row do not share a prompt" if size else "the table names no group"
    builder.notice(
        f"step {step}: {reason}: rows with equal prompt tokens are one group. Set it with --set group_size=N"
    )
    return {n: f"step{step}-{hashlib.blake2b(prompt, digest_size=6).hexdigest()}" for n, prompt in prompts.items()}


def _say(builder: RowBuilder, step: int, rows: list[Row]) -> None:
    if any(row["sampler_logprobs"] is None for row in rows):
        builder.notice(
            f"step {step}: no sampler log-probs in some or all rows: TRL has them only with use_vllm=True, or from a "
            f"rollout_func; log them as one of {', '.join(LOGPROBS)}"
        )
    if any(row["sampler_version"] is None for row in rows):
        builder.notice(
            f"step {step}: no sampler version: there is no sampler_version column and no training_args.bin. With TRL's "
            "defaults (one generation an update) --set sampler_lag=0 says it"
        )
    stale = sum(row["stale_trainer"] for row in rows)
    if stale:
        builder.notice(
            f"step {step}: {_TRAINER} of {stale} rows is left out: TRL computes it with the weights that sampled, "
            "which are not known to be those of the update"
        )
    zeros = sum(_zeros(row["sampler_logprobs"], row["loss_mask"]) for row in rows)
    if zeros:
        builder.notice(
            f"step {step}: sampler log-probs are exactly 0.0 at {zeros} loss tokens: a probability that rounds to 1, "
            "or TRL's filler at tool tokens where tool_mask was not logged; kept as logged"
        )


def _zeros(logprobs: Floats | None, mask: Floats | None) -> int:
    """Loss tokens whose log-prob is exactly 0; none where the two do not fit, which the builder says."""
    if logprobs is None or (mask is not None and len(mask) != len(logprobs)):
        return 0
    zero = logprobs == 0.0
    return int(np.count_nonzero(zero if mask is None else zero & (mask > 0)))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _cell(cells: Mapping[str, Any], key: str) -> Any:
    """A list column, or one that was written as JSON text."""
    value = cells.get(key)
    return parse_json(value.encode()) if isinstance(value, str) else value


def _integers(cells: Mapping[str, Any], keys: tuple[str, ...]) -> Ints | None:
    for key in keys:
        value = _cell(cells, key)
        if value is not None:
            array = np.asarray(value)
            if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
                raise ValueError(f"{key} is not a flat list of integers")
            return array.astype(np.int64, copy=False)
    return None


def _floats(cells: Mapping[str, Any], key: str) -> Floats | None:
    value = _cell(cells, key)
    if value is None:
        return None
    array = np.asarray(value, dtype=np.float64)
    # The engine's lists have one entry for each of the log-probs asked for, the sampled token's alone by default.
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1:
        raise ValueError(f"{key} is not a flat list")
    return array
