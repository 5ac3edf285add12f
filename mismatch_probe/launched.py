"""Whether torchrun started this process; without torch, so that the command line can ask."""

from __future__ import annotations

import os


def launched_processes() -> int | None:
    """How many processes torchrun started; None where it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def follows() -> bool:
    """True in all processes of torchrun but the first."""
    return (launched_processes() or 1) > 1 and int(os.environ["RANK"]) > 0
