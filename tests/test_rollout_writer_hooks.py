"""The dicts that frameworks hold, ragged and with tool turns, against the rows they must become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from mismatch_probe.log import RolloutWriter
from mismatch_probe.log.hooks import rows_from_areal, rows_from_openrlhf, rows_from_skyrl, rows_from_trl
from mismatch_probe.run import Rollouts
from tests.test_rollout_writer import load, no_ranks

__all__ = ["no_ranks"]

# Two turns with a tool's tokens 20, 21 between; then a short one.
PROMPTS = [[5, 6], [7]]
RESPONSES = [[8, 9, 20, 21, 10, 2], [11, 2]]
TRAINED = [[1, 1, 0, 0, 1, 1], [1, 1]]
SAMPLED = [[-0.5, -1.5, 0.0, 0.0, -0.25, -2.0], [-3.0, -0.125]]
TRAINER = [[-0.75, -1.25, -9.0, -9.0, -0.5, -2.5], [-3.5, -0.25]]
ADVANTAGE = [0.5, -1.0]
WIDTH = 8


def full(rows: list[list], fill: float = 0, right: bool = True) -> torch.Tensor:
    """(2, 8): values at the responses' places in sequences padded on the right (else the left)."""
    out = torch.full((2, WIDTH), fill, dtype=torch.float32 if isinstance(rows[0][0], float) else torch.int64)
    for at, values in enumerate(rows):
        start = len(PROMPTS[at]) if right else WIDTH - len(values)
        out[at, start : start + len(values)] = torch.tensor(values, dtype=out.dtype)
    return out


