"""Padded batches: padding on either side, arrays of each width, lists and tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.log import RolloutWriter
from mismatch_probe.run import Rollouts
from tests.test_rollout_writer import load, no_ranks

__all__ = ["no_ranks"]

PAD = 0
# (prompt, response with 0 in `trained` where a tool wrote the token)
SEQUENCES = [
    {"prompt": [5, 6, 7], "response": [8, 9], "trained": [1, 1]},
    {"prompt": [5], "response": [6, 7, 8, 9], "trained": [1, 0, 0, 1]},
    {"prompt": [4, 4], "response": [3], "trained": [1]},
]
LOGPROBS = [[-0.5, -1.0], [-0.25, -8.0, -8.0, -2.0], [-4.0]]
VERSIONS = [[1, 1], [1, 1, 2, 2], [0]]


def padded(side: str) -> dict[str, np.ndarray]:
    """Each sequence as a whole, padded to the longest on one side; or prompts left and responses right ("block")."""
    width = {"block": 3 + 4}.get(side, 5)
    arrays = {
        "input_ids": np.full((3, width), PAD),
        "attention_mask": np.zeros((3, width), dtype=int),
        "response_mask": np.zeros((3, width), dtype=int),
        "sampler_logprobs": np.zeros((3, width), dtype=np.float32),
        "sampler_version": np.full((3, width), -1),
    }
    for at, one in enumerate(SEQUENCES):
        prompt, length = len(one["prompt"]), len(one["prompt"]) + len(one["response"])
        start = {"left": width - length, "right": 0, "block": 3 - prompt}[side]
        arrays["input_ids"][at, start : start + length] = one["prompt"] + one["response"]
        arrays["attention_mask"][at, start : start + length] = 1
        arrays["response_mask"][at, start + prompt : start + length] = one["trained"]
        arrays["sampler_logprobs"][at, start + prompt : start + length] = LOGPROBS[at]
        arrays["sampler_version"][at, start + prompt : start + length] = VERSIONS[at]
    return arrays


def check(rollouts: Rollouts) -> None:
    assert not rollouts.rejected
    for at, one in enumerate(SEQUENCES):
        assert rollouts.prompt[at].tolist() == one["prompt"] and rollouts.response[at].tolist() == one["response"]
    assert rollouts.loss_mask.astype(int).tolist() == [mark for one in SEQUENCES for mark in one["trained"]]
    assert rollouts.sampler_logprob.tolist() == [value for row in LOGPROBS for value in row]
    assert rollouts.sampler_version.tolist() == [version for row in VERSIONS for version in row]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("side", ["left", "right", "block"])
def test_padding_on_either_side_is_cut_off(tmp_path: Path, side: str, kind) -> None:
    RolloutWriter(tmp_path).write_padded(0, **{key: kind(value) for key, value in padded(side).items()})
    check(load(tmp_path))


@pytest.mark.parametrize("width", [7, 6, 4])
def test_narrow_arrays_belong_to_the_last_columns(tmp_path: Path, width: int) -> None:
    """All of T, T - 1 (shifted by one) and the response block alone."""
    arrays = padded("block")
    narrow = {key: arrays[key][:, 7 - width :] for key in ("response_mask", "sampler_logprobs", "sampler_version")}
    RolloutWriter(tmp_path).write_padded(0, **{**arrays, **narrow})
    check(load(tmp_path))


def test_values_of_a_row_and_a_narrower_loss_mask(tmp_path: Path) -> None:
    arrays = padded("left") | {"sampler_version": torch.tensor([3, 4, 5])}
    loss = arrays["response_mask"].copy()
    loss[0] = 0
    RolloutWriter(tmp_path).write_padded(
        6,
        **arrays,
        loss_mask=loss,
        trainer_logprobs=arrays["sampler_logprobs"] * 2,
        advantages=np.array([0.5, -0.5, 1.0]),
        reward=torch.tensor([1.0, 0.0, 0.5]),
        finish_reason=["stop", "length", None],
        group_id=[7, 7, 8],
    )
    rollouts = load(tmp_path)
    assert rollouts.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert rollouts.sampler_version.tolist() == [3, 3, 4, 4, 4, 4, 5]
    assert rollouts.trainer_logprob.tolist() == [2 * value for row in LOGPROBS for value in row]
    assert rollouts.advantage.tolist() == [0.5] * 2 + [-0.5] * 4 + [1.0]
    assert rollouts.reward.tolist() == [1.0, 0.0, 0.5] and rollouts.finish_reason.tolist() == ["stop", "length", None]
    assert rollouts.group_id.tolist() == ["7", "7", "8"]


def test_a_batch_of_ragged_columns(tmp_path: Path) -> None:
    RolloutWriter(tmp_path).write_batch(
        0,
        prompt_ids=[one["prompt"] for one in SEQUENCES],
        response_ids=[torch.tensor(one["response"]) for one in SEQUENCES],
        loss_mask=[one["trained"] for one in SEQUENCES],
        sampler_logprobs=[np.array(row) for row in LOGPROBS],
        sampler_version=VERSIONS,
        trainer_logprobs=None,
        reward=torch.tensor([1.0, 0.0, 0.5]),
    )
    check(load(tmp_path))
    assert load(tmp_path).reward.tolist() == [1.0, 0.0, 0.5]
    RolloutWriter(tmp_path).write_batch(
        1, prompt_ids=[[1], [2]], response_ids=[[3], [4]], sampler_logprobs=[[-1.0], [-2.0]], sampler_version=9
    )
    assert load(tmp_path, 1).sampler_version.tolist() == [9, 9]


@st.composite
def ragged(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, response, mask) of some sequences; the first response token is always trained."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
        response = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
        mask = [1, *draw(st.lists(st.integers(0, 1), min_size=len(response) - 1, max_size=len(response) - 1))]
        rows.append((prompt, response, mask))
    return rows


@settings(max_examples=40, deadline=None)
@given(rows=ragged(), extra=st.integers(0, 3), data=st.data())
def test_padding_and_width_never_change_what_is_written(rows, extra: int, data, tmp_path_factory) -> None:
    """Any padding before and after each sequence, any width that still covers the responses, against the rows alone."""
    width = max(len(prompt) + len(response) for prompt, response, _ in rows) + extra
    arrays = {key: np.zeros((len(rows), width), dtype=int) for key in ("input_ids", "attention_mask", "response_mask")}
    logprobs = np.zeros((len(rows), width), dtype=np.float32)
    first = width
    for at, (prompt, response, mask) in enumerate(rows):
        start = data.draw(st.integers(0, width - len(prompt) - len(response)))
        middle, end = start + len(prompt), start + len(prompt) + len(response)
        arrays["input_ids"][at, start:end], arrays["attention_mask"][at, start:end] = prompt + response, 1
        arrays["response_mask"][at, middle:end] = mask
        logprobs[at, middle:end] = -np.arange(1, len(response) + 1) / 7
        first = min(first, middle)
    cut = data.draw(st.integers(0, first))
    arrays["response_mask"] = arrays["response_mask"][:, cut:]
    path = tmp_path_factory.mktemp("padded")
    writer = RolloutWriter(path, strict=True)
    writer.write_padded(0, **arrays, sampler_logprobs=logprobs[:, cut:], sampler_version=3)
    rollouts = load(path)
    for at, (prompt, response, _) in enumerate(rows):
        assert rollouts.prompt[at].tolist() == prompt and rollouts.response[at].tolist() == response
    assert rollouts.loss_mask.astype(int).tolist() == [mark for _, _, mask in rows for mark in mask]
    expected = np.concatenate([-np.arange(1, len(response) + 1, dtype=np.float64) / 7 for _, response, _ in rows])
    assert rollouts.sampler_logprob.tolist() == expected.astype(np.float32).tolist()
    writer.close()


ARRAYS = padded("right")
BATCHES = {
    "attention_mask is (3, 4), input_ids (3, 5)": {"attention_mask": ARRAYS["attention_mask"][:, 1:]},
    "response_mask marks padding in row 2": {"response_mask": ARRAYS["response_mask"][:, :3]},
    "sampler_logprobs is (2, 5), input_ids (3, 5)": {"sampler_logprobs": ARRAYS["sampler_logprobs"][:2]},
    "sampler_logprobs has 1 dimensions, not (B, T)": {"sampler_logprobs": ARRAYS["sampler_logprobs"][0]},
    "reward has 2 values for 3 rows": {"reward": [1.0, 2.0]},
    "rewards is no field of a row": {"rewards": [1.0, 2.0, 3.0]},
}


@pytest.mark.parametrize("reason", BATCHES)
def test_a_batch_whose_shapes_do_not_fit_is_set_aside_and_counted_row_by_row(tmp_path, reason: str, caplog) -> None:
    writer = RolloutWriter(tmp_path)
    writer.write_padded(0, **{**ARRAYS, **BATCHES[reason]})
    assert writer.rows_set_aside == 3 and reason in caplog.text and len(caplog.messages) == 1
    rejected = load(tmp_path).rejected
    assert len(rejected) == 3 and reason in rejected[0].reason


def test_ragged_columns_of_unequal_length_are_set_aside(tmp_path: Path, caplog) -> None:
    writer = RolloutWriter(tmp_path)
    writer.write_batch(0, prompt_ids=[[1]], response_ids=[[2], [3]], sampler_logprobs=[[-1.0]] * 2, sampler_version=0)
    assert writer.rows_set_aside == 2 and "columns of unequal length: prompt_ids 1, response_ids 2" in caplog.text


def test_a_row_without_response_is_set_aside_and_the_rest_is_written(tmp_path: Path) -> None:
    arrays = padded("right")
    arrays["response_mask"][1] = 0
    writer = RolloutWriter(tmp_path)
    writer.write_padded(0, **arrays)
    assert writer.rows_set_aside == 1 and load(tmp_path).reward.shape == (2,)
    assert load(tmp_path).rejected[0].reason == "not written: response_ids is empty"
