"""The tokens table of one step, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_probe.errors import InputError
from mismatch_probe.run import UNKNOWN_TOKEN
from mismatch_probe.stats.positions import Place
from mismatch_probe.stats.ratios import Levels, Split
from mismatch_probe.stats.stream import Runs
from mismatch_probe.stats.terms import PARTS, VOCABULARY, StepTokens
from mismatch_probe.stats.types import Bools, Floats, Ints

STALE, SOURCE = "stale_trainer_logprob", "trainer_logprob_source"
COLUMNS = ("sequence_id", "token_id", *PARTS, *VOCABULARY, STALE, SOURCE)
PLACES = ("sequence_id", "log_ratio", "kl_trainer_stale")
_BATCH = 1 << 17
_HELD = 52_000_000
"""Tokens of the places that are held at once, ended sequences counted; 16 bytes each."""
_TURNED = 8
"""Places that share a line of the processor's cache."""


@dataclass(frozen=True, eq=False)
class StepIndex:
    """The sequences of a step by name, and the prompt group of each, (S,), numbered as in ``Rollouts``.

    ``longest``: tokens of the longest response; another number costs time or memory and changes no result.
    """

    number: dict[str, int]
    group: Ints
    longest: int

    @classmethod
    def of(cls, sequence_ids: Sequence[str], group_ids: Sequence[str], tokens: Sequence[int]) -> StepIndex:
        """From the columns of the sequences table."""
        _, group = np.unique(np.asarray(group_ids, dtype=str), return_inverse=True)
        numbers = {name: row for row, name in enumerate(sequence_ids)}
        return cls(numbers, group.astype(np.int64), max(tokens, default=0))

    def numbers(self, names: pa.Array) -> Ints:
        """Number of each name, (n,).

        Raises:
            KeyError: one is not among the sequences.
        """
        coded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        used = np.flatnonzero(np.bincount(codes, minlength=len(coded.dictionary)))
        number_of_code = np.full(len(coded.dictionary), -1, dtype=np.int64)
        number_of_code[used] = [self.number[name] for name in coded.dictionary.take(pa.array(used)).to_pylist()]
        return np.asarray(number_of_code[codes])