def sequences(right: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(2, WIDTH, dtype=torch.int64), torch.zeros(2, WIDTH, dtype=torch.int64)
    for at, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        length = len(prompt) + len(response)
        place = slice(0, length) if right else slice(WIDTH - length, WIDTH)
        ids[at, place], mask[at, place] = torch.tensor(prompt + response), 1
    return ids, mask


def flat(rows: list[list]) -> list:
    return [value for row in rows for value in row]


def written(path: Path, rows) -> Rollouts:
    writer = RolloutWriter(path, strict=True)
    with writer.step(4) as step:
        step.add_rows(rows)
    rollouts = load(path)
    assert [rollouts.prompt[at].tolist() for at in range(2)] == PROMPTS
    assert [rollouts.response[at].tolist() for at in range(2)] == RESPONSES
    assert rollouts.loss_mask.astype(int).tolist() == flat(TRAINED)
    return rollouts


def test_openrlhf_arrays_of_length_t_minus_1_are_shifted(tmp_path: Path) -> None:
    ids, mask = sequences()
    advantages = [[ADVANTAGE[at] * mark for mark in marks] for at, marks in enumerate(TRAINED)]
    experience = SimpleNamespace(
        sequences=ids,
        attention_mask=mask,
        action_mask=full(TRAINED)[:, 1:].bool(),
        rollout_log_probs=full(SAMPLED)[:, 1:],
        action_log_probs=full(TRAINER)[:, 1:],
        advantages=full(advantages)[:, 1:],
        rewards=torch.tensor([1.0, 0.0]),
    )
    rollouts = written(tmp_path, rows_from_openrlhf(experience, sampler_version=4))
    assert rollouts.sampler_logprob.tolist() == flat(SAMPLED)
    assert rollouts.trainer_logprob.tolist() == flat(TRAINER)
    assert rollouts.advantage.tolist() == flat(advantages)
    assert rollouts.reward.tolist() == [1.0, 0.0] and rollouts.sampler_version.tolist() == [4] * 8
    experience.rollout_log_probs = None  # the correction is off
    assert np.isnan(written(tmp_path / "off", rows_from_openrlhf(experience, 4)).sampler_logprob).all()


class Remote:
    """A handle as AReaL's single controller holds them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to_local(self) -> torch.Tensor:
        return self.tensor


def test_areal_versions_are_minus_1_where_no_engine_drew(tmp_path: Path) -> None:
    ids, mask = sequences()
    proximal = torch.zeros(2, WIDTH)
    proximal[:, :-1] = full(TRAINER)[:, 1:]  # index t holds token t + 1
    proximal[:, -1] = -77.0
    trajectory = {
        "input_ids": ids.int(),
        "attention_mask": mask.bool(),
        "loss_mask": full(TRAINED).int(),
        "logprobs": full(SAMPLED),
        "versions": full([[3, 3, -1, -1, 4, 4], [2, 2]], fill=-1).int(),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    rollouts = written(tmp_path, rows_from_areal(trajectory))
    assert rollouts.sampler_version.tolist() == [3, 3, 3, 3, 4, 4, 2, 2]
    assert rollouts.sampler_logprob.tolist() == flat(SAMPLED) and rollouts.reward.tolist() == [1.0, 0.0]
    assert np.isnan(rollouts.trainer_logprob).all()
    remote = {key: Remote(value) for key, value in (trajectory | {"prox_logp": proximal}).items()}
    rollouts = written(tmp_path / "remote", rows_from_areal(remote, group_id=["a", "b"]))
    assert rollouts.trainer_logprob.tolist() == flat(TRAINER) and rollouts.group_id.tolist() == ["a", "b"]


def test_trl_prompts_are_padded_left_and_completions_right(tmp_path: Path) -> None:
    def right(rows: list[list], fill: float = 0) -> torch.Tensor:
        return torch.tensor([row + [fill] * (6 - len(row)) for row in rows])

    batch = {
        "prompt_ids": torch.tensor([[5, 6], [0, 7]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids": right(RESPONSES),
        "completion_mask": right([[1] * 6, [1] * 2]),
        "tool_mask": right(TRAINED, 1),
        "sampling_per_token_logps": right(SAMPLED),
        "old_per_token_logps": right(TRAINER, -5.0).bfloat16(),
        "advantages": torch.tensor(ADVANTAGE),
        "num_items_in_batch": torch.tensor(6),
    }
    rollouts = written(tmp_path, rows_from_trl(batch, step=4))
    assert rollouts.sampler_logprob.tolist() == flat(SAMPLED) and rollouts.trainer_logprob.tolist() == flat(TRAINER)
    assert rollouts.advantage.tolist() == [0.5] * 6 + [-1.0] * 2
    assert rollouts.sampler_version.tolist() == [4] * 8
    # Used again: what TRL computed when it drew the second sequence is not the trainer's log-prob at step 4.
    rollouts = written(tmp_path / "again", rows_from_trl(batch, 4, sampler_version=torch.tensor([4, 3])))
    assert rollouts.sampler_version.tolist() == [4] * 6 + [3] * 2
    assert rollouts.trainer_logprob[:6].tolist() == TRAINER[0] and np.isnan(rollouts.trainer_logprob[6:]).all()


def test_skyrl_response_tensors_are_right_aligned_and_a_made_up_end_is_null(tmp_path: Path) -> None:
    ids, mask = sequences(right=False)
    sampled = [[*SAMPLED[0][:-1], 0.0], SAMPLED[1]]  # the first generation stopped without its end token
    batch = {
        "sequences": ids,
        "attention_mask": mask,
        "response_mask": full([[1] * 6, [1] * 2], right=False)[:, 2:],
        "loss_mask": full(TRAINED, right=False)[:, 2:],
        "rollout_logprobs": full(sampled, right=False)[:, 2:],
        "action_log_probs": full(TRAINER, right=False)[:, 2:],
        "advantages": full([[0.5] * 6, [-1.0] * 2], right=False)[:, 2:],
    }
    rollouts = written(tmp_path, rows_from_skyrl(batch, sampler_version=4))
    assert np.isnan(rollouts.sampler_logprob[5])
    assert np.delete(rollouts.sampler_logprob, 5).tolist() == [*SAMPLED[0][:-1], *SAMPLED[1]]
    assert rollouts.trainer_logprob.tolist() == flat(TRAINER)
    assert rollouts.advantage.tolist() == [0.5] * 6 + [-1.0] * 2
    assert batch["rollout_logprobs"][0, -1] == 0.0  # the trainer's own tensor stays as it is


def test_a_batch_of_another_shape_does_not_end_the_training(tmp_path: Path, caplog) -> None:
    writer = RolloutWriter(tmp_path)
    with writer.step(0) as step:
        step.add_rows(rows_from_trl({"prompt_ids": torch.zeros(1, 1)}, step=0))
        step.add_rows(rows_from_openrlhf(SimpleNamespace(), sampler_version=0))
        step.add_rows(rows_from_areal({}))
        step.add_rows(rows_from_skyrl({}, sampler_version=0))
    assert writer.rows_set_aside == 4 and "completion_mask" in caplog.text
