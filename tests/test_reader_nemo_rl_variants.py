"""NeMo-RL: the shared cases, older dumps, resumed experiments, and what a checkpoint's config says.

Fields, names and padding as ``Logger.log_batched_dict_as_jsonl`` writes them in NVIDIA-NeMo/RL at 7ea279abf.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers import ReadOptions, open_run
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz

UNHELD = ("sampler_version", "finish_reason")


def line(case: Case, idx: int, width: int) -> dict:
    """A sample as the writer has it: arrays over prompt and response, right-padded to the batch's width."""
    prompt, n = len(case.prompt), len(case.prompt) + len(case.response)

    def padded(values: list, fill: float = 0) -> list[list]:
        return [[fill] * prompt + list(values) + [fill] * (width - n)]

    ids = [[*case.prompt, *case.response, *[0] * (width - n)]]
    return {
        "content": [[f"prompt {case.group}", *(who for who, _ in case.turns)]],
        "rewards": [case.reward],
        "input_lengths": [n],
        "token_ids": ids,
        "token_loss_mask": padded(case.mask),
        "sample_loss_mask": [1.0],
        "advantages": [[case.advantage] * width],
        "generation_logprobs": padded(case.sampler),
        "prev_logprobs": padded(case.trainer, -11.5),
        "idx": idx,
    }


def lines(step: int = 3) -> list[dict]:
    made = cases(step)
    width = max(len(case.prompt) + len(case.response) for case in made) + 2
    return [line(case, idx, width) for idx, case in enumerate(made)]


def old_lines() -> list[dict]:
    """v0.3 to v0.5: neither ids nor masks nor advantages."""
    kept = ("content", "rewards", "input_lengths", "generation_logprobs", "prev_logprobs", "idx")
    return [{key: value for key, value in entry.items() if key in kept} for entry in lines()]


