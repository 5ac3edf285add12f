"""Where verl's dumps, its config, its checkpoints and its text dump lie, and what is said of each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError, UsageError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from tests.tiny import save_model
from tests.verl_files import FOLDER, dp_bytes, load, padded, row, save, tq_bytes


def test_mini_batches_of_a_step_are_joined_and_said(tmp_path: Path) -> None:
    for inner in ("0", "1"):
        save(tmp_path, tq_bytes([row(int(inner))], keys=[f"p_{inner}_0"]), inner=inner)
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["p_0_0", "p_1_0"]
    assert any("2 mini-batches" in notice for notice in rollouts.notices)


def test_a_copied_file_counts_once(tmp_path: Path) -> None:
    for inner in ("0", "1"):
        save(tmp_path, tq_bytes([row(0), row(1)]), inner=inner)
    rollouts = load(tmp_path)
    assert len(rollouts) == 2 and any("exact copies" in notice for notice in rollouts.notices)


def test_the_layout_before_inner_directories(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([row(0)]), step=7, inner="")
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [7] and len(run.steps[0].load()) == 1


def test_generations_are_mapped_to_steps_without_meta(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for generation in (3, 4):
        (folder / f"genstep_{generation:06d}").mkdir(parents=True)
        (folder / f"genstep_{generation:06d}" / "gen_batch.dp").write_bytes(dp_bytes(padded([row(generation)])))
    (folder / "train_step__gen_step.txt").write_text("2 3\n2 4\nnot a pair\n")
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [2] and len(run.steps[0].load()) == 2


def test_the_asynchronous_trainers_directories_are_no_steps(tmp_path: Path) -> None:
    save(tmp_path, dp_bytes(padded([row(0), row(1)])), 17, None, folder="e_p/GBS1_N2_in8_out16")
    run = open_run(tmp_path)
    assert not run.versions_known and any("count prompts" in notice for notice in run.notices)


def test_a_dump_that_names_no_step_says_so_until_the_lag_is_declared(tmp_path: Path) -> None:
    (tmp_path / "e_p_GBS4__N2").write_bytes(dp_bytes(padded([row(0), row(1)])))
    run = open_run(tmp_path)
    assert not run.versions_known and any("names no training step" in notice for notice in run.notices)
    declared = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=0",)))
    assert declared.trainer_version(1) == 0 and (declared.steps[0].load().sampler_version == 0).all()


CONFIG = """
actor_rollout_ref:
  actor: {fsdp_config: {dtype: bfloat16}}
  model: {path: MODEL}
  rollout: {temperature: 0.7, top_p: 0.95, top_k: 20, logprobs_mode: raw_logprobs, calculate_log_probs: true}
algorithm: {adv_estimator: grpo, rollout_correction: {bypass_mode: true}}
data: {max_response_length: 16}
trainer: {experiment_name: "${oc.env:NAME}"}
"""


def test_settings_come_from_hydras_config_and_the_bypass_copy_is_said(tmp_path: Path) -> None:
    save_model(tmp_path / "base", "llama")
    save(tmp_path, tq_bytes([row(0)]))
    hydra = tmp_path / "outputs" / "2026-07-20" / "10-00-00" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "base")))
    run = open_run(tmp_path, ReadOptions(overrides=("top_k=-1",)))
    settings = run.settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.7, 0.95, -1)
    assert (settings.logprobs_mode, settings.trainer_dtype, settings.max_response_length) == ("raw", "bfloat16", 16)
    assert settings.name == "exp_proj" and not settings.assumed
    assert settings.sources["temperature"].endswith(".hydra/config.yaml: actor_rollout_ref.rollout.temperature")
    assert run.initial == tmp_path / "base"
    assert any("bypass_mode" in notice and "no such copy" in notice for notice in run.notices)
    (hydra / "config.yaml").write_text("a: [")
    with pytest.raises(BadFileError, match="cannot be parsed"):
        open_run(tmp_path)


def test_switches_of_the_config_that_change_what_is_read_are_said(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([row(0)]))
    rollout = {"temperature": 0.5, "calculate_log_probs": False}
    config = {"actor_rollout_ref": {"rollout": rollout}, "algorithm": {"adv_estimator": "remax"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    run = open_run(tmp_path)
    said = " ".join(run.notices)
    assert run.settings.temperature == 0.5 and "calculate_log_probs is off" in said and "greedy baseline" in said


def test_a_config_of_another_program_is_no_matter(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([row(0)]))
    for text in ("model: {temperature: 3}", "a: ["):
        (tmp_path / "config.yaml").write_text(text)
        assert "temperature" in open_run(tmp_path).settings.assumed


def test_checkpoints_are_found_below_the_run_or_asked_for(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([row(0)]))
    for version in (10, 20):
        (tmp_path / "checkpoints" / "p" / "e" / f"global_step_{version}" / "actor").mkdir(parents=True)
    run = open_run(tmp_path)
    assert run.trainer_checkpoints is not None and run.trainer_checkpoints.versions() == [10, 20]
    assert "checkpoints found in checkpoints/p/e" in run.notices
    (tmp_path / "other" / "global_step_1" / "actor").mkdir(parents=True)
    run = open_run(tmp_path)
    assert run.trainer_checkpoints is None and any("lie in checkpoints/p/e, other" in said for said in run.notices)
    run = open_run(tmp_path, ReadOptions(overrides=("checkpoints='other/global_step_{version}/actor'",)))
    assert run.trainer_checkpoints is not None and run.trainer_checkpoints.versions() == [1]
    with pytest.raises(UsageError, match="that holds"):
        open_run(tmp_path, ReadOptions(overrides=("checkpoints=other",)))


TEXT = {"input": "user\n1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 1, "uid": "a_0_0"}


@pytest.mark.parametrize("form", ["plain", "crlf", "bom", "torn", "gzip", "zstd", "duplicated"])
def test_the_text_dump_is_answered(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = 2 * (json.dumps(TEXT).encode() + b"\n")
    suffix = {"gzip": ".gz", "zstd": ".zst"}.get(form, "")
    changed = {
        "crlf": data.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + data,
        "torn": data[:-20],
        "gzip": gzip.compress(data),
        "zstd": bytes(pa.compress(data, codec="zstd", asbytes=True)),
    }
    file = tmp_path / "rollouts" / f"1.jsonl{suffix}"
    file.parent.mkdir()
    file.write_bytes(changed.get(form, data))
    if form == "duplicated":
        (file.parent / "2.jsonl").write_bytes(data)
    assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path)] == ["verl"]
    with pytest.raises(NothingToJudgeError, match=r"no token ids.*skip\.rollout_tq\.enable=True.*fresh dump_dir"):
        open_run(file.parent)
    for command in ("inspect", "decompose"):
        assert main([command, str(tmp_path)]) == 5
        assert "skip.rollout_tq.steps" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'{"input": "x"}\n', b"[1]\n", b'{"input": 1, "output": 1}'])
def test_other_jsonl_is_not_taken_for_a_text_dump(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)


def test_a_tq_dump_wins_over_a_text_dump(tmp_path: Path) -> None:
    save(tmp_path, tq_bytes([row(0)]))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1.jsonl").write_text(json.dumps(TEXT) + "\n")
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == 1 and any("text dump of the run, left unread" in said for said in run.notices)
