"""Several versions at one step: a prefix cache that outlives updates, updates inside responses, one replica behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.field.base import BOS, NAMES, NOISE, FieldRun, base, log_softmax, make_rows
from tests.field.case import Build, Case, Variant


def prompts_of(rng: np.random.Generator, number: int) -> list[list[int]]:
    return [[BOS, *rng.integers(3, NAMES, size=5).tolist()] for _ in range(number)]


def repeats(
    held: Callable[[int], int], *, steps: int = 5, old: int = 4, since: int = 1, seed: int = 0, size: float = 0.002
) -> Build:
    """At each step ``old`` of 8 prompts are those of step 0, sampled by version ``held(step)``; the rest are new."""

    def build(path: Path) -> object:
        run = base(seed, steps=steps, size=size)
        rng = np.random.default_rng(100 + seed)
        known = [row["prompt_ids"] for row in run.rows[0]][:: len(run.rows[0]) // 8][:old]
        for step in range(since, steps):
            cached = make_rows(run.models[held(step)], step, step, rng, prompts=known)
            new = make_rows(run.models[step], step, step, rng, prompts=prompts_of(rng, 8 - old))
            for at, row in enumerate(new):
                number = old + at // 4
                row["sequence_id"], row["group_id"] = f"{step}-{number}-{at % 4}", f"{step}-{number}"
            run.rows[step] = cached + new
        return run.write(path)

    return build


@torch.no_grad()
def from_cache(
    then: LlamaForCausalLM, now: LlamaForCausalLM, prompt: list[int], step: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Four responses under ``now`` that go on from the states ``then`` left of the prompt, its last token aside."""
    ids = torch.tensor([prompt] * 4)
    cache = then(ids[:, :-1], use_cache=True).cache
    rows: list[dict[str, Any]] = [{"response_ids": [], "sampler_logprobs": []} for _ in range(4)]
    last = ids[:, -1:]
    for _ in range(24):
        found = now(last, cache=cache, use_cache=True)
        logp = log_softmax(found.logits[:, -1, :NAMES].numpy() + NOISE * rng.normal(size=(4, NAMES)))
        token = [int(rng.choice(NAMES, p=np.exp(row) / np.exp(row).sum())) for row in logp]
        for member, row in enumerate(rows):
            if not row["response_ids"] or row["response_ids"][-1] != 1:
                row["response_ids"].append(token[member])
                row["sampler_logprobs"].append(float(logp[member, token[member]]))
        cache, last = found.cache, torch.tensor(token)[:, None]
    return [
        row
        | {"prompt_ids": prompt, "loss_mask": [True] * len(row["response_ids"]), "sampler_version": step, "reward": 0.0}
        for row in rows
    ]


def states_kept(size: float, old: int = 4, steps: int = 5) -> Build:
    """Repeated prompts go on from their states under version 0, as in a prefix cache; new prompts are in order."""

    def build(path: Path) -> object:
        run = base(size=size, steps=steps)
        rng = np.random.default_rng(11)
        known = [row["prompt_ids"] for row in run.rows[0]][::4][:old]
        for step in range(1, steps):
            rows = [row for row in run.rows[step] if int(row["group_id"].split("-")[1]) >= old]
            for at, prompt in enumerate(known):
                cached = from_cache(run.models[0], run.models[step], prompt, step, rng)
                names = {"group_id": f"{step}-{at}"}
                rows += [row | names | {"sequence_id": f"{step}-{at}-{k}"} for k, row in enumerate(cached)]
            run.rows[step] = rows
        return run.write(path)

    return build


@torch.no_grad()
def cut_over(
    first: LlamaForCausalLM, then: LlamaForCausalLM, row: dict[str, Any], at: int, rng: np.random.Generator
) -> None:
    """The response goes on under other weights from token ``at``; partial responses are read anew by them."""
    response, logged = row["response_ids"][:at], row["sampler_logprobs"][:at]
    while len(response) < 24 and (not response or response[-1] != 1):
        found = then(torch.tensor([row["prompt_ids"] + response])).logits[0, -1, :NAMES].numpy()
        logp = log_softmax(found + NOISE * rng.normal(size=NAMES))
        token = int(rng.choice(NAMES, p=np.exp(logp) / np.exp(logp).sum()))
        response, logged = [*response, token], [*logged, float(logp[token])]
    row |= {"response_ids": response, "sampler_logprobs": logged, "loss_mask": [True] * len(response)}