def text(entries: list[dict]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def write(folder: Path, entries: list[dict], step: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"train_data_step{step}.jsonl").write_bytes(text(entries))
    return folder


def config(path: Path, asynchronous: bool, **generation: object) -> None:
    folder = path / "results" / "grpo" / "step_10"
    (folder / "policy" / "weights" / "model").mkdir(parents=True)
    table = {
        "grpo": {"async_grpo": {"enabled": asynchronous}},
        "policy": {
            "model_name": "Qwen/Qwen2.5-1.5B",
            "precision": "bfloat16",
            "generation": {"top_k": None, "vllm_cfg": {"logprobs_mode": "processed_logprobs"}, **generation},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(table))


def test_the_shared_cases_read_as_written(tmp_path: Path) -> None:
    rollouts = open_run(write(tmp_path, lines())).steps[0].load()
    assert_same(rollouts, cases(), without=UNHELD)
    assert [row.reason for row in rollouts.rejected] == [
        "not a NeMo-RL sample: token_loss_mask marks no response token"
    ]


def test_dumps_before_v0_6_give_log_probs_and_no_ids(tmp_path: Path) -> None:
    run = open_run(write(tmp_path, old_lines()))
    rollouts = run.steps[0].load()
    expected = [case for case in cases() if case.response]
    assert len(rollouts) == len(expected) and set(rollouts.response.values) == {-1}
    mask = np.concatenate([np.array(case.mask, dtype=bool) for case in expected])
    assert rollouts.loss_mask.tolist() == mask.tolist()
    assert rollouts.sampler_logprob[mask].tolist() == np.concatenate([case.sampler for case in expected])[mask].tolist()
    assert rollouts.trainer_logprob[mask].tolist() == np.concatenate([case.trainer for case in expected])[mask].tolist()
    assert len(set(rollouts.group_id)) == 3
    assert any("before v0.6.0" in notice for notice in run.notices)


def test_decompose_of_an_old_dump_gives_the_total_and_null_ids(tmp_path: Path) -> None:
    write(tmp_path, old_lines())
    assert main(["decompose", str(tmp_path), "-q", "--set", "checkpoints=results/step_{version}"]) == 0
    tokens = pd.read_parquet(tmp_path / "mismatch_probe" / "tokens" / "step=3" / "part-0.parquet")
    assert tokens["token_id"].isna().all() and tokens["log_ratio"].notna().all()
    assert tokens["trainer_version"].eq(2).all() and tokens["sampler_version"].isna().all()


def test_a_checkpoints_config_settles_what_the_dump_does_not_say(tmp_path: Path, capsys) -> None:
    write(tmp_path / "logs" / "exp_001", lines())
    config(tmp_path, asynchronous=False, temperature=0.7, top_p=0.95)
    run = open_run(tmp_path)
    settings = run.settings
    assert (settings.temperature, settings.top_p, settings.top_k, settings.logprobs_mode) == (
        0.7,
        0.95,
        -1,
        "processed",
    )
    assert (settings.trainer_dtype, settings.model) == ("bfloat16", "Qwen/Qwen2.5-1.5B")
    assert settings.assumed == {"top_k"}
    assert run.trainer_checkpoints is not None
    assert run.trainer_checkpoints.path(2) == tmp_path / "results/grpo/step_2/policy/weights/model"
    main(["inspect", str(tmp_path), "--set", "temperature=0.8"])
    out = " ".join(capsys.readouterr().out.split())
    assert "temperature 0.8 (--set)" in out and "top_k -1 (assumed)" in out
    assert "top_p 0.95 (results/grpo/step_10/config.yaml: policy.generation.top_p)" in out


def test_synchronous_training_needs_no_checkpoint_to_be_split(tmp_path: Path) -> None:
    """Step 3 trains version 2, and the sampler had it: pi_s is pi, D = prev - generation, L = 0."""
    write(tmp_path / "logs" / "exp_001", lines())
    config(tmp_path, asynchronous=False)
    (rollouts,) = [step.load() for step in open_run(tmp_path).steps]
    assert set(rollouts.sampler_version) == {2}
    assert any("sampler_lag = 0" in notice for notice in rollouts.notices)
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    tokens = pd.read_parquet(tmp_path / "mismatch_probe" / "tokens" / "step=3" / "part-0.parquet")
    assert (tokens["lag"] == 0).all()
    assert (tokens["discrepancy"] == tokens["trainer_logprob"] - tokens["sampler_logprob"]).all()


def test_asynchronous_training_is_split_only_where_the_lag_is_declared(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "exp_001", lines())
    config(tmp_path, asynchronous=True)
    run = open_run(tmp_path)
    assert set(run.steps[0].load().sampler_version) == {-1}
    assert any("not identifiable" in notice for notice in run.notices)
    declared = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=1",)))
    assert set(declared.steps[0].load().sampler_version) == {1}


def test_a_wrong_config_names_file_and_key(tmp_path: Path) -> None:
    write(tmp_path, lines())
    config(tmp_path, asynchronous=False, temperature=-1)
    with pytest.raises(BadFileError, match=r"config\.yaml: policy\.generation\.temperature.*--set temperature=VALUE"):
        open_run(tmp_path)
    (tmp_path / "results/grpo/step_10/config.yaml").write_text("a: [")
    with pytest.raises(BadFileError, match=r"config\.yaml: cannot be parsed"):
        open_run(tmp_path)


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / "exp_001", lines(), step)
    for step in (3, 4):
        write(tmp_path / "exp_002", lines()[:2], step)
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [1, 2, 3, 4]
    assert [len(step.load()) for step in run.steps] == [5, 5, 2, 2]
    assert "exp_002 resumes exp_001 at step 3; 1 steps that were trained twice count as in exp_002" in run.notices
    assert run.settings.name == "exp_002"


def test_experiments_that_do_not_resume_one_another_are_asked_about(tmp_path: Path) -> None:
    write(tmp_path / "exp_001", lines(), 1)
    assert open_run(tmp_path).settings.name == "exp_001"
    write(tmp_path / "exp_002", lines(), 1)
    with pytest.raises(InputError, match="exp_001, exp_002"):
        open_run(tmp_path)


@pytest.mark.parametrize("kind", ["crlf", "bom", "gzip", "zstd", "nul tail", "blank lines"])
def test_encodings_of_the_file(tmp_path: Path, kind: str) -> None:
    data, name = text(lines()), "train_data_step3.jsonl"
    if kind == "crlf":
        data = data.replace(b"\n", b"\r\n")
    elif kind == "bom":
        data = b"\xef\xbb\xbf" + data
    elif kind == "gzip":
        data, name = gzip.compress(data), f"{name}.gz"
    elif kind == "zstd":
        data, name = pa.compress(data, codec="zstd", asbytes=True), f"{name}.zst"
    elif kind == "nul tail":
        data += bytes(512)
    else:
        data = data.replace(b"\n", b"\n\n")
    (tmp_path / name).write_bytes(data)
    assert_same(open_run(tmp_path).steps[0].load(), cases(), without=UNHELD)


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_an_error(tmp_path: Path) -> None:
    data = text(lines())
    file = tmp_path / "train_data_step3.jsonl"
    torn = data.splitlines(keepends=True)
    file.write_bytes(b"".join(torn[:4]) + torn[4][:50])
    rollouts = open_run(tmp_path).steps[0].load()
    assert len(rollouts) == 4 and "row 5: torn last line dropped" in rollouts.notices[0]
    file.write_bytes(b"".join([*torn[:1], torn[1][:50] + b"\n", *torn[2:]]))
    with pytest.raises(BadFileError, match="row 2: not valid JSON"):
        open_run(tmp_path).steps[0].load()
    skipping = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[0].load()
    assert len(skipping) == 4 and [row.row for row in skipping.rejected] == [2, 6]


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00garbage\n", b"[1, 2]\n", b"{}\n"])
def test_what_is_no_dump_is_not_taken_for_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "train_data_step3.jsonl").write_bytes(data)
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    data = text(lines())
    (tmp_path / "train_data_step3.jsonl").write_bytes(data.replace(b'"idx": 1', b'"idx": "\xff"', 1))
    with pytest.raises(BadFileError, match="row 2: not valid JSON"):
        open_run(tmp_path).steps[0].load()


def test_damaged_old_dumps_read_or_end_in_a_clean_error() -> None:
    fuzz(lambda run_dir: write(run_dir, old_lines()) / "train_data_step3.jsonl")
