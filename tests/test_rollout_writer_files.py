"""Attempts, parts, ranks, run.toml: what a writer puts where, and which of it readers count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.log import RolloutWriter
from mismatch_probe.log.files import temporary_name
from mismatch_probe.readers import open_run
from mismatch_probe.readers.step_files import StepName
from tests.test_rollout_writer import load, names, no_ranks, row

__all__ = ["no_ranks"]


def put(writer: RolloutWriter, step: int, *sequences: str) -> None:
    with writer.step(step) as block:
        for name in sequences:
            block.add(**row(name))


def sequences(path: Path, at: int = 0) -> list[str]:
    return load(path, at).sequence_id.tolist()


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("step_000012.parquet", StepName(12)),
        ("step_12.jsonl", StepName(12)),
        ("step_000012_rank_3.parquet", StepName(12, 3)),
        ("step_000012_attempt_2.parquet", StepName(12, None, 2)),
        ("step_000012_rank_0_attempt_2_part_10.parquet", StepName(12, 0, 2, 10)),
        ("step_000012_part_2_attempt_2.parquet", None),
        (".step_000012.parquet.host.1.tmp", None),
        ("step_000012.parquet.bak", None),
    ],
)
def test_names_say_step_rank_attempt_and_part(name: str, parsed: StepName | None) -> None:
    assert StepName.parse(name) == parsed
    if parsed is not None and name.endswith("parquet"):
        assert parsed.parquet() == name


def test_a_second_block_of_one_writer_is_a_part_and_counts(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    put(writer, 3, "a")
    first = (tmp_path / "rollouts" / "step_000003.parquet").read_bytes()
    put(writer, 3, "b")
    assert names(tmp_path) == ["step_000003.parquet", "step_000003_part_2.parquet"]
    assert (tmp_path / "rollouts" / "step_000003.parquet").read_bytes() == first
    assert sequences(tmp_path) == ["a", "b"] and not open_run(tmp_path).notices


def test_a_resumed_step_is_a_new_attempt_and_the_last_one_counts(tmp_path: Path) -> None:
    first = RolloutWriter(tmp_path)
    for step in range(4):
        put(first, step, f"old{step}")
    resumed = RolloutWriter(tmp_path)
    put(resumed, 2, "new2")
    put(resumed, 2, "more2")
    assert [sequences(tmp_path, at) for at in range(4)] == [["old0"], ["old1"], ["new2", "more2"], ["old3"]]
    notices = open_run(tmp_path).notices
    assert notices == (
        "step 2 was written more than once, as a resumed run does: the last attempt counts, "
        "left unread: step_000002.parquet",
        "written before step 2 was resumed and not again since: step 3; "
        "what is there belongs to the run before it resumed",
    )
    put(resumed, 3, "new3")
    assert sequences(tmp_path, 3) == ["new3"]
    (only_two, only_three) = open_run(tmp_path).notices
    assert "step 2 was" in only_two and "step 3 was" in only_three


def test_a_restart_within_a_process_is_said_with_restart(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for step in (0, 1, 2):
        put(writer, step, f"old{step}")
    writer.restart(1)
    put(writer, 1, "new1")
    put(writer, 2, "new2")
    put(writer, 0, "more0")
    assert [sequences(tmp_path, at) for at in range(3)] == [["old0", "more0"], ["new1"], ["new2"]]


def test_batches_that_come_one_by_one_make_one_file_a_step(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for step, name in ((0, "a"), (0, "b"), (1, "c"), (2, "d"), (2, "e")):
        writer.collect(step).add(**row(name))
    assert names(tmp_path) == ["step_000000.parquet", "step_000001.parquet"]
    writer.close()
    writer.close()
    assert [sequences(tmp_path, at) for at in range(3)] == [["a", "b"], ["c"], ["d", "e"]]


def test_the_end_of_the_process_writes_the_open_block(tmp_path: Path) -> None:
    code = (
        "import sys; from mismatch_probe.log import RolloutWriter\n"
        "RolloutWriter(sys.argv[1]).collect(5).add("
        "prompt_ids=[1], response_ids=[2], sampler_logprobs=[-1.0], sampler_version=0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert names(tmp_path) == ["step_000005.parquet"] and len(load(tmp_path)) == 1


def test_ranks_are_joined_and_resume_each_on_its_own(tmp_path: Path) -> None:
    """Rank 0 died before it wrote step 1: resumed, its file is its first, rank 1's the second attempt."""
    ranks = [RolloutWriter(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    put(ranks[0], 0, "a")
    put(ranks[1], 0, "b")
    put(ranks[1], 1, "lost")
    ranks = [RolloutWriter(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    put(ranks[0], 1, "c")
    put(ranks[1], 1, "d")
    assert sequences(tmp_path, 0) == ["a", "b"] and sequences(tmp_path, 1) == ["c", "d"]


def test_a_writer_that_opens_late_is_no_resume_of_the_others(tmp_path: Path) -> None:
    put(RolloutWriter(tmp_path, rank=0, world_size=2), 0, "a")
    put(RolloutWriter(tmp_path, rank=1, world_size=2), 0, "b")
    assert sequences(tmp_path) == ["a", "b"] and not open_run(tmp_path).notices


def test_ranks_that_are_gone_after_a_resume_do_not_count(tmp_path: Path) -> None:
    for world in (4, 2):
        for writer in [RolloutWriter(tmp_path, rank=rank, world_size=world) for rank in range(world)]:
            put(writer, 0, f"rank{writer.rank}of{world}")
    assert sequences(tmp_path) == ["rank0of2", "rank1of2"]
    (notice,) = open_run(tmp_path).notices
    left = ", ".join(f"step_000000_rank_{rank}.parquet" for rank in range(4))
    assert notice.endswith(f"left unread: {left}")


def test_a_run_without_ranks_that_resumes_with_them_replaces_its_step(tmp_path: Path) -> None:
    put(RolloutWriter(tmp_path), 0, "old")
    put(RolloutWriter(tmp_path, rank=0, world_size=2), 0, "new0")
    put(RolloutWriter(tmp_path, rank=1, world_size=2), 0, "new1")
    assert sequences(tmp_path) == ["new0", "new1"]


def test_rank_and_world_size_come_from_the_launcher(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    put(RolloutWriter(tmp_path), 0, "a")
    assert names(tmp_path) == ["step_000000_rank_3.parquet"]
    footer = pq.read_metadata(tmp_path / "rollouts" / "step_000000_rank_3.parquet").metadata
    assert footer[b"mismatch_probe.world_size"] == b"8"


def test_two_processes_that_forgot_their_ranks_lose_nothing(tmp_path: Path, caplog) -> None:
    writers = [RolloutWriter(tmp_path), RolloutWriter(tmp_path)]
    for at, writer in enumerate(writers):
        with writer.step(0) as step:
            step.add(**row(None, reward=float(at)))
    assert sequences(tmp_path) == ["step0-0", "step0-part2-0"]
    assert load(tmp_path).reward.tolist() == [0.0, 1.0]
    assert "another process writes under this rank; give each its own" in caplog.text


def test_a_file_system_without_links_still_never_overwrites(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("mismatch_probe.log.files.os.link", refuse)
    put(RolloutWriter(tmp_path), 0, "a")
    writer = RolloutWriter(tmp_path)
    writer._found.clear()  # as if the other file had come a moment later
    put(writer, 0, "b")
    assert sequences(tmp_path) == ["a", "b"]


def test_unfinished_files_are_ignored_by_readers_and_cleaned_by_the_next_writer(tmp_path: Path, caplog) -> None:
    put(RolloutWriter(tmp_path, rank=1), 0, "a")
    folder = tmp_path / "rollouts"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    mine = temporary_name(folder / "step_000001_rank_1.parquet")
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{int(gone.stdout)}."))
    elsewhere = dead.with_name(".step_000002_rank_1.parquet.other-host.1.0.tmp")
    other_rank = dead.with_name(dead.name.replace("rank_1", "rank_0"))
    for path in (mine, dead, elsewhere, other_rank):
        path.write_bytes(b"torn")
    assert sequences(tmp_path) == ["a"] and not open_run(tmp_path).notices
    RolloutWriter(tmp_path, rank=1)
    assert mine.exists() and other_rank.exists() and not dead.exists() and not elsewhere.exists()
    assert "left unfinished: ['step_000001_rank_1.parquet', 'step_000002_rank_1.parquet']" in caplog.text


def test_a_strange_footer_is_no_fault_of_the_reader(tmp_path: Path) -> None:
    put(RolloutWriter(tmp_path), 0, "a")
    path = tmp_path / "rollouts" / "step_000000.parquet"
    strange = {"mismatch_probe.set_aside": "{", "mismatch_probe.written": "nan", "mismatch_probe.world_size": "many"}
    pq.write_table(pq.read_table(path).replace_schema_metadata(strange), path)
    put(RolloutWriter(tmp_path), 0, "b")
    assert sequences(tmp_path) == ["b"]
    (tmp_path / "rollouts" / "step_000000_attempt_2.parquet").unlink()
    assert sequences(tmp_path) == ["a"]


def test_settings_are_written_to_run_toml_and_read_back(tmp_path: Path) -> None:
    RolloutWriter(
        tmp_path, name='a "run"', temperature=0.7, top_k=20, eos_token_id=(2, 3), vocab_size=None, logprobs_mode="raw"
    )
    put(RolloutWriter(tmp_path), 0, "a")
    settings = open_run(tmp_path).settings
    assert (settings.name, settings.temperature, settings.top_k) == ('a "run"', 0.7, 20)
    assert settings.eos_token_id == (2, 3) and settings.logprobs_mode == "raw"
    assert settings.assumed == {"top_p", "trainer_dtype"}
    assert names(tmp_path) == ["step_000000.parquet"]


def test_an_existing_run_toml_keeps_its_text_and_gains_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("# ours\ntemperature = 1")
    RolloutWriter(tmp_path, temperature=1.0, vocab_size=16)
    assert (tmp_path / "run.toml").read_text() == "# ours\ntemperature = 1\nvocab_size = 16\n"
    RolloutWriter(tmp_path, vocab_size=16, checkpoints="ckpt/{version}")
    assert (tmp_path / "run.toml").read_text().endswith('vocab_size = 16\ncheckpoints = "ckpt/{version}"\n')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "run.toml: temperature is 1.0 there and 0.7 here"),
        ({"temprature": 0.7}, "run.toml: unknown key 'temprature'. Did you mean 'temperature'?"),
        ({"top_p": 1.5}, "run.toml: top_p = 1.5 is not a number in (0, 1]"),
        (
            {"checkpoints": "step_{step}"},
            "run.toml: checkpoints = 'step_{step}' is not a path that holds {version} once",
        ),
        ({"model": object}, "run.toml: model cannot be a type"),
    ],
)
def test_wrong_settings_are_refused_when_the_writer_is_made(tmp_path: Path, settings: dict, message: str) -> None:
    (tmp_path / "run.toml").write_text("temperature = 1.0\n")
    with pytest.raises(UsageError) as error:
        RolloutWriter(tmp_path, **settings)
    assert message in str(error.value) and "tmp." not in str(error.value)
    assert (tmp_path / "run.toml").read_text() == "temperature = 1.0\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rollouts", "run.toml"]


def test_ranks_that_start_together_agree_on_run_toml(tmp_path: Path) -> None:
    code = (
        "import sys; from mismatch_probe.log import RolloutWriter\n"
        "RolloutWriter(sys.argv[1], rank=int(sys.argv[2]), temperature=0.9, vocab_size=32)"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(rank)]) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert (tmp_path / "run.toml").read_text() == "temperature = 0.9\nvocab_size = 32\n"
