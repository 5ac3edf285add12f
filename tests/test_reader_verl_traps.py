"""What verl's dump files leave out or hide."""

from __future__ import annotations

import collections
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_probe.errors import BadFileError
from mismatch_probe.run import UNKNOWN_VERSION
from tests.verl_files import dp_bytes, load, padded, row, save, tq_bytes


def without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def stamps(low: list[Any], high: list[Any]) -> dict[str, Any]:
    return {key: np.array(values, dtype=object) for key, values in zip(STAMPS, (low, high), strict=True)}


STAMPS = ("min_global_steps", "max_global_steps")


@pytest.mark.parametrize("kind", ["tq", "dp"])
def test_absent_rollout_log_probs_are_null_and_the_switch_is_named(tmp_path: Path, kind: str) -> None:
    rows = [without(row(i), "rollout_log_probs") for i in range(2)]
    tq, dp = (tq_bytes(rows), "0"), (dp_bytes(padded(rows)), None)
    content, inner = tq if kind == "tq" else dp
    save(tmp_path, content, inner=inner)
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all() and len(rollouts) == 2
    assert any("calculate_log_probs=True" in notice for notice in rollouts.notices)


def test_a_range_of_versions_gives_null_per_token(tmp_path: Path) -> None:
    others = stamps([1, 0, None, 1], [1, 1, None, np.int64(1)])
    save(tmp_path, dp_bytes(padded([row(i) for i in range(4)]), others), 2, None)
    rollouts = load(tmp_path)
    versions = rollouts.sampler_version.reshape(4, 4)
    assert versions.tolist() == [[1] * 4, [UNKNOWN_VERSION] * 4, [UNKNOWN_VERSION] * 4, [1] * 4]
    said = " ".join(rollouts.notices)
    assert "1 of 4 responses were sampled across a weight update" in said and "1 of 4 rows name no version" in said


def test_versions_of_extra_fields_serve_where_tags_have_none(tmp_path: Path) -> None:
    extra = [{"turn_scores": []}, {"min_global_steps": 3, "max_global_steps": 3}]
    rows = [row(i) | {"extra_fields": extra[i]} for i in range(2)]
    save(tmp_path, tq_bytes(rows, tags=[{"status": "success"}] * 2))
    assert load(tmp_path).sampler_version.tolist() == [UNKNOWN_VERSION] * 4 + [3] * 4


def test_a_column_that_some_rows_lack_is_null_there(tmp_path: Path) -> None:
    """The queue keeps such a column as a list of objects, a tensor in some."""
    rows = [row(0), row(1) | {"rollout_log_probs": None, "rm_scores": None}]
    save(tmp_path, tq_bytes(rows))
    rollouts = load(tmp_path)
    assert rollouts.sampler_logprob[:4].tolist() == row(0)["rollout_log_probs"]
    assert np.isnan(rollouts.sampler_logprob[4:]).all() and np.isnan(rollouts.reward).tolist() == [False, True]
    assert any("absent in 1 of 2 rows" in notice for notice in rollouts.notices)


def test_objects_of_a_dataset_do_not_hinder(tmp_path: Path) -> None:
    """Columns of any kind travel with the batch; those that are not needed are passed over, whatever they hold."""
    objects = [collections.defaultdict(list, a=[1]), decimal.Decimal("0.5")]
    save(tmp_path, tq_bytes([row(i) | {"reward_model": objects[i]} for i in range(2)]))
    assert len(load(tmp_path)) == 2


def test_groups_are_n_rows_in_a_row(tmp_path: Path) -> None:
    """Two prompts of the same tokens are two groups when the directory's name says N = 2."""
    save(tmp_path, dp_bytes(padded([row(i) for i in range(4)])), inner=None)
    assert load(tmp_path).group_of_sequence.tolist() == [0, 0, 1, 1]
    assert load(tmp_path, "group_size=4").group_of_sequence.tolist() == [0, 0, 0, 0]


def test_rows_out_of_order_are_grouped_by_prompt_and_that_is_said(tmp_path: Path) -> None:
    prompts = [(5, 6, 7), (8, 9), (8, 9), (5, 6, 7)]
    save(tmp_path, dp_bytes(padded([row(i, prompt=prompt) for i, prompt in enumerate(prompts)])), inner=None)
    rollouts = load(tmp_path)
    assert rollouts.group_of_sequence.tolist() == [0, 1, 1, 0]
    assert any("rows with the same prompt" in notice for notice in rollouts.notices)


def test_uid_and_key_prefix_name_groups(tmp_path: Path) -> None:
    uid = {"uid": np.array(["b", "a", "b"], dtype=object)}
    save(tmp_path / "v0", dp_bytes(padded([row(i) for i in range(3)]), uid), inner=None)
    assert load(tmp_path / "v0").group_of_sequence.tolist() == [1, 0, 1]
    save(tmp_path / "v1", tq_bytes([row(i) for i in range(3)], keys=["b_x_0_0", "a_0_0", "b_x_1_1"]))
    assert load(tmp_path / "v1").group_of_sequence.tolist() == [1, 0, 1]


