"""slime's weight versions, its saved arguments and its checkpoints."""

from __future__ import annotations

import enum
import json
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.errors import BadFileError, UsageError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.readers.slime_versions import Numbering
from mismatch_probe.run import UNKNOWN_VERSION, Run
from tests.reader_cases import Case, cases
from tests.slime_dump import sample, train_sample, write_rollout, write_train_2

UNTOLD = UNKNOWN_VERSION


def one() -> Case:
    return cases(0)[0]


def write(path: Path, numbers: dict[int, int | str | list[str]]) -> Path:
    """A rollout file of one sample for each rollout id, sampled by the engine's version that is given."""
    for step, number in numbers.items():
        named = number if isinstance(number, list) else [str(number)]
        write_rollout(path, [sample(one(), 0, step, weight_versions=named)], step)
    return path


def versions(run: Run) -> dict[int, int]:
    """Version of the single sample of each rollout."""
    return {step.index: int(step.load().sampler_version[0]) for step in run.steps}


def driver(rollouts: int, start: int = 0, interval: int = 1, ahead: bool = False) -> dict[int, tuple[int, int]]:
    """slime's loops: rollout id -> (engine's number, rollouts trained before those weights were pushed).

    ``ahead`` is train_async.py: the next rollout is sampled while one trains, and a push waits for it.
    """
    number, weights, sampled = 1, start, {start: (1, start)}
    for step in range(start, rollouts):
        if ahead:
            sampled.setdefault(step + 1, (number, weights))
        if not ahead or (step + 1) % interval == 0:
            number, weights = number + 1, step + 1
        sampled.setdefault(step + 1, (number, weights))
    return {step: sampled[step] for step in range(start, rollouts)}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("start", [0, 7])
def test_versions_count_trained_rollouts(tmp_path: Path, start: int, ahead: bool) -> None:
    truth = driver(start + 6, start, ahead=ahead)
    run = open_run(write(tmp_path, {step: number for step, (number, _) in truth.items()}))
    assert versions(run) == {step: weights for step, (_, weights) in truth.items()}
    assert [run.trainer_version(step.index) for step in run.steps] == list(range(start, start + 6))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_resume_starts_the_count_again(tmp_path: Path, ahead: bool) -> None:
    truth = driver(9, ahead=ahead) | driver(8, 5, ahead=ahead)  # rollout 8 is left over from before the resume
    run = open_run(write(tmp_path, {step: number for step, (number, _) in truth.items()}))
    read = versions(run)
    assert read == {step: weights for step, (_, weights) in truth.items()}
    assert "started, or was resumed, at rollout 5" in " ".join(run.steps[6].load().notices)


