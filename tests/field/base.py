"""R0, the run that every field report is one mutation of: five versions of a tiny model, sampled without a fault."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.diagnosis.job import Scanning, diagnose_run
from mismatch_probe.entry import main
from mismatch_probe.folder import Analysis, open_analysis
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.scoring.network import ScoringOptions

NAMES, ROWS = 32, 40
"""Ids with a name, and rows of the embedding: the last eight are padding."""
PAD, EOS, BOS = 0, 1, 2
STEPS, GROUPS, MEMBERS, LONGEST = 5, 8, 4, 24
NOISE = 0.01
"""Standard deviation of the engine's logit noise: its numerics."""


NEVER = (PAD, BOS, *range(NAMES, ROWS))
"""Ids that the model gives a probability of e^-30 or less."""
UPDATE = 0.002
"""Standard deviation of one update of each weight: mean |d| of one version of lag is then .06."""
_CONSTANT = 6.0


def make_model(seed: int, **config: Any) -> LlamaForCausalLM:
    """A random Llama in float64 whose distributions are neither flat nor certain, and never give NEVER's ids."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": ROWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **config,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.35 if "lm_head" in name else 0.25)
    return forbid(model)


@torch.no_grad()
def forbid(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Keep the first state constant, and hang the logits of NEVER on it: a head without a bias has no other way."""
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[list(NEVER), 0] = -15.0
    return model


