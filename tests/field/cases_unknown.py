"""Weights in the engine that no checkpoint shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from transformers import LlamaForCausalLM

from tests.field.base import UPDATE, base, make_model
from tests.field.case import Build, Case, Variant
from tests.field.cases_files import swapped

Models = list[LlamaForCausalLM]


def engine(what: Callable[[Models, int], LlamaForCausalLM], size: float = UPDATE, **how: float) -> Build:
    """The engine holds something else than the checkpoint of its step."""

    def build(path: Path) -> object:
        return base(engine=what, size=size, **how).write(path)

    return build


def lost(since: int = 0, seed: int = 5) -> Build:
    """Random weights from a step on."""
    random = make_model(seed)
    return engine(lambda models, step: random if step >= since else models[step])


def rope(model: LlamaForCausalLM, theta: float) -> LlamaForCausalLM:
    """The model with another base of its rotary embedding."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    found = LlamaForCausalLM(config).double().eval()
    found.load_state_dict(model.state_dict())
    return found


CASES = (
    Case(
        21,
        "the engine's weights are random",
        "verl-project/verl#3461",
        "MP205",
        Variant("at every step", lost()),
        Variant("other random weights", lost(seed=8)),
        Variant("other random weights", lost(seed=11)),
    ),
    Case(
        21,
        "the engine's base is lost at the first sleep",
        "verl-project/verl#3461",
        "MP206",
        Variant("from step 1 on", lost(1)),
        Variant("from step 2 on", lost(2)),
        Variant("at the last step only", lost(4)),
    ),
    Case(
        25,
        "the engine's loader mixes up tensors",
        "vllm-project/vime#274",
        "MP205",
        Variant("gate and up of one MLP exchanged", engine(lambda models, step: swapped(models[step]))),
        Variant("exchanged in both layers", engine(lambda models, step: swapped(swapped(models[step]), 1))),
        Variant("eight rows of 48 exchanged in the last layer", engine(lambda m, step: swapped(m[step], 1, 8))),
    ),
    Case(
        26,
        "the second load mixes up the engine's tensors",
        "NovaSky-AI/SkyRL#1680",
        "MP206",
        Variant("gate and up of one MLP, from step 1 on", engine(lambda m, k: swapped(m[k]) if k else m[0])),
        Variant("in both layers", engine(lambda m, k: swapped(swapped(m[k]), 1) if k else m[0])),
        Variant(
            "eight rows of 48 in the last layer, from step 3 on",
            engine(lambda m, k: swapped(m[k], 1, 8) if k > 2 else m[k]),
        ),
    ),
    Case(
        34,
        "the engine rotates by another base",
        "PrimeIntellect-ai/prime-rl#2802",
        "MP205",
        Variant("theta 10000 against 100", engine(lambda models, step: rope(models[step], 100.0))),
        Variant("theta 10000 against 10", engine(lambda models, step: rope(models[step], 10.0))),
        Variant("theta 10000 against 200", engine(lambda models, step: rope(models[step], 200.0))),
    ),
)