def test_rows_that_are_no_samples_are_set_aside(tmp_path: Path) -> None:
    """Greedy baselines of REMAX, and rows that only fill a batch."""
    sampled = {"__do_sample__": np.array([True, True, False])}
    save(tmp_path / "v0", dp_bytes(padded([row(i) for i in range(3)]), sampled), inner=None)
    rollouts = load(tmp_path / "v0")
    assert len(rollouts) == 2 and "REMAX" in rollouts.rejected[0].reason
    save(tmp_path / "v1", tq_bytes([row(0), row(1)], tags=[{}, {"is_padding": True}]))
    assert [rejected.row for rejected in load(tmp_path / "v1").rejected] == [2]


def test_padding_tokens_of_value_that_look_real_are_cut(tmp_path: Path) -> None:
    """Only attention_mask tells padding: id 0 may be a token, and a pad id may be any."""
    entry = row(0)
    entry["prompts"], entry["responses"] = [0, 6, 0], [0, 11, 12, 0]
    columns = padded([entry])
    columns["responses"][0, 4:], columns["prompts"][0, :5] = 77, 77
    save(tmp_path, dp_bytes(columns), inner=None)
    rollouts = load(tmp_path)
    assert rollouts.prompt[0].tolist() == [0, 6, 0] and rollouts.response[0].tolist() == [0, 11, 12, 0]


def test_columns_that_do_not_fit_set_the_row_aside(tmp_path: Path) -> None:
    columns = padded([row(0), row(1)])
    columns["attention_mask"][1, 9] = 0
    save(tmp_path / "holes", dp_bytes(columns), inner=None)
    assert load(tmp_path / "holes").rejected[0].reason == "attention_mask has holes in the response"
    columns = padded([row(0)]) | {"rollout_log_probs": np.zeros((1, 3), dtype=np.float32)}
    save(tmp_path / "short", dp_bytes(columns), inner=None)
    assert "rollout_log_probs has shape (3,)" in load(tmp_path / "short").rejected[0].reason
    columns = padded([row(0)])
    del columns["attention_mask"]
    save(tmp_path / "none", dp_bytes(columns), inner=None)
    assert load(tmp_path / "none").rejected[0].reason == "attention_mask is missing"
    columns = padded([row(0)]) | {"attention_mask": np.ones((1, 5), dtype=np.int64)}
    save(tmp_path / "wide", dp_bytes(columns), inner=None)
    assert "attention_mask has shape (5,) for 8 + 16 tokens" in load(tmp_path / "wide").rejected[0].reason
    save(tmp_path / "text", tq_bytes([row(0) | {"prompts": "2+2?"}]))
    assert load(tmp_path / "text").rejected[0].reason == "prompt_ids is not a flat array"
    save(tmp_path / "tools", tq_bytes([without(row(0), "response_mask")]))
    assert "response_mask is missing" in load(tmp_path / "tools").rejected[0].reason


def test_a_table_without_its_columns_is_a_bad_file(tmp_path: Path) -> None:
    save(tmp_path / "ids", tq_bytes([without(row(0), "responses")]))
    with pytest.raises(BadFileError, match="no column 'responses'"):
        load(tmp_path / "ids")
    save(tmp_path / "keys", tq_bytes([row(0)], keys=["a", "b"]))
    with pytest.raises(BadFileError, match="one value for each of 2 trajectories"):
        load(tmp_path / "keys")
    save(tmp_path / "no keys", tq_bytes([row(0)], keys="a"))
    with pytest.raises(BadFileError, match="no list of trajectory keys"):
        load(tmp_path / "no keys")
    save(tmp_path / "none", dp_bytes(None), inner=None)
    with pytest.raises(BadFileError, match="holds no batch"):
        load(tmp_path / "none")


@pytest.mark.parametrize("offsets", [[0, 99], [3, 1], [-1, 2]])
def test_offsets_outside_the_values_are_a_bad_file(tmp_path: Path, offsets: list[int]) -> None:
    column = torch.nested.nested_tensor_from_jagged(torch.arange(4), torch.tensor(offsets))
    save(tmp_path, tq_bytes([without(row(0), "prompts")], more={"prompts": column}))
    with pytest.raises(BadFileError, match="does not fit its storage"):
        load(tmp_path)


def test_columns_of_several_dimensions_are_passed_over(tmp_path: Path) -> None:
    """Positions of a multimodal model are (3, tokens) a row, which torch writes as another kind of nested tensor."""
    wide = torch.nested.as_nested_tensor([torch.ones(3, 4)], layout=torch.jagged).transpose(1, 2)
    save(tmp_path, tq_bytes([row(0)], more={"position_ids": wide, "uid": wide}))
    assert len(load(tmp_path)) == 1


def test_absent_rewards_are_null_and_said(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([without(row(0), "rm_scores")]))
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.reward).all() and any("rewards are null" in notice for notice in rollouts.notices)
