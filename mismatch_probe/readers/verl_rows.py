"""verl's columns -> native rows: padding cut, versions and groups named, what is missing said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.verl_archive import Batch, load_dp, load_tq
from mismatch_probe.run import Rollouts


@dataclass(frozen=True)
class Dump:
    """One file: the step it belongs to, its kind ("tq" or "dp") and its place among the files of the step.

    ``part`` is the inner directory of a ``tq`` file, or the generation of a ``dp`` file where a step may have several.
    ``group_size`` is N of the directory's name, None where there is none. ``whole`` is False when verl wrote no
    ``meta.json`` beside it, which it does last.
    """

    step: int
    file: Path
    kind: str
    part: int | None = None
    group_size: int | None = None
    whole: bool = True


def load(step: int, dumps: tuple[Dump, ...], root: Path, vocab_size: int | None, options: ReadOptions) -> Rollouts:
    """The rollouts of one step.

    Raises:
        BadFileError: a file cannot be read, unless ``skip_bad_rows`` is set or verl had not finished writing it.
    """
    builder = RowBuilder(step, root, vocab_size, options)
    said: Counter[str] = Counter()
    for dump in dumps:
        try:
            batch = load_tq(dump.file) if dump.kind == "tq" else load_dp(dump.file)
        except BadFileError as error:
            if dump.whole and not options.skip_bad_rows:
                raise
            unfinished = "" if dump.whole else "; meta.json, which is written last, is not there"
            builder.reject(dump.file, 0, None, f"{error}{unfinished}")
            continue
        if dump.kind == "tq":
            _add_tq(builder, dump, batch, said)
        else:
            _add_dp(builder, dump, batch, said)
    _say(builder, step, dumps, said)
    return builder.build()


def _add_tq(builder: RowBuilder, dump: Dump, batch: Batch, said: Counter[str]) -> None:
    for row in range(batch.rows):
        key = (batch.keys or [])[row]
        tag = batch.tags[row] if batch.tags and row < len(batch.tags) else None
        tag = tag if isinstance(tag, dict) else {}
        if tag.get("is_padding"):
            builder.reject(dump.file, row + 1, key, "a row that verl added to fill the batch, not a sample")
            continue
        extra = batch.cell("extra_fields", row)
        stated = tag if "max_global_steps" in tag else extra if isinstance(extra, dict) else {}
        mask = batch.cell("response_mask", row)
        native = {
            "sequence_id": key,
            # Keys are {uid}_{session}_{output}: all sessions of a prompt share its uid.
            "group_id": key.rsplit("_", 2)[0],
            "prompt_ids": batch.cell("prompts", row),
            "response_ids": batch.cell("responses", row),
            "loss_mask": batch.cell("loss_mask", row) if mask is None else mask,
            "sampler_logprobs": batch.cell("rollout_log_probs", row),
            "reward": _reward(batch.cell("rm_scores", row)),
        }
        _add(builder, dump, row, native, stated, said)


def _add_dp(builder: RowBuilder, dump: Dump, batch: Batch, said: Counter[str]) -> None:
    groups = _groups(dump, batch, said)
    part = "" if dump.part is None else f"-generation{dump.part}"
    for row in range(batch.rows):
        name = f"step{dump.step}{part}-row{row + 1}"
        if batch.cell("__do_sample__", row) is not None and not batch.cell("__do_sample__", row):
            builder.reject(dump.file, row + 1, name, "a greedy baseline of REMAX, not a sample of the policy")
            continue
        try:
            native = _unpadded(batch, row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            builder.reject(dump.file, row + 1, name, reason)
            continue
        stated = {key: batch.cell(key, row) for key in ("min_global_steps", "max_global_steps")}
        native |= {"sequence_id": name, "group_id": f"step{dump.step}{part}-{groups[row]}"}
        _add(builder, dump, row, native, stated, said)


def _add(
    builder: RowBuilder, dump: Dump, row: int, native: dict[str, Any], stated: dict[str, Any], said: Counter[str]
) -> None:
    """Keep one row; ``stated`` is what verl says of the versions that sampled it."""
    misfit = _misfit(native)
    if misfit:
        builder.reject(dump.file, row + 1, native["sequence_id"], misfit)
        return
    native["sampler_version"], why = _version(stated)
    said["rows"] += 1
    said["no log-probs"] += native["sampler_logprobs"] is None
    said["no reward"] += native["reward"] is None
    said[why] += 1
    builder.add(native, dump.file, row + 1)


def _misfit(native: dict[str, Any]) -> str | None:
    for key in ("prompt_ids", "response_ids"):
        if not isinstance(native[key], np.ndarray) or native[key].ndim != 1:
            return f"{key} is not a flat array"
    if not len(native["response_ids"]):
        return "response_ids is empty"
    if native["loss_mask"] is None:
        return "response_mask is missing, so tool tokens cannot be told from sampled ones"
    return None


def _unpadded(batch: Batch, row: int) -> dict[str, Any]:
    """Prompts are padded on the left, responses on the right; ``attention_mask`` (prompt + response) tells which."""
    prompt, response = np.asarray(batch.cell("prompts", row)), np.asarray(batch.cell("responses", row))
    attention = batch.cell("attention_mask", row)
    if attention is None:
        raise KeyError("attention_mask")
    attention = np.asarray(attention)
    if attention.shape != (len(prompt) + len(response),):
        raise ValueError(f"attention_mask has shape {attention.shape} for {len(prompt)} + {len(response)} tokens")
    kept, present = attention[: len(prompt)] > 0, attention[len(prompt) :] > 0
    length = int(present.sum())
    if not bool(present[:length].all()):
        raise ValueError("attention_mask has holes in the response")
    mask = batch.cell("response_mask", row)
    logprobs = batch.cell("rollout_log_probs", row)
    for name, array in (("response_mask", mask), ("rollout_log_probs", logprobs)):
        if array is not None and np.shape(array) != response.shape:
            raise ValueError(f"{name} has shape {np.shape(array)} for {len(response)} padded response tokens")
    return {
        "prompt_ids": prompt[kept],
        "response_ids": response[:length],
        # Where verl wrote no response_mask it trains on every token that is not padding.
        "loss_mask": np.ones(length) if mask is None else mask[:length],
        "sampler_logprobs": None if logprobs is None else logprobs[:length],
        "reward": _reward(batch.cell("rm_scores", row)),
    }


def _groups(dump: Dump, batch: Batch, said: Counter[str]) -> list[str]:
    """A name for the prompt of each row: ``uid``, else N rows in a row, else the rows whose prompt is the same."""
    if "uid" in batch.columns:
        return [str(batch.columns["uid"][row]) for row in range(batch.rows)]
    prompts = [np.asarray(batch.columns["prompts"][row]).tobytes() for row in range(batch.rows)]
    size = dump.group_size
    if size and all(prompts[row] == prompts[row - row % size] for row in range(batch.rows)):
        return [f"prompt{row // size + 1}" for row in range(batch.rows)]
    said["grouped by prompt"] += 1
    first: dict[bytes, int] = {}
    return [f"prompt{first.setdefault(prompt, len(first)) + 1}" for prompt in prompts]


def _version(stated: dict[str, Any]) -> tuple[int | None, str]:
    """The version that sampled every token, None where verl names only a range, or nothing; and which it is."""
    low, high = _count(stated.get("min_global_steps")), _count(stated.get("max_global_steps"))
    if low is None or high is None:
        return None, "no version"
    return (low, "one version") if low == high else (None, "several versions")


def _count(value: Any) -> int | None:
    known = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0
    return int(value) if known else None


def _reward(scores: Any) -> float | None:
    """``rm_scores`` holds the reward at the last token and zeros before it."""
    if scores is None:
        return None
    array = np.asarray(scores)
    return float(array.sum()) if array.dtype.kind in "fiu" else None


def _say(builder: RowBuilder, step: int, dumps: tuple[Dump, ...], said: Counter[str]) -> None:
    rows = said["rows"]
    if said["no log-probs"]:
        builder.notice(
            f"step {step}: rollout_log_probs is absent in {said['no log-probs']} of {rows} rows, so no discrepancy. "
            "Set actor_rollout_ref.rollout.calculate_log_probs=True to have it written"
        )
    if said["several versions"]:
        builder.notice(
            f"step {step}: {said['several versions']} of {rows} responses were sampled across a weight update. verl "
            "writes only their first and last version (min/max_global_steps), so the versions of their tokens are null"
        )
    if said["no version"]:
        builder.notice(
            f"step {step}: {said['no version']} of {rows} rows name no version (min/max_global_steps, written since "
            "March 2026). --set sampler_lag=0 states it for a run that samples and trains in turns"
        )
    if said["no reward"] == rows and rows:
        builder.notice(f"step {step}: rm_scores is absent, as with a reward model that runs later: rewards are null")
    if said["grouped by prompt"]:
        builder.notice(
            f"step {step}: neither uid nor N of the directory's name tells the groups; rows with the same prompt are "
            "one. --set group_size=N if N rows in a row are"
        )
    later = [dump for dump in dumps if dump.kind == "tq" and dump.part]
    if later:
        builder.notice(
            f"step {step}: verl trained it in {len(later) + 1} mini-batches with an update after each. Those after the "
            f"first were trained by weights that have no version; they are compared with the weights that the step "
            "began with, so their lag leaves out the updates inside the step"
        )
