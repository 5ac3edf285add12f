"""``RolloutWriter``: append-only, crash-safe, one file a step and rank."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.errors import OutputError, UsageError
from mismatch_probe.log.declare import declare
from mismatch_probe.log.files import clean, put
from mismatch_probe.log.step import StepWriter
from mismatch_probe.log.table import warm_up, write_rows
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.step_files import StepName, list_step_files

logger = logging.getLogger("mismatch_probe.log")


class RolloutWriter:
    """Writes a run directory in the native layout from inside a trainer. Make one a process, when it starts.

    Args:
        run_dir: made when missing. A run that is there is continued: nothing in it is overwritten.
        rank: number of this process among those that write the same step; default the variable RANK, else none.
        world_size: how many of them there are; default the variable WORLD_SIZE, else unknown.
        strict: raise where the default is to warn, count and go on.
        settings: keys of ``run.toml`` (``temperature``, ``checkpoints``, ``vocab_size``, ...), written there.

    Once made it does not raise, unless ``strict``: rows that do not fit and files that the disk refuses are warned of
    through the logger ``mismatch_probe.log`` and counted in ``rows_set_aside`` and ``steps_lost``.

    A second block for the same step writes a further part, which counts too. A step that an earlier process wrote, as
    before a resume, goes to a new attempt; readers take the last. ``restart(step)`` says the same within a process.

    Raises:
        UsageError: a setting is unknown, of the wrong kind, or differs from the ``run.toml`` that is there.
        OutputError: the directory cannot be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        strict: bool = False,
        **settings: Any,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.rank = _from_environment("RANK") if rank is None else int(rank)
        self.world_size = _from_environment("WORLD_SIZE") if world_size is None else int(world_size)
        self.strict = strict
        self.rows_written = self.rows_set_aside = self.steps_written = self.steps_lost = 0
        self._folder = self.run_dir / "rollouts"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            vocab_size = declare(self.run_dir, settings)
            unfinished = clean(self._folder, self._mine)
        except OSError as error:
            raise OutputError(f"{self.run_dir}: cannot be written ({error.strerror}). Give another run_dir") from None
        if unfinished:
            logger.warning("%s: removed what an earlier process left unfinished: %s", self._folder, unfinished)
        self._checker = RowBuilder(0, self.run_dir, vocab_size, ReadOptions())
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._warned: set[str] = set()
        self._attempts: dict[int, int] = {}
        self._parts: Counter[int] = Counter()
        self._found = self._attempts_on_disk()
        self._collecting = threading.Lock()
        self._open: StepWriter | None = None
        warm_up()
        atexit.register(self.close)

    def step(self, index: int) -> StepWriter:
        """A block that collects the rows of a step: the update that turns version ``index`` into ``index`` + 1.

        Raises:
            UsageError: ``index`` is negative.
        """
        if int(index) < 0:
            raise UsageError(f"step {index}: steps are numbered from 0")
        return StepWriter(self, int(index))

    def collect(self, index: int) -> StepWriter:
        """The open block of a step, for a trainer that hands its batches over one by one.

        Asking for another step writes the block before it; ``close()``, or the end of the process, writes the last.

        Raises:
            UsageError: ``index`` is negative.
        """
        with self._collecting:
            if self._open is None or self._open.index != index:
                self._finish()
                self._open = self.step(index)
            return self._open

    def close(self) -> None:
        """Write the block that ``collect`` left open, if there is one."""
        with self._collecting:
            self._finish()

    def _finish(self) -> None:
        block, self._open = self._open, None
        if block is not None:
            self.write(block)

    def write_padded(self, step: int, **arrays: Any) -> None:
        """One padded batch as a step, or as a part of it; the arrays are ``StepWriter.add_padded``'s."""
        with self.step(step) as block:
            block.add_padded(**arrays)

    def write_batch(self, step: int, **columns: Any) -> None:
        """Columns of lists as a step, or as a part of it; the columns are ``StepWriter.add_batch``'s."""
        with self.step(step) as block:
            block.add_batch(**columns)

    def restart(self, step: int) -> None:
        """Say that training goes back to ``step`` within this process: it and what follows become new attempts."""
        with self._writing:
            self._found = self._attempts_on_disk()
            for later in [known for known in self._attempts if known >= step]:
                del self._attempts[later], self._parts[later]

    def write(self, block: StepWriter) -> None:
        """Write a block's rows and reasons, once; called by its end."""
        if not block.finish():
            return
        try:
            with self._writing:
                self._put(block)
        except Exception as error:  # the last line between a log and the run that it serves
            with self._counting:
                self.steps_lost += 1
            if self.strict:
                raise OutputError(f"{self._folder}: step {block.index} cannot be written ({error})") from error
            logger.error("step %d is lost: %d rows cannot be written (%s)", block.index, len(block.rows), error)
        else:
            with self._counting:
                self.steps_written += 1
                self.rows_written += len(block.rows)

    def misfit(self, row: dict[str, Any]) -> str | None:
        """Why readers would set the row aside; None when it fits."""
        return self._checker.misfit(row)

    def refused(self, step: int, sequence_id: str | None, reason: str, rows: int, cause: Exception | None) -> None:
        """Count rows that do not fit and warn of them, once a kind of reason.

        Raises:
            UsageError: the writer is strict.
        """
        where = f"step {step}" if sequence_id is None else f"step {step}, sequence {sequence_id}"
        if self.strict:
            raise UsageError(f"{where}: {reason}") from cause
        kind = "".join("#" if character.isdigit() else character for character in reason)
        with self._counting:
            self.rows_set_aside += rows
            new = kind not in self._warned
            self._warned.add(kind)
        if new:
            logger.warning("%s: set aside, %s. More of this kind are counted without a warning", where, reason)

    def _put(self, block: StepWriter) -> None:
        step = block.index
        attempt = self._attempts.setdefault(step, 1 + self._found.get(step, 0))
        while True:
            self._parts[step] += 1
            name = StepName(step, self.rank, attempt, self._parts[step])
            write = partial(write_rows, block.rows, block.set_aside, name, self.world_size)
            try:
                put(self._folder / name.parquet(), write)
            except FileExistsError:
                # It appeared since this writer opened, so it is no earlier attempt: both are parts of this one.
                logger.warning("%s: another process writes under this rank; give each its own", name.parquet())
            else:
                return

    def _attempts_on_disk(self) -> dict[int, int]:
        """The last attempt of each step, whichever rank's."""
        return {step: max(name.attempt for name, _ in named) for step, named in list_step_files(self._folder).items()}

    def _mine(self, name: str) -> bool:
        parsed = StepName.parse(name)
        return parsed is not None and parsed.rank == self.rank


def _from_environment(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None
