"""What level of discrepancy is normal: ranges that were published, by precision and architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_probe.run import Settings

PRECISIONS = ("float64", "float32", "float16", "bfloat16", "fp8", "int8", "fp4")
"""Finest first; the coarser of the two programs decides."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True)
class Usual:
    """Range of mean |D| and of k3, nats a token, that runs in working order had, and from where to suspect a fault.

    ``source``: "owner/name#number" where there is an issue or a pull request.
    """

    precision: str
    experts: bool
    mean_abs: tuple[float, float]
    k3: tuple[float, float]
    suspect_mean_abs: float
    suspect_k3: float
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """In words: "bfloat16 dense"."""
        return f"{self.precision} {'mixture of experts' if self.experts else 'dense'}"


# Reports give mean |D|, or k3, or both. Where one of them is not published, it is the other's by k3 = sigma^2 / 2 and
# the mean |D| of 0.3 sigma that the bfloat16 runs of the study have. Suspicion begins at 0.05 nats (vime#64) and at a
# k3 of 3e-3 (twice prime-rl's floor) for bfloat16 dense; the other rows keep the same distance, and that is our choice.
_STUDY = "AknA13/train-infer-mismatch"
TABLE = (
    Usual("float32", False, (0.0, 2e-3), (0.0, 1e-5), 6e-3, 3e-4, (_STUDY,)),
    Usual("float16", False, (1e-3, 3e-3), (1e-5, 4e-5), 0.02, 1e-3, (_STUDY,)),
    Usual(
        "bfloat16",
        False,
        (6e-3, 2.7e-2),
        (1e-5, 1.5e-3),
        0.05,
        3e-3,
        (_STUDY, "vllm-project/vime#64", "PrimeIntellect-ai/prime-rl#2802", "NovaSky-AI/SkyRL#1408"),
    ),
    Usual(
        "bfloat16",
        True,
        (6e-3, 3e-2),
        (5e-4, 1.5e-2),
        0.07,
        2e-2,
        ("NovaSky-AI/SkyRL#2182", "PrimeIntellect-ai/prime-rl#2808", "PrimeIntellect-ai/prime-rl#3424"),
    ),
    Usual("fp8", False, (3.9e-2, 7.5e-2), (9.5e-3, 3.2e-2), 0.12, 0.06, (_STUDY, "verl-project/verl#7519")),
    Usual("fp8", True, (4e-2, 6.7e-2), (9.5e-3, 3.2e-2), 0.12, 0.06, ("radixark/miles#2722", "verl-project/verl#7519")),
    Usual("int8", False, (6e-2, 0.13), (2e-2, 0.1), 0.2, 0.2, ("yaof20/Flash-RL",)),
    Usual("fp4", True, (4e-2, 6.7e-2), (9e-3, 2.5e-2), 0.12, 0.06, ("radixark/miles#2722",)),
)


def experts_of(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config is of a mixture of experts."""
    nested = [part for part in config.values() if isinstance(part, dict)]
    counts = (part.get(key) for part in (config, *nested) for key in _EXPERTS)
    return any(isinstance(found, int) and found > 1 for found in counts)


@dataclass(frozen=True)
class Expected:
    """The row that fits a run, and what had to be assumed for it, in words ("" nothing)."""

    usual: Usual
    assumed: str


def expected(settings: Settings, config: Mapping[str, Any]) -> Expected:
    """The row of the coarser of the two programs; an engine that declares nothing is taken to run in bfloat16."""
    engine = settings.sampler_dtype or "bfloat16"
    precision = max(engine, settings.trainer_dtype, key=PRECISIONS.index)
    experts = experts_of(config)
    rows = [row for row in TABLE if row.precision == max(precision, "float32", key=PRECISIONS.index)]
    row = next((row for row in rows if row.experts == experts), rows[0])
    said = []
    if settings.sampler_dtype is None:
        said.append("the engine's precision is not declared (sampler_dtype), bfloat16 is assumed")
    if "trainer_dtype" in settings.assumed and PRECISIONS.index(engine) < PRECISIONS.index("bfloat16"):
        said.append("nor is the trainer's" if said else "the trainer's precision is not declared")
    if not config:
        said.append("no checkpoint tells the architecture")
    elif row.experts != experts:
        said.append(f"no range is published for {precision} {'mixtures of experts' if experts else 'dense models'}")
    return Expected(row, "; ".join(said))


def differences(a: Settings, b: Settings) -> list[str]:
    """What two runs declare differently, as "key: a, b"; facts of ``about`` by themselves."""
    skipped = {"name", "sources", "about", "checkpoints", "sampler_checkpoints", "adapter_base"}
    keys = [key for key in a.__dataclass_fields__ if key not in skipped]
    found = [(key, getattr(a, key), getattr(b, key)) for key in keys]
    facts = [dict(_fact(entry) for entry in settings.about) for settings in (a, b)]
    found = [(key, facts[0].get(key), facts[1].get(key)) for key in sorted({*facts[0], *facts[1]})] + found
    return [f"{key}: {_shown(one)}, {_shown(other)}" for key, one, other in found if one != other]


def _fact(entry: str) -> tuple[str, str]:
    key, _, value = entry.partition("=")
    return key.strip(), value.strip() or "yes"


def _shown(value: object) -> str:
    return "not declared" if value is None else value if isinstance(value, str) else json.dumps(value)
