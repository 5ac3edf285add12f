"""tinker-cookbook's capture: files that its own code wrote (see fixtures/tinker/write.py), and one of each trap."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Run
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz
from tests.tiny import save_model

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "tinker"
LACKS = ("trainer_logprob", "advantage", "reward")


def turns(case: Case) -> list[Case]:
    """What fixtures/tinker/write.py asked for: a request for each turn, with what came before as its prompt."""
    made, at = [], 0
    for who, count in case.turns:
        part = slice(at, at + count)
        if who == "assistant":
            made.append(
                Case(
                    case.name, case.group, case.prompt + case.response[:at], case.response[part], case.mask[part],
                    case.sampler[part], case.trainer[part], [min(case.version)] * count, 0.0, 0.0, case.finish_reason,
                )
            )  # fmt: skip
        at += count
    return made


def record(case: Case, number: int, scope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """One request for a whole response, from the keys that the capture documents."""
    return {
        "kind": "sample",
        "scope": {"run_id": "tiny", "iteration": 3, "group_idx": case.group, "split": "train", **(scope or {})},
        "num_samples": 1,
        "sampling_session_id": "session",
        "seq_id": number,
        "model_path": "tinker://run/sampler_weights/000003",
        "prompt_tokens": case.prompt,
        "sampling_params": {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "samples": [{"tokens": case.response, "logprobs": case.sampler, "stop_reason": case.finish_reason}],
        "status": "ok",
        **changes,
    }


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    file = path / "capture" / "sample.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return file


def single(step: int = 3) -> list[Case]:
    return [case for case in cases(step) if case.name in ("single-turn", "no-eos", "alone")]


def notices(run: Run) -> str:
    return " ".join([*run.notices, *(text for step in run.steps for text in step.load().notices)])


@pytest.mark.parametrize("name", ["jsonl", "store"])
def test_requests_are_what_the_capture_wrote(name: str) -> None:
    run = open_run(FIXTURES / name)
    assert run.format == "tinker" and run.first_version == 0 and [step.index for step in run.steps] == [3, 4]
    for step in run.steps:
        rollouts = step.load()
        expected = [turn for case in cases(step.index, seed=step.index) for turn in turns(case)]
        assert_same(rollouts, expected, without=LACKS)
        assert not rollouts.rejected and "requests of another split" in rollouts.notices[0]
    assert (run.settings.temperature, run.settings.top_k) == (0.7, -1)
    assert "sampling_params" in run.settings.sources["temperature"]


def test_the_capture_folder_itself_is_read() -> None:
    assert len(open_run(FIXTURES / "jsonl" / "capture").steps) == 2


def test_the_store_is_left_as_it_was(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "store", tmp_path / "store")
    before = (tmp_path / "store" / "capture.sqlite").read_bytes()
    for step in open_run(tmp_path / "store").steps:
        step.load()
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["capture.sqlite"]
    assert (tmp_path / "store" / "capture.sqlite").read_bytes() == before


def test_a_store_of_several_runs_asks_which(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "store" / "capture.sqlite", tmp_path)
    with sqlite3.connect(tmp_path / "capture.sqlite") as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("UPDATE wire_rows SET run_id = 'other' WHERE iteration = 4")
    connection.close()
    with pytest.raises(InputError, match="other, tiny"):
        open_run(tmp_path)
    run = open_run(tmp_path, ReadOptions(overrides=("name=other",)))
    assert [step.index for step in run.steps] == [4]


def test_a_view_in_place_of_the_table_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "capture.sqlite") as connection:
        endless = (
            "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x FROM t) SELECT x AS run_id, x AS iteration FROM t"
        )
        connection.execute(f"CREATE VIEW wire_rows AS {endless}")
    connection.close()
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)
    with pytest.raises(NothingToJudgeError):
        open_run(tmp_path, format="tinker")


def test_versions_come_from_checkpoints_jsonl_then_from_the_path(tmp_path: Path) -> None:
    paths = ["tinker://run/sampler_weights/final", "tinker://run/sampler_weights/000002", "tinker://run/x", None]
    write(tmp_path, [record(case, at, model_path=path) for at, (case, path) in enumerate(zip(single() * 2, paths))])  # noqa: B905
    saved = {"name": "final", "batch": 3, "sampler_path": paths[0]}
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
    run = open_run(tmp_path)
    rollouts = run.steps[0].load()
    versions = [int(rollouts.sampler_version[start]) for start in rollouts.response.offsets[:-1]]
    assert versions == [3, 2, UNKNOWN_VERSION, UNKNOWN_VERSION]
    assert "2 requests name no weights by number" in notices(run)


def test_evaluations_and_failures_are_no_training_rows(tmp_path: Path) -> None:
    first, second, third = single()
    write(
        tmp_path,
        [record(first, 0), record(second, 1, {"split": "test"}), record(third, 2, samples=None, status="error")],
    )
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == 1
    assert "evaluations" in notices(run) and "1 requests failed" in notices(run)


def test_the_last_attempt_at_an_iteration_counts(tmp_path: Path) -> None:
    write(tmp_path, [record(case, at, {"run_attempt": at > 0}) for at, case in enumerate(single())][:1]
          + [record(case, 5 + at, {"run_attempt": 1}) for at, case in enumerate(single())])  # fmt: skip
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == 3 and "earlier run_attempt" in notices(run)


def test_a_record_that_was_sent_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, [record(case, at) for at, case in enumerate(single())] * 2)
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == 3 and "3 rows are exact copies" in notices(run)


def test_without_a_group_only_one_requests_samples_are_a_group(tmp_path: Path) -> None:
    first, second = single()[:2]
    samples = [{"tokens": c.response, "logprobs": c.sampler, "stop_reason": "stop"} for c in (first, second)]
    write(tmp_path, [record(first, 0, {"group_idx": None}, samples=samples), record(first, 1, {"group_idx": None})])
    run = open_run(tmp_path)
    groups = run.steps[0].load().group_id
    assert groups[0] == groups[1] != groups[2] and "no group_idx" in notices(run)


def test_temperatures_that_differ_are_said(tmp_path: Path) -> None:
    first, second = single()[:2]
    write(tmp_path, [record(first, 0), record(second, 1, sampling_params={"temperature": 0.5})])
    assert "differ in temperature (0.5, 1.0)" in notices(open_run(tmp_path))


def test_records_outside_any_iteration_cannot_be_placed(tmp_path: Path) -> None:
    write(tmp_path, [record(single()[0], 0, {"iteration": None})])
    with pytest.raises(NothingToJudgeError, match="iteration=i"):
        open_run(tmp_path)


def test_summaries_alone_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "iteration_000003" / "train_rollout_summaries.jsonl"
    file.parent.mkdir()
    summary = {"schema_version": 1, "split": "train", "iteration": 3, "sampling_client_step": 3, "steps": []}
    file.write_text(json.dumps(summary) + "\n")
    assert main(["inspect", str(tmp_path)]) == 5
    assert "capture_to_store" in capsys.readouterr().err


def test_inspect_and_decompose_with_downloaded_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [record(case, at) for at, case in enumerate(single())])
    (tmp_path / "run.toml").write_text('checkpoints = "weights/{version}"\n')
    save_model(tmp_path / "weights" / "3", "llama")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "tinker" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path), "-q"]) == 0


def test_only_this_reader_matches(tmp_path: Path) -> None:
    write(tmp_path, [record(single()[0], 0)])
    for place in (tmp_path, FIXTURES / "jsonl", FIXTURES / "store"):
        assert [reader.FORMAT for reader in _READERS if reader.matches(place)] == ["tinker"]
    for data in (b"", b"\0\xff", b"[]", b'{"kind": "sample"}\n', b"SQLite format 3\0garbage"):
        for file in (tmp_path / "capture" / "sample.jsonl", tmp_path / "capture.sqlite"):
            file.write_bytes(data)
        assert not any(reader.matches(tmp_path) for reader in _READERS)


@pytest.mark.parametrize("kind", ["crlf", "bom", "gz", "zst", "torn"])
def test_text_in_other_clothes_is_read(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, [record(case, at) for at, case in enumerate(single())])
    data = file.read_bytes()
    if kind in ("gz", "zst"):
        packed = gzip.compress(data) if kind == "gz" else pa.compress(data, codec="zstd", asbytes=True)
        file.with_name(f"sample.jsonl.{kind}").write_bytes(packed)
        file.unlink()
    else:
        changed = {"crlf": data.replace(b"\n", b"\r\n"), "bom": b"\xef\xbb\xbf" + data, "torn": data[:-40]}
        file.write_bytes(changed[kind])
    run = open_run(tmp_path)
    assert len(run.steps[0].load()) == (2 if kind == "torn" else 3)
    assert ("row 3: torn last line" in notices(run)) == (kind == "torn")


@pytest.mark.parametrize("bad", [b'{"kind": ', b"\xff\xfe"])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    file = write(tmp_path, [record(case, at) for at, case in enumerate(single())])
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'{"kind": ', bad)[:200]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(BadFileError, match=r"sample\.jsonl, row 2: not valid JSON"):
        open_run(tmp_path).steps[0].load()
    rollouts = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[0].load()
    assert len(rollouts) == 2 and rollouts.rejected[0].row == 2


@pytest.mark.parametrize("name", ["jsonl/capture/sample.jsonl", "store/capture.sqlite"])
def test_damaged_files_read_or_end_in_a_clean_error(name: str) -> None:
    def copy(run_dir: Path) -> Path:
        place = run_dir / "capture" if name.endswith("jsonl") else run_dir
        place.mkdir(exist_ok=True)
        return Path(shutil.copy(FIXTURES / name, place))

    fuzz(copy)
    fuzz(copy, examples=15, skip_bad_rows=True)
