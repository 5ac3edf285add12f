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

from mismatch_probe.approximate import approximate
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


def step_label(step: int, approximate: bool) -> str:
    """The step's number, starred where something stands in for what was not kept."""
    return f"{step}*" if approximate else str(step)


def approximation_note(steps: pd.DataFrame) -> str:
    """What the star means, "" where every step is exact."""
    parts = (_nearest_note(steps["nearest_gap_max"]), _engine_note(steps["sampler_from_engine"]))
    note = " ".join(part for part in parts if part)
    return f"*: {note}" if note else ""


def _engine_note(tokens: pd.Series) -> str:
    starred = int((tokens > 0).sum())
    if not starred:
        return ""
    return (
        f"D of {starred} of {len(tokens)} steps is approximate: no sampler log-prob was logged and the engine's "
        "prefill stands in (--engine). No breakdown is declared on D or d there."
    )


def _nearest_note(gaps: pd.Series) -> str:
    starred = gaps[gaps > 0]
    if starred.empty:
        return ""
    farthest = "1 update" if starred.max() == 1 else f"{starred.max()} updates"
    return (
        f"{len(starred)} of {len(gaps)} steps are approximate, scored at the nearest checkpoint, up to "
        f"{farthest} from the version that counts (--nearest). No breakdown is declared on them."
    )


def engine_sentence(steps: pd.DataFrame) -> str:
    """What D consists of at the last step at which the engine was asked again, "" where it was nowhere."""
    known = steps[steps["discrepancy_decode_rms"].notna()]
    if known.empty:
        return ""
    row = known.iloc[-1]
    parts = [
        f"{what} rms {nats(row[f'discrepancy_{part}_rms'])} ({row[f'discrepancy_{part}_share']:.0%} of mean D^2)"
        for part, what in (("prefill", "engine against trainer"), ("decode", "decode against prefill"))
    ]
    return f"Inside D (step {row['step']}): {', '.join(parts)}."


def decomposition_table(steps: pd.DataFrame) -> Table:
    """Per step: mean and rms of D and L, ESS of the lag at three levels, prefix KL, status."""
    table = plain_table(
        *("step", "D mean", "D rms", "L mean", "L rms", "token", "seq", "prompt", "KL", "status"),
        left=(0, 9),
        tight=True,
    )
    for row, starred in zip(steps.to_dict("records"), approximate(steps), strict=True):
        table.add_row(
            step_label(row["step"], starred),
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
