"""ROLL's rollout dumps. The fixtures are what its own code wrote from ``reader_cases.cases()`` with tensordict 0.15.3:

``roll_3077befc.pkl`` at v0.2.0 (2026-02-04), where the dump first appeared; ``roll_8eb27cc2.pkl`` at 2026-08-19, where
the pickled state has a fourth part. Its ``postprocess_generate`` padded and shifted them.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.readers import roll as reader
from mismatch_probe.run import Rollouts
from tests.reader_cases import assert_same, cases
from tests.reader_fuzz import fuzz
from tests.roll_writer import fields, shifted, write
from tests.stand_ins import TouchesAFile, named

FIXTURES = Path(__file__).parent / "fixtures" / "roll"
NOT_HELD = ("sampler_version", "advantage", "finish_reason")
WITHOUT_TRAINER = (*NOT_HELD, "trainer_logprob")
PROMPT_IDS = {"prompt_id": torch.tensor([[case.group] for case in cases()])}


def load(run_dir: Path, *overrides: str) -> Rollouts:
    return open_run(run_dir, ReadOptions(overrides=overrides)).steps[0].load()


@pytest.mark.parametrize("name", ["roll_3077befc", "roll_8eb27cc2"])
def test_what_its_own_code_wrote_is_read(tmp_path: Path, name: str) -> None:
    shutil.copy(FIXTURES / f"{name}.pkl", tmp_path / "step_000004.pkl")
    run = open_run(tmp_path)
    assert run.format == "roll" and [step.index for step in run.steps] == [4]
    rollouts = run.steps[0].load()
    assert_same(rollouts, cases(), without=WITHOUT_TRAINER)
    assert ["the response is empty" in r.reason for r in rollouts.rejected] == [True]


@pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "apart"])
@pytest.mark.parametrize("remote", [True, False], ids=["four-parts", "three-parts"])
def test_every_form(tmp_path: Path, consolidated: bool, remote: bool) -> None:
    write(tmp_path / "train", fields(cases()) | PROMPT_IDS, None, 4, consolidated, remote)
    rollouts = load(tmp_path)
    assert_same(rollouts, cases(), without=WITHOUT_TRAINER)
    assert not rollouts.notices
    assert sum(other.matches(tmp_path) for other in _READERS) == 1


def test_t_minus_1_arrays_are_shifted_right(tmp_path: Path) -> None:
    batch = fields(cases())
    width = batch["input_ids"].shape[1]
    assert batch["infer_logprobs"].shape[1] == width - 1
    write(tmp_path / "train", batch | {"old_log_probs": shifted(cases(), width)})
    assert_same(load(tmp_path), cases(), without=NOT_HELD)
    write(tmp_path / "train", batch | {"infer_logprobs": torch.zeros(len(cases()), width)})
    with pytest.raises(BadFileError, match="infer_logprobs has shape"):
        load(tmp_path)


def test_bypass_copies_are_reported_as_copies(tmp_path: Path) -> None:
    batch = fields(cases())
    write(tmp_path / "train", batch | {"old_log_probs": batch["infer_logprobs"]})
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all()
    assert any("enable_old_logprobs_recompute=true" in text for text in rollouts.notices)


def test_all_zero_trainer_logprobs_are_not_computed(tmp_path: Path) -> None:
    batch = fields(cases())
    write(tmp_path / "train", batch | {"old_log_probs": torch.zeros_like(batch["infer_logprobs"])})
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all()
    assert any("not computed" in text for text in rollouts.notices)


def test_without_sampler_log_probs_the_switch_is_named(tmp_path: Path) -> None:
    batch = fields(cases())
    del batch["infer_logprobs"]
    write(tmp_path / "train", batch)
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all()
    assert any("generating_args.logprobs=0" in text for text in rollouts.notices)


def test_agentic_runs_group_by_trajectory_and_score_the_last_token(tmp_path: Path) -> None:
    batch = fields(cases())
    scores = torch.zeros_like(batch["input_ids"], dtype=torch.float32)
    scores[:, -1] = batch["scores"]
    names = [f"env_{case.group}_7" for case in cases()]
    batch["response_mask"] = batch["response_mask"].bool()
    write(tmp_path / "train", batch | {"scores": scores}, {"traj_group_id": names})
    rollouts = load(tmp_path)
    assert_same(rollouts, cases(), without=WITHOUT_TRAINER)
    assert rollouts.group_id[0] == "step4-env_0_7"


def test_groups_without_ids(tmp_path: Path) -> None:
    write(tmp_path / "train", fields(cases()))
    rollouts = load(tmp_path)
    assert_same(rollouts, cases(), without=WITHOUT_TRAINER)
    assert any("equal prompt tokens" in text for text in rollouts.notices)
    assert load(tmp_path, "group_size=2").group_of_sequence.tolist() == [0, 0, 1, 1, 2]


def test_object_columns_may_hold_tensors_and_classes(tmp_path: Path) -> None:
    """As multi-modal prompts do; nothing is read from them."""

    class Image:
        def __init__(self) -> None:
            self.pixels = torch.ones(2, 2)

    columns = {"multi_modal_data": [{"image": Image(), "grid": torch.ones(3)} for _ in cases()]}
    with named("PIL.Image.Image", Image):
        write(tmp_path / "train", fields(cases()) | PROMPT_IDS, columns)
    assert_same(load(tmp_path), cases(), without=WITHOUT_TRAINER)


@pytest.mark.parametrize("consolidated", [True, False])
def test_bfloat16_and_int32_tensors_are_read(tmp_path: Path, consolidated: bool) -> None:
    batch = fields(cases())
    rounded = batch["infer_logprobs"].bfloat16()
    batch |= {"infer_logprobs": rounded, "input_ids": batch["input_ids"].int()}
    write(tmp_path / "train", batch, consolidated=consolidated)
    rollouts = load(tmp_path)
    wanted = rounded.float()[batch["response_mask"][:, 1:] != 0]
    assert rollouts.sampler_logprob[rollouts.loss_mask].tolist() == wanted.tolist()


def test_sampling_settings_are_taken_from_the_dump(tmp_path: Path) -> None:
    config = {"temperature": 0.9, "top_p": 0.95, "top_k": 100, "num_return_sequences": 2}
    write(tmp_path / "train", fields(cases()), meta={"generation_config": config})
    run = open_run(tmp_path)
    assert (run.settings.temperature, run.settings.top_p, run.settings.top_k) == (0.9, 0.95, 100)
    assert run.settings.sources["temperature"] == "step_000004.pkl: generation_config.temperature"
    assert any("logprobs_mode" in text for text in run.notices)
    run = open_run(tmp_path, ReadOptions(overrides=("logprobs_mode=raw",)))
    assert not any("logprobs_mode" in text for text in run.notices)


def test_checkpoint_n_holds_version_n_plus_1(tmp_path: Path) -> None:
    write(tmp_path / "rollout_mock_dumps" / "train", fields(cases()), step=5)
    for number in (4, 9):
        (tmp_path / "actor_train-0-G0" / f"checkpoint-{number}").mkdir(parents=True)
    run = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=0",)))
    assert run.trainer_version(5) == 5
    assert run.trainer_checkpoint(5) == tmp_path / "actor_train-0-G0" / "checkpoint-4"
    assert run.trainer_checkpoint(4) is None
    assert set(run.steps[0].load().sampler_version.tolist()) == {5}
    assert any("versions 5 to 10" in text for text in run.notices)


@pytest.mark.parametrize("missing", ["input_ids", "attention_mask", "response_mask"])
def test_a_batch_without_a_needed_tensor_is_refused(tmp_path: Path, missing: str) -> None:
    batch = fields(cases())
    del batch[missing]
    file = write(tmp_path / "train", batch)
    with pytest.raises(BadFileError, match=f"{missing} (is missing|has shape None)") as error:
        load(tmp_path)
    assert str(file) in str(error.value)
    rollouts = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[0].load()
    assert len(rollouts) == 0 and [r.row for r in rollouts.rejected] == [0]


def test_empty_cut_and_foreign_files(tmp_path: Path) -> None:
    file = write(tmp_path / "train", fields(cases()))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadFileError, match="step_000004"):
        load(tmp_path)
    for other in (b"", b"\x80\x04garbage", pickle.dumps({"sequences": 1})):
        file.write_bytes(other)
        assert not any(other.matches(tmp_path) for other in _READERS)
    with pytest.raises(InputError, match="rollout_mock"):
        open_run(tmp_path, format="roll")


@pytest.mark.parametrize("inside", [False, True], ids=["outer-pickle", "tensors"])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, inside: bool) -> None:
    touched = tmp_path / "touched"
    hostile = TouchesAFile(str(touched))
    if inside:
        write(tmp_path / "train", fields(cases()) | {"x": hostile}, consolidated=False)
    else:
        write(tmp_path / "train", fields(cases()), meta={"x": hostile})
    with pytest.raises(BadFileError, match="nothing was run"):
        load(tmp_path)
    assert not touched.exists()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_text_log_is_answered_with_what_to_record(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"id": ["0"], "prompt": ["Q"], "responses": ["A"], "scores": [1.0], "sampling_params": ["{}"]}
    data = (json.dumps(table | {"global_step": [3]}) + "\n").encode()
    file = tmp_path / f"rollout_dump_data.step_3.jsonl{suffix}"
    file.write_bytes(gzip.compress(data) if suffix else data)
    assert [other.FORMAT for other in _READERS if other.matches(tmp_path)] == ["roll"]
    with pytest.raises(NothingToJudgeError, match=r"rollout_mock\.enable=true rollout_mock\.mode=dump"):
        open_run(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 5
    assert "rollout_mock.dump_dir" in capsys.readouterr().err
    write(tmp_path / "train", fields(cases()))
    assert open_run(tmp_path).steps, "a dump beside the text log is read"


def test_text_of_others_is_not_taken_for_rolls(tmp_path: Path) -> None:
    for content in (b"", b"{}\n", b'[{"responses": 1}]\n', b"\xff\xfe\x00"):
        (tmp_path / "rollout_dump_data.step_3.jsonl").write_bytes(content)
        assert not reader.matches(tmp_path)


def test_inspect_and_decompose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = fields(cases())
    trainer = shifted(cases(), batch["input_ids"].shape[1])
    write(tmp_path / "train", batch | PROMPT_IDS | {"old_log_probs": trainer})
    assert main(["inspect", str(tmp_path)]) == 0
    assert "roll" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path)]) == 0
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    d = np.array(
        [t - s for case in cases() for t, s, m in zip(case.trainer, case.sampler, case.mask, strict=True) if m]
    )
    weights = np.exp(d)
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(d) * (weights**2).sum()))


@pytest.mark.parametrize("consolidated", [True, False])
def test_damaged_files_read_or_end_in_a_clean_error(consolidated: bool) -> None:
    def make(run_dir: Path) -> Path:
        return write(run_dir / "train", fields(cases()) | PROMPT_IDS, None, 4, consolidated)

    fuzz(make)
