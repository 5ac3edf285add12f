"""A planted run, decomposed by the command line, and what it wrote."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mismatch_probe.entry import main
from tests.planted import Planted, write_rows


def analysis(run: Planted) -> Path:
    return run.path / "mismatch_probe"


def steps(run: Planted) -> pd.DataFrame:
    return pd.read_parquet(analysis(run) / "steps.parquet").set_index("step")


def tokens(run: Planted, step: int) -> pd.DataFrame:
    return pd.read_parquet(analysis(run) / "tokens" / f"step={step}" / "part-0.parquet")


def decompose(run: Planted, *options: str) -> int:
    """The decomposition alone: looking for causes has tests of its own."""
    return main(["decompose", str(run.path), "-q", "--no-diagnose", *options])


def rewrite(run: Planted, step: int) -> None:
    write_rows(run.path / "rollouts" / f"step_{step:06d}.parquet", run.rows[step])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def tables(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if not name.startswith("scores/")}
