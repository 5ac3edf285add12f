"""prime-rl's files, built by hand from the fields its writers are documented to emit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgpack

from tests.reader_cases import Case, cases

DATA = Path(__file__).parent / "fixtures" / "prime_rl"
"""Written by prime-rl's own code at each tag (its token exporter, packer and transport types, msgspec 0.23.0) and by
verifiers 0.4.0's ``Episode.to_record``, all from ``reader_cases.cases()`` at temperature 0.75."""
STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")


def arrays(case: Case) -> dict[str, Any]:
    """Full-length arrays of one sequence, zeros on what was not sampled."""
    n = len(case.prompt)
    mask = [0] * n + case.mask
    return {
        "token_ids": case.prompt + case.response,
        "mask": [bool(m) for m in mask],
        "logprobs": [0.0] * n + case.sampler,
        "advantages": [case.advantage * m for m in mask],
        "trainer": [-math.log(64)] + [-3.0] * (n - 1) + case.trainer,
    }


def export_line(case: Case, step: int, idx: int, variant: str = "current", **changes: Any) -> dict[str, Any]:
    """One line of a token export: "current", "v0.8.0" or "june" (and May) 2026."""
    full = arrays(case)
    n = len(full["token_ids"])
    ratio = [t - s for t, s in zip(full["trainer"], full["logprobs"], strict=True)]
    line: dict[str, Any] = {"schema_version": 1, "step": step}
    if variant != "current":
        line["export_step"] = step
    line |= {"rank": 0, "micro_step": 0, "micro_sequence_idx": idx, "export_sequence_idx": idx, "env_name": "math"}
    if variant != "current":
        line["run_id"] = "run_default"
    if variant == "june":
        line["training_mode"] = "rl"
    line |= {
        "token_ids": full["token_ids"],
        "position_ids": list(range(n)),
        "loss_mask": full["mask"],
        "advantages": full["advantages"],
    }
    if variant == "june":
        line["rewards"] = [case.reward] * n
    line |= {
        "inference_logprobs": full["logprobs"],
        "trainer_logprobs": full["trainer"],
        "entropy": [0.5] * n,
        "mismatch_kl": [math.exp(r) - r - 1 for r in ratio],
        "log_importance_ratio": ratio,
        "is_masked": [False] * n,
    }
    if variant != "june":
        line |= {name: [None] * n for name in STREAMS}
    return line | changes


def write_export(run: Path, lines: list[dict[str, Any]], step: int, rank: int = 0) -> Path:
    folder = run / "token_exports" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{rank}.jsonl"
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    (folder / "STABLE").touch()
    return file


def exported(run: Path, step: int, variant: str = "current") -> Path:
    """All cases that have a response, as the exporter writes them."""
    lines = [export_line(case, step, idx, variant) for idx, case in enumerate(cases()) if case.response]
    return write_export(run, lines, step)


def node(ids: list[int], parent: int | None, sampled: bool, logprobs: list[float], **more: Any) -> dict[str, Any]:
    mask = more.pop("mask", [sampled] * len(ids))
    role = "assistant" if sampled else "user"
    out = {"message": {"role": role, "content": "text"}, "sampled": sampled, "token_ids": ids, "mask": mask}
    return out | {"logprobs": logprobs} | ({} if parent is None else {"parent": parent}) | more


def trace(case: Case, number: int, **more: Any) -> dict[str, Any]:
    """A chain of messages; the prompt's last token is the scaffold of the first answer, where it has two or more."""
    scaffold = case.prompt[-1:] if len(case.prompt) > 1 else []
    nodes = [node(case.prompt[: len(case.prompt) - len(scaffold)], None, False, [])]
    at, calls = 0, []
    for who, count in case.turns:
        ids, mask = case.response[at : at + count], [who == "assistant"] * count
        logprobs = case.sampler[at : at + count] if who == "assistant" else []
        extra = {"advantages": [case.advantage] * count} if who == "assistant" else {}
        ids, mask = (scaffold + ids, [False] * len(scaffold) + mask) if at == 0 else (ids, mask)
        nodes.append(node(ids, len(nodes) - 1, who == "assistant", logprobs, mask=mask, **extra))
        if who == "assistant":
            sampling = {"temperature": 0.75}
            calls.append({"node": len(nodes) - 1, "sampling": sampling, "finish_reason": case.finish_reason})
        at += count
    rewards = {"correct": {"score": case.reward * 2, "weight": 0.5}}
    out = {"version": 1, "id": f"trace{number}", "task": {"type": "Task", "data": {}}, "nodes": nodes, "calls": calls}
    return out | {"rewards": rewards, "ok": True, "errors": [], "agent": {"name": "agent", "trainable": True}} | more


def episode(case: Case, number: int, policy: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    span = policy or {"start": min(case.version, default=3), "end": max(case.version, default=3)}
    return {
        "id": f"episode{number}",
        "env": {"id": "math", "name": "math"},
        "task": {"type": "Task", "data": {}},
        "group": {"id": f"group{case.group}"},
        "run": {"type": "train", "id": "run", "work": {"type": "train", "step": 4, "policy": span}},
        "ok": True,
        "traces": [trace(case, number)],
    } | more


def write_traces(run: Path, lines: list[dict[str, Any]], step: int = 4, subset: str = "effective") -> Path:
    folder = run / "rollouts" / f"step_{step}" / "train" / subset
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "traces.jsonl"
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return file


def traced(run: Path, step: int = 4, subset: str = "effective") -> Path:
    return write_traces(run, [episode(case, number) for number, case in enumerate(cases())], step, subset)


def micro_batch(group: list[Case], fields: int = 16, temperature: float = 0.75) -> list[Any]:
    """Sequences packed into one row of the given layout: 10, 12, 16, 17, 18 or 19 fields."""
    full = [arrays(case) for case in group]
    packed = {
        key: [value for one in full for value in one[key]] for key in ("token_ids", "mask", "advantages", "logprobs")
    }
    lengths = [len(one["token_ids"]) for one in full]
    positions = [place for length in lengths for place in range(length)]
    temperatures, names = [temperature] * len(positions), ["math"] * len(positions)
    first = [packed["token_ids"], packed["mask"], packed["advantages"], packed["logprobs"], positions]
    if fields in (10, 12):
        return [*first, temperatures, *[None] * (fields - 6)]
    if fields == 17:
        rewards = [case.reward for case, length in zip(group, lengths, strict=True) for _ in range(length)]
        return [*first, temperatures, names, lengths, *[None] * 5, "rl", rewards, None, None]
    seq_lens = [] if fields == 18 else [lengths]
    row = [*first, lengths, temperatures, names, *seq_lens]
    return [*row, *[None] * (fields - len(row))]


def write_rank(run: Path, rows: list[Any], step: int = 4, rank: int = 0) -> Path:
    folder = run / "rollouts" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{rank}.bin"
    file.write_bytes(msgpack.packb(rows))
    return file


def ranked(run: Path, step: int = 4, fields: int = 16) -> Path:
    filled = [case for case in cases() if case.response]
    return write_rank(run, [micro_batch(filled[:3], fields), micro_batch(filled[3:], fields)], step)


def unspanned() -> list[Case]:
    """The cases as traces hold them: a sequence that spans versions has none."""
    out = cases()
    for case in out:
        if len(set(case.version)) > 1:
            case.version = [-1] * len(case.version)
    return out
