"""Results on stdout, progress and notices on stderr."""

from __future__ import annotations

import sys

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Task as ProgressTask
from rich.table import Table
from rich.text import Text

from mismatch_probe.reporters.format import nats, share

STATUS_STYLE = {
    "ok": "green",
    "warning": "yellow",
    "breakdown": "bold red",
    "unjudged": "dim",
    "approximate": "yellow",
}


def stdout() -> Console:
    """Console for results: 80 columns when not a terminal, colour only where one can show it."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def stderr() -> Console:
    """Console for everything else."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def plain_table(*headings: str, left: tuple[int, ...] = (0,), tight: bool = False) -> Table:
    """A table without vertical lines; columns are right-aligned but for those in ``left``, one space apart if tight."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0) if tight else (0, 1), pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True)
    return table


def step_label(step: int, gap: float) -> str:
    """The step's number, starred where weights of a neighbouring version stand in for its own."""
    return f"{step}*" if gap else str(step)


def approximation_note(gaps: pd.Series) -> str:
    """What the star means, "" where every step is exact. ``gaps`` is the nearest_gap_max column."""
    starred = gaps[gaps > 0]
    if starred.empty:
        return ""
    farthest = "1 update" if starred.max() == 1 else f"{starred.max()} updates"
    return (
        f"*: {len(starred)} of {len(gaps)} steps are approximate, scored at the nearest checkpoint, up to "
        f"{farthest} from the version that counts (--nearest). No breakdown is declared on them."
    )


def decomposition_table(steps: pd.DataFrame) -> Table:
    """Per step: mean and rms of D and L, ESS of the lag at three levels, prefix KL, status."""
    table = plain_table(
        *("step", "D mean", "D rms", "L mean", "L rms", "token", "seq", "prompt", "KL", "status"),
        left=(0, 9),
        tight=True,
    )
    for row in steps.to_dict("records"):
        table.add_row(
            step_label(row["step"], row["nearest_gap_max"]),
            nats(row["discrepancy_mean"]),
            nats(row["discrepancy_rms"]),
            nats(row["lag_mean"]),
            nats(row["lag_rms"]),
            share(row["ess_lag_token"], row["tokens_with_lag"]),
            share(row["ess_lag_sequence"], row["sequences"]),
            share(row["ess_lag_prompt"], row["groups"]),
            nats(row["prefix_kl_stale_trainer"]),
            Text(row["status"], style=STATUS_STYLE[row["status"]]),
        )
    return table


class TerminalProgress:
    """Progress bar on stderr with tokens per second and time left; silent where stderr is no terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = stderr()
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _TokensPerSecond(),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("scoring", total=None)
        self._steps, self._begun, self._done, self._planned = 0, 0, 0, 0

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, steps: int) -> None:
        """The number of steps is known."""
        self._steps = steps

    def step(self, index: int, tokens: int) -> None:
        """A step begins; the total assumes that the steps to come are like those seen."""
        self._begun += 1
        self._planned += tokens
        total = self._planned * self._steps / self._begun
        self._bar.update(self._task, description=f"step {index} ({self._begun}/{self._steps})", total=total)

    def tokens(self, count: int) -> None:
        """Tokens went through a network."""
        # The noise floor's second scoring is not in the plan and must not push the bar over its end.
        self._done = min(self._done + count, self._planned)
        self._bar.update(self._task, completed=self._done)

    def notice(self, text: str) -> None:
        """One line on stderr."""
        if not self._quiet:
            self._console.print(Text(f"note: {text}"))


class _TokensPerSecond(ProgressColumn):
    """Tokens per second."""

    def render(self, task: ProgressTask) -> Text:
        """The rate, once there is one."""
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s")
