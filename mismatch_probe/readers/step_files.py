"""Names of native step files, and which of them count when a step was written more than once.

``step_000012[_rank_3][_attempt_2][_part_2].parquet``. A rank writes its share of a step in one or more parts; a run
that resumes from a checkpoint writes the step again under the next attempt, with other content. Per rank the last
attempt counts. All of this is in the names; the footers of such a step's files say how many ranks the last attempt had
and when it was written.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORLD_SIZE = b"mismatch_probe.world_size"
WRITTEN = b"mismatch_probe.written"
SET_ASIDE = b"mismatch_probe.set_aside"

_NAME = re.compile(r"step_(\d+)(?:_rank_(\d+))?(?:_attempt_(\d+))?(?:_part_(\d+))?\.(?:parquet|jsonl(?:\.gz|\.zst)?)")


@dataclass(frozen=True)
class StepName:
    """What a step file's name says; no rank is rank 0's place."""

    step: int
    rank: int | None = None
    attempt: int = 1
    part: int = 1

    @classmethod
    def parse(cls, name: str) -> StepName | None:
        """None for a name that is no step file's."""
        match = _NAME.fullmatch(name)
        if not match:
            return None
        step, rank, attempt, part = match.groups()
        return cls(int(step), None if rank is None else int(rank), int(attempt or 1), int(part or 1))

    def parquet(self) -> str:
        """The file's name."""
        rank = "" if self.rank is None else f"_rank_{self.rank}"
        attempt = "" if self.attempt == 1 else f"_attempt_{self.attempt}"
        part = "" if self.part == 1 else f"_part_{self.part}"
        return f"step_{self.step:06d}{rank}{attempt}{part}.parquet"

    @property
    def place(self) -> int:
        """Rank, 0 where the name has none."""
        return self.rank or 0


Named = tuple[StepName, Path]


def list_step_files(folder: Path) -> dict[int, list[Named]]:
    """All step files of a folder by step, whatever their attempt; sorted by name."""
    files: dict[int, list[Named]] = defaultdict(list)
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = StepName.parse(entry.name)
        if name:
            files[name.step].append((name, entry))
    return dict(files)


def last_attempts(files: dict[int, list[Named]]) -> tuple[dict[int, list[Path]], list[str]]:
    """The files that count, by step, and notices on those that do not."""
    counted: dict[int, list[Path]] = {}
    notices = []
    again = sorted(step for step, named in files.items() if any(name.attempt > 1 for name, _ in named))
    for step, named in files.items():
        kept = _last(named) if step in again else [path for _, path in named]
        counted[step] = kept
        left = [path.name for _, path in named if path not in kept]
        if left:
            notices.append(
                f"step {step} was written more than once, as a resumed run does: the last attempt counts, "
                f"left unread: {', '.join(left)}"
            )
    notices += _abandoned(counted, again)
    return counted, notices


def footer(path: Path) -> dict[bytes, bytes]:
    """Metadata of a Parquet file; empty for another kind or one that cannot be read, which loading will report."""
    if path.suffix != ".parquet":
        return {}
    try:
        return dict(pq.read_metadata(path).metadata or {})
    except (pa.ArrowException, OSError):
        return {}


def set_aside(path: Path) -> list[tuple[str | None, str]]:
    """(sequence_id, reason) of the rows that the writer of a file could not write."""
    try:
        rows = json.loads(footer(path).get(SET_ASIDE, b"[]"))
        return [(None if name is None else str(name), str(reason)) for name, reason in rows]
    except (ValueError, TypeError):
        return []  # not a list of pairs: not this writer's


def _last(named: list[Named]) -> list[Path]:
    newest: dict[int, int] = {}
    for name, _ in named:
        newest[name.place] = max(name.attempt, newest.get(name.place, 0))
    kept = [(name, path) for name, path in named if name.attempt == newest[name.place]]
    footers = [footer(path) for _, path in kept]
    latest = max(footers, key=_written)
    # Resumed on fewer ranks: the shares of ranks that are gone belong to the attempt before.
    world = int(_number(latest, WORLD_SIZE))
    return [path for name, path in kept if not world or name.place < world]


def _written(metadata: dict[bytes, bytes]) -> float:
    return _number(metadata, WRITTEN)


def _number(metadata: dict[bytes, bytes], key: bytes) -> float:
    try:
        value = float(metadata.get(key, b"0"))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _abandoned(counted: dict[int, list[Path]], again: list[int]) -> list[str]:
    """Steps that lie after a resumed one and were written before it: the resumed run never came that far."""
    if not again:
        return []
    later = sorted(step for step in counted if step >= again[0])
    written = {step: max(_written(footer(path)) for path in counted[step]) for step in later}
    old = [
        step
        for step in later
        if written[step] > 0 and any(resumed < step and written[step] < written[resumed] for resumed in again)
    ]
    if not old:
        return []
    return [
        f"written before step {again[0]} was resumed and not again since: step {', '.join(map(str, old))}; "
        "what is there belongs to the run before it resumed"
    ]