@pytest.mark.parametrize("interval", [2, 3])
def test_pushes_at_an_interval_are_not_guessed(tmp_path: Path, interval: int) -> None:
    truth = driver(9, interval=interval, ahead=True)
    write(tmp_path, {step: number for step, (number, _) in truth.items()})
    read = versions(open_run(tmp_path))
    assert all(read[step] in (weights, UNTOLD) for step, (_, weights) in truth.items())
    assert UNTOLD in read.values()
    arguments(tmp_path, update_weights_interval=interval)
    assert versions(open_run(tmp_path)) == {step: weights for step, (_, weights) in truth.items()}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_version_is_right_or_untold(data: st.DataObject) -> None:
    """Any interval, any lag (fully asynchronous rollouts), any resumes, told of the interval or not."""
    interval = data.draw(st.integers(1, 4))
    clock = 0
    start, numbers, truth, written = data.draw(st.integers(0, 3)), {}, {}, {}
    for _ in range(data.draw(st.integers(1, 3))):
        second = (start // interval + 1) * interval + 1  # the first rollout that a second push can reach
        stop = second + data.draw(st.integers(0, 7))
        pushes = [start, *(step + 1 for step in range(start, stop) if (step + 1) % interval == 0)]
        newest = 1
        for step in range(start, stop):
            # What trained before this rollout was asked for has been pushed.
            there = 1 + sum(weights <= step - 1 for weights in pushes[1:])
            newest = max(newest, there - data.draw(st.integers(0, 2)))
            numbers[step] = frozenset({newest, max(1, newest - data.draw(st.integers(0, 1)))})
            clock += 1
            written[step] = clock
            truth[step] = {number: pushes[number - 1] for number in numbers[step]}
        start = data.draw(st.integers(second, stop))
    held = sorted(numbers)
    told = Numbering(held, numbers.get, written.get, data.draw(st.sampled_from([None, interval])))
    for step in held:
        known, _ = told.versions(step)
        assert known.items() <= truth[step].items(), (step, numbers)


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({4: 3, 5: 4}, "does not hold the first rollout after the program's start"),
        ({0: 1, 1: 1, 2: 1}, "stays 1 over several rollouts"),
        ({0: 1, 5: 2}, "several --update-weights-interval"),
        ({0: 1, 1: 40}, "not slime's count of pushes"),
        ({0: "default"}, "name no weight version, or one that is no number"),
        ({0: []}, "name no weight version"),
        ({3: ["3", "4"]}, "sampled under several weight versions"),
    ],
)
def test_what_cannot_be_told_is_null_and_said(tmp_path: Path, numbers: dict, said: str) -> None:
    last = open_run(write(tmp_path, numbers)).steps[-1].load()
    assert (last.sampler_version == UNTOLD).all() and said in " ".join(last.notices)


def test_untold_versions_follow_a_declared_lag(tmp_path: Path) -> None:
    run = open_run(write(tmp_path, {4: 3}), ReadOptions(overrides=("sampler_lag=1",)))
    assert versions(run) == {4: 3}


def test_a_colocated_run_needs_no_other_file(tmp_path: Path) -> None:
    write(tmp_path, {41: 2})
    arguments(tmp_path, colocate=True)
    assert versions(open_run(tmp_path)) == {41: 41}  # started at rollout 40


class AttnBackend(enum.Enum):
    FLASH = 1


AttnBackend.__module__ = "megatron.core.enums"


def arguments(path: Path, iteration: int = 3, **values: object) -> Path:
    """A Megatron checkpoint's ``common.pt`` as it holds the arguments, without weights."""
    folder = path / "ckpt" / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (path / "ckpt" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.save({"args": Namespace(**values), "iteration": iteration, "dtype": torch.bfloat16}, folder / "common.pt")
    return path


def test_settings_come_from_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, {0: 1})
    arguments(tmp_path, 1, rollout_temperature=0.5)
    arguments(
        tmp_path, 4, rollout_temperature=0.8, rollout_top_p=0.95, rollout_top_k=-1, n_samples_per_prompt=8, bf16=True,
        params_dtype=torch.bfloat16, hf_checkpoint="/models/Qwen3-4B", save=Path("/ckpt"), vocab_size=None,
    )  # fmt: skip
    found = open_run(tmp_path).settings
    assert (found.temperature, found.top_p, found.group_size) == (0.8, 0.95, 8)
    assert (found.trainer_dtype, found.model) == ("bfloat16", "/models/Qwen3-4B")
    assert found.sources["temperature"] == "ckpt/iter_0000004/common.pt: rollout_temperature"
    given = open_run(tmp_path, ReadOptions(overrides=("temperature=1.0",))).settings
    assert given.temperature == 1.0 and given.sources["temperature"] == "--set"


def test_arguments_with_enumerations_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ""
    for part in ("megatron", "core", "enums"):
        name = f"{name}.{part}".lstrip(".")
        module = types.ModuleType(name)
        module.AttnBackend = AttnBackend
        monkeypatch.setitem(sys.modules, name, module)
    arguments(write(tmp_path, {0: 1}), rollout_temperature=0.7, attention_backend=AttnBackend.FLASH)
    assert open_run(tmp_path).settings.temperature == 0.7


