"""prime-rl's ``rollouts/step_N/train/{all,effective}/traces.jsonl``: one Episode a line, before v0.8.1 one Trace.

Written by default. A Trace is a tree of messages: each node holds the tokens that it adds, and ``logprobs`` of its
sampled tokens only. Every path from the root to a leaf is one trained sequence; a sampled node that several paths
share is trained in the first of them. ``effective`` holds what step N trained, ``all`` whatever had
arrived by then.

``run.work.policy`` counts weight versions from 0: ``start`` was live when the episode's group was dispatched, ``end``
when the episode was done. Where they differ, which token came from which version is not recorded. A bare Trace has
``policy_version``, the start, alone. Verifiers 0.4.0 rounds log-probs to four decimals on the way to this file.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.readers.files import Row, jsonl_rows
from mismatch_probe.readers.prime_rl_samples import Sample, bools, floats, ints, member, sample
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.run import Bools, Floats, Ints

DECIMALS = 4
_PER_SAMPLED = {"sampler_logprobs": "logprobs", "trainer_logprobs": "trainer_logprobs", "advantages": "advantages"}


def traces_in(row: Row) -> list[Row] | None:
    """The traces of one line, None where it is neither an Episode nor a Trace."""
    if isinstance(row.get("traces"), list) and "task" in row:
        return [trace for trace in row["traces"] if isinstance(trace, dict)]
    return [row] if isinstance(row.get("nodes"), list) and "rewards" in row else None


def temperature_in(row: Row) -> float | None:
    """Sampling temperature of the first model call of a line that states one."""
    calls = [call for trace in traces_in(row) or [] for call in _objects(trace.get("calls"))]
    for call in calls:
        value = _at(call, "sampling", "temperature")
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def read_traces(
    files: tuple[Path, ...], step: int, newest: int, builder: RowBuilder, skip_bad: bool, context: bool = False
) -> list[Sample]:
    """The sequences of one step.

    Args:
        newest: the latest version there was when the step's batch was complete.
        context: other files of the step hold the log-probs; nothing is said of these.
    """
    samples: list[Sample] = []
    seen: Counter[str] = Counter()
    for file in files:

        def torn(number: int, reason: str, file: Path = file) -> None:
            builder.torn(file, number, reason)

        def bad(number: int, reason: str, file: Path = file) -> None:
            builder.reject(file, number, None, reason)

        for number, line in jsonl_rows(file, torn, bad if skip_bad else None):
            traces = traces_in(line)
            if traces is None:
                builder.reject(file, number, None, "neither an Episode nor a Trace")
            for trace in traces or []:
                reason = _untrained(trace)
                if reason:
                    seen[reason] += 1
                    continue
                try:
                    version = _version(line, trace, newest)
                    samples += _sequences(file, number, trace, line, version, seen)
                except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
                    builder.reject(file, number, _text(trace.get("id")), f"not a trace: {error}")
    _say(samples, step, seen, builder, context)
    return samples


def _say(samples: list[Sample], step: int, seen: Counter[str], builder: RowBuilder, context: bool) -> None:
    for reason in ("not trainable", "ended in an error"):
        if seen[reason]:
            builder.notice(f"step {step}: {seen[reason]} traces {reason}: not trained, passed over")
    if seen["without"] and not context:
        builder.notice(f"step {step}: {seen['without']} sampled messages came without log-probs; theirs are null")
    unknown = sum(one.row["sampler_version"] is None for one in samples)
    if unknown:
        builder.notice(
            f"step {step}: {unknown} of {len(samples)} sequences may span several weight versions, and which token "
            "came from which is not recorded: their sampler version is null. orchestrator.max_off_policy_steps = 0 "
            "keeps every episode within one version"
        )
    known = [one.row["sampler_logprobs"] for one in samples if one.row["sampler_logprobs"] is not None]
    if known and not context and all(map(_rounded, known)):
        builder.notice(
            f"step {step}: log-probs in traces.jsonl are rounded to {DECIMALS} decimals (by verifiers): each is off by "
            "up to 5e-5 nats. trainer.enable_token_export = true writes them in full"
        )


def _rounded(values: Floats) -> bool:
    return bool(((np.round(values, DECIMALS) == values) | ~np.isfinite(values)).all())


def _untrained(trace: Row) -> str:
    if _at(trace, "agent", "trainable") is False:
        return "not trainable"
    failed = trace["ok"] is False if "ok" in trace else bool(trace.get("errors"))
    return "ended in an error" if failed else ""


def _version(line: Row, trace: Row, newest: int) -> int | None:
    policy = _at(line, "run", "work", "policy")
    if isinstance(policy, dict):
        start, end = policy["start"], policy["end"]
    else:
        start = trace.get("policy_version", _at(trace, "info", "policy_version"))
        # No later version exists before the step's batch is complete, so a start at the newest one is its end too.
        end = start if start == newest else None
    for value in (start, end):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"policy version {value!r} is not an integer of 0 or more")
    return start if start == end else None


@dataclass
class _Node:
    """One message: the tokens that it adds, with its values spread onto the sampled ones."""

    parent: int | None
    sampled: bool
    ids: Ints
    mask: Bools
    count: int
    columns: dict[str, Floats | None]
    weights: dict[str, Floats]
    links: set[tuple[str, int]]
    finish_reason: str | None


def _sequences(file: Path, number: int, trace: Row, line: Row, version: int | None, seen: Counter[str]) -> list[Sample]:
    nodes = _nodes(trace)
    parents = {node.parent for node in nodes}
    leaves = [index for index in range(len(nodes)) if index not in parents]
    resumed = {index for node in nodes for kind, index in node.links if kind == "compaction"}
    group = _at(line, "group", "id") or trace.get("group_id") or _at(trace, "info", "group_id")
    shared = {"sampler_version": version, "reward": _reward(trace.get("rewards")), "group_id": _text(group)}
    temperature = temperature_in(trace)
    found: list[Sample] = []
    trained: set[int] = set()
    for leaf in leaves:
        # A compaction that the agent did not resume from is on no trained path.
        if leaf not in resumed and any(kind == "compaction_attempt" for kind, _ in nodes[leaf].links):
            continue
        path = _path(nodes, leaf)
        name = f"{_text(trace.get('id')) or f'row{number}'}"
        one = _sequence(file, number, name if len(leaves) == 1 else f"{name}-{leaf}", nodes, path, trained)
        if one is not None:
            last = [nodes[index].finish_reason for index in path if nodes[index].sampled]
            one.row |= shared | {"finish_reason": last[-1] if last else None}
            one.temperature = temperature
            found.append(one)
    seen["without"] += sum(node.count > 0 and node.columns["sampler_logprobs"] is None for node in nodes)
    if not found:
        raise ValueError("no token of it was sampled")
    return found


def _sequence(
    file: Path, number: int, name: str, nodes: list[_Node], path: list[int], trained: set[int]
) -> Sample | None:
    chain = [nodes[index] for index in path]
    masks = []
    for index, node in zip(path, chain, strict=True):
        once = node.sampled and node.count > 0
        masks.append(np.zeros_like(node.mask) if once and index in trained else node.mask)
        if once:
            trained.add(index)
    mask: Bools = np.concatenate(masks)
    if not mask.any():
        return None
    streams = {}
    for kind in ("rl", "ce", "ref_kl"):
        if any(kind in node.weights for node in chain):
            streams[kind] = np.concatenate([node.weights.get(kind, np.zeros(len(node.ids))) for node in chain])
    columns: dict[str, Any] = {}
    for ours in _PER_SAMPLED:
        parts = [node.columns[ours] for node in chain]
        if any(part is not None for part in parts):
            filled = [np.full(len(n.ids), np.nan) if p is None else p for n, p in zip(chain, parts, strict=True)]
            columns[ours] = np.concatenate(filled)
        else:
            columns[ours] = None
    ids: Ints = np.concatenate([node.ids for node in chain])
    return sample(
        file,
        number,
        name,
        ids,
        mask,
        member(mask, streams.get("rl"), streams.get("ce"), streams.get("ref_kl")),
        columns,
    )


def _nodes(trace: Row) -> list[_Node]:
    calls = {call.get("node"): call for call in _objects(trace.get("calls")) if isinstance(call.get("node"), int)}
    nodes = []
    for index, node in enumerate(trace["nodes"]):
        parent = node.get("parent")
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < index):
            raise ValueError(f"node {index} names {parent!r} as its parent, which does not precede it")
        ids, mask = ints(node.get("token_ids", []), "token_ids"), bools(node.get("mask", []), "mask")
        if len(ids) != len(mask):
            raise ValueError(f"node {index} has {len(mask)} mask values for {len(ids)} tokens")
        count = int(np.count_nonzero(mask))
        columns = {ours: _spread(node.get(theirs), mask, count, theirs) for ours, theirs in _PER_SAMPLED.items()}
        weights = {}
        for kind, values in (node.get("loss_weights") or {}).items():
            stream = floats(values, f"loss_weights.{kind}")
            if stream is None or len(stream) != len(ids):
                raise ValueError(f"node {index}: loss_weights.{kind} does not have {len(ids)} values")
            weights[kind] = stream
        links = {(str(link.get("type")), int(link["node"])) for link in _objects(node.get("semantic_parents"))}
        reason = _text(calls.get(index, node).get("finish_reason"))
        nodes.append(_Node(parent, bool(node.get("sampled")), ids, mask, count, columns, weights, links, reason))
    return nodes


def _path(nodes: list[_Node], leaf: int) -> list[int]:
    path = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].parent
    return path[::-1]


def _spread(values: Any, mask: Bools, count: int, name: str) -> Floats | None:
    """Values of the ``count`` sampled tokens at their places, NaN elsewhere; None where there are none."""
    compact = floats(values, name)
    if compact is None or not len(compact):
        return None
    if len(compact) != count:
        raise ValueError(f"{name} has {len(compact)} values for {count} sampled tokens")
    if count == len(mask):
        return compact
    spread = np.full(len(mask), np.nan)
    spread[mask] = compact
    return spread


def _reward(rewards: Any) -> float | None:
    """Weighted sum of the named rewards; null where none was computed."""
    parts = list(rewards.values()) if isinstance(rewards, dict) else []
    values = [
        part["score"] * part.get("weight", 1.0) if isinstance(part, dict) else part
        for part in parts
        if part is not None
    ]
    total = float(sum(values)) if values else math.nan
    return total if math.isfinite(total) else None


def _objects(value: Any) -> list[Row]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
