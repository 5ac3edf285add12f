"""Checkpoints that the sampler was given and that are not the trainer's."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.field.base import NAMES, UPDATE, FieldRun, base, make_model, make_rows
from tests.field.case import Build, Case, Variant
from tests.field.cases_origins import adapter

SAMPLER = "sampler/step_{version:06d}"
STEPS = 3
"""Fewer than in other cases: there are two checkpoints of each version."""
Models = list[LlamaForCausalLM]


@torch.no_grad()
def swapped(model: LlamaForCausalLM, layer: int = 0, rows: int | None = None) -> LlamaForCausalLM:
    """Gate and up of one MLP exchanged, or some of their rows."""
    found = copy.deepcopy(model)
    gate, up = found.model.layers[layer].mlp.gate_proj.weight, found.model.layers[layer].mlp.up_proj.weight
    kept = gate[:rows].clone()
    gate[:rows] = up[:rows]
    up[:rows] = kept
    return found


def given(what: Callable[[Models, int], LlamaForCausalLM], *, used: bool = True, size: float = UPDATE) -> Build:
    """The sampler's files hold something else than the trainer's; the engine uses them, or is right all the same."""

    def build(path: Path) -> object:
        run = base(engine=what if used else None, size=size, steps=STEPS)
        run.toml["sampler_checkpoints"] = SAMPLER
        for version in range(STEPS + 1):
            run.weights[SAMPLER.format(version=version)] = what(run.models, version)
        return run.write(path)

    return build


def erased(size: float) -> Build:
    """Adapters over a bfloat16 base, merged in bfloat16 for the sampler."""

    def build(path: Path) -> object:
        with torch.no_grad():
            model = make_model(0)
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().double())
        model.save_pretrained(path / "base")
        toml = base(steps=1, groups=1, members=1).toml | {"adapter_base": "base", "sampler_checkpoints": SAMPLER}
        run = FieldRun({}, [], toml)
        rng = np.random.default_rng(0)
        for version in range(STEPS + 1):
            folder = path / f"checkpoints/step_{version:06d}"
            modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            merged = adapter(model, folder, 1, size * version, modules)
            with torch.no_grad():
                for parameter in merged.parameters():
                    parameter.copy_(parameter.bfloat16().double())
            run.models.append(merged)
            run.weights[SAMPLER.format(version=version)] = merged
            if version < STEPS:
                run.rows[version] = make_rows(merged, version, version, rng)
        return run.write(path)

    return build


def rope(theta: float, *, used: bool = True) -> Build:
    """The sampler's files have the trainer's tensors under another base of the rotary embedding."""

    def build(path: Path) -> object:
        def other(models: Models, version: int) -> LlamaForCausalLM:
            config = copy.deepcopy(models[version].config)
            config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
            found = LlamaForCausalLM(config).double().eval()
            found.load_state_dict(models[version].state_dict())
            return found

        return given(other, used=used)(path)

    return build


def head_stays(models: Models, version: int) -> LlamaForCausalLM:
    found = copy.deepcopy(models[version])
    with torch.no_grad():
        found.lm_head.weight.copy_(models[0].lm_head.weight)
    return found


@torch.no_grad()
def tied_models() -> Models:
    """A tied model and its updates, without padding: a head that is the embedding cannot keep ids out by itself."""
    torch.manual_seed(0)
    config = {**make_model(0).config.to_dict(), "vocab_size": NAMES, "tie_word_embeddings": True}
    models = [LlamaForCausalLM(LlamaConfig(**config)).double().eval()]
    for parameter in models[0].parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.3)
    for _ in range(STEPS):
        models.append(copy.deepcopy(models[-1]))
        for parameter in models[-1].parameters():
            parameter += UPDATE * torch.randn_like(parameter)
    return models


def tied(head_of: Callable[[int], int] | None, in_trainer: bool = True) -> Build:
    """Tied files: the trainer's hold the head too; the sampler's hold that of another version, or none."""

    def build(path: Path) -> object:
        models = tied_models()
        rng = np.random.default_rng(0)
        rows = {k: make_rows(models[k], k, k, rng) for k in range(STEPS)}
        toml = base(steps=1, groups=1, members=1).toml | {"sampler_checkpoints": SAMPLER, "vocab_size": NAMES}
        run = FieldRun(rows, models, toml, {f"checkpoints/step_{v:06d}": model for v, model in enumerate(models)})
        run.write(path)
        embedding = "model.embed_tokens.weight"
        for version in range(STEPS + 1):
            trainer, sampler = path / f"checkpoints/step_{version:06d}", path / SAMPLER.format(version=version)
            shutil.copytree(trainer, sampler)
            tensors = load_file(trainer / "model.safetensors")
            if in_trainer:
                both = tensors | {"lm_head.weight": tensors[embedding].clone()}
                save_file(both, trainer / "model.safetensors", {"format": "pt"})
            if head_of is not None:
                head = load_file(path / f"checkpoints/step_{head_of(version):06d}" / "model.safetensors")[embedding]
                save_file(tensors | {"lm_head.weight": head.clone()}, sampler / "model.safetensors", {"format": "pt"})
            assert json.loads((sampler / "config.json").read_text())["tie_word_embeddings"]
        return run

    return build


CASES = (
    Case(
        22,
        "the sampler's checkpoints are copies of the first",
        "NovaSky-AI/SkyRL#1776",
        "MP208",
        Variant("copies of version 0, used by the engine", given(lambda models, _: models[0])),
        Variant(
            "copies of version 0, updates five times as large", given(lambda models, _: models[0], size=5 * UPDATE)
        ),
        Variant("copies of version 0, but the engine was right", given(lambda models, _: models[0], used=False)),
    ),
    Case(
        23,
        "merging adapters on the bfloat16 grid erases the update",
        "NVIDIA-NeMo/RL#3696",
        "MP209",
        Variant("updates of a thousandth of the weights", erased(1e-4)),
        Variant("updates a quarter as large", erased(2.5e-5)),
        Variant("updates twice as large", erased(2e-4)),
    ),
    Case(
        24,
        "the head in the sampler's files stays that of version 0",
        "NVIDIA-NeMo/Megatron-Bridge#4883",
        "MP210",
        Variant("untied head equals version 0", given(head_stays)),
        Variant("updates five times as large", given(head_stays, size=5 * UPDATE)),
        Variant("the engine was right", given(head_stays, used=False)),
    ),
    Case(
        24,
        "config ties the head, the file holds another",
        "vllm-project/vllm#51665",
        "MP210",
        Variant("head of version 0", tied(lambda version: 0)),
        Variant("head one version behind", tied(lambda version: max(0, version - 1))),
        Variant("head of version 0, the trainer's files hold none", tied(lambda version: 0, in_trainer=False)),
    ),
    Case(
        24,
        "the head is missing and tied again: in order",
        "NVIDIA-NeMo/Megatron-Bridge#4883",
        "MP210",
        Variant("no head in the sampler's files", tied(None)),
        Variant("no head in the sampler's files", tied(None)),
        Variant("no head in the sampler's files", tied(None)),
        least=0,
    ),
    Case(
        25,
        "a converter mixes up tensors",
        "vllm-project/vime#274",
        "MP205",
        Variant("gate and up of one MLP exchanged", given(lambda models, v: swapped(models[v]))),
        Variant("exchanged in both layers", given(lambda models, v: swapped(swapped(models[v]), 1))),
        Variant("two rows of 48 exchanged", given(lambda models, v: swapped(models[v], 1, 2))),
    ),
    Case(
        26,
        "the second load mixes up tensors",
        "NovaSky-AI/SkyRL#1680",
        "MP206",
        Variant("gate and up of one MLP, from version 1 on", given(lambda m, v: swapped(m[v]) if v else m[0])),
        Variant("in both layers", given(lambda m, v: swapped(swapped(m[v]), 1) if v else m[0])),
        Variant("two rows of 48, from version 2 on", given(lambda m, v: swapped(m[v], 1, 2) if v > 1 else m[v])),
    ),
    Case(
        34,
        "one rope field differs",
        "PrimeIntellect-ai/prime-rl#2802",
        "MP211",
        Variant(
            "rope_theta 10000 against 100",
            rope(100.0),
        ),
        Variant(
            "rope_theta 10000 against 10",
            rope(10.0),
        ),
        Variant(
            "the engine was right",
            rope(1000.0, used=False),
        ),
    ),
)
