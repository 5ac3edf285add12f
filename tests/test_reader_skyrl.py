"""SkyRL's training batches. The fixtures are what its own code wrote from ``reader_cases.cases()``:

``skyrl_0.3.0.pkl`` the released package, with two rows of batch padding; ``skyrl_train_*.pkl`` the earlier package
``skyrl-train`` at the commit in the name (2025-08-14: raw torch bytes; 2026-01-28: numpy dicts), both with prompts
padded on the left and responses on the right.
"""

from __future__ import annotations

import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, UsageError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import Rollouts
from tests.reader_cases import EOS, Case, assert_same, cases
from tests.reader_fuzz import fuzz
from tests.skyrl_writer import boundaries, fields, torch_bytes, write
from tests.stand_ins import TouchesAFile

FIXTURES = Path(__file__).parent / "fixtures" / "skyrl"
NOT_HELD = ("sampler_version", "reward", "finish_reason")


def by_group() -> list[Case]:
    return sorted(cases(), key=lambda case: case.group)


def load(run_dir: Path, *overrides: str) -> Rollouts:
    return open_run(run_dir, ReadOptions(overrides=overrides)).steps[0].load()


@pytest.mark.parametrize("name", ["skyrl_0.3.0", "skyrl_train_81f2973f5", "skyrl_train_f4b8cad82"])
def test_what_its_own_code_wrote_is_read(tmp_path: Path, name: str) -> None:
    shutil.copy(FIXTURES / f"{name}.pkl", tmp_path / "global_step_4_training_input.pkl")
    run = open_run(tmp_path)
    assert run.format == "skyrl" and [step.index for step in run.steps] == [4]
    rollouts = run.steps[0].load()
    assert_same(rollouts, by_group(), without=NOT_HELD, order=False)
    assert ["the response is empty" in r.reason for r in rollouts.rejected] == [True]
    padded = [text for text in rollouts.notices if "2 rows that only fill the batch up" in text]
    assert len(padded) == (name == "skyrl_0.3.0")


@pytest.mark.parametrize("encoding", ["numpy", "numpy without format", "torch", "bytes"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "left-and-right"])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "dict"])
def test_every_form_and_padding(tmp_path: Path, encoding: str, left: bool, reduced: bool) -> None:
    write(
        tmp_path, fields(by_group(), left), {"policy_prompt_boundaries": boundaries(by_group())}, 4, encoding, reduced
    )
    rollouts = load(tmp_path)
    assert_same(rollouts, by_group(), without=NOT_HELD)
    assert not rollouts.notices
    assert sum(reader.matches(tmp_path) for reader in _READERS) == 1


def test_bfloat16_log_probs_are_read(tmp_path: Path) -> None:
    """numpy has no bfloat16: SkyRL falls back to torch.save for that field alone."""
    batch = fields(by_group())
    rounded = torch.from_numpy(batch["rollout_logprobs"]).bfloat16()
    write(tmp_path, {**batch, "rollout_logprobs": {"format": "torch", "data": torch_bytes(rounded)}}, {})
    wanted = rounded.float().numpy()[batch["response_mask"] != 0]
    assert load(tmp_path).sampler_logprob.tolist() == wanted.tolist()


def test_groups_without_boundaries(tmp_path: Path) -> None:
    write(tmp_path, fields(by_group()), {})
    rollouts = load(tmp_path)
    assert_same(rollouts, by_group(), without=NOT_HELD)
    assert any("equal prompt tokens" in text for text in rollouts.notices)
    sized = load(tmp_path, "group_size=3")
    assert sized.group_of_sequence.tolist() == [0, 0, 1, 1, 1]
    assert any("group_size" in text for text in sized.notices)


def test_step_wise_trajectories_are_grouped_by_their_ids(tmp_path: Path) -> None:
    """Turns of one trajectory have prompts of their own; before 2026-04 only trajectory ids told the group."""
    rows = [case for case in by_group() if case.response]
    write(tmp_path, fields(rows), {"trajectory_ids": [f"p_{case.group}_{n}" for n, case in enumerate(rows)]})
    assert_same(load(tmp_path), rows, without=NOT_HELD)


def test_faked_eos_logprob_is_null(tmp_path: Path) -> None:
    rows = by_group()
    rows[0].sampler[-1] = 0.0
    assert rows[0].response[-1] == EOS and rows[0].mask[-1] == 1
    write(tmp_path, fields(rows), {})
    rollouts = load(tmp_path)
    last = rollouts.response.offsets[1] - 1
    assert math.isnan(rollouts.sampler_logprob[last]) and rollouts.trainer_logprob[last] == rows[0].trainer[-1]
    assert np.isfinite(rollouts.sampler_logprob[:last]).all()
    assert any(text.startswith("step 4: 1 responses end in a loss token") for text in rollouts.notices)
    kept = load(tmp_path, f"eos_token_id={EOS + 1}")
    assert kept.sampler_logprob[last] == 0.0, "declared not to be an EOS: a probability that rounds to 1"


def test_action_log_probs_may_be_null(tmp_path: Path) -> None:
    write(tmp_path, {**fields(by_group()), "action_log_probs": None}, {})
    rollouts = load(tmp_path)
    assert_same(rollouts, by_group(), without=(*NOT_HELD, "trainer_logprob"))
    assert any("action_log_probs is null" in text for text in rollouts.notices)


