"""prime-rl's msgpack transport files, by the number of fields in a row; and its configs and checkpoints."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import Rollouts
from tests.prime_rl_files import DATA, episode, exported, micro_batch, ranked, traced, write_rank, write_traces
from tests.reader_cases import assert_same, cases

NOT_PACKED = ("trainer_logprob", "sampler_version", "finish_reason")
TAGS = {"v0.4.0": 3, "v0.5.0": 3, "v0.6.0": 3, "v0.7.0": 4, "v0.8.0": 4, "2026-08-21": 4}


def first(run: Path, options: ReadOptions | None = None) -> Rollouts:
    return open_run(run, options).steps[0].load()


@pytest.mark.parametrize("tag", TAGS)
def test_rank_files_of_every_version_read_as_prime_rl_packed_them(tmp_path: Path, tag: str) -> None:
    shutil.copytree(DATA / tag / "rollouts", tmp_path / "rollouts", ignore=shutil.ignore_patterns("*rollouts.bin"))
    run = open_run(tmp_path)
    assert run.trainer_version(run.steps[0].index) == -1 and run.first_version == (0 if TAGS[tag] == 3 else -1)
    assert run.steps[0].index == TAGS[tag] and run.settings.temperature == 0.75
    without = NOT_PACKED if tag == "v0.6.0" else (*NOT_PACKED, "reward")
    rollouts = run.steps[0].load()
    assert_same(rollouts, cases(), without=without, order=False)
    assert any("hold no sampled token" in text for text in rollouts.notices)


@pytest.mark.parametrize("tag", [tag for tag in TAGS if tag.startswith("v")])
def test_the_orchestrators_batch_of_every_version_reads_as_written(tmp_path: Path, tag: str) -> None:
    shutil.copytree(DATA / tag / "rollouts", tmp_path / "rollouts", ignore=shutil.ignore_patterns("rank_*"))
    run = open_run(tmp_path)
    assert run.first_version == (0 if TAGS[tag] == 3 else -1) and run.settings.temperature == 0.75
    without = NOT_PACKED if TAGS[tag] == 3 else (*NOT_PACKED, "reward")
    rollouts = run.steps[0].load()
    assert_same(rollouts, cases(), without=without)
    assert [r.reason for r in rollouts.rejected] == ["not a training sample: no token of it was sampled"]


@pytest.mark.parametrize("fields", [10, 12, 16, 17, 18, 19])
def test_every_row_length_reads_as_written(tmp_path: Path, fields: int) -> None:
    ranked(tmp_path, fields=fields)
    assert_same(first(tmp_path), cases(), without=NOT_PACKED if fields == 17 else (*NOT_PACKED, "reward"))


LATER_FIELDS = ("routed_experts", "mm_kwargs", "mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights")


@pytest.mark.parametrize("fields", [16, 18, 19])
def test_loss_weights_are_found_in_every_layout(tmp_path: Path, fields: int) -> None:
    row = micro_batch(cases()[:1], fields)
    lora = () if fields == 16 else ("lora_num_tokens",)
    weights = {"rl_weights": [0, 0, 0, 1, 0, 0, 0], "ce_weights": [0, 0, 0, 1, 1, 1, 0]}
    weights["ref_kl_weights"] = [0, 0, 0, 0, 0, 1, 0]
    # Before them come the 8 lists that every row has, and since v0.8 seq_lens.
    for place, name in enumerate(("ref_logprobs", *lora, *LATER_FIELDS), 8 if fields == 18 else 9):
        row[place] = weights.get(name)
    write_rank(tmp_path, [row])
    assert first(tmp_path).loss_mask.tolist() == [True, False, True, True]


def test_packed_rows_get_rewards_from_the_batch_beside_them(tmp_path: Path) -> None:
    shutil.copytree(DATA / "v0.4.0" / "rollouts", tmp_path / "rollouts")
    rollouts = first(tmp_path)
    assert_same(rollouts, cases(), without=NOT_PACKED, order=False)
    assert any("5 of 5 sequences joined with rollouts.bin" in text for text in rollouts.notices)


def test_the_token_export_comes_before_rank_files_and_those_before_traces(tmp_path: Path) -> None:
    ranked(tmp_path)
    traced(tmp_path)
    rollouts = first(tmp_path)
    assert rollouts.origin[0][0].endswith("rank_0.bin") and rollouts.group_id[0] == "group0"
    assert np.isnan(rollouts.trainer_logprob).all()
    exported(tmp_path, 4)
    assert first(tmp_path).origin[0][0].startswith("token_exports")


def test_a_step_with_traces_alone_is_read_from_them(tmp_path: Path) -> None:
    exported(tmp_path, 4)
    write_traces(tmp_path, [episode(cases()[0], 0)], 5)
    steps = open_run(tmp_path).steps
    assert [step.index for step in steps] == [4, 5]
    assert steps[1].load().origin[0][0].endswith("traces.jsonl")


def test_a_copied_rank_file_counts_once(tmp_path: Path) -> None:
    file = ranked(tmp_path)
    shutil.copy(file, file.with_name("rank_1.bin"))
    rollouts = first(tmp_path)
    assert len(rollouts) == 5 and any("rank_1.bin is a copy of rank_0.bin" in text for text in rollouts.notices)


def test_imitation_of_v0_6_has_no_sampler(tmp_path: Path) -> None:
    row = micro_batch(cases()[:1], 17)
    row[13] = "sft"
    write_rank(tmp_path, [row])
    assert np.isnan(first(tmp_path).sampler_logprob).all()


def test_all_zero_sampler_logprobs_are_absent(tmp_path: Path) -> None:
    row = micro_batch(cases()[:2])
    row[3] = [0.0] * len(row[0])
    write_rank(tmp_path, [row])
    rollouts = first(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all()
    assert any("sampler_logprobs are 0.0 at every loss token" in text for text in rollouts.notices)


def test_a_micro_batch_that_does_not_fit_is_set_aside(tmp_path: Path) -> None:
    late, short, torn, text = (micro_batch(cases()[:2]) for _ in range(4))
    late[4] = [place + 1 for place in late[4]]
    short[3] = short[3][:-1]
    torn[5] = [3, len(torn[0]) - 3]
    text[0] = "ids"
    write_rank(tmp_path, [micro_batch(cases()[2:5]), late, short, torn, text])
    rollouts = first(tmp_path)
    assert len(rollouts) == 3
    assert [r.row for r in rollouts.rejected] == [2, 3, 4, 5]
    assert "different places" in rollouts.rejected[2].reason


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-20], "No more data|OutOfData"),
        (lambda data: data + b"\xc0", "follows its last row"),
        (lambda data: b"\x93" + data[1:], "OutOfData|No more data"),
    ],
)
def test_a_damaged_file_is_refused_or_set_aside(tmp_path: Path, damage, reason: str) -> None:
    file = ranked(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadFileError, match=reason):
        first(tmp_path)
    kept = first(tmp_path, ReadOptions(skip_bad_rows=True))
    assert len(kept) in (3, 5) and len(kept.rejected) == 1


def test_a_row_of_unknown_length_is_named(tmp_path: Path) -> None:
    write_rank(tmp_path, [micro_batch(cases()[:1]), [*micro_batch(cases()[1:2]), *[None] * 30]])
    with pytest.raises(BadFileError, match="a row of 46 fields, known are 10, 12, 16, 17, 18, 19"):
        first(tmp_path)


def test_a_declared_size_beyond_the_file_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    row = msgpack.packb(micro_batch(cases()[:1]))
    second = b"\xdc\x00\x10" + b"\xdd" + struct.pack(">I", 100_000)
    file = write_rank(tmp_path, [])
    file.write_bytes(b"\x92" + row + second)
    with pytest.raises(BadFileError, match="exceeds max_array_len"):
        first(tmp_path)


def test_settings_come_from_the_saved_configs(tmp_path: Path) -> None:
    ranked(tmp_path)
    (tmp_path / "configs").mkdir()
    sampling = {"temperature": 0.5, "extra_body": {"top_k": 20}}
    envs = [{"sampling": {"temperature": 0.5}}, {"sampling": {"temperature": 0.9}}]
    config = {"model": {"name": "Qwen/Qwen3-0.6B"}, "train": {"sampling": sampling, "env": envs}}
    (tmp_path / "configs" / "orchestrator.json").write_text(json.dumps(config))
    run = open_run(tmp_path)
    settings = run.settings
    assert (settings.temperature, settings.top_k, settings.top_p) == (0.5, 20, 1.0)
    assert settings.sources["temperature"] == "configs/orchestrator.json: train.sampling.temperature"
    assert settings.model == "Qwen/Qwen3-0.6B" and run.initial is None and settings.logprobs_mode == "processed"
    assert any("several temperatures (0.5, 0.9)" in text for text in run.notices)
    assert any("sampled at temperature 0.75" in text for text in run.steps[0].load().notices)


def test_the_orchestrators_config_comes_before_the_launchers(tmp_path: Path) -> None:
    ranked(tmp_path)
    (tmp_path / "configs").mkdir()
    for name, temperature in (("orchestrator", 0.5), ("rl", 0.9)):
        config = {"train": {"sampling": {"temperature": temperature}}}
        (tmp_path / "configs" / f"{name}.json").write_text(json.dumps(config))
    assert open_run(tmp_path).settings.temperature == 0.5


def test_version_0_lies_where_the_config_says(tmp_path: Path) -> None:
    ranked(tmp_path / "run", 1)
    (tmp_path / "base").mkdir()
    (tmp_path / "run" / "configs").mkdir()
    (tmp_path / "run" / "broadcasts" / "step_1").mkdir(parents=True)
    (tmp_path / "run" / "configs" / "trainer.json").write_text(json.dumps({"model": {"name": str(tmp_path / "base")}}))
    run = open_run(tmp_path / "run")
    assert run.trainer_checkpoint(run.trainer_version(1)) == tmp_path / "base"


def test_toml_configs_of_older_versions_are_read(tmp_path: Path) -> None:
    ranked(tmp_path / "run_default", fields=10)
    (tmp_path / "run_default" / "control").mkdir()
    (tmp_path / "run_default" / "control" / "orch.toml").write_text(
        '[model]\nname = "m"\n[sampling]\ntemperature = 0.6\n'
    )
    settings = open_run(tmp_path).settings
    assert settings.temperature == 0.6
    assert settings.sources["temperature"] == "run_default/control/orch.toml: sampling.temperature"


def test_checkpoints_are_found_and_said(tmp_path: Path) -> None:
    ranked(tmp_path)
    assert open_run(tmp_path).trainer_checkpoints is None
    (tmp_path / "checkpoints" / "step_2" / "trainer").mkdir(parents=True)
    assert open_run(tmp_path).trainer_checkpoints.versions() == [2]
    for version in (2, 3):
        (tmp_path / "broadcasts" / f"step_{version}").mkdir(parents=True)
    (tmp_path / "broadcasts" / "step_2" / "STABLE").touch()
    run = open_run(tmp_path)
    assert run.trainer_checkpoint(run.trainer_version(4)) == tmp_path / "broadcasts" / "step_3"
    assert any("also there: checkpoints/step_{version}/trainer" in text for text in run.notices)
    assert any("no STABLE in version 3" in text for text in run.notices)
    chosen = open_run(tmp_path, ReadOptions(overrides=("checkpoints=checkpoints/step_{version}/trainer",)))
    assert chosen.trainer_checkpoint(2) == tmp_path / "checkpoints" / "step_2" / "trainer"


def test_a_bad_config_is_named(tmp_path: Path) -> None:
    ranked(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rl.json").write_text("{")
    with pytest.raises(BadFileError, match=r"rl\.json"):
        open_run(tmp_path)
