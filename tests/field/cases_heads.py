"""The output head of another version than the body: in the engine only, so that no file shows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tests.field.base import UPDATE, base
from tests.field.case import Build, Case, Variant

Models = list[LlamaForCausalLM]


@torch.no_grad()
def joined(body: LlamaForCausalLM, head: LlamaForCausalLM) -> LlamaForCausalLM:
    """One model's body under another's head."""
    both = copy.deepcopy(body)
    both.lm_head.weight.copy_(head.lm_head.weight)
    return both


def engine_of(pair: Callable[[int], tuple[int, int]], size: float = UPDATE) -> Build:
    """The engine holds the body and the head of two versions, by step."""

    def build(path: Path) -> object:
        def engine(models: Models, step: int) -> LlamaForCausalLM:
            body, head = pair(step)
            return joined(models[body], models[head])

        return base(engine=engine, size=size).write(path)

    return build


CASES = (
    Case(
        24,
        "the engine's output head is not updated with its body",
        "NVIDIA-NeMo/Megatron-Bridge#4883",
        "MP203",
        Variant("body of version k, head of version 0", engine_of(lambda step: (step, 0))),
        Variant("updates five times as large", engine_of(lambda step: (step, 0), 5 * UPDATE)),
        Variant(
            "head stays from step 2 on: two versions behind at the last", engine_of(lambda step: (step, min(step, 2)))
        ),
    ),
    Case(
        24,
        "the engine's body is not updated with its output head",
        "NVIDIA-NeMo/Megatron-Bridge#4883",
        "MP203",
        Variant("body of version 0, head of version k", engine_of(lambda step: (0, step))),
        Variant("updates five times as large", engine_of(lambda step: (0, step), 5 * UPDATE)),
        Variant("body one version behind", engine_of(lambda step: (max(0, step - 1), step))),
    ),
)
