"""Rows of one step, collected in memory and handed to the writer as one table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_probe.log.arrays import Row, batch_rows, own_array, padded_rows, prompt_group
from mismatch_probe.readers.rows import OPTIONAL, REQUIRED

if TYPE_CHECKING:
    from mismatch_probe.log.writer import RolloutWriter

logger = logging.getLogger("mismatch_probe.log")
FIELDS = (*REQUIRED, *OPTIONAL)
_UNREADABLE = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError)


class StepWriter:
    """One step of one rank. Rows are held until the ``with`` block ends, then written as one file.

    All methods may be called from several threads. A row that does not fit is set aside: warned of, counted in
    ``RolloutWriter.rows_set_aside``, and named with its reason inside the file, so that ``inspect`` lists it. With
    ``strict`` it raises UsageError instead.
    """

    def __init__(self, writer: RolloutWriter, step: int) -> None:
        self.index = step
        self.rows: list[Row] = []
        self.set_aside: list[tuple[str | None, str]] = []
        self._writer = writer
        self._lock = threading.Lock()
        self._closed = False

    def add(
        self,
        *,
        prompt_ids: Any,
        response_ids: Any,
        sampler_logprobs: Any,
        sampler_version: Any,
        loss_mask: Any = None,
        group_id: Any = None,
        sequence_id: Any = None,
        trainer_logprobs: Any = None,
        advantages: Any = None,
        reward: Any = None,
        finish_reason: Any = None,
    ) -> None:
        """Add one sequence of n response tokens.

        Args:
            prompt_ids: ids before the first token that the sampler drew.
            response_ids: (n,) all ids from there on, tool output included.
            sampler_logprobs: (n,) nats, as the engine returned them; None or NaN where it returned none, never 0.0.
            sampler_version: version of the weights that drew the response, or (n,) one a token; None if unknown.
            loss_mask: (n,) 1 where the loss counts the token; None counts all.
            group_id: prompt group; None groups the step's sequences by identical prompt.
            sequence_id: unique in the step; None numbers the rows.
            trainer_logprobs: (n,) nats under the weights that this step updates.
            advantages: one number, or (n,).
            reward: one number.
            finish_reason: text.
        """
        given = locals()
        self._add({key: given[key] for key in FIELDS})

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add sequences given as mappings with the keys of ``add``."""
        self._add_all(iter(rows), 1)

    def add_batch(self, **columns: Any) -> None:
        """Add sequences given as columns with the names of ``add``, each a list with one entry a sequence."""
        self._add_all(batch_rows(columns), _size(columns.get("response_ids")))

    def add_padded(self, **arrays: Any) -> None:
        """Add a padded batch; see ``mismatch_probe.log.arrays.padded_rows`` for the arrays."""
        self._add_all(padded_rows(**arrays), _size(arrays.get("input_ids")))

    def _add_all(self, rows: Iterator[Mapping[str, Any]], size: int) -> None:
        """What cannot be cut into rows is set aside as a whole: a log must not end a training run."""
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except _UNREADABLE as error:
                self._refuse(None, f"a batch that cannot be cut into rows: {error}", size, error)
                return
            self._add(row)

    def _add(self, given: Mapping[str, Any]) -> None:
        name = given.get("sequence_id")
        unknown = sorted(set(given) - set(FIELDS))
        if unknown:
            self._refuse(name, f"{', '.join(unknown)}: no field of a row; known are {', '.join(FIELDS)}")
            return
        try:
            row = {key: own_array(given.get(key)) for key in FIELDS}
            if row["group_id"] is None:
                row["group_id"] = prompt_group(row["prompt_ids"])
            # A row that is named when it is written only needs some name to be checked.
            reason = self._writer.misfit(row if row["sequence_id"] is not None else {**row, "sequence_id": "row"})
        except _UNREADABLE as error:
            self._refuse(name, f"values that cannot be read: {error}", cause=error)
            return
        if reason:
            self._refuse(name, reason)
            return
        with self._lock:
            if not self._closed:
                self.rows.append(row)
                return
        self._refuse(name, "it came after its step was written")

    def finish(self) -> bool:
        """Take no more rows; False when that was done before."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def _refuse(self, name: Any, reason: str, rows: int = 1, cause: Exception | None = None) -> None:
        named = None if name is None else str(name)
        with self._lock:
            self.set_aside += [(named, reason)] * rows
        self._writer.refused(self.index, named, reason, rows, cause)

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._writer.write(self)
        else:
            # Half a step would look like a whole one.
            logger.warning("step %d ended in %s and is not written", self.index, kind.__name__)


def _size(column: Any) -> int:
    """How many rows a batch would have been."""
    return len(column) if isinstance(column, list | tuple) or np.ndim(column) > 0 or hasattr(column, "detach") else 1
