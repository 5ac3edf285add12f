"""``inspect --weights``: what is printed, and what the process returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.entry import main
from tests.conftest import SAMPLE
from tests.tiny import save_model

RUN = str(SAMPLE / "broken_sync_run")
STEPS = SAMPLE / "broken_sync_run" / "checkpoints"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two checkpoints that differ in every way that has a sentence of its own, under long paths."""
    folder = tmp_path_factory.mktemp("a_folder_with_a_name_so_long_that_no_terminal_of_eighty_columns_holds_it")
    save_model(folder / "a", "qwen3", num_hidden_layers=4)
    save_model(folder / "b", "qwen3", num_hidden_layers=4, rms_norm_eps=1e-5)
    file = folder / "b" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16() if "norm" in name else tensor * 1.25
    tensors["lm_head.weight"] = load_file(folder / "a" / "model.safetensors")["lm_head.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    for number in range(6):
        tensors[f"model.layers.0.mlp.experts.{number}.a_projection_with_a_name_of_some_length.weight"] = torch.ones(1)
    del tensors["model.layers.3.mlp.gate_proj.weight"]
    save_file(tensors, file)
    return str(folder / "a"), str(folder / "b")


def test_versions_of_a_run_and_paths_are_the_same_question(capsys: Capture) -> None:
    assert main(["inspect", RUN, "--weights", "0", "40"]) == 0
    by_version = capsys.readouterr().out
    assert main(["inspect", "--weights", str(STEPS / "step_000000"), str(STEPS / "step_000040")]) == 0
    assert capsys.readouterr().out == by_version
    assert main(["inspect", RUN, "--weights", "trainer:0", str(STEPS / "step_000040")]) == 0
    assert capsys.readouterr().out == by_version
    said = " ".join(by_version.split())
    assert "24 tensors: 24 changed." in said and "Largest change: 0.0285 in model.norm.weight at [10]." in said
    assert "lm_head.weight is absent in A and B because it is tied: model.embed_tokens.weight is the head" in said


def test_versions_are_looked_up_where_set_says(tmp_path: Path, capsys: Capture) -> None:
    for number in (0, 40):
        (tmp_path / f"kept_{number}").symlink_to(STEPS / f"step_{number:06d}")
    given = ["--set", f"checkpoints={tmp_path}/kept_{{version}}"]
    assert main(["inspect", RUN, "--weights", "0", "40", *given]) == 0
    out = capsys.readouterr().out
    assert "kept_40" in out.replace("\n", "") and "24 tensors: 24 changed." in " ".join(out.split())


def test_the_samplers_own_checkpoints_are_asked_for_by_name(tmp_path: Path, capsys: Capture) -> None:
    for whose, seed in (("trainer", 0), ("sampler", 1)):
        save_model(tmp_path / whose / "v3", "qwen3", seed=seed)
    declared = 'checkpoints = "trainer/v{version}"\nsampler_checkpoints = "sampler/v{version}"\n'
    (tmp_path / "run.toml").write_text(declared)
    (tmp_path / "rollouts").mkdir()
    row = {"prompt_ids": [1], "response_ids": [2], "sampler_logprobs": [-1.0], "sampler_version": 3}
    (tmp_path / "rollouts" / "step_000003.jsonl").write_text(json.dumps({**row, "sequence_id": "s", "group_id": "g"}))
    assert main(["inspect", str(tmp_path), "--weights", "3", "sampler:3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path_a"].endswith("trainer/v3") and found["path_b"].endswith("sampler/v3")


def test_the_text_fits_80_columns_and_says_all(odd: tuple[str, str], capsys: Capture) -> None:
    assert main(["inspect", "--weights", *odd]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    said = " ".join(out.split())
    for text in (
        "Did not move while others did: lm_head.weight",
        "B = bfloat16(A) exactly, in 17 tensors.",
        "Stored as float32 in A, bfloat16 in B: 17 tensors.",
        "Shape differs: model.embed_tokens.weight [61, 32] in A, [60, 32] in B.",
        "Only in A: model.layers.3.mlp.gate_proj.weight",
        "... 6 tensors only in B in all",
        "Not finite in B: model.layers.0.mlp.up_proj.weight, 1 NaN and 0 infinite.",
        "config.json, rms_norm_eps: 1e-06 in A, 1e-05 in B",
        "3/4 changed",
    ):
        assert text in said


def test_a_head_that_differs_between_trainer_and_sampler_is_singled_out(tmp_path: Path, capsys: Capture) -> None:
    for name in ("trainer", "sampler"):
        save_model(tmp_path / name, "qwen3")
    file = tmp_path / "sampler" / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, file)
    assert main(["inspect", "--weights", str(tmp_path / "trainer"), str(tmp_path / "sampler")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Only these moved: lm_head.weight. If A and B" in said and "Did not move" not in said


def test_json_holds_every_tensor_and_no_nan(odd: tuple[str, str], capsys: Capture) -> None:
    assert main(["inspect", "--weights", *odd, "--format", "json"]) == 0
    out = capsys.readouterr().out

    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    found = json.loads(out, parse_constant=refuse)
    assert list(found) == [
        *("schema_version", "counts", "path_a", "path_b", "tensors", "families", "unmoved_families", "config"),
        "notices",
    ]
    assert sum(found["counts"].values()) == len(found["tensors"])
    assert sum(sum(family["states"].values()) for family in found["families"]) == len(found["tensors"])
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    moved = by_name["model.layers.1.mlp.down_proj.weight"]
    assert list(moved) == ["name", "family", "state", "a", "b", "difference", "tied"]
    assert list(moved["a"]) == ["shape", "dtype", "hash", "nan", "inf"]
    assert list(moved["difference"]) == [
        *("elements", "finite", "unchanged", "largest", "largest_at", "rms_a", "rms_change", "relative", "rounding")
    ]
    assert moved["state"] == "changed" and moved["difference"]["relative"] == pytest.approx(0.25)
    assert by_name["lm_head.weight"]["state"] == "identical"
    assert by_name["model.norm.weight"]["state"] == "rounded"
    assert by_name["model.embed_tokens.weight"]["difference"] is None


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_same_question_gives_the_same_bytes(odd: tuple[str, str], form: str) -> None:
    command = [sys.executable, "-m", "mismatch_probe", "inspect", "--weights", *odd, "--format", form]
    outputs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 1 and b"\x1b" not in outputs.pop()


@pytest.mark.parametrize("wrong", [["--weights"], ["--weights", "0"], [RUN, "--weights", "0", "40", "41"]])
def test_wrong_numbers_of_arguments_are_usage_errors(wrong: list[str]) -> None:
    assert main(["inspect", *wrong]) == 2


def test_what_is_not_there_is_one_line_and_exit_2(tmp_path: Path, capsys: Capture) -> None:
    for arguments, text in (
        ([RUN, "--weights", "0", "7"], "no trainer checkpoint of version 7. There are versions 0-40:10, 41"),
        (["--weights", str(STEPS / "step_000000"), str(tmp_path / "nowhere")], "nowhere: no such checkpoint"),
        (["--weights", str(STEPS / "step_000000"), str(tmp_path)], str(tmp_path)),
        ([str(tmp_path), "--weights", "0", "1"], "no run found"),
    ):
        assert main(["inspect", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and text in error


def test_nothing_in_common_is_exit_5(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({f"{name}.weight": torch.ones(2)}, tmp_path / name / "model.safetensors")
    assert main(["inspect", "--weights", str(tmp_path / "a"), str(tmp_path / "b")]) == 5
    assert "2 tensors: 1 only in A, 1 only in B." in capsys.readouterr().out


def test_names_from_files_are_no_commands_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    for name, value in (("a", "\x07"), ("b", [1] * 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"field\x1b[31m": value}))
        save_file({"w\x1b[31m[bold]": torch.ones(2)}, tmp_path / name / "model.safetensors")
    assert main(["inspect", "--weights", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "w?[31m[bold]" in out and "field?[31m" in out and out.replace("\n", "").isprintable()
    assert '"\\u0007" in A, [1, 1,' in " ".join(out.split()) and "... in B" in " ".join(out.split())


def test_a_damaged_config_is_named(tmp_path: Path, capsys: Capture) -> None:
    save_model(tmp_path / "a", "qwen3")
    for text in ("[1]", '{"vocab_size": '):
        (tmp_path / "a" / "config.json").write_text(text)
        assert main(["inspect", "--weights", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
        assert "config.json" in capsys.readouterr().err
