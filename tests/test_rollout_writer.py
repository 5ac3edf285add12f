from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_probe.errors import OutputError, UsageError
from mismatch_probe.log import RolloutWriter
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Rollouts

KINDS = {
    "list": list,
    "numpy": np.asarray,
    "torch": torch.as_tensor,
    "bfloat16": lambda values: torch.tensor(values, dtype=torch.bfloat16 if isinstance(values[0], float) else None),
}


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def row(name: str | None = "a", **changes) -> dict:
    return {
        "sequence_id": name,
        "group_id": "g",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "sampler_logprobs": [-0.5, -0.25, -0.125],
        "loss_mask": [1, 0, 1],
        "sampler_version": 2,
        **changes,
    }


def load(path: Path, at: int = 0, **options) -> Rollouts:
    return open_run(path, ReadOptions(**options)).steps[at].load()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "rollouts").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_read_back_as_given(tmp_path: Path, kind: str) -> None:
    as_given = KINDS[kind]
    full = row(
        prompt_ids=as_given([1, 2]),
        response_ids=as_given([3, 4, 5]),
        sampler_logprobs=as_given([-0.5, -0.25, -0.125]),
        loss_mask=as_given([1, 0, 1]),
        sampler_version=as_given([2, 2, 3]),
        trainer_logprobs=as_given([-1.0, -2.0, -4.0]),
        advantages=as_given([0.5, 0.0, -0.5]),
        reward=1.5,
        finish_reason="stop",
    )
    with RolloutWriter(tmp_path).step(7) as step:
        step.add(**full)
        step.add(**row("b"))
    rollouts = load(tmp_path)
    assert open_run(tmp_path).steps[0].index == 7
    assert rollouts.sequence_id.tolist() == ["a", "b"] and rollouts.group_id.tolist() == ["g", "g"]
    assert rollouts.prompt[0].tolist() == [1, 2] and rollouts.response[0].tolist() == [3, 4, 5]
    assert rollouts.sampler_logprob.tolist() == [-0.5, -0.25, -0.125] * 2
    assert rollouts.loss_mask.tolist() == [True, False, True] * 2
    assert rollouts.sampler_version.tolist() == [2, 2, 3, 2, 2, 2]
    assert rollouts.trainer_logprob[:3].tolist() == [-1.0, -2.0, -4.0]
    assert np.isnan(rollouts.trainer_logprob[3:]).all()  # absent is null, never 0.0
    assert rollouts.advantage[:3].tolist() == [0.5, 0.0, -0.5] and np.isnan(rollouts.advantage[3:]).all()
    assert rollouts.reward[0] == 1.5 and np.isnan(rollouts.reward[1])
    assert rollouts.finish_reason.tolist() == ["stop", None]


def test_columns_that_nobody_gave_are_not_written(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path).step(0) as step:
        step.add(prompt_ids=[1], response_ids=[2, 3], sampler_logprobs=None, sampler_version=None)
    table = pq.read_table(tmp_path / "rollouts" / "step_000000.parquet")
    assert table.column_names == ["sequence_id", "group_id", "prompt_ids", "response_ids"]
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all() and (rollouts.sampler_version == UNKNOWN_VERSION).all()


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (np.array([-0.1, -0.3], dtype=np.float32), "float"),
        (torch.tensor([-0.1, -0.3], dtype=torch.bfloat16), "float"),
        ([float(np.float32(-0.1)), None], "float"),
        ([-0.1, -0.3], "double"),
        ([-1e300, -0.5], "double"),
    ],
)
def test_log_probs_keep_their_last_bit(tmp_path: Path, values, kept: str) -> None:
    with RolloutWriter(tmp_path).step(0) as step:
        step.add(**row(response_ids=[3, 4], sampler_logprobs=values, loss_mask=None))
    column = pq.read_table(tmp_path / "rollouts" / "step_000000.parquet")["sampler_logprobs"]
    assert str(column.type.value_type) == kept
    given = values.float().tolist() if isinstance(values, torch.Tensor) else list(values)
    assert [None if x != x else x for x in column[0].as_py()] == given


def test_large_ids_are_int64_and_small_ones_int32(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path).step(0) as step:
        step.add(**row(prompt_ids=[2**31]))
    schema = pq.read_schema(tmp_path / "rollouts" / "step_000000.parquet")
    assert str(schema.field("prompt_ids").type.value_type) == "int64"
    assert str(schema.field("response_ids").type.value_type) == "int32"


def test_a_buffer_that_the_trainer_reuses_is_copied(tmp_path: Path) -> None:
    logprobs, ids = torch.tensor([-0.5, -0.25, -0.125]), np.array([3, 4, 5])
    with RolloutWriter(tmp_path).step(0) as step:
        step.add(**row(sampler_logprobs=logprobs, response_ids=ids))
        logprobs.zero_()
        ids[:] = 0
    rollouts = load(tmp_path)
    assert rollouts.sampler_logprob.tolist() == [-0.5, -0.25, -0.125] and rollouts.response[0].tolist() == [3, 4, 5]


