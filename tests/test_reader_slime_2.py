"""slime's traps: what looks like data and is not, or is data of something else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers import _READERS, ReadOptions, open_run, pickles
from mismatch_probe.run import Rollouts
from tests.reader_cases import Case, cases
from tests.reader_fuzz import fuzz
from tests.slime_dump import sample, train_sample, write_rollout, write_train_1, write_train_2

STEP = 3


def filled() -> list[Case]:
    return [case for case in cases(STEP) if case.response and len(set(case.version)) == 1]


def write(path: Path, changes: dict | None = None, train: dict | None = None, steps: int = 1) -> Path:
    """Both files of one rollout; ``changes`` and ``train`` go into the first sample of each."""
    made = [sample(case, at, STEP, **(changes or {} if at == 0 else {})) for at, case in enumerate(filled())]
    write_rollout(path, made, STEP)
    rows = [train_sample(case, at) for at, case in enumerate(filled())]
    rows[0].update(train or {})
    write_train_2(path, rows, STEP, steps)
    return path


def load(path: Path, **options) -> Rollouts:
    return open_run(path, ReadOptions(**options)).steps[0].load()


def row(rollouts: Rollouts, at: int) -> slice:
    return slice(int(rollouts.response.offsets[at]), int(rollouts.response.offsets[at + 1]))


def test_a_loss_mask_of_none_is_all_ones(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, {"loss_mask": None}, {"loss_masks": None}))
    assert rollouts.loss_mask[row(rollouts, 0)].all()


def test_the_mask_that_was_trained_with_wins(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, {"loss_mask": [1, 1, 1, 1]}, {"loss_masks": torch.tensor([1, 0, 0, 1])}))
    assert rollouts.loss_mask[row(rollouts, 0)].tolist() == [True, False, False, True]


def test_tool_tokens_at_zero_are_not_counted(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path))
    tools = row(rollouts, 1)
    assert (rollouts.sampler_logprob[tools] == 0.0).tolist() == (~rollouts.loss_mask[tools]).tolist()


def test_a_removed_sample_counts_no_token(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, {"remove_sample": True}))
    assert not rollouts.loss_mask[row(rollouts, 0)].any() and rollouts.loss_mask[row(rollouts, 2)].all()
    assert "1 samples have remove_sample set" in " ".join(rollouts.notices)


@pytest.mark.parametrize("reward, read", [(0.5, 0.5), ({"acc": 1.0, "format": 0.0}, np.nan), (None, np.nan)])
def test_a_reward_may_be_a_table(tmp_path: Path, reward: object, read: float) -> None:
    assert np.array_equal(load(write(tmp_path, {"reward": reward})).reward[:1], [read], equal_nan=True)


def test_the_kept_set_of_top_p_is_said(tmp_path: Path) -> None:
    kept = {"rollout_top_p_token_ids": torch.arange(4), "rollout_top_p_token_offsets": torch.arange(5)}
    assert "give it with --set top_p=VALUE" in " ".join(load(write(tmp_path, kept)).notices)
    assert "give it with" not in " ".join(load(tmp_path, overrides=("top_p=0.9",)).notices)


def test_logprobs_from_inside_the_training_pass_are_said(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, steps=2))
    assert "--use-rollout-logprobs" in " ".join(rollouts.notices) and "2 optimizer steps" in " ".join(rollouts.notices)
    assert not np.isnan(rollouts.trainer_logprob[rollouts.loss_mask]).any()
    assert "optimizer steps" not in " ".join(load(write(tmp_path / "one")).notices)


def test_a_train_file_without_logprobs_is_said(tmp_path: Path) -> None:
    rows = [train_sample(case, at) for at, case in enumerate(filled())]
    for each in rows:
        del each["log_probs"]
    write_train_2(tmp_path, rows, STEP)
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.trainer_logprob).all() and not np.isnan(rollouts.advantage).any()
    assert "--get-mismatch-metrics" in " ".join(rollouts.notices)


def test_eval_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    made = [sample(case, at, STEP) for at, case in enumerate(filled())]
    write_rollout(tmp_path, made, 0, name="eval_0.pt")
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [STEP]
    assert run.notices[0].startswith("1 eval_*.pt files")


def test_numpy_arrays_of_older_routed_experts_are_read(tmp_path: Path) -> None:
    experts = {"rollout_routed_experts": np.zeros((6, 2, 2), dtype=np.int32), "metadata": {"x": np.float32(1.5)}}
    assert len(load(write(tmp_path, experts))) == len(filled())


def test_routed_experts_are_not_even_read(tmp_path: Path) -> None:
    experts = {"rollout_routed_experts": torch.full((6, 2, 2), 7, dtype=torch.int32)}
    file = write(tmp_path, experts, experts) / "rollout_data" / "3.pt"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(torch.full((24,), 7, dtype=torch.int32).numpy().tobytes(), bytes(96)))
    assert file.read_bytes() != whole  # its checksum is now wrong, which only reading would notice
    assert len(load(tmp_path)) == len(filled())


def test_large_tensors_may_take_the_memory_that_their_file_explains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_ROOM", 1 << 20)
    file = write_train_2(tmp_path, [], STEP, large=torch.zeros(16 << 20))
    assert file.stat().st_size > 64 << 20
    assert len(load(tmp_path)) == 0


def test_dropped_samples_count_no_token(tmp_path: Path) -> None:
    write(tmp_path)
    write_train_2(tmp_path, [train_sample(case, at) for at, case in enumerate(filled())][:2], STEP)
    rollouts = load(tmp_path)
    counted = np.bincount(rollouts.sequence_of_token[rollouts.loss_mask], minlength=len(rollouts))
    assert (counted > 0).tolist() == [True, True, False, False]
    assert "2 samples were sampled and not trained on" in " ".join(rollouts.notices)


def test_a_rollout_sampled_again_after_a_resume_is_not_joined_with_the_old_training(tmp_path: Path) -> None:
    write(tmp_path)
    again = [sample(case, at, STEP) for at, case in enumerate(filled())]
    for each in again:
        each["tokens"] = [*each["tokens"][:-1], 63]
    write_rollout(tmp_path, again, STEP)
    rollouts = load(tmp_path)
    assert len(rollouts) == len(filled()) and np.isnan(rollouts.trainer_logprob).all()
    assert "holds other samples than the rollout file" in " ".join(rollouts.notices)


def test_a_copied_file_counts_once_and_the_newer_wins(tmp_path: Path) -> None:
    write(tmp_path)
    made = [sample(case, at, STEP, reward=7.0) for at, case in enumerate(filled())]
    copy = write_rollout(tmp_path, made, STEP, name="3_again.pt")
    later = (tmp_path / "rollout_data" / "3.pt").stat().st_mtime_ns + 10**9
    os.utime(copy, ns=(later, later))
    run = open_run(tmp_path)
    rollouts = run.steps[0].load()
    assert len(run.steps) == 1 and rollouts.reward.tolist() == [7.0] * len(filled())
    assert "the newer, 3_again.pt, counts" in " ".join(run.notices)


def test_samples_that_share_an_index_are_all_kept(tmp_path: Path) -> None:
    rollouts = load(write(tmp_path, {"index": 101}, {"sample_index": 101}))
    assert len(set(rollouts.sequence_id)) == len(filled())
    assert not np.isnan(rollouts.trainer_logprob[rollouts.loss_mask]).any()


@pytest.mark.parametrize("bad", [{"tokens": "text"}, {"response_length": 99}, {"tokens": None}, {"loss_mask": [1]}])
def test_a_sample_that_does_not_fit_is_set_aside(tmp_path: Path, bad: dict) -> None:
    path = write(tmp_path, bad)
    (path / "train_data" / "3.pt").unlink()
    rollouts = load(path)
    assert len(rollouts) == len(filled()) - 1 and rollouts.rejected[0].row == 1


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\3\4" + bytes(40)])
@pytest.mark.parametrize("place", ["rollout_data/4.pt", "train_data/4.pt"])
def test_a_file_that_cannot_be_read_ends_the_command_or_is_set_aside(tmp_path: Path, data: bytes, place: str) -> None:
    write(tmp_path)
    (tmp_path / place).write_bytes(data)
    with pytest.raises(BadFileError, match=r"4\.pt: not a readable torch archive"):
        open_run(tmp_path).steps[1].load()
    kept = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[1].load()
    assert len(kept) == 0 and kept.rejected[0].file == place


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "rollout_data" / "3.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadFileError, match=r"3\.pt"):
        load(tmp_path)
    # The train file still holds the rest.
    assert len(load(tmp_path, skip_bad_rows=True)) == len(filled())


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("kind", ["rollout", "train", "train of a rank"])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, kind: str) -> None:
    hostile = Hostile(tmp_path / "touched")
    if kind == "rollout":
        write_rollout(tmp_path, [sample(filled()[0], 0, STEP, metadata={"x": hostile})], STEP)
    elif kind == "train":
        write_train_2(tmp_path, [train_sample(filled()[0], 0)], STEP, raw_reward=hostile)
    else:
        write_train_1(tmp_path, filled()[:1], STEP)
        torch.save({"rollout_id": STEP, "rank": 1, "rollout_data": hostile}, tmp_path / "train_data" / "3_1.pt")
    with pytest.raises(BadFileError, match="nothing was run"):
        load(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_two_runs_below_are_asked_about(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert open_run(tmp_path).steps[0].index == STEP
    write(tmp_path / "b")
    with pytest.raises(InputError, match=r"several slime runs \(a, b\)"):
        open_run(tmp_path)


def test_only_this_reader_matches(tmp_path: Path) -> None:
    write(tmp_path / "both")
    write_train_1(tmp_path / "ranks", filled(), STEP)
    other = tmp_path / "other" / "rollout_data"
    other.mkdir(parents=True)
    torch.save({"tensordict": 1, "keys": [], "tags": []}, other / "3.pt")
    for name, wanted in (("both", ["slime"]), ("ranks", ["slime"]), ("other", [])):
        assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path / name)] == wanted


def test_inspect_and_decompose_give_the_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    write(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "slime" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    tokens = pd.read_parquet(tmp_path / "mismatch_probe" / "tokens" / "step=3" / "part-0.parquet")
    wanted = [t - s for case in filled() for t, s, m in zip(case.trainer, case.sampler, case.mask, strict=True) if m]
    assert tokens["log_ratio"].tolist() == pytest.approx(wanted, abs=1e-12)
    weights = np.exp(wanted)
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    assert steps.loc[0, "ess_total_token"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", ["rollout", "train", "train of a rank"])
def test_damaged_files_read_or_end_in_a_clean_error(kind: str, skip: bool) -> None:
    def make(run_dir: Path) -> Path:
        write(run_dir)
        if kind == "rollout":
            return run_dir / "rollout_data" / "3.pt"
        if kind == "train of a rank":
            (run_dir / "train_data" / "3.pt").unlink()
            write_train_1(run_dir, filled(), STEP, cp=2)
            return run_dir / "train_data" / "3_1.pt"
        return run_dir / "train_data" / "3.pt"

    fuzz(make, skip_bad_rows=skip)