def in_flight(ahead: int, *, label: int = 0, steps: tuple[int, ...] = (0, 1, 2, 3, 4), size: float = 0.002) -> Build:
    """Responses start under version k and go on under k + ahead from a token that differs; the label is k + label."""

    def build(path: Path) -> object:
        run = base(size=size, steps=5 + max(0, ahead - 1))
        run.rows = {step: rows for step, rows in run.rows.items() if step < 5}
        rng = np.random.default_rng(9)
        for step in steps:
            for row in run.rows[step]:
                at = int(rng.integers(4, 16))
                if at < len(row["response_ids"]):
                    cut_over(run.models[step], run.models[step + ahead], row, at, rng)
                row["sampler_version"] = step + label
        return run.write(path)

    return build


def behind(share: float, by: int) -> Build:
    """One of several replicas is some versions behind: its share of the responses is labelled like the rest."""

    def build(path: Path) -> object:
        run = base()
        rng = np.random.default_rng(5)
        for step in range(by, 5):
            for place, row in enumerate(run.rows[step]):
                if rng.random() < share:
                    old = make_rows(run.models[step - by], step, step, rng, prompts=[row["prompt_ids"]], members=1)[0]
                    run.rows[step][place] = row | {k: old[k] for k in ("response_ids", "sampler_logprobs", "loss_mask")}
        return run.write(path)

    return build


def both(temperature: float) -> Build:
    """Raw log-probs under a temperature, and a prefix cache that is as old as the run."""

    def build(path: Path) -> object:
        how: dict[str, Any] = {"draw": lambda z: log_softmax(z / temperature), "log": log_softmax}
        run: FieldRun = base(**how)
        run.toml["temperature"] = temperature
        rng = np.random.default_rng(3)
        known = [row["prompt_ids"] for row in run.rows[0]][::4][:4]
        for step in range(1, 5):
            old = make_rows(run.models[0], step, step, rng, prompts=known, **how)
            new = [row for row in run.rows[step] if int(row["group_id"].split("-")[1]) >= 4]
            run.rows[step] = old + new
        return run.write(path)

    return build


CASES = (
    Case(
        19,
        "a prefix cache outlives updates",
        "NVIDIA-NeMo/RL#4018",
        "MP207",
        Variant("repeated prompts from version k - 3, new ones from k", repeats(lambda k: max(0, k - 3))),
        Variant(
            "from version 0, six of eight prompts, restart before the last step",
            repeats(lambda k: 0 if k < 6 else k, old=6, steps=7),
        ),
        Variant("two of eight prompts, one version old", repeats(lambda k: max(0, k - 1), old=2)),
    ),
    Case(
        19,
        "a prefix cache keeps states of older weights",
        "NVIDIA-NeMo/RL#4018",
        "MP207",
        Variant("states of version 0, updates five times as large", states_kept(0.01)),
        Variant("states of version 0, updates ten times as large", states_kept(0.02)),
        Variant("states of version 0, three of eight prompts", states_kept(0.005, old=3)),
    ),
    Case(
        3,
        "raw log-probs and a stale prefix cache at once",
        "https://huggingface.co/blog/ServiceNow-AI/correctness-before-corrections",
        "MP401",
        Variant("T = .6 raw, half of the prompts from version 0", both(0.6)),
        Variant("T = .5", both(0.5)),
        Variant("T = .8", both(0.8)),
        also=("MP207",),
    ),
    Case(
        28,
        "versions change inside responses, labels name one",
        "areal-project/AReaL#1736",
        "MP212",
        Variant("from version k to k + 1, labelled k", in_flight(1)),
        Variant("from version k to k + 3, labelled k", in_flight(3)),
        Variant("from version k to k + 1, labelled k + 1, at one step only", in_flight(1, label=1, steps=(2,))),
    ),
    Case(
        18,
        "one replica of the engine is behind",
        "huggingface/trl#5312",
        "MP202",
        Variant("a third of the responses, two versions", behind(0.33, 2)),
        Variant("half of the responses, four versions", behind(0.5, 4)),
        Variant("one in eight responses, one version", behind(0.125, 1)),
    ),
)
