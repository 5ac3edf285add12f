"""Samplers that hold a reference model, the base without its adapter, or versions that the label does not follow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from tests.field.base import STEPS, FieldRun, base, make_model, make_rows, nudged
from tests.field.case import Build, Case, Variant


def resumed(steps: tuple[int, ...], *, equal: bool = True) -> Build:
    """Some steps after a resume are sampled by the reference model, which equals version 0 or is another."""

    def build(path: Path) -> object:
        reference = None if equal else nudged(make_model(0), 77, 0.004)
        run = base(engine=lambda held, step: (reference or held[0]) if step in steps else held[step])
        run.weights["checkpoints/reference"] = reference or run.models[0]
        return run.write(path)

    return build


def frozen_label(lag: int = 0, steps: int = STEPS) -> Build:
    """The recorded version stays 0 while the sampler follows the trainer."""

    def build(path: Path) -> object:
        run = base(version=lambda step: max(0, step - lag), steps=steps)
        for row in run:
            row["sampler_version"] = 0
        return run.write(path)

    return build


@torch.no_grad()
def adapter(model: LlamaForCausalLM, folder: Path, seed: int, size: float, modules: list[str]) -> LlamaForCausalLM:
    """Save an adapter over a model; returns the model with it merged, as an engine would hold it."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=4, target_modules=modules))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0.0, size)
    wrapped.double().save_pretrained(folder)
    return wrapped.merge_and_unload()


def adapters(base_at: Callable[[int], bool], *, size: float = 0.05) -> Build:
    """Adapters of a base; the engine samples some steps without one."""

    def build(path: Path) -> object:
        model = make_model(0)
        model.save_pretrained(path / "base")
        merged = [
            adapter(model, path / f"checkpoints/step_{v:06d}", v, size * (1 + v), ["q_proj", "v_proj", "down_proj"])
            for v in range(STEPS + 1)
        ]
        rng = np.random.default_rng(0)
        rows = {k: make_rows(model if base_at(k) else merged[k], k, k, rng) for k in range(STEPS)}
        toml = base(steps=1, groups=1, members=1).toml | {"adapter_base": "base"}
        return FieldRun(rows, merged, toml).write(path)

    return build


CASES = (
    Case(
        20,
        "after a resume the sampler holds the reference",
        "THUDM/slime#1695",
        "MP204",
        Variant("from step 3 on; the reference equals version 0", resumed((3, 4))),
        Variant("from step 2 on; the reference is a model of its own", resumed((2, 3, 4), equal=False)),
        Variant("one step only; the reference equals version 0", resumed((3,))),
    ),
    Case(
        21,
        "the adapter is not applied at first",
        "verl-project/verl#3541",
        "MP214",
        Variant("step 0 is the base's", adapters(lambda k: k == 0)),
        Variant("every step is the base's", adapters(lambda k: True)),
        Variant("step 0 is the base's, adapters a fifth as large", adapters(lambda k: k == 0, size=0.01)),
    ),
    Case(
        28,
        "the recorded version stays 0",
        "allenai/open-instruct#1616",
        "MP705",
        Variant("tokens from version k", frozen_label()),
        Variant("tokens from version k, nine steps", frozen_label(steps=9)),
        Variant("tokens from version k - 1", frozen_label(lag=1)),
    ),
)