def test_missing_names_are_made_unique_and_groups_follow_the_prompt(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = RolloutWriter(tmp_path, rank=rank)
        for _ in range(2):  # two parts of the step
            with writer.step(3) as step:
                step.add(**row(None, group_id=None, prompt_ids=[1, 2]))
                step.add(**row(None, group_id=None, prompt_ids=np.array([1, 2], dtype=np.int32)))
                step.add(**row(None, group_id=None, prompt_ids=torch.tensor([2, 1])))
    rollouts = load(tmp_path)
    assert len(set(rollouts.sequence_id)) == 12
    assert rollouts.sequence_id[:4].tolist() == [
        *("step3-rank0-0", "step3-rank0-1", "step3-rank0-2"),
        "step3-rank0-part2-0",
    ]
    assert rollouts.group_of_sequence.tolist() in ([0, 0, 1] * 4, [1, 1, 0] * 4)


MISFITS = {
    "sampler_logprobs has 2 values for 3 response tokens": {"sampler_logprobs": [-0.1, -0.2]},
    "loss_mask holds values other than 0 and 1": {"loss_mask": [1, 2, 1]},
    "response_ids is empty": {"response_ids": [], "sampler_logprobs": [], "loss_mask": []},
    "response_ids holds id 16, outside the vocabulary of 16": {"response_ids": torch.tensor([3, 16, 5])},
    "prompt_ids holds values that are not integers": {"prompt_ids": ["1", "2"]},
    "sampler_logprobs holds values that are not numbers": {"sampler_logprobs": ["x", -0.2, -0.3]},
    "sampler_version holds the negative version -1": {"sampler_version": -1},
    "sampler_version has 2 values for 3 response tokens": {"sampler_version": [1, 2]},
}


@pytest.mark.parametrize("reason", MISFITS)
def test_a_row_that_does_not_fit_is_counted_warned_of_and_named(tmp_path: Path, reason: str, caplog) -> None:
    writer = RolloutWriter(tmp_path, vocab_size=16)
    with writer.step(0) as step:
        step.add(**row("good"))
        step.add(**row("bad", **MISFITS[reason]))
        step.add(**row("worse", **MISFITS[reason]))
    assert (writer.rows_written, writer.rows_set_aside) == (1, 2)
    (warning,) = caplog.messages  # once a kind of reason
    assert f"step 0, sequence bad: set aside, {reason}" in warning
    rollouts = load(tmp_path)
    assert rollouts.sequence_id.tolist() == ["good"]
    assert [(r.sequence_id, r.reason) for r in rollouts.rejected] == [
        (name, f"not written: {reason}") for name in ("bad", "worse")
    ]


@pytest.mark.parametrize("reason", MISFITS)
def test_a_strict_writer_raises(tmp_path: Path, reason: str) -> None:
    writer = RolloutWriter(tmp_path, vocab_size=16, strict=True)
    with pytest.raises(UsageError, match=f"step 0, sequence bad: {reason}"), writer.step(0) as step:
        step.add(**row("bad", **MISFITS[reason]))
    assert names(tmp_path) == []


def test_a_misspelt_field_is_set_aside_by_name(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    with writer.step(0) as step:
        step.add_rows([{**row(), "logprobs": [1]}, row("b")])
    assert load(tmp_path).sequence_id.tolist() == ["b"]
    assert load(tmp_path).rejected[0].reason.startswith("not written: logprobs: no field of a row; known are sequence_")


def test_a_step_that_ends_in_an_exception_is_not_written(tmp_path: Path, caplog) -> None:
    writer = RolloutWriter(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"), writer.step(4) as step:
        step.add(**row())
        raise RuntimeError("out of memory")
    assert names(tmp_path) == [] and "step 4 ended in RuntimeError and is not written" in caplog.text


def test_a_disk_that_refuses_does_not_end_the_training(tmp_path: Path, caplog, monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    writer, strict = RolloutWriter(tmp_path), RolloutWriter(tmp_path, strict=True)
    monkeypatch.setattr("mismatch_probe.log.table.pq.write_table", refuse)
    with writer.step(0) as step:
        step.add(**row())
    assert (writer.steps_lost, writer.steps_written, writer.rows_written) == (1, 0, 0)
    assert "step 0 is lost: 1 rows cannot be written" in caplog.text and "No space left" in caplog.text
    with pytest.raises(OutputError, match="step 0 cannot be written"), strict.step(0) as step:
        step.add(**row())
    assert names(tmp_path) == []  # no temporary file stays either
    monkeypatch.undo()
    with writer.step(0) as step:
        step.add(**row())
    assert load(tmp_path).sequence_id.tolist() == ["a"]


def test_rows_after_the_end_of_their_step_are_counted_as_lost(tmp_path: Path, caplog) -> None:
    writer = RolloutWriter(tmp_path)
    with writer.step(0) as step:
        step.add(**row("a"))
    step.add(**row("b"))
    assert writer.rows_set_aside == 1 and "it came after its step was written" in caplog.text
    with step:  # ends a second time, and writes nothing
        pass
    assert names(tmp_path) == ["step_000000.parquet"] and load(tmp_path).sequence_id.tolist() == ["a"]


def test_rows_may_come_from_several_threads(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    with writer.step(0) as step:

        def work(worker: int) -> None:
            for at in range(50):
                step.add(**row(f"{worker}-{at}", reward=float(worker)))
                with writer.step(1 + worker) as own:
                    own.add(**row(f"{worker}-{at}"))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(load(tmp_path).sequence_id)) == 200 and writer.rows_written == 400
    assert all(len(load(tmp_path, at)) == 50 for at in (1, 2, 3, 4))


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from mismatch_probe.log import RolloutWriter, hooks\n"
        "with RolloutWriter(sys.argv[1]).step(0) as step:\n"
        "    step.add(prompt_ids=[1], response_ids=[2], sampler_logprobs=[-1.0], sampler_version=0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_negative_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="step -1: steps are numbered from 0"):
        RolloutWriter(tmp_path).step(-1)


def test_a_directory_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: cannot be written"):
        RolloutWriter(tmp_path / "file")


def test_an_empty_step_is_a_step_without_rows(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING), RolloutWriter(tmp_path).step(0):
        pass
    assert len(load(tmp_path)) == 0 and not caplog.messages