def test_all_zero_trainer_logprobs_are_not_computed(tmp_path: Path) -> None:
    batch = fields(by_group())
    write(tmp_path, {**batch, "action_log_probs": np.zeros_like(batch["action_log_probs"])}, {})
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all()
    assert any("all 0.0, taken as not computed" in text for text in rollouts.notices)


def test_without_sampler_log_probs_the_switch_is_named(tmp_path: Path) -> None:
    write(tmp_path, {**fields(by_group()), "rollout_logprobs": None}, {})
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all()
    assert any("generator.sampling_params.logprobs=1" in text for text in rollouts.notices)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"response_mask": None}, "no 'response_mask'"),
        ({"loss_mask": np.zeros((6, 2), np.float32)}, "loss_mask has shape"),
        ({"attention_mask": np.zeros((6, 2), np.int64)}, "do not fit"),
        ({"sequences": np.zeros(6, np.int64)}, "sequences has shape"),
    ],
)
def test_a_batch_of_another_shape_is_refused(tmp_path: Path, change: dict, reason: str) -> None:
    file = write(tmp_path, fields(by_group()) | change, {})
    with pytest.raises(BadFileError, match=reason) as error:
        load(tmp_path)
    assert str(file) in str(error.value)
    rollouts = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[0].load()
    assert len(rollouts) == 0 and [r.row for r in rollouts.rejected] == [0]


def test_tensor_lists_are_refused_where_a_tensor_belongs(tmp_path: Path) -> None:
    write(tmp_path, fields(by_group()), {}, encoding="tensor_list")
    with pytest.raises(BadFileError, match="encoded as 'tensor_list'"):
        load(tmp_path)


def test_a_row_whose_masks_contradict_is_set_aside(tmp_path: Path) -> None:
    batch = fields(by_group())
    batch["attention_mask"][0, -2] = 0
    batch["response_mask"][1, -2] = 0
    write(tmp_path, batch, {})
    rollouts = load(tmp_path)
    reasons = {r.row: r.reason for r in rollouts.rejected}
    assert "gaps between real tokens" in reasons[1] and "response_mask has gaps" in reasons[2]
    assert len(rollouts) == 3


def test_empty_cut_and_foreign_files(tmp_path: Path) -> None:
    file = write(tmp_path, fields(by_group()), {})
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadFileError, match="global_step_4"):
        load(tmp_path)
    for other in (b"", b"\x80\x04garbage", pickle.dumps({"sequences": 1})):
        file.write_bytes(other)
        assert not any(reader.matches(tmp_path) for reader in _READERS)


@pytest.mark.parametrize("inside", [False, True], ids=["outer-pickle", "tensor"])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, inside: bool) -> None:
    touched = tmp_path / "touched"
    hostile = TouchesAFile(str(touched))
    tensor = {"format": "torch", "data": torch_bytes(hostile)}
    batch = fields(by_group()) | ({"advantages": tensor} if inside else {})
    write(tmp_path, batch, {} if inside else {"x": hostile})
    with pytest.raises(BadFileError, match="nothing was run"):
        load(tmp_path)
    assert not touched.exists()


def test_versions_come_from_the_lag_that_the_user_states(tmp_path: Path) -> None:
    write(tmp_path, fields(by_group()), {}, step=4)
    run = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=1",)))
    assert run.trainer_version(4) == 3
    assert set(run.steps[0].load().sampler_version.tolist()) == {2}


def test_checkpoints_are_found_beside_the_dump(tmp_path: Path) -> None:
    write(tmp_path, fields(by_group()), {})
    for version in (3, 10):
        (tmp_path / f"global_step_{version}" / "policy").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "dumped_data"):
        run = open_run(given)
        assert run.trainer_checkpoint(3) == tmp_path / "global_step_3" / "policy"
        assert any("versions 3 to 10" in text for text in run.notices)
    with pytest.raises(UsageError, match="version"):
        open_run(tmp_path, ReadOptions(overrides=("checkpoints='nowhere'",)))


def test_temperature_is_asked_for_until_it_is_known(tmp_path: Path) -> None:
    write(tmp_path, fields(by_group()), {})
    asked = [any("logprobs_mode" in text for text in open_run(tmp_path).notices)]
    for given in (("temperature=1.0",), ("temperature=0.7",), ("temperature=0.7", "logprobs_mode=raw")):
        asked.append(any("logprobs_mode" in t for t in open_run(tmp_path, ReadOptions(overrides=given)).notices))
    assert asked == [True, False, True, False]


def test_inspect_and_decompose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, fields(by_group()), {"policy_prompt_boundaries": boundaries(by_group())})
    assert main(["inspect", str(tmp_path)]) == 0
    assert "skyrl" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path)]) == 0
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    rows = [case for case in by_group() if case.response]
    d = np.array([t - s for case in rows for t, s, m in zip(case.trainer, case.sampler, case.mask, strict=True) if m])
    weights = np.exp(d)
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(d) * (weights**2).sum()))


@pytest.mark.parametrize(("reduced", "encoding"), [(True, "numpy"), (True, "torch"), (False, "bytes")])
def test_damaged_files_read_or_end_in_a_clean_error(reduced: bool, encoding: str) -> None:
    def make(run_dir: Path) -> Path:
        return write(
            run_dir, fields(by_group()), {"policy_prompt_boundaries": boundaries(by_group())}, 4, encoding, reduced
        )

    fuzz(make)
