"""Field reports of a gap that is only as large as precision explains, and of experts routed otherwise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mismatch_probe.run import Ragged
from mismatch_probe.scoring.candidates import CandidateScorer
from mismatch_probe.scoring.network import ScoringOptions
from tests.field.base import NEVER, ROWS, FieldRun, base, make_rows
from tests.field.case import Build, Case, Variant
from tests.field.cases_numerics import Error, plant


@torch.no_grad()
def mixture(seed: int) -> Any:
    """A random mixture of four experts, two a token, that never gives NEVER's ids."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=ROWS,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0.0, 0.35 if "lm_head" in name else 0.25)
    model.model.embed_tokens.weight[:, 0] = 6.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.experts.down_proj[:, 0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[list(NEVER), 0] = -15.0
    return model


def routed(share: float, sd: float, exact: float = 0.005) -> Build:
    """A share of the tokens of a mixture of experts is off by sd, the rest by little."""

    def error(row: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
        n = len(row["response_ids"])
        return rng.normal(size=n) * np.where(rng.random(n) < share, sd, exact)

    return in_mixture(error)


def in_mixture(error: Error) -> Build:
    """R0 of a mixture of experts."""

    def build(path: Path) -> object:
        run = base(groups=1, members=1, longest=1)
        models = [mixture(0)]
        for _ in run.models[1:]:
            models.append(copy.deepcopy(models[-1]))
        rng = np.random.default_rng(6)
        rows = {step: make_rows(models[step], step, step, rng) for step in run.rows}
        weights = dict(zip(run.weights, models, strict=True))
        return plant(FieldRun(rows, models, run.toml, weights), error).write(path)

    return build


def same_program(rows_at_once: int, noise: float = 0.0) -> Build:
    """The sampler is the probe's own program in bfloat16, with batches of another shape."""

    def build(path: Path) -> object:
        run = base(groups=4, members=2)
        run.toml |= {"trainer_dtype": "bfloat16", "sampler_dtype": "bfloat16"}
        run.write(path)
        rng = np.random.default_rng(8)
        scorer = CandidateScorer(ScoringOptions(device="cpu", dtype="bfloat16"))
        for step, rows in run.rows.items():
            for first in range(0, len(rows), rows_at_once):
                part = rows[first : first + rows_at_once]
                prompt, response = (
                    Ragged.of([np.array(row[key]) for row in part]) for key in ("prompt_ids", "response_ids")
                )
                every = np.ones(len(response.values), dtype=bool)
                found = scorer.score(path / f"checkpoints/step_{step:06d}", prompt, response, every, [1.0]).logprob[0]
                found = np.minimum(found + noise * rng.normal(size=len(found)), 0.0)
                for at, row in enumerate(part):
                    row["sampler_logprobs"] = found[response.offsets[at] : response.offsets[at + 1]].tolist()
        return run.write(path)

    return build


CASES = (
    Case(
        39,
        "the probe's own noise floor",
        "verl-project/verl#6280",
        "MP310",
        Variant("sampler and probe are one program in bfloat16, each row alone", same_program(1)),
        Variant("the same, three rows at once", same_program(3)),
        Variant("each row alone, and .003 nats of noise", same_program(1, 0.003)),
        least=0,
    ),
    Case(
        40,
        "experts routed otherwise",
        "PrimeIntellect-ai/prime-rl#2808",
        "MP311",
        Variant("5 % of the tokens with sd .5, the rest with .005", routed(0.05, 0.5)),
        Variant("10 % of the tokens with sd .8", routed(0.1, 0.8)),
        Variant("2 % of the tokens with sd .5", routed(0.02, 0.5)),
    ),
)
