"""prime-rl's traces.jsonl: trees of messages, as Episodes and as bare Traces."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Rollouts
from tests.prime_rl_files import DATA, episode, exported, node, trace, traced, unspanned, write_traces
from tests.reader_cases import Case, assert_same, cases

FORK = [
    node([5, 6], None, False, []),
    node([7, 11, 12], 0, True, [-0.25, -0.5], mask=[False, True, True]),
    node([20], 1, False, []),
    node([21, 22], 2, True, [-1.0, -1.25]),
    node([30, 31], 1, False, []),
    node([32], 4, True, [-2.0]),
]
"""One answer, then two continuations of it: [5 6 7 11 12 20 21 22] and [5 6 7 11 12 30 31 32]."""


def first(run: Path, options: ReadOptions | None = None) -> Rollouts:
    return open_run(run, options).steps[0].load()


def forked(**more: Any) -> dict[str, Any]:
    return episode(cases()[0], 0, traces=[trace(cases()[0], 0) | {"nodes": FORK, "calls": []} | more])


def test_episodes_read_as_written(tmp_path: Path) -> None:
    traced(tmp_path)
    rollouts = first(tmp_path)
    assert_same(rollouts, unspanned(), without=("trainer_logprob",))
    assert [r.reason for r in rollouts.rejected] == ["not a trace: no token of it was sampled"]
    assert any("1 of 5 sequences may span several weight versions" in text for text in rollouts.notices)


def test_episodes_written_by_verifiers_0_4_0_read_as_written(tmp_path: Path) -> None:
    shutil.copytree(DATA / "verifiers-0.4.0-full" / "rollouts", tmp_path / "rollouts")
    assert_same(first(tmp_path), unspanned(), without=("trainer_logprob",))
    assert open_run(tmp_path).settings.temperature == 0.75


def test_logprobs_that_verifiers_rounded_are_said(tmp_path: Path) -> None:
    shutil.copytree(DATA / "verifiers-0.4.0" / "rollouts", tmp_path / "rollouts")
    rollouts = first(tmp_path)
    wanted = np.concatenate([np.array(case.sampler) for case in cases()])
    counted = rollouts.loss_mask
    assert np.abs(rollouts.sampler_logprob - wanted)[counted].max() == pytest.approx(5e-5, abs=2e-5)
    assert any("rounded to 4 decimals" in text for text in rollouts.notices)


@pytest.mark.parametrize("place", ["top", "info"])
def test_bare_traces_of_v0_7_and_v0_8(tmp_path: Path, place: str) -> None:
    wanted = unspanned()
    lines = []
    for number, case in enumerate(wanted):
        more = {"group_id": f"g{case.group}", "policy_version": 3 if case.version and case.version[0] == 3 else 1}
        rewards = {"correct": case.reward} if place == "top" else {"correct": {"score": case.reward, "weight": 1.0}}
        lines.append(trace(case, number, rewards=rewards, **(more if place == "top" else {"info": more})))
    write_traces(tmp_path, lines)
    assert_same(first(tmp_path), wanted, without=("trainer_logprob",))


def test_v0_7_names_the_finish_reason_on_the_node(tmp_path: Path) -> None:
    line = trace(cases()[0], 0, calls=[])
    line["nodes"][1]["finish_reason"] = "length"
    write_traces(tmp_path, [line])
    assert first(tmp_path).finish_reason.tolist() == ["length"]


def test_compact_arrays_are_expanded(tmp_path: Path) -> None:
    write_traces(tmp_path, [episode(cases()[1], 0)])
    rollouts, case = first(tmp_path), cases()[1]
    mask = np.array(case.mask, dtype=bool)
    assert np.isnan(rollouts.sampler_logprob[~mask]).all()
    assert rollouts.sampler_logprob[mask].tolist() == np.array(case.sampler)[mask].tolist()


def test_a_shared_sampled_node_is_trained_once(tmp_path: Path) -> None:
    write_traces(tmp_path, [forked()])
    rollouts = first(tmp_path)
    one, two = rollouts.response.lengths
    assert [rollouts.prompt[row].tolist() for row in (0, 1)] == [[5, 6, 7], [5, 6, 7, 11, 12, 30, 31]]
    assert (one, two) == (5, 1)
    assert rollouts.loss_mask.tolist() == [True, True, False, True, True, True]
    assert rollouts.sampler_logprob[rollouts.loss_mask].tolist() == [-0.25, -0.5, -1.0, -1.25, -2.0]
    assert rollouts.sequence_id.tolist() == ["trace0-3", "trace0-5"]


def test_a_compaction_that_was_not_resumed_is_not_trained(tmp_path: Path) -> None:
    nodes = [dict(entry) for entry in FORK]
    nodes[5]["semantic_parents"] = [{"type": "compaction_attempt", "node": 1}]
    write_traces(tmp_path, [forked(nodes=nodes)])
    assert len(first(tmp_path)) == 1
    nodes[3]["semantic_parents"] = [{"type": "compaction", "node": 5}]
    write_traces(tmp_path, [forked(nodes=nodes)])
    assert len(first(tmp_path)) == 2


@pytest.mark.parametrize(
    ("policy", "version"), [({"start": 2, "end": 2}, 2), ({"start": 2, "end": 3}, UNKNOWN_VERSION)]
)
def test_a_span_of_versions_is_known_only_where_it_is_one(tmp_path: Path, policy: dict[str, int], version: int) -> None:
    write_traces(tmp_path, [episode(cases()[0], 0, policy)])
    assert (first(tmp_path).sampler_version == version).all()


def test_an_unknown_version_is_settled_by_sampler_lag(tmp_path: Path) -> None:
    write_traces(tmp_path, [episode(cases()[0], 0, {"start": 2, "end": 3})])
    assert (first(tmp_path, ReadOptions(overrides=("sampler_lag=1",))).sampler_version == 2).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ok": False}, "1 traces ended in an error"),
        ({"agent": {"name": "judge", "trainable": False}}, "1 traces not trainable"),
    ],
)
def test_traces_that_were_not_trained_are_passed_over(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    lines = [episode(cases()[0], 0), episode(cases()[1], 1, traces=[trace(cases()[1], 1, **change)])]
    write_traces(tmp_path, lines)
    rollouts = first(tmp_path)
    assert len(rollouts) == 1 and any(said in text for text in rollouts.notices)


def test_effective_is_read_and_what_only_arrived_is_not(tmp_path: Path) -> None:
    traced(tmp_path, 4, "all")
    write_traces(tmp_path, [episode(cases()[0], 0)], 4)
    traced(tmp_path, 5, "all")
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [4] and len(run.steps[0].load()) == 1
    assert any("steps 5 have train/all/traces.jsonl alone" in text for text in run.notices)


def test_without_effective_all_is_read_and_said(tmp_path: Path) -> None:
    traced(tmp_path, 4, "all")
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == 5
    assert any("not what was trained" in text for text in run.notices)


def test_evaluation_is_left_unread(tmp_path: Path) -> None:
    traced(tmp_path)
    shutil.copytree(tmp_path / "rollouts" / "step_4" / "train", tmp_path / "rollouts" / "step_8" / "eval")
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [4]
    assert any("1 evaluation traces.jsonl" in text for text in run.notices)


def test_duplicated_lines_count_once(tmp_path: Path) -> None:
    write_traces(tmp_path, [episode(cases()[0], 0), episode(cases()[0], 0)])
    rollouts = first(tmp_path)
    assert len(rollouts) == 1 and any("exact copies" in text for text in rollouts.notices)


def test_sampled_tokens_without_logprobs_are_null(tmp_path: Path) -> None:
    one = trace(cases()[0], 0)
    one["nodes"][1]["logprobs"] = []
    write_traces(tmp_path, [episode(cases()[0], 0, traces=[one])])
    rollouts = first(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all() and rollouts.loss_mask.all()
    assert any("1 sampled messages came without log-probs" in text for text in rollouts.notices)


def test_trainer_logprobs_on_the_nodes_are_read(tmp_path: Path) -> None:
    one = trace(cases()[0], 0)
    one["nodes"][1]["trainer_logprobs"] = cases()[0].trainer
    write_traces(tmp_path, [episode(cases()[0], 0, traces=[one])])
    assert first(tmp_path).trainer_logprob.tolist() == cases()[0].trainer


def test_tokens_of_the_ce_component_alone_are_not_counted(tmp_path: Path) -> None:
    one = trace(cases()[0], 0)
    # The third has no weight at all (its advantage is 0, say): it was sampled from this policy and counts.
    one["nodes"][1]["loss_weights"] = {"rl": [0.0, 1.0, 0.0, 0.0, 1.0], "ce": [0.0, 0.0, 0.0, 1.0, 1.0]}
    write_traces(tmp_path, [episode(cases()[0], 0, traces=[one])])
    assert first(tmp_path).loss_mask.tolist() == [True, True, False, True]


def test_an_unscored_reward_is_null(tmp_path: Path) -> None:
    one = trace(cases()[0], 0, rewards={"correct": None})
    write_traces(tmp_path, [episode(cases()[0], 0, traces=[one])])
    assert np.isnan(first(tmp_path).reward).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parent": 1}, "does not precede it"),
        ({"mask": [True]}, "mask values"),
        ({"logprobs": [-0.5]}, "logprobs has 1 values for 4 sampled tokens"),
        ({"token_ids": [1.5] * 5}, "not a flat list of integers"),
        ({"loss_weights": {"rl": [1.0]}}, "loss_weights.rl"),
    ],
)
def test_a_tree_that_does_not_fit_is_set_aside(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    one = trace(cases()[0], 0)
    one["nodes"][1] |= change
    write_traces(tmp_path, [episode(cases()[0], 0, traces=[one]), episode(cases()[1], 1)])
    rollouts = first(tmp_path)
    assert len(rollouts) == 1 and reason in rollouts.rejected[0].reason
    assert rollouts.rejected[0].sequence_id == "trace0"


def test_another_temperature_than_the_settings_is_said(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    traced(tmp_path)
    assert not any("temperature" in text for text in first(tmp_path).notices)
    shutil.rmtree(tmp_path / "token_exports")
    said = first(tmp_path, ReadOptions(overrides=("temperature=1.0",))).notices
    assert any("sampled at temperature 0.75, the run's settings say 1" in text for text in said)


def test_a_chain_of_one_token_nodes_keeps_its_order(tmp_path: Path) -> None:
    case = Case("long", 0, [9], list(range(40, 60)), [1] * 20, [-0.5] * 20, [-0.5] * 20, [3] * 20, 0.5, 1.0)
    case.turns = [("assistant", 1)] * 20
    write_traces(tmp_path, [episode(case, 0)])
    assert_same(first(tmp_path), [case], without=("trainer_logprob",))