@pytest.mark.parametrize("state", [b"garbage", {"iteration": 3}, {"args": {"x": 1}}])
def test_arguments_that_cannot_be_read_are_said(tmp_path: Path, state: object) -> None:
    arguments(write(tmp_path, {0: 1}), rollout_temperature=0.7)
    file = tmp_path / "ckpt" / "iter_0000003" / "common.pt"
    if isinstance(state, bytes):
        file.write_bytes(state)
    else:
        torch.save(state, file)
    run = open_run(tmp_path)
    assert "temperature" in run.settings.assumed
    assert any("arguments" in text for text in run.notices)


def test_a_wrong_saved_argument_names_its_place(tmp_path: Path) -> None:
    arguments(write(tmp_path, {0: 1}), rollout_temperature="hot")
    with pytest.raises(BadFileError, match=r"common\.pt: rollout_temperature.*--set temperature=VALUE"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "said, dropped",
    [
        ({"use_rollout_logprobs": True, "get_mismatch_metrics": False}, [False, True]),
        ({"use_rollout_logprobs": True, "get_mismatch_metrics": True}, [False, False]),
        ({"use_rollout_logprobs": False, "get_mismatch_metrics": False}, [False, False]),
        ({"keep_old_actor": True}, [True, True]),
    ],
)
def test_logprobs_of_other_weights_are_absent(tmp_path: Path, said: dict, dropped: list[bool]) -> None:
    made = [case for case in cases(0) if case.response][:4]
    write_rollout(tmp_path, [sample(case, at, 0, weight_versions=["1"]) for at, case in enumerate(made)], 0)
    write_train_2(tmp_path, [train_sample(case, at) for at, case in enumerate(made)], 0, steps=2)
    arguments(tmp_path, **said)
    rollouts = open_run(tmp_path).steps[0].load()
    null = [bool(np.isnan(rollouts.trainer_logprob[rollouts.sequence_of_token == at]).all()) for at in range(4)]
    # Of each rank's two samples the second belongs to the second optimizer step.
    assert null == [dropped[0], dropped[0], dropped[1], dropped[1]]
    assert ("taken as absent" in " ".join(rollouts.notices)) == any(dropped)


def hugging_face(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def numbered(path: Path) -> None:
    hugging_face(path / "hf" / "2")
    hugging_face(path / "hf" / "5")


def named(path: Path) -> None:
    hugging_face(path / "out" / "actor_2" / "hf")
    hugging_face(path / "out" / "actor_5" / "hf")
    arguments(path, save_hf="/elsewhere/out/actor_{rollout_id}/hf")


def megatron(path: Path) -> None:
    arguments(path, 2)
    arguments(path, 5)


@pytest.mark.parametrize(
    "make, place", [(numbered, "hf/2"), (named, "out/actor_2/hf"), (megatron, "ckpt/iter_0000002")]
)
@pytest.mark.parametrize("below", [False, True])
def test_checkpoint_n_holds_the_weights_after_rollout_n(
    tmp_path: Path, make: Callable[[Path], None], place: str, below: bool
) -> None:
    write(tmp_path / "dump", {3: 4})
    make(tmp_path)
    run = open_run(tmp_path / "dump" if below else tmp_path)
    assert run.trainer_checkpoints is not None and run.trainer_checkpoints.versions() == [3, 6]
    assert run.trainer_checkpoint(3) == tmp_path / place and run.trainer_checkpoint(2) is None
    assert any("2 checkpoints found at" in text for text in run.notices)


def test_a_declared_pattern_wins_and_counts_the_same_way(tmp_path: Path) -> None:
    write(tmp_path, {3: 4})
    numbered(tmp_path)
    hugging_face(tmp_path / "mine" / "iter_0000008")
    hugging_face(tmp_path / "base")
    run = open_run(tmp_path, ReadOptions(overrides=("checkpoints=mine/iter_{version:07d}", "model=base")))
    assert run.trainer_checkpoints is not None and run.trainer_checkpoints.versions() == [9]
    assert run.trainer_checkpoint(0) == tmp_path / "base"
    with pytest.raises(UsageError, match="that holds"):
        open_run(tmp_path, ReadOptions(overrides=("checkpoints=mine",)))
