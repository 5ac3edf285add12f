"""Field reports of engines that compute differently: single tokens, sequences, positions, growth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.field.base import BOS, MEMBERS, NAMES, FieldRun, base, make_rows, rescore
from tests.field.case import Build, Case, Variant

Row = dict[str, Any]
Error = Callable[[Row, np.random.Generator], np.ndarray]
"""D of each token of a row, nats."""


def planted(error: Error, groups: Callable[[int, np.random.Generator], list[tuple[int, int]]] | None = None) -> Build:
    """The log holds rescored log-probs minus an error; ``groups`` gives (groups, members) of each step."""

    def build(path: Path) -> object:
        return plant(base() if groups is None else mixed(groups), error).write(path)

    return build


def plant(run: FieldRun, error: Error) -> FieldRun:
    """Put the error between the models and the log; where a log-prob would be above 0 the error changes its sign."""
    rng = np.random.default_rng(7)
    for row in run:
        exact = rescore(run.models[row["sampler_version"]], row)
        d = error(row, rng)
        row["sampler_logprobs"] = np.where(exact - d < 0, exact - d, exact - np.abs(d)).tolist()
    return run


def mixed(groups: Callable[[int, np.random.Generator], list[tuple[int, int]]]) -> FieldRun:
    """R0 with groups of several sizes."""
    run = base(groups=1, members=1, longest=1)
    rng = np.random.default_rng(1)
    for step in run.rows:
        run.rows[step] = []
        for number, members in groups(step, rng):
            prompts = [[BOS, *rng.integers(3, NAMES, size=5).tolist()] for _ in range(number)]
            rows = make_rows(run.models[step], step, step, rng, members=members, prompts=prompts)
            for row in rows:
                row["group_id"] += f"-of-{members}"
                row["sequence_id"] += f"-of-{members}"
            run.rows[step] += rows
    return run


def large_and_small(step: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(5, 4), (6, 2)]


def in_large_groups(sd: float, since: int) -> Error:
    """Off from a position on, where four or more responses share the prompt."""

    def error(row: Row, rng: np.random.Generator) -> np.ndarray:
        n = len(row["response_ids"])
        large = row["group_id"].endswith("of-4")
        return rng.normal(size=n) * np.where(large & (np.arange(n) >= since), sd, 0.005)

    return error


def beyond(sd: float, since: int) -> Error:
    """Off from a position on, in every response."""
    return lambda row, rng: (
        rng.normal(size=len(row["response_ids"])) * np.where(np.arange(len(row["response_ids"])) >= since, sd, 0.005)
    )


def in_groups(sd: float, groups: int, steps: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Error:
    """Off in all responses to the first prompts of some steps."""

    def error(row: Row, rng: np.random.Generator) -> np.ndarray:
        step, group = map(int, row["group_id"].split("-"))
        wrong = step in steps and group < groups
        return rng.normal(size=len(row["response_ids"])) * (sd if wrong else 0.01)

    return error


def single(d: float, every: int, most: int = 10**9) -> Error:
    """One token in every so many rows is off by d, ``most`` in all."""
    seen, hit = [0], [0]

    def error(row: Row, rng: np.random.Generator) -> np.ndarray:
        found = 0.01 * rng.normal(size=len(row["response_ids"]))
        seen[0] += 1
        if seen[0] % every == 0 and hit[0] < most:
            found[rng.integers(len(found))] = d
            hit[0] += 1
        return found

    return error


def single_in_trainer(d: float, every: int) -> Build:
    """The trainer's own log-probs are off by d at one token in every so many rows."""

    def build(path: Path) -> object:
        run = base()
        rng = np.random.default_rng(3)
        for at, row in enumerate(run):
            logged = rescore(run.models[row["sampler_version"]], row)
            logged = logged + 0.005 * rng.normal(size=len(logged))
            if at % every == 0:
                logged[rng.integers(len(logged))] += d
            row["trainer_logprobs"] = np.minimum(logged, 0.0).tolist()
        return run.write(path)

    return build


def growing(rise: float, groups: int = 8, lag: int = 0) -> Build:
    """Engine noise that rises by a share from step to step; the sampler is ``lag`` versions behind."""

    def build(path: Path) -> object:
        run = base(groups=1, members=1, longest=1)
        rng = np.random.default_rng(5)
        for step in run.rows:
            version = max(0, step - lag)
            noise = 0.01 * (1 + rise) ** step
            run.rows[step] = make_rows(
                run.models[version], step, version, rng, groups=groups, members=MEMBERS, noise=noise
            )
        return run.write(path)

    return build


