"""How a step is cut: into units that are scored, stored and sent to a worker whole, and into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from mismatch_probe.run import Bools, Ints, Rollouts
from mismatch_probe.scoring.packing import unique_tokens
from mismatch_probe.scoring.units import Unit

CPU_MAX_TOKENS, CUDA_MAX_TOKENS = 2048, 16384
"""Tokens in one forward pass. On a CPU larger passes fall out of the caches and cost page faults."""
PASSES_IN_UNIT = 8
"""A kill loses one unit at most, and the hidden states of one unit are held at a time, for two networks."""
NOISE_SEQUENCES = 8
"""Sequences a step that are scored a second time, alone, for the noise floor; one a unit at least."""
_NOISE_SHARE, _NOISE_TOKENS = 0.02, 512
"""Share of a unit's tokens that the noise floor may add, or so many where that is more."""


def batches(lengths: Ints, max_tokens: int) -> Iterator[Ints]:
    """Cut sequences into right-padded batches of at most ``max_tokens`` padded tokens, longest first.

    Sorting by length keeps the padding small; longest first finds a lack of memory at once. A sequence that is longer
    than the budget goes alone.

    Args:
        lengths: tokens of each sequence, (n,).
        max_tokens: rows times longest row.

    Yields:
        Row numbers of one batch.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + rows]
        start += rows


def units(
    step: int,
    rollouts: Rollouts,
    half: Ints,
    trainer: Path | None,
    sampler: Callable[[int], Path | None],
    unit_tokens: int,
    gradient: Bools | None = None,
    recurring: Bools | None = None,
) -> list[Unit]:
    """Cut a step into units: whole sequences that need the same weights, prompt groups together.

    What a unit holds depends on the step alone, so that a unit scored in an earlier run is found again. Sequences that
    other steps hold too are in units of their own.

    Args:
        step: step number.
        rollouts: the step's sequences.
        half: 0 or 1 for each sequence, by prompt group, (n,).
        trainer: checkpoint of the trainer's current weights, None when there is none.
        sampler: checkpoint of a sampler version, or None.
        unit_tokens: counted tokens of a unit; a larger prompt group is cut.
        gradient: tokens whose factors of the head's gradient are wanted, (tokens,).
        recurring: sequences that other steps hold too, (n,).
    """
    counted, version = rollouts.loss_mask, rollouts.sampler_version
    offsets = rollouts.response.offsets
    kinds: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for row in range(len(rollouts)):
        mine = slice(offsets[row], offsets[row + 1])
        if counted[mine].any():
            versions = tuple(int(v) for v in np.unique(version[mine][counted[mine]]))
            kinds.setdefault((recurring is not None and bool(recurring[row]), versions), []).append(row)
    cut = [
        (recurs, versions, rows)
        for (recurs, versions), members in sorted(kinds.items())
        for rows in _shards(rollouts, np.array(members), unit_tokens)
    ]
    found = []
    for number, (recurs, versions, rows) in enumerate(cut):
        part = rollouts.take(rows)
        place = rollouts.response.places(rows)
        found.append(
            Unit(
                step=step,
                number=number,
                place=place,
                prompt=part.prompt,
                response=part.response,
                counted=part.loss_mask,
                version=part.sampler_version,
                half=half[rows],
                gradient=None if gradient is None else gradient[place],
                noise=max(1, NOISE_SEQUENCES // len(cut)),
                trainer=trainer,
                samplers={v: sampler(v) for v in versions},
                recurs=recurs,
            )
        )
    return found


def forward_passes(unit: Unit) -> list[tuple[Path, int]]:
    """(checkpoint, tokens) that one unit sends through each network, the noise floor left out."""
    passes = []
    if unit.trainer is not None:
        passes.append((unit.trainer, unique_tokens(unit.prompt, unit.response, unit.counted)))
    for version, path in unit.samplers.items():
        if path is not None and path != unit.trainer:
            mine = unit.counted & (unit.version == version)
            passes.append((path, unique_tokens(unit.prompt, unit.response, mine)))
    return passes


def forward_tokens(units: Iterable[Unit]) -> int:
    """Tokens that units send through networks, each once for each set of weights."""
    return sum(tokens for unit in units for _, tokens in forward_passes(unit))


def noise_rows(unit: Unit, shared: Ints) -> Ints:
    """Sequences of a unit that are scored again alone: some of those that ``shared`` a pass with others.

    They add little to the unit's cost, but there is one at least.
    """
    if not len(shared) or not unit.noise:
        return shared[:0]
    budget = max(_NOISE_TOKENS, _NOISE_SHARE * unique_tokens(unit.prompt, unit.response, unit.counted))
    lengths = unit.prompt.lengths[shared] + unit.response.lengths[shared]
    count = max(1, min(unit.noise, len(shared), int(budget // max(1.0, float(lengths.mean())))))
    chosen = np.unique(np.linspace(0, len(shared) - 1, count + 2).astype(int)[1:-1])
    return np.asarray(shared[chosen], dtype=np.int64)


def _shards(rollouts: Rollouts, rows: Ints, most: int) -> Iterator[Ints]:
    """Cut rows into runs of about ``most`` counted tokens; sequences with one prompt stay together where they can."""
    counts = np.bincount(rollouts.sequence_of_token, weights=rollouts.loss_mask, minlength=len(rollouts)).astype(int)
    prompts: dict[bytes, list[int]] = {}
    for row in rows:
        prompts.setdefault(rollouts.prompt[row].tobytes(), []).append(int(row))
    held: list[int] = []
    size = 0
    for group in prompts.values():
        whole = int(counts[group].sum())
        if held and size + whole > most:
            yield np.array(held)
            held, size = [], 0
        for row in group:
            if held and size + counts[row] > most:
                yield np.array(held)
                held, size = [], 0
            held.append(row)
            size += int(counts[row])
    if held:
        yield np.array(held)
