"""The tables that grow with every step, written while it is at hand."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from mismatch_probe.assemble import StepData
from mismatch_probe.rows import place_table, sequence_table, token_table
from mismatch_probe.run import Rejected
from mismatch_probe.stats.positions import Places
from mismatch_probe.table_io import TableWriter, table_of, write_table
from mismatch_probe.tables import PLACES, REJECTED, SEQUENCES


class StepTables:
    """Context that writes the tokens, sequences, places and rejected rows of one step after another.

    Args:
        folder: where the tables go.
        provenance: kept in their schemas.

    Raises:
        OutputError: here and from every method: the folder cannot be written.
    """

    def __init__(self, folder: Path, provenance: dict[str, str]) -> None:
        self._folder, self._provenance = folder, provenance
        self._sequences = TableWriter(folder / "sequences.parquet", SEQUENCES, provenance)
        self._places = TableWriter(folder / "places.parquet", PLACES, provenance)
        self._rejected = TableWriter(folder / "rejected.parquet", REJECTED, provenance)
        self._open = ExitStack()
        self.first_rejected: Rejected | None = None

    @property
    def sequences(self) -> int:
        """Sequences so far."""
        return self._sequences.rows

    @property
    def rejected(self) -> int:
        """Rows set aside so far."""
        return self._rejected.rows

    def __enter__(self) -> StepTables:
        with self._open:
            for table in (self._sequences, self._places, self._rejected):
                self._open.enter_context(table)
            self._open = self._open.pop_all()
        return self

    def add(self, data: StepData, places: Places) -> None:
        """Write one step."""
        part = self._folder / "tokens" / f"step={data.step}" / "part-0.parquet"
        write_table(token_table(data, self._provenance), part)
        self._sequences.add(sequence_table(data, self._provenance))
        self._places.add(place_table(data.step, places, self._provenance))
        rejected = data.rollouts.rejected
        self._rejected.add(table_of([asdict(row) for row in rejected], REJECTED, self._provenance))
        self.first_rejected = self.first_rejected or next(iter(rejected), None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