def noisy_trainer(sd: float) -> Build:
    """The trainer's own log-probs scatter, as with dropout."""

    def build(path: Path) -> object:
        run = base()
        rng = np.random.default_rng(2)
        for row in run:
            exact = rescore(run.models[row["sampler_version"]], row)
            noise = sd * rng.normal(size=len(exact))
            row["trainer_logprobs"] = np.where(exact + noise < 0, exact + noise, exact - np.abs(noise)).tolist()
        return run.write(path)

    return build


def packed_trainer(rows_in_pack: int) -> Build:
    """The trainer packs rows without their boundaries: each sees those before it."""

    def build(path: Path) -> object:
        run = base()
        for step, rows in run.rows.items():
            for first in range(0, len(rows), rows_in_pack):
                before: list[int] = []
                for row in rows[first : first + rows_in_pack]:
                    seen = {**row, "prompt_ids": before + row["prompt_ids"]}
                    row["trainer_logprobs"] = rescore(run.models[step], seen).tolist()
                    before = before + row["prompt_ids"] + row["response_ids"]
        return run.write(path)

    return build


CASES = (
    Case(
        30,
        "one token in ten rows is off by 20 nats",
        "NVIDIA-NeMo/RL#1801",
        "MP302",
        Variant("the trainer's log-prob is 20 nats too low at one token in ten rows", single_in_trainer(-20.0, 10)),
        Variant("the sampler's is 20 nats too low at one token in each row", planted(single(20.0, 1))),
        Variant("the sampler's is 2 nats too low at one token of the run", planted(single(2.0, 80, 1))),
    ),
    Case(
        31,
        "some prompts are bad as a whole",
        "NVIDIA-NeMo/RL#2100",
        "MP303",
        Variant("D of sd 3 in one prompt of eight", planted(in_groups(3.0, 1))),
        Variant("D of sd 3 in two prompts of eight", planted(in_groups(3.0, 2))),
        Variant("D of sd .3 in one prompt of 40", planted(in_groups(0.3, 1, (2,)))),
    ),
    Case(
        32,
        "packing without boundaries: mismatch before the first update",
        "NVIDIA-NeMo/RL#2105",
        "MP304",
        Variant("the trainer packs four rows", packed_trainer(4)),
        Variant("the trainer packs eight rows", packed_trainer(8)),
        Variant("the trainer packs two rows", packed_trainer(2)),
    ),
    Case(
        33,
        "dropout left on in the trainer",
        "Human-Agent-Society/reef#536",
        "MP305",
        Variant("trainer log-probs with noise of sd .3", noisy_trainer(0.3)),
        Variant("noise of sd .86", noisy_trainer(0.86)),
        Variant("noise of sd .1", noisy_trainer(0.1)),
    ),
    Case(
        34,
        "error beyond a position, no config that differs",
        "PrimeIntellect-ai/prime-rl#2802",
        "MP306",
        Variant("D of sd .3 from position 12 on, .005 before", planted(beyond(0.3, 12))),
        Variant("D of sd 1 from position 6 on", planted(beyond(1.0, 6))),
        Variant("D of sd .02 from position 12 on", planted(beyond(0.02, 12))),
    ),
    Case(
        35,
        "cascade attention: only under prompts that many share",
        "verl-project/verl#3595",
        "MP307",
        Variant("D of sd .3 from position 12 on in groups of 4", planted(in_large_groups(0.3, 12), large_and_small)),
        Variant("D of sd 1 from position 0 on in groups of 4", planted(in_large_groups(1.0, 0), large_and_small)),
        Variant("D of sd .03 from position 12 on in groups of 4", planted(in_large_groups(0.03, 12), large_and_small)),
    ),
    Case(
        36,
        "numerics grow, lag flat",
        "verl-project/verl#7519",
        "MP308",
        Variant("noise rises by 10 % a step over 5 steps", growing(0.1)),
        Variant("noise rises by 30 % a step, two versions of lag", growing(0.3, lag=2)),
        Variant("noise rises by 7 % a step, 16 prompts a step", growing(0.07, groups=16)),
    ),
)
