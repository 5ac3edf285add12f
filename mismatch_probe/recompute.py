"""The statistics of every step again from the tokens table, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mismatch_probe.columns import with_ends
from mismatch_probe.errors import InputError
from mismatch_probe.folder import Analysis
from mismatch_probe.stats.breakdown import LEVELS, RATIOS
from mismatch_probe.stats.intervals import ClusterIntervals, Interval
from mismatch_probe.stats.positions import Places, audit, full_kl_interval
from mismatch_probe.stats.running import RunningSummary
from mismatch_probe.stats.terms import VOCABULARY
from mismatch_probe.stats.types import Floats
from mismatch_probe.table_io import read_rows
from mismatch_probe.token_chunks import StepIndex, TokenFile

_INDEX = ("sequence_id", "group_id", "tokens")
RTOL, ATOL = 1e-9, 1e-12
"""What sums in another order may change; ATOL is for what is a small difference of large numbers."""
UNCHECKED = frozenset(
    name
    for ratio in RATIOS
    for level in LEVELS
    for name in (
        *(
            f"{kind}_{ratio}_{level}_ci_{end}"
            for kind in ("ess", "perplexity_ess", "chi_square", "predicted_ess")
            for end in ("low", "high")
        ),
        *([] if level == "token" else [f"pareto_k_{ratio}_{level}"]),
    )
)
"""What a rounding can move far, and so is not checked: ends on the scale log(-log x), without bound at 1, and the
shape of the tail of sums that differ by roundings only."""


def stats_of_tokens(analysis: Analysis) -> Iterator[dict[str, float]]:
    """The statistics of each step, as the tokens table now stands; NaN = null. Tokens removed from it do not count.

    Yields:
        ``step``, ``tokens`` and, named as in the steps table, all that it takes from the split and the exact sums over
        the vocabulary, with the ends of intervals. Not in the tokens table, and so not here: the mean bias vector of
        the lag, the probe's noise floor, gradients, and what clipping, the engine, a reference or fresh rollouts add.

    Raises:
        InputError: a step's file or the sequences table cannot be read.
    """
    sequences = read_rows(analysis.folder / "sequences.parquet").select(["step", *_INDEX])
    step_of_row = sequences["step"].to_numpy()
    previous: Floats | None = None
    for step in analysis.steps["step"]:
        rows = sequences.take(np.flatnonzero(step_of_row == step))
        index = StepIndex.of(*(rows[name].to_pylist() for name in _INDEX))
        file = TokenFile(analysis.folder / "tokens" / f"step={step}" / "part-0.parquet", index)
        row, _, previous = stats_of_file(file, analysis.record["options"], previous)
        yield {"step": int(step), **row}


def stats_of_file(
    file: TokenFile, options: dict[str, Any], previous: Floats | None = None
) -> tuple[dict[str, float], Places, Floats | None]:
    """Those of one step, its running weight by place, and its mean bias vector of the discrepancy.

    Args:
        file: the step's tokens.
        options: ``seed``, ``resamples``, ``confidence`` and ``intervals`` of ``decompose``.
        previous: that vector of the step before, None where it had none.

    Raises:
        InputError: it cannot be read.
    """
    running = RunningSummary(file.index.group, file.rows())
    for chunk in file.chunks():
        running.add(chunk)
    tokens = int(running.tokens.sum())
    # As in decompose: tokens known for a part of the step are no sample of it.
    mixed = 0 < file.rescored < tokens
    partial = mixed or 0 < file.stale < tokens
    if partial:
        running.forget("discrepancy", "lag", *VOCABULARY, *(["log_ratio"] if mixed else []))
    n_groups = int(file.index.group.max(initial=-1)) + 1
    how = (options["seed"], options["resamples"], options["confidence"], options["intervals"])
    intervals = ClusterIntervals(n_groups, *how)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite sums are refused with a reason
        values, found, vector = running.found(intervals, previous)
        whole = ~np.isnan(running.sequence_sums("log_ratio"))
        places = audit(file.places(whole, running.tokens, with_kl=not partial), file.index.group[whole], intervals)
        zero = Interval(0.0, 0.0, 0.0)
        found["full_kl_trainer_stale"] = zero if running.is_zero() else full_kl_interval(places, intervals)
    counts = {"tokens": tokens}
    counts |= {f"tokens_with_{part}": running.known(part) for part in ("discrepancy", "lag") if not partial}
    return counts | values | with_ends(found), places, vector


def check_steps(analysis: Analysis) -> str:
    """One sentence: the steps table holds the statistics that its tokens give.

    Raises:
        InputError: a step's tokens give another one, or cannot be read.
    """
    tokens, names = 0, 0
    stored = analysis.steps.set_index("step")
    for found in stats_of_tokens(analysis):
        step = int(found.pop("step"))
        tokens += int(found["tokens"])
        checked = {name: value for name, value in found.items() if name not in UNCHECKED}
        names = max(names, len(checked))
        for name, value in checked.items():
            there = float(stored[name].loc[step])
            if not np.isclose(value, there, rtol=RTOL, atol=ATOL, equal_nan=True):
                raise InputError(
                    f"{analysis.folder}: {name} at step {step} is {there:.6g} in steps.parquet and {value:.6g} by its "
                    "tokens, so one of the two was changed. Run decompose again with --overwrite"
                )
    return f"Recomputed from {tokens:,} tokens: {names} numbers a step are as steps.parquet has them."