class TokenFile:
    """One step's tokens. After ``chunks`` are through, ``stale`` and ``rescored`` count the tokens whose log pi_s is
    known and whose log pi a network gave.

    Args:
        path: of the file.
        index: the step's sequences.

    Raises:
        InputError: from every method: it cannot be read, or holds a sequence that the sequences table lacks.
    """

    def __init__(self, path: Path, index: StepIndex) -> None:
        self.path, self.index = path, index
        self.stale = self.rescored = 0
        self._held = _Held(len(index.group), 0)

    def rows(self) -> int:
        """Tokens in the file."""
        try:
            return int(pq.read_metadata(self.path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def chunks(self) -> Iterator[StepTokens]:
        """Its tokens; the exact bias sums of the lag are not in it."""
        self.stale = self.rescored = 0
        self._held = _Held(len(self.index.group), self.index.longest)
        for batch in self._batches(COLUMNS):
            sequence = self._sequence(batch)
            self.stale += len(batch) - batch[STALE].null_count
            self.rescored += _count(batch[SOURCE], ("rescored", "nearest"))
            tokens = StepTokens(
                split=Split(*(_floats(batch[part]) for part in PARTS)),
                levels=Levels(sequence, self.index.group),
                half=self.index.group[sequence] % 2,
                token_id=pc.fill_null(batch["token_id"], UNKNOWN_TOKEN).to_numpy().astype(np.int64),
                **{name: _floats(batch[name]) for name in VOCABULARY},
                bias_lag_sums=None,
                bias_lag_tokens=np.zeros(2, dtype=np.int64),
            )
            self._held.add(sequence, tokens.split.log_ratio, tokens.kl_trainer_stale)
            yield tokens

    def places(self, whole: Bools, tokens: Ints, with_kl: bool) -> Iterator[Place]:
        """Place after place of the responses that are whole, after ``chunks``.

        The first places are kept from there; for the others the file is read again, as often as memory asks.

        Args:
            whole: sequences to give, (S,); they are numbered anew from 0 in their order.
            tokens: of each sequence, (S,).
            with_kl: give the KL, else NaN.
        """
        row = np.cumsum(whole) - 1
        longest = int(tokens[whole].max(initial=0))
        for first in range(0, longest, self._held.at_once):
            if first:
                self._held.begin(first)
                for batch in self._batches(PLACES):
                    self._held.add(self._sequence(batch), *(_floats(batch[c]) for c in PLACES[1:]))
            for alive, log_ratio, kl in self._held.places(whole, longest):
                yield Place(row[alive], log_ratio, kl if with_kl else np.full(len(kl), np.nan))

    def _batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            # Buffered ahead, the whole file would lie in memory.
            with pq.ParquetFile(self.path, pre_buffer=False) as file:
                for name in columns:
                    file.schema_arrow.field(name)
                for batch in file.iter_batches(_BATCH, columns=list(columns)):
                    if len(batch):
                        yield batch
        except (pa.ArrowException, OSError, KeyError) as error:
            raise self._unreadable(error) from None

    def _sequence(self, batch: pa.RecordBatch) -> Ints:
        try:
            return self.index.numbers(batch["sequence_id"])
        except KeyError as error:
            raise self._unreadable(f"the sequences table has no sequence {error}") from None

    def _unreadable(self, error: Exception | str) -> InputError:
        reason = str(error).splitlines()[0]
        return InputError(f"{self.path}: not readable ({reason}). Run decompose again with --overwrite")


class _Held:
    """Log-ratio and KL of all sequences at some places.

    Args:
        sequences: S.
        longest: tokens of the longest response, as far as known.
    """

    def __init__(self, sequences: int, longest: int) -> None:
        self.at_once = max(1, min(longest, _HELD // max(1, sequences)))
        self._first, self._tokens = 0, np.zeros(sequences, dtype=np.int64)
        self._values = np.empty((2, sequences, self.at_once))

    def begin(self, first: int) -> None:
        """Hold the places from ``first`` on; the tokens come from the beginning again."""
        self._first = first
        self._tokens[:] = 0

    def add(self, sequence: Ints, *values: Floats) -> None:
        """Take in the next tokens: their sequences (n,), log-ratios and KL."""
        order = slice(None) if bool((sequence[1:] >= sequence[:-1]).all()) else np.argsort(sequence, kind="stable")
        runs = Runs(sequence[order])
        place = self._tokens[runs.sequence] - self._first  # of the first token of each stretch
        self._tokens[runs.sequence] += runs.lengths
        skipped = np.clip(-place, 0, runs.lengths)
        taken = np.clip(self.at_once - place, skipped, runs.lengths) - skipped
        starts = np.cumsum(runs.lengths) - runs.lengths + skipped
        cells = runs.sequence * self.at_once + place + skipped
        count = np.arange(int(taken.sum()))
        before = np.cumsum(taken) - taken
        source, target = (count + np.repeat(begin - before, taken) for begin in (starts, cells))
        for held, more in zip(self._values, values, strict=True):
            held.reshape(-1)[target] = more[order][source]

    def places(self, whole: Bools, longest: int) -> Iterator[tuple[Ints, Floats, Floats]]:
        """Of each place up to that of the longest response: the whole sequences that are alive, and their values."""
        end = min(self.at_once, longest - self._first)
        for start in range(0, end, _TURNED):
            turned = self._values[:, :, start : min(start + _TURNED, end)].transpose(0, 2, 1).copy()
            for place in range(turned.shape[1]):
                alive = np.flatnonzero(whole & (self._tokens > self._first + start + place))
                yield alive, turned[0, place, alive], turned[1, place, alive]


def _count(column: pa.Array, wanted: Sequence[str]) -> int:
    """How many entries are one of the wanted words."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    among = np.array([*(word in wanted for word in coded.dictionary.to_pylist()), False])
    return int(among[coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)].sum())


def _floats(column: pa.Array) -> Floats:
    values: Floats = column.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    return values
