"""A run and its analysis -> Evidence; the one place of diagnosis that reads files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from mismatch_probe.diagnosis.evidence import Evidence, Sequences, Tokens
from mismatch_probe.folder import Analysis
from mismatch_probe.run import Floats, Ints, Rollouts, Run, Step

MOST_TOKENS = 2_000_000
"""Response tokens that are looked at, over all steps: whole prompt groups, drawn evenly from the steps."""
_SCORED = {
    "stale": "stale_trainer_logprob",
    "trainer": "trainer_logprob",
    "entropy": "entropy_stale",
}


def gather(run: Run, steps: Sequence[Step], analysis: Analysis | None, seed: int = 0) -> Evidence:
    """Read the steps and join what their analysis knows of each token.

    Args:
        run: the run.
        steps: those of its steps to look at.
        analysis: its analysis, None where nothing could be compared.
        seed: of the sample that is drawn from a run of more than ``MOST_TOKENS``.

    Raises:
        InputError: a file cannot be read.
    """
    most = MOST_TOKENS // max(1, len(steps))
    loaded = [(step, _sample(step.load(), most, seed)) for step in steps]
    floor = float("nan") if analysis is None else float(analysis.steps["noise_floor_rms"].max())
    trainer = run.trainer_checkpoints
    tokens = _tokens(run, loaded, analysis)
    return Evidence(
        settings=run.settings,
        sequences=_sequences(loaded),
        tokens=tokens,
        usable=tokens.counted & ~np.isnan(tokens.sampler) & ~np.isnan(tokens.stale),
        versions=() if trainer is None else tuple(trainer.versions()),
        noise_floor=floor,
        temperature=run.settings.scoring_temperature,
    )


def _sample(rollouts: Rollouts, most: int, seed: int) -> Rollouts:
    """Whole prompt groups of a step, of about ``most`` tokens in all."""
    total = len(rollouts.response.values)
    if total <= most:
        return rollouts
    group = rollouts.group_of_sequence
    tokens = np.bincount(group, weights=rollouts.response.lengths)
    order = np.random.default_rng(seed).permutation(len(tokens))
    kept = order[: max(1, int(np.searchsorted(np.cumsum(tokens[order]), most)))]
    return rollouts.take(np.flatnonzero(np.isin(group, kept)))


def _sequences(loaded: list[tuple[Step, Rollouts]]) -> Sequences:
    steps, groups, prompts, prompt_ids, lengths = [], [], [], [], []
    number_of_prompt: dict[bytes, int] = {}
    seen = 0
    for step, rollouts in loaded:
        steps.append(np.full(len(rollouts), step.index, dtype=np.int64))
        group = rollouts.group_of_sequence
        groups.append(group + seen)
        seen += int(group.max()) + 1 if len(group) else 0
        for row in range(len(rollouts)):
            ids = rollouts.prompt[row]
            prompts.append(number_of_prompt.setdefault(ids.tobytes(), len(number_of_prompt)))
            prompt_ids.append(ids)
        lengths.append(rollouts.response.lengths)
    origin = [place for _, rollouts in loaded for place in rollouts.origin]
    return Sequences(
        step=_joined(steps),
        sequence_id=_objects([name for _, rollouts in loaded for name in rollouts.sequence_id]),
        group=_joined(groups),
        prompt=np.array(prompts, dtype=np.int64),
        prompt_ids=tuple(prompt_ids),
        first=np.concatenate([[0], np.cumsum(_joined(lengths))]).astype(np.int64),
        file=_objects([file for file, _ in origin]),
        row=np.array([row for _, row in origin], dtype=np.int64),
        reward=np.concatenate([np.zeros(0), *(rollouts.reward for _, rollouts in loaded)]),
        finish_reason=_objects([reason for _, rollouts in loaded for reason in rollouts.finish_reason]),
    )


def _tokens(run: Run, loaded: list[tuple[Step, Rollouts]], analysis: Analysis | None) -> Tokens:
    sequence, seen, versions = [], 0, []
    scored: dict[str, list[Floats]] = {name: [] for name in ("sampler", *_SCORED)}
    for step, rollouts in loaded:
        sequence.append(rollouts.sequence_of_token + seen)
        seen += len(rollouts)
        versions.append(np.full(len(rollouts.response.values), run.trainer_version(step.index), dtype=np.int64))
        found = _scored(step.index, rollouts, analysis)
        for name in scored:
            scored[name].append(found[name])
    every = [rollouts for _, rollouts in loaded]
    return Tokens(
        sequence=_joined(sequence),
        position=_joined([rollouts.position_of_token for rollouts in every]),
        token_id=_joined([rollouts.response.values for rollouts in every]),
        counted=np.concatenate([np.zeros(0, dtype=np.bool_), *(rollouts.loss_mask for rollouts in every)]),
        **{name: np.concatenate([np.zeros(0), *parts]) for name, parts in scored.items()},
        trainer_logged=np.concatenate([np.zeros(0), *(rollouts.trainer_logprob for rollouts in every)]),
        claimed=_joined([rollouts.sampler_version for rollouts in every]),
        trainer_version=_joined(versions),
    )


def _scored(step: int, rollouts: Rollouts, analysis: Analysis | None) -> dict[str, Floats]:
    """The analysed columns at each response token of a step, NaN where there is none."""
    out = {name: np.full(len(rollouts.response.values), np.nan) for name in _SCORED}
    # The engine's own prefill may stand in for what was not logged: that is no evidence about the log.
    out["sampler"] = rollouts.sampler_logprob
    table = None if analysis is None else analysis.tokens_of(step, ["sequence_id", "position", *_SCORED.values()])
    if table is None or table.empty:
        return out
    start = pd.Series(rollouts.response.offsets[:-1], index=rollouts.sequence_id.astype(str))
    place = start.reindex(table["sequence_id"].astype(str)).to_numpy() + table["position"].to_numpy()
    known = ~np.isnan(place)
    at = place[known].astype(np.int64)
    for name, column in _SCORED.items():
        out[name][at] = table[column].to_numpy(dtype=np.float64)[known]
    return out


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


def _objects(values: list[object]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out