def nudged(model: LlamaForCausalLM, seed: int, size: float = UPDATE) -> LlamaForCausalLM:
    """The model after one update: every weight moved a little."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return forbid(moved)


@torch.no_grad()
def logits(model: LlamaForCausalLM, prompt: list[int], response: list[int]) -> np.ndarray:
    """Logits before each response token over the named ids, (len(response), NAMES)."""
    found = model(torch.tensor([prompt + response])).logits[0]
    return found[len(prompt) - 1 : -1, :NAMES].numpy()


def log_softmax(table: np.ndarray) -> np.ndarray:
    peak = table.max(axis=-1, keepdims=True)
    return table - peak - np.log(np.exp(table - peak).sum(axis=-1, keepdims=True))


Transform = Callable[[np.ndarray], np.ndarray]
"""Logits (n, NAMES) -> log-probs (n, NAMES)."""


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    rng: np.random.Generator,
    *,
    draw: Transform = log_softmax,
    log: Transform | None = None,
    noise: float = NOISE,
    longest: int = LONGEST,
) -> list[tuple[list[int], list[float]]]:
    """Responses and their logged log-probs.

    Args:
        model: the sampler's weights.
        prompts: of one length.
        rng: draws noise and tokens.
        draw: turns logits into the log-probs that are drawn from.
        log: turns them into those that are logged; None means as drawn.
        noise: of the engine's logits.
        longest: tokens of a response without an end token.
    """
    ids = torch.tensor(prompts)
    responses: list[list[int]] = [[] for _ in prompts]
    logged: list[list[float]] = [[] for _ in prompts]
    ended = np.zeros(len(prompts), dtype=bool)
    for _ in range(longest):
        table = model(ids).logits[:, -1, :NAMES].numpy()
        table = table + noise * rng.normal(size=table.shape)
        drawn_from = draw(table)
        recorded = drawn_from if log is None else log(table)
        token = np.array([rng.choice(NAMES, p=np.exp(row) / np.exp(row).sum()) for row in drawn_from])
        for row, one in enumerate(token):
            if not ended[row]:
                responses[row].append(int(one))
                logged[row].append(float(recorded[row, one]))
        ended |= token == EOS
        ids = torch.cat([ids, torch.from_numpy(token)[:, None]], dim=1)
        if ended.all():
            break
    return list(zip(responses, logged, strict=True))


@dataclass
class FieldRun:
    """A run that is still in memory: rows by step, settings, and models by the path they are saved under."""

    rows: dict[int, list[dict[str, Any]]]
    models: list[LlamaForCausalLM]
    toml: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, LlamaForCausalLM] = field(default_factory=dict)

    def __iter__(self) -> Any:
        """Every row of every step."""
        return (row for rows in self.rows.values() for row in rows)

    def write(self, path: Path) -> Path:
        """Save it in the native layout."""
        for name, model in self.weights.items():
            model.save_pretrained(path / name)
        for step, rows in self.rows.items():
            file = path / "rollouts" / f"step_{step:06d}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.toml.items()]
        (path / "run.toml").write_text("\n".join(lines) + "\n")
        return path


def on_policy(step: int) -> int:
    """The version that step k updates samples it."""
    return step


def base(
    seed: int = 0,
    *,
    steps: int = STEPS,
    version: Callable[[int], int] = on_policy,
    size: float = UPDATE,
    engine: Callable[[list[LlamaForCausalLM], int], LlamaForCausalLM] | None = None,
    **how: Any,
) -> FieldRun:
    """R0.

    Args:
        seed: of weights, prompts and tokens.
        steps: step k updates version k.
        version: which samples step k, and is what its rows claim.
        size: of an update, standard deviation of each weight.
        engine: gives the model that really samples a step, from all versions and the step; None: that version.
        how: goes to ``sample``.
    """
    if engine is None and version is on_policy and not how:
        made = _plain(seed, steps, size)
        return FieldRun(copy.deepcopy(made.rows), list(made.models), dict(made.toml), dict(made.weights))
    return _sampled(seed, steps, version, size, engine, how)


@cache
def _plain(seed: int, steps: int, size: float) -> FieldRun:
    """R0 as most faults are planted into it: sampled once."""
    return _sampled(seed, steps, on_policy, size, None, {})


def _sampled(
    seed: int,
    steps: int,
    version: Callable[[int], int],
    size: float,
    engine: Callable[[list[LlamaForCausalLM], int], LlamaForCausalLM] | None,
    how: dict[str, Any],
) -> FieldRun:
    models = [make_model(seed)]
    for update in range(steps):
        models.append(nudged(models[-1], 1000 * (seed + 1) + update, size))
    rng = np.random.default_rng(seed)
    really = engine or (lambda held, step: held[version(step)])
    rows = {step: make_rows(really(models, step), step, version(step), rng, **how) for step in range(steps)}
    toml = {
        "name": "R0",
        "trainer_dtype": "float64",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs_mode": "processed",
        "vocab_size": ROWS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "max_response_length": LONGEST,
    }
    weights = {f"checkpoints/step_{v:06d}": model for v, model in enumerate(models)}
    return FieldRun(rows, models, toml, weights)


def make_rows(
    model: LlamaForCausalLM,
    step: int,
    claimed: int,
    rng: np.random.Generator,
    *,
    groups: int = GROUPS,
    members: int = MEMBERS,
    prompts: list[list[int]] | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """One step's rows, sampled by a model."""
    prompts = prompts or [[BOS, *rng.integers(3, NAMES, size=5).tolist()] for _ in range(groups)]
    repeated = [prompt for prompt in prompts for _ in range(members)]
    drawn = sample(model, repeated, rng, **how)
    return [
        {
            "sequence_id": f"{step}-{at // members}-{at % members}",
            "group_id": f"{step}-{at // members}",
            "prompt_ids": prompt,
            "response_ids": response,
            "sampler_logprobs": logged,
            "loss_mask": [True] * len(response),
            "sampler_version": claimed,
            "reward": float(response[-1] == EOS),
            "finish_reason": "stop" if response[-1] == EOS else "length",
        }
        for at, (prompt, (response, logged)) in enumerate(zip(repeated, drawn, strict=True))
    ]


def rescore(model: LlamaForCausalLM, row: dict[str, Any], transform: Transform = log_softmax) -> np.ndarray:
    """Log-probs of a row's response under a model, without noise, as ``sample`` would log them, (n,)."""
    table = logits(model, row["prompt_ids"], row["response_ids"])
    ids = np.array(row["response_ids"])
    return transform(table)[np.arange(len(ids)), np.minimum(ids, NAMES - 1)]


def find(path: Path, *options: str) -> Diagnosis:
    """Decompose a run by the command line, as far as that goes, and diagnose it."""
    code = main(["decompose", str(path), "-q", "--no-gradient", "--no-diagnose", "--overwrite", *options])
    run = open_run(path, ReadOptions(), None)
    analysis: Analysis | None = open_analysis(path, None) if code == 0 else None
    return diagnose_run(run, analysis, Scanning(ScoringOptions(device="cpu", dtype="float64")))


def codes(diagnosis: Diagnosis, *, least: int = 1) -> list[str]:
    """Codes of warnings and errors, in their order."""
    return [finding.code for finding in diagnosis.findings if finding.severity >= least]


def link_weights(source: Path, target: Path) -> None:
    """The checkpoints of another run, not written again."""
    shutil.copytree(source / "checkpoints", target / "checkpoints", copy_function=os.link)
