"""What a run directory holds, what can be computed from it, and what scoring it will cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch_probe.cost import PassCost, seconds
from mismatch_probe.resolve import StepCheckpoints, semantic_reasons, set_aside
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Ints, Rejected, Rollouts, Run
from mismatch_probe.scoring.plan import CPU_MAX_TOKENS, PASSES_IN_UNIT, forward_passes

QUANTITIES = ("discrepancy", "lag", "log_ratio", "full_vocabulary")
"""What can be known of a token: D, L, d, and the exact KL, total variation and bias of the lag."""

LOG_PROBS = ("sampler", "stale_trainer", "trainer")
"""log mu, log pi_s, log pi."""


@dataclass(frozen=True)
class Missing:
    """Something a step lacks; ``where`` it was looked for, empty where it has no place."""

    what: str
    where: str


@dataclass(frozen=True)
class StepInspection:
    """One step.

    ``sources`` maps each of LOG_PROBS to the share of counted tokens by where its value comes from: "logged",
    "rescored", "nearest" (a checkpoint of another version, taken only with --nearest) or "missing". ``nearest`` names
    that checkpoint's version for each "sampler N" and "trainer N". ``can`` maps each of QUANTITIES to the share of
    counted tokens for which it can be computed exactly.
    """

    step: int
    sequences: int
    groups: int
    tokens: int
    rejected: int
    versions: tuple[int, ...]
    trainer_version: int | None
    sources: dict[str, dict[str, float]]
    nearest: dict[str, int]
    can: dict[str, float]
    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class Cost:
    """What scoring will take; ``seconds`` is an estimate for this CPU, good to a factor of about three."""

    forward_tokens: int
    forward_passes: int
    checkpoints: int
    checkpoint_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Inspection:
    """All that ``inspect`` says."""

    path: Path
    format: str
    name: str
    model: str
    settings: dict[str, str]
    steps: tuple[StepInspection, ...]
    checkpoint_versions: tuple[int, ...]
    architecture: str
    parameters: int | None
    cost: Cost
    rejected: tuple[Rejected, ...]
    notices: tuple[str, ...]


_SHOWN = (
    *("temperature", "top_p", "top_k", "logprobs_mode", "trainer_dtype", "vocab_size"),
    *("checkpoints", "sampler_checkpoints", "adapter_base", "sampler_lag", "group_size"),
)


def _passes(step: int, rollouts: Rollouts, checkpoints: StepCheckpoints, max_tokens: int) -> Iterator[tuple[Path, int]]:
    for unit in checkpoints.units(step, rollouts, np.zeros(len(rollouts), np.int64), PASSES_IN_UNIT * max_tokens):
        yield from forward_passes(unit)


def inspect_run(run: Run, max_tokens: int = CPU_MAX_TOKENS) -> Inspection:
    """Read every step's rollouts and the checkpoints' headers; no weights, no torch."""
    steps: list[StepInspection] = []
    passes: list[tuple[PassCost, int]] = []
    rejected: list[Rejected] = []
    notices = [*run.notices, *semantic_reasons(run)]
    described: dict[Path, PassCost] = {}
    architecture, parameters = "", None
    for step in run.steps:
        rollouts = step.load()
        trainer_version = run.trainer_version(step.index)
        checkpoints = StepCheckpoints(run, rollouts, trainer_version, tolerant=True)
        rollouts = set_aside(rollouts, checkpoints, step.index)
        for description in checkpoints.descriptions:
            described[description.path] = PassCost(description.parameters, description.vocab_size, description.bytes)
            architecture, parameters = description.architecture, description.parameters
        passes += [(described[path], tokens) for path, tokens in _passes(step.index, rollouts, checkpoints, max_tokens)]
        steps.append(_inspect_step(run, step.index, rollouts, trainer_version, checkpoints))
        rejected += rollouts.rejected
        notices += [*rollouts.notices, *checkpoints.problems, *checkpoints.notes]
    estimate = seconds(passes, list(described.values()), max_tokens)
    return Inspection(
        path=run.path,
        format=run.format,
        name=run.settings.name,
        model=run.settings.model,
        settings=_settings(run),
        steps=tuple(steps),
        checkpoint_versions=tuple(run.trainer_checkpoints.versions()) if run.trainer_checkpoints else (),
        architecture=architecture,
        parameters=parameters,
        cost=Cost(
            forward_tokens=sum(tokens for _, tokens in passes),
            forward_passes=sum(-(-tokens // max_tokens) for _, tokens in passes),
            checkpoints=len(described),
            checkpoint_bytes=sum(cost.bytes for cost in described.values()),
            seconds=estimate,
        ),
        rejected=tuple(rejected),
        notices=tuple(dict.fromkeys(notices)),
    )


def _settings(run: Run) -> dict[str, str]:
    """Each setting that bears on a number, with where it comes from."""
    settings = run.settings
    out = {}
    for key in _SHOWN:
        value = getattr(settings, key)
        if value is not None:
            out[key] = f"{value} ({settings.sources.get(key, 'assumed')})"
    return out


def _inspect_step(
    run: Run, step: int, rollouts: Rollouts, trainer_version: int, checkpoints: StepCheckpoints
) -> StepInspection:
    counted = rollouts.loss_mask
    versions = rollouts.sampler_version[counted]
    total = max(1, int(counted.sum()))
    has_mu = ~np.isnan(rollouts.sampler_logprob[counted])
    has_logged = ~np.isnan(rollouts.trainer_logprob[counted])
    there = {int(v): checkpoints.sampler(int(v)) is not None for v in np.unique(versions)}
    stale_scored = np.array([there[int(v)] for v in versions], dtype=np.bool_)
    has_pi = np.full(len(versions), checkpoints.trainer is not None) | has_logged
    same = (versions == trainer_version) & (trainer_version != UNKNOWN_VERSION) & (run.sampler_checkpoints is None)
    has_stale = stale_scored | (same & has_pi)
    near = _nearest(run, trainer_version, checkpoints, there)
    known = {
        "discrepancy": has_mu & has_stale,
        "lag": has_pi & has_stale,
        "log_ratio": has_mu & has_pi,
        "full_vocabulary": stale_scored & (checkpoints.trainer is not None),
    }
    return StepInspection(
        step=step,
        sequences=len(rollouts),
        groups=len(set(rollouts.group_id)),
        tokens=int(counted.sum()),
        rejected=len(rollouts.rejected),
        versions=tuple(int(v) for v in np.unique(versions) if v != UNKNOWN_VERSION),
        trainer_version=None if trainer_version == UNKNOWN_VERSION else trainer_version,
        sources=_sources(has_mu, has_logged, stale_scored, same, checkpoints.trainer is not None, near, versions),
        nearest=near,
        can={name: float(mask.sum()) / total for name, mask in known.items()},
        missing=tuple(_missing(run, rollouts, trainer_version, checkpoints, there, bool(has_mu.all()))),
    )


def _nearest(run: Run, trainer_version: int, checkpoints: StepCheckpoints, there: dict[int, bool]) -> dict[str, int]:
    """For each version without a checkpoint, the one that --nearest would take."""
    wanted = [("sampler", version) for version, found in there.items() if not found]
    wanted += [("trainer", trainer_version)] if checkpoints.trainer is None else []
    found = {(who, version): run.nearest_checkpoint(version, sampler=who == "sampler") for who, version in wanted}
    return {f"{who} {version}": place[0] for (who, version), place in found.items() if place is not None}


def _sources(
    has_mu: Bools,
    has_logged: Bools,
    stale_scored: Bools,
    same: Bools,
    trainer_scored: bool,
    near: dict[str, int],
    versions: Ints,
) -> dict[str, dict[str, float]]:
    """Share of counted tokens by source, for each of LOG_PROBS."""
    none = np.zeros(len(versions), dtype=np.bool_)
    stale_near = np.array([f"sampler {version}" in near for version in versions], dtype=np.bool_)
    trainer = np.full(len(versions), trainer_scored)
    trainer_near = np.full(len(versions), any(name.startswith("trainer") for name in near))
    stale_rescored = stale_scored | (same & trainer)
    parts = {
        "sampler": (has_mu, none, none),
        "stale_trainer": (same & has_logged & ~stale_rescored, stale_rescored, stale_near),
        "trainer": (has_logged & ~trainer, trainer, trainer_near),
    }
    total = max(1, len(versions))
    shares = {}
    for name, (logged, rescored, nearest) in parts.items():
        nearest = nearest & ~logged & ~rescored
        masks = {"logged": logged, "rescored": rescored, "nearest": nearest, "missing": ~(logged | rescored | nearest)}
        shares[name] = {kind: float(mask.sum()) / total for kind, mask in masks.items() if mask.any()}
    return shares


def _missing(
    run: Run,
    rollouts: Rollouts,
    trainer_version: int,
    checkpoints: StepCheckpoints,
    there: dict[int, bool],
    all_sampled: bool,
) -> list[Missing]:
    missing: list[Missing] = []
    if not len(rollouts):
        missing.append(Missing("rows that fit", ""))
    if not all_sampled:
        missing.append(Missing("sampler log-probs of some or all tokens", ""))
    if run.trainer_checkpoints is None:
        missing.append(Missing("sampler versions and checkpoints", ""))
        return missing
    if checkpoints.trainer is None:
        missing.append(Missing("trainer checkpoint", _relative(run, run.trainer_checkpoints.path(trainer_version))))
    pattern = run.sampler_checkpoints or run.trainer_checkpoints
    for version, found in there.items():
        if version == UNKNOWN_VERSION:
            missing.append(Missing("sampler_version of some or all tokens", ""))
        elif not found:
            missing.append(Missing("sampler checkpoint", _relative(run, pattern.path(version))))
    return missing


def _relative(run: Run, path: Path) -> str:
    return path.relative_to(run.path).as_posix() if path.is_relative_to(run.path) else str(path)
