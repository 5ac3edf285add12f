"""Options that every reader takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadOptions:
    """How a run directory is read.

    ``skip_bad_rows``: a file or line that cannot be parsed is set aside instead of ending the command.
    ``strict``: a row that would be set aside, or a torn last line, ends the command.
    ``overrides``: "KEY=VALUE" texts that take the place of run.toml keys.
    """

    skip_bad_rows: bool = False
    strict: bool = False
    overrides: tuple[str, ...] = ()
