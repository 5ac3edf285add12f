"""ESS of every step again from the tokens table, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_probe.errors import InputError
from mismatch_probe.folder import Analysis
from mismatch_probe.stats.stream import RunningLevels
from mismatch_probe.stats.types import Ints

_COLUMN = {"lag": "lag", "discrepancy": "discrepancy", "total": "log_ratio"}
COLUMNS = ("sequence_id", "group_id", *_COLUMN.values(), "stale_trainer_logprob", "trainer_logprob_source")
_BATCH = 1 << 17


def stats_of_tokens(analysis: Analysis) -> Iterator[dict[str, float]]:
    """The nine ESS of each step, as the tokens table now stands; NaN = null. Tokens removed from it do not count.

    Yields:
        ``step``, ``tokens`` and ``ess_{ratio}_{level}`` as in the steps table.

    Raises:
        InputError: a step's file cannot be read.
    """
    for step in analysis.steps["step"]:
        yield {"step": int(step), **ess_of_file(analysis.folder / "tokens" / f"step={step}" / "part-0.parquet")}


def check_steps(analysis: Analysis) -> str:
    """One sentence: the steps table holds the ESS that its tokens give.

    Raises:
        InputError: a step's tokens give another one, or cannot be read.
    """
    tokens = 0
    stored = analysis.steps.set_index("step")
    for found in stats_of_tokens(analysis):
        step = int(found.pop("step"))
        tokens += int(found.pop("tokens"))
        for name, value in found.items():
            there = float(stored[name].loc[step])
            if not np.isclose(value, there, rtol=1e-9, atol=1e-12, equal_nan=True):
                raise InputError(
                    f"{analysis.folder}: {name} at step {step} is {there:.6g} in steps.parquet and {value:.6g} by its "
                    "tokens, so one of the two was changed. Run decompose again with --overwrite"
                )
    return f"Recomputed from {tokens:,} tokens: every ESS is as steps.parquet has it."


def ess_of_file(path: Path) -> dict[str, float]:
    """``tokens`` and the nine ESS of one step's file.

    Raises:
        InputError: it cannot be read.
    """
    running = {ratio: RunningLevels() for ratio in _COLUMN}
    sequences: dict[str, int] = {}
    groups: dict[str, int] = {}
    group_of_sequence: Ints = np.zeros(0, dtype=np.int64)
    tokens = stale = rescored = 0
    try:
        # Buffered ahead, the whole file would lie in memory.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(_BATCH, columns=list(COLUMNS)):
                if not len(batch):
                    continue
                sequence, group = _numbers(batch["sequence_id"], sequences), _numbers(batch["group_id"], groups)
                more = len(sequences) - len(group_of_sequence)
                group_of_sequence = np.pad(group_of_sequence, (0, more))
                group_of_sequence[sequence] = group
                for ratio, column in _COLUMN.items():
                    running[ratio].add(batch[column].to_numpy(zero_copy_only=False).astype(np.float64), sequence)
                tokens += len(batch)
                stale += len(batch) - batch["stale_trainer_logprob"].null_count
                source = batch["trainer_logprob_source"].cast(pa.string())
                rescored += pc.sum(pc.is_in(source, pa.array(["rescored", "nearest"]))).as_py()
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not readable ({reason}). Run decompose again with --overwrite") from None
    # As in decompose: tokens known for a part of the step are no sample of it.
    mixed = 0 < rescored < tokens
    null = {"lag": mixed or 0 < stale < tokens, "total": mixed}
    null["discrepancy"] = null["lag"]
    out = {"tokens": float(tokens)}
    for ratio, sums in running.items():
        for level, value in sums.values(group_of_sequence).items():
            out[f"ess_{ratio}_{level}"] = float("nan") if null[ratio] else value
    return out


def _numbers(names: pa.Array, seen: dict[str, int]) -> Ints:
    """The number of each name from 0, (n,); ``seen`` grows."""
    coded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False)
    number_of_code = np.full(len(coded.dictionary), -1, dtype=np.int64)
    for code in np.flatnonzero(np.bincount(codes, minlength=len(number_of_code))):
        number_of_code[code] = seen.setdefault(coded.dictionary[int(code)].as_py(), len(seen))
    numbers: Ints = number_of_code[codes]
    return numbers
