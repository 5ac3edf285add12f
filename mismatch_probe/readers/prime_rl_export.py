"""prime-rl's token export: ``token_exports/step_N/rank_R.jsonl``, one packed sequence a line, written by the trainer.

Switched on by ``trainer.enable_token_export = true``. Arrays are aligned to ``token_ids`` and already shifted: value t
belongs to token t, and the first of each is filler. Values that are not finite are written as null. The lines name no
weight version, no group and no temperature, and, since 2026-06-27, no reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.files import Row, Torn, jsonl_rows, read_bytes
from mismatch_probe.readers.prime_rl_samples import WEIGHTS, Sample, bools, floats, ints, member, sample
from mismatch_probe.readers.rows import RowBuilder

_STEP = re.compile(rb'^\{"schema_version":\s*\d+,\s*"step":\s*(\d+)', re.MULTILINE)


def is_export(row: Row) -> bool:
    """True for a line of a token export."""
    return "schema_version" in row and "inference_logprobs" in row and "trainer_logprobs" in row


def counts_from_zero(row: Row) -> bool:
    """True for a line written while prime-rl numbered steps from 0 (until 2026-07-03)."""
    return "training_mode" in row


def steps_in(file: Path) -> list[int]:
    """Steps of a flat ``token_exports/rank_R.jsonl``, which held all of them (2026-05-21), ascending."""
    try:
        return sorted({int(step) for step in _STEP.findall(read_bytes(file)) if len(step) < 10})
    except BadFileError:
        return []


def read_exports(files: tuple[Path, ...], step: int, builder: RowBuilder, skip_bad: bool) -> list[Sample]:
    """The sequences of one step's files; lines of a flat file that belong to other steps are passed over."""
    samples = []
    no_sampler = 0
    for file in files:
        for number, line in _lines(file, builder, skip_bad):
            if file.parent.name == "token_exports" and line.get("step") != step:
                continue
            try:
                one = _sample(file, number, step, line)
            except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                builder.reject(file, number, None, f"not a token export: {_reason(error)}")
                continue
            no_sampler += one.row["sampler_logprobs"] is None
            samples.append(one)
    if no_sampler:
        builder.notice(
            f"step {step}: {no_sampler} sequences were trained without sampler log-probs (no rl component, or "
            "training_mode sft); what stands in inference_logprobs there is filler and is taken as absent"
        )
    return samples


def _lines(file: Path, builder: RowBuilder, skip_bad: bool) -> Iterator[tuple[int, Row]]:
    def torn(number: int, reason: str) -> None:
        builder.torn(file, number, reason)

    def bad(number: int, reason: str) -> None:
        builder.reject(file, number, None, reason)

    on_bad: Torn | None = bad if skip_bad else None
    return jsonl_rows(file, torn, on_bad)


def _sample(file: Path, number: int, step: int, line: Row) -> Sample:
    ids = ints(line["token_ids"], "token_ids")
    mask = bools(line["loss_mask"], "loss_mask")
    positions = line.get("position_ids")
    if isinstance(positions, list) and 0 in positions[1:]:
        raise ValueError("position_ids start again inside it: several sequences in one row")
    columns: dict[str, Any] = {
        "sampler_logprobs": floats(line["inference_logprobs"], "inference_logprobs"),
        "trainer_logprobs": floats(line["trainer_logprobs"], "trainer_logprobs"),
        "advantages": floats(line["advantages"], "advantages"),
        **{name: floats(line.get(name), name) for name in WEIGHTS},
        "rewards": floats(line.get("rewards"), "rewards"),
    }
    ratios = line.get("log_importance_ratio", ())
    # The exporter leaves the ratio out where no token of the batch has a sampler's log-prob.
    if line.get("training_mode") == "sft" or (len(ratios) and floats(ratios, "log_importance_ratio") is None):
        columns["sampler_logprobs"] = None
    fits = len(mask) == len(ids)
    for name in WEIGHTS:
        fits = fits and (columns[name] is None or len(columns[name]) == len(ids))
    if not fits:
        raise ValueError(f"loss_mask or loss weights do not have {len(ids)} values, one a token")
    counted = member(mask, *(columns.pop(name) for name in WEIGHTS))
    name = f"step{step}-rank{line.get('rank', 0)}-{line.get('export_sequence_idx', number - 1)}"
    one = sample(file, number, name, ids, mask, counted, columns)
    rewards = one.row.pop("rewards")
    one.row["reward"] = None if rewards is None else float(rewards[0])
    return one


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
