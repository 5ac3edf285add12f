"""prime-rl's token export, and what the kinds of files have in common."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import Rollouts
from tests.prime_rl_files import (
    DATA,
    STREAMS,
    episode,
    export_line,
    exported,
    ranked,
    traced,
    unspanned,
    write_export,
    write_traces,
)  # fmt: skip
from tests.reader_cases import assert_same, cases

NOT_EXPORTED = ("sampler_version", "finish_reason")


def first(run: Path, options: ReadOptions | None = None) -> Rollouts:
    return open_run(run, options).steps[0].load()


@pytest.mark.parametrize("variant", ["current", "v0.8.0", "june"])
def test_every_variant_of_the_token_export_reads_as_written(tmp_path: Path, variant: str) -> None:
    exported(tmp_path, 4, variant)
    assert_same(first(tmp_path), cases(), without=NOT_EXPORTED if variant == "june" else (*NOT_EXPORTED, "reward"))


def test_an_export_written_by_prime_rls_exporter_of_2026_08_21(tmp_path: Path) -> None:
    shutil.copytree(DATA / "2026-08-21" / "token_exports", tmp_path / "token_exports")
    assert_same(first(tmp_path), cases(), without=(*NOT_EXPORTED, "reward"), order=False)
    assert open_run(tmp_path / "token_exports").steps[0].index == 4


def test_the_flat_file_of_may_holds_several_steps(tmp_path: Path) -> None:
    filled = {step: [case for case in cases(seed=step) if case.response] for step in (0, 1)}
    lines = [export_line(case, step, idx, "june") for step in (0, 1) for idx, case in enumerate(filled[step])]
    for line in lines:
        del line["export_step"], line["run_id"]
    file = tmp_path / "token_exports" / "rank_0.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [0, 1] and run.first_version == 0
    for step in run.steps:
        rollouts = step.load()
        assert_same(rollouts, cases(seed=step.index), without=NOT_EXPORTED)
        assert not rollouts.rejected


@pytest.mark.parametrize(("variant", "first_version"), [("current", -1), ("v0.8.0", -1), ("june", 0)])
def test_steps_count_from_1_since_july_2026_and_from_0_before(tmp_path: Path, variant: str, first_version: int) -> None:
    exported(tmp_path, 4, variant)
    run = open_run(tmp_path)
    assert run.first_version == first_version
    assert any("steps count from" in text for text in run.notices)


def test_versions_groups_and_rewards_come_from_the_traces_by_token_ids(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    traced(tmp_path)
    rollouts = first(tmp_path)
    assert_same(rollouts, unspanned())
    assert set(rollouts.group_id) == {"group0", "group1", "group2"}
    assert any("5 of 5 sequences joined with traces.jsonl" in text for text in rollouts.notices)


def test_a_join_takes_only_what_all_candidates_agree_on(tmp_path: Path) -> None:
    case = cases()[0]
    write_export(tmp_path, [export_line(case, 4, 0)], 4)
    write_traces(
        tmp_path, [episode(case, 0), episode(case, 1, {"start": 2, "end": 2}, group={"id": "group0"})]
    )  # the same tokens, sampled from two versions
    rollouts = first(tmp_path)
    assert len(rollouts) == 1 and rollouts.group_id[0] == "group0" and (rollouts.sampler_version == -1).all()
    assert any("several rows there" in text for text in rollouts.notices)


def test_a_sequence_without_a_trace_keeps_what_it_has(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    write_traces(tmp_path, [episode(cases()[0], 0)])
    rollouts = first(tmp_path)
    known = [bool((rollouts.sampler_version[rollouts.sequence_of_token == row] == 3).all()) for row in range(5)]
    assert known == [True, False, False, False, False]
    assert any("1 of 5 sequences joined" in text for text in rollouts.notices)


def test_what_is_read_and_what_is_missing_is_said(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    said = open_run(tmp_path).notices
    assert "read: token exports of 1 steps, each step from the first of them that has it" in said
    assert any("sampler_lag=N" in text for text in said)
    traced(tmp_path)
    run = open_run(tmp_path)
    assert any("token exports of 1 steps, traces of 1 steps" in text for text in run.notices)
    assert not any("sampler_lag=N" in text for text in run.notices) and run.trainer_version(4) == 3


def test_null_is_nan(tmp_path: Path) -> None:
    line = export_line(cases()[0], 4, 0)
    line["inference_logprobs"][4] = None
    write_export(tmp_path, [line], 4)
    rollouts = first(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).tolist() == [False, True, False, False]
    assert any("null or NaN" in text for text in rollouts.notices)


def test_the_first_trainer_logprob_is_filler_and_never_counted(tmp_path: Path) -> None:
    line = export_line(cases()[0], 4, 0)
    line["loss_mask"][0] = True
    write_export(tmp_path, [line], 4)
    assert first(tmp_path).prompt[0].tolist() == [5, 6, 7]


def test_all_zero_trainer_logprobs_are_not_computed(tmp_path: Path) -> None:
    lines = [export_line(case, 4, i) for i, case in enumerate(cases()) if case.response]
    write_export(tmp_path, [line | {"trainer_logprobs": [0.0] * len(line["token_ids"])} for line in lines], 4)
    rollouts = first(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all()
    assert any("trainer_logprobs are 0.0 at every loss token" in text for text in rollouts.notices)


def test_a_sampler_logprob_of_exactly_zero_is_said(tmp_path: Path) -> None:
    line = export_line(cases()[0], 4, 0)
    line["inference_logprobs"][4] = 0.0
    write_export(tmp_path, [line], 4)
    assert any("exactly 0.0 at 1 loss tokens" in text for text in first(tmp_path).notices)


def test_batches_without_sampler_logprobs_are_not_compared(tmp_path: Path) -> None:
    lines = [export_line(case, 4, i) for i, case in enumerate(cases()[:2])]
    lines[0] |= {"log_importance_ratio": [None] * len(lines[0]["token_ids"])}
    write_export(tmp_path, lines, 4)
    rollouts = first(tmp_path)
    assert np.isnan(rollouts.sampler_logprob[rollouts.sequence_of_token == 0]).all()
    assert not np.isnan(rollouts.sampler_logprob[rollouts.sequence_of_token == 1]).any()
    assert any("1 sequences were trained without sampler log-probs" in text for text in rollouts.notices)


def test_tokens_of_the_ce_component_alone_are_not_counted(tmp_path: Path) -> None:
    line = export_line(cases()[0], 4, 0)
    line |= dict(zip(STREAMS, ([0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1]), strict=True))
    write_export(tmp_path, [line], 4)
    assert first(tmp_path).loss_mask.tolist() == [True, True, False, True]


def test_tokens_that_zero_advantages_took_out_still_count(tmp_path: Path) -> None:
    line = export_line(cases()[0], 4, 0)
    line["rl_weights"] = [0, 0, 0, 0, 1, 1, 1]
    write_export(tmp_path, [line], 4)
    assert first(tmp_path).loss_mask.all()


def test_rows_out_of_order_and_without_group_are_grouped_by_prompt_tokens(tmp_path: Path) -> None:
    order = [cases()[at] for at in (3, 0, 4, 1, 2)]
    write_export(tmp_path, [export_line(case, 4, idx) for idx, case in enumerate(order)], 4)
    rollouts = first(tmp_path, ReadOptions(overrides=("group_size=5",)))
    assert_same(rollouts, cases(), without=(*NOT_EXPORTED, "reward"), order=False)
    assert any("group_size is not applied: packing reorders" in text for text in rollouts.notices)


def test_duplicated_rank_files_count_once(tmp_path: Path) -> None:
    file = exported(tmp_path, 4)
    shutil.copy(file, file.with_name("rank_1.jsonl"))
    rollouts = first(tmp_path)
    assert len(rollouts) == 5 and any("exact copies" in text for text in rollouts.notices)


def test_a_row_that_does_not_fit_is_set_aside(tmp_path: Path) -> None:
    good = export_line(cases()[0], 4, 0)
    packed = export_line(cases()[1], 4, 1)
    packed["position_ids"][5] = 0
    short = export_line(cases()[2], 4, 2)
    short["trainer_logprobs"].pop()
    text = export_line(cases()[3], 4, 3) | {"token_ids": ["5"]}
    write_export(tmp_path, [good, packed, short, text, {"schema_version": 1}], 4)
    rollouts = first(tmp_path)
    assert len(rollouts) == 1
    assert [(r.row, r.reason.split(": ")[1].split(" ")[0]) for r in rollouts.rejected] == [
        (2, "position_ids"), (3, "trainer_logprobs"), (4, "token_ids"), (5, "token_ids"),
    ]  # fmt: skip


def test_text_of_v0_6_is_answered_with_the_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rollouts" / "step_0"
    folder.mkdir(parents=True)
    (folder / "train_rollouts.jsonl").write_text(json.dumps({"example_id": 1, "reward": 1.0, "prompt": []}) + "\n")
    with pytest.raises(NothingToJudgeError, match="enable_token_export = true"):
        open_run(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 5
    assert "enable_token_export" in capsys.readouterr().err


def test_several_runs_of_one_trainer_are_asked_about(tmp_path: Path) -> None:
    for name in ("run_a", "run_b"):
        exported(tmp_path / name, 4)
    with pytest.raises(InputError, match="run_a, run_b"):
        open_run(tmp_path)
    assert len(first(tmp_path / "run_a")) == 5


def test_the_orchestrators_directory_is_found_below(tmp_path: Path) -> None:
    exported(tmp_path, 4, "v0.8.0")
    traced(tmp_path / "run_default")
    assert any("5 of 5 sequences joined" in text for text in first(tmp_path).notices)


@pytest.mark.parametrize("write", [exported, traced, ranked])
def test_each_kind_matches_one_reader(tmp_path: Path, write) -> None:
    write(tmp_path, 4)
    assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path)] == ["prime-rl"]


def test_a_name_alone_is_no_match(tmp_path: Path) -> None:
    write_export(tmp_path, [{"schema_version": 1, "text": "x"}], 4)
    (tmp_path / "rollouts" / "step_4").mkdir(parents=True)
    (tmp_path / "rollouts" / "step_4" / "rank_0.bin").write_bytes(b"\x91\x90")
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)


def test_an_unfinished_step_is_said(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    (tmp_path / "token_exports" / "step_4" / "STABLE").unlink()
    assert any("steps 4 have no STABLE file" in text for text in open_run(tmp_path).notices)


def test_strict_refuses_a_row(tmp_path: Path) -> None:
    write_export(tmp_path, [export_line(cases()[0], 4, 0), {"schema_version": 1}], 4)
    with pytest.raises(BadFileError, match="row 2"):
        first(tmp_path, ReadOptions(strict=True))


def test_decompose_gives_the_total_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(tmp_path, 4)
    traced(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "prime-rl" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path)]) == 0
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    pairs = [
        (trainer - sampler)
        for case in cases()
        for trainer, sampler, mask in zip(case.trainer, case.sampler, case.mask, strict=True)
        if mask
    ]
    weights = np.exp(np.array(pairs))
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
