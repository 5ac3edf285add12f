"""Record the sample runs: ``python record.py stale|synced|broken|all [--start FOLDER] [--output FOLDER]``.

Version v is a set of weights; step k is the update that turns version k into version k + 1. The three runs differ only
in how the engine gets its weights, and in the learning rate of the third.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engine import Completion, Engine
from pretrain import pretrain
from store import Row, checkpoint, start_run, write_step
from task import EOS, MAX_RESPONSE_LENGTH, reward, sample_prompt
from trainer import Trainer

SEED = 2
PROMPTS_A_STEP = 16
GROUP_SIZE = 8
TOKENS_BEFORE_UPDATE = 6  # of a response that an in-flight weight update interrupts
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Plan:
    """One run.

    ``in_flight_from``: the first step whose responses are begun under the version before. ``keep_every``: of the steps
    made, those whose number it divides are kept on disk.
    """

    name: str
    sync: str
    steps: int
    learning_rate: float
    in_flight_from: int | None = None
    keep_every: int = 1


PLANS = {
    "stale": Plan("stale_run", sync="never", steps=17, learning_rate=4e-4),
    "synced": Plan("synced_run", sync="restart", steps=12, learning_rate=4e-4, in_flight_from=6),
    "broken": Plan("broken_sync_run", sync="reload", steps=41, learning_rate=8e-4, keep_every=10),
}


@dataclass(frozen=True)
class Sample:
    """A response with, for each token, the version of the weights that the trainer believes drew it."""

    completion: Completion
    versions: list[int]


def step_prompts(step: int) -> list[list[int]]:
    """The prompts of a step, each repeated once for every member of its group; the same in every run."""
    rng = np.random.default_rng([SEED, step])
    return [prompt for _ in range(PROMPTS_A_STEP) for prompt in [sample_prompt(rng)] * GROUP_SIZE]


def step_seeds(step: int, resumed: bool = False) -> list[int]:
    """One sampling seed a row; a response that goes on in another engine takes a second one."""
    rows = PROMPTS_A_STEP * GROUP_SIZE
    first = SEED * 1_000_000 + step * 1_000 + 500 * resumed
    return list(range(first, first + rows))


def sample(engine: Engine, version: int, step: int) -> list[Sample]:
    """Whole responses from one engine."""
    completions = engine.generate(step_prompts(step), step_seeds(step), MAX_RESPONSE_LENGTH)
    return [Sample(each, [version] * len(each.token_ids)) for each in completions]


def resume(engine: Engine, version: int, step: int, begun: list[Sample]) -> list[Sample]:
    """Finish the open responses. The engine reads prompt and partial response anew, under its own weights."""
    open_rows = [row for row, each in enumerate(begun) if each.completion.token_ids[-1] != EOS]
    prompts, seeds = step_prompts(step), step_seeds(step, resumed=True)
    endings = engine.generate(
        [prompts[row] + begun[row].completion.token_ids for row in open_rows],
        [seeds[row] for row in open_rows],
        MAX_RESPONSE_LENGTH - TOKENS_BEFORE_UPDATE,
    )
    samples = list(begun)
    for row, ending in zip(open_rows, endings, strict=True):
        first = begun[row].completion
        whole = Completion(first.token_ids + ending.token_ids, first.logprobs + ending.logprobs, ending.finish_reason)
        samples[row] = Sample(whole, begun[row].versions + [version] * len(ending.token_ids))
    return samples


class Sampler:
    """Draws the responses of each step, and brings the engine up to date in the way the plan says."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._version = 0
        self._engine = Engine(checkpoint(folder, 0))

    def stop(self) -> None:
        """End the engine."""
        self._engine.stop()

    def rollouts(self, step: int) -> list[Sample]:
        """The responses of step ``step``, whose trainer holds version ``step``."""
        plan = self._plan
        if plan.in_flight_from is not None and step >= plan.in_flight_from:
            begun = self._engine.generate(step_prompts(step), step_seeds(step), TOKENS_BEFORE_UPDATE)
            partial = [Sample(each, [self._version] * len(each.token_ids)) for each in begun]
            self._update(step)
            return resume(self._engine, self._version, step, partial)
        self._update(step)
        return sample(self._engine, self._version, step)

    def _update(self, version: int) -> None:
        if self._plan.sync == "never" or version == self._version:
            return
        if self._plan.sync == "reload":
            self._engine.reload(checkpoint(self._folder, version))
        else:
            self._engine.stop()
            self._engine = Engine(checkpoint(self._folder, version))
        self._version = version


@contextmanager
def running_sampler(plan: Plan, folder: Path) -> Iterator[Sampler]:
    """A sampler whose engine ends with the block."""
    sampler = Sampler(plan, folder)
    try:
        yield sampler
    finally:
        sampler.stop()


def record(plan: Plan, start: Path, output: Path) -> None:
    """Record one run under ``output``."""
    begun = time.monotonic()
    folder = output / plan.name
    start_run(folder, plan.name)
    trainer = Trainer(start, plan.learning_rate)
    trainer.save(checkpoint(folder, 0))
    with running_sampler(plan, folder) as sampler:
        for step in range(plan.steps):
            samples = sampler.rollouts(step)
            rows = train(plan, trainer, step, samples)
            trainer.save(checkpoint(folder, trainer.version))
            if step % plan.keep_every == 0:
                write_step(folder, step, rows)
            else:
                shutil.rmtree(checkpoint(folder, step))
            print(f"{plan.name} step {step}: reward {np.mean([row.reward for row in rows]):.3f}", flush=True)
    print(f"{plan.name}: recorded in {time.monotonic() - begun:.0f} s", flush=True)


def train(plan: Plan, trainer: Trainer, step: int, samples: list[Sample]) -> list[Row]:
    """Make the step's update; returns the rollouts as they go on disk."""
    prompts = step_prompts(step)
    responses = [each.completion.token_ids for each in samples]
    rewards = [reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    result = trainer.step(prompts, responses, rewards, GROUP_SIZE)
    return [
        Row(
            sequence_id=f"s{step:03d}-g{row // GROUP_SIZE:02d}-r{row % GROUP_SIZE}",
            group_id=f"s{step:03d}-g{row // GROUP_SIZE:02d}",
            prompt_ids=prompts[row],
            response_ids=each.completion.token_ids,
            sampler_logprobs=each.completion.logprobs,
            loss_mask=[True] * len(each.completion.token_ids),
            sampler_version=each.versions if plan.in_flight_from is not None else each.versions[0],
            trainer_logprobs=result.logprobs[row],
            advantages=result.advantages[row],
            reward=rewards[row],
            finish_reason=each.completion.finish_reason,
        )
        for row, each in enumerate(samples)
    ]


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=[*PLANS, "all"])
    parser.add_argument(
        "--start", type=Path, default=HERE / "start", help="version 0; trained first where it is missing"
    )
    parser.add_argument("--output", type=Path, default=HERE.parent, help="where the run directories go")
    options = parser.parse_args()
    start: Path = options.start.resolve()
    if not (start / "config.json").is_file():
        pretrain(start)
    for plan in PLANS.values() if options.run == "all" else [PLANS[options.run]]:
        record(plan, start, options.output.resolve())


if __name__ == "__main__":
    main()
