"""Text-only dumps, from the keys that their writers emit: each is named, explained and refused with exit code 5."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from mismatch_probe.entry import main
from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers import _READERS, FORMATS, open_run
from tests.reader_fuzz import damage, damaged

SWIFT = {
    "step": ["1", "1"],
    "prompt": ["q", "q"],
    "completion": ["a", "b"],
    "acc": [1.0, 0.0],
    "advantages": [0.5, -0.5],
}
SWIFT_MEGATRON = {"gen_step": [1], "prompt": ["q"], "completion": ["a"]}
AREAL = {
    "task_id": 7,
    "sample_idx": 0,
    "seqlen": 5,
    "prompt_len": 3,
    "head_version": 1,
    "tail_version": 2,
    "reward": 1.0,
    "prompt": "<|im_start|>q",
    "completion": "a<|im_end|>",
}
RLLM = {
    "training_step": 3,
    "epoch": 0,
    "episode_id": "x:0",
    "task": {},
    "trajectories": [{"name": "solver", "steps": [{"model_response": "a"}]}],
}
LINES = {
    "ms-swift": [("completions.jsonl", SWIFT), ("v0-20260101-120000/completions.jsonl", SWIFT_MEGATRON)],
    "areal": [
        ("rollout/2/7.jsonl", AREAL),
        ("2/7.jsonl", AREAL | {"version_rle": [[1, 1], [2, 1]]}),
        ("7.jsonl", AREAL),
    ],
}
EPISODES = [
    "episodes/train_step_3_epoch_0/episode_hashab_idx_0.json",
    "train_step_3_epoch_0/episode_hashab_idx_0.json",
    "episode_hashab_idx_0.json",
]
LAID = [(name, *place) for name, places in LINES.items() for place in places] + [("rllm", at, RLLM) for at in EPISODES]
OPTION = {"ms-swift": "_log_rollout", "areal": "arun_episode", "rllm": "EpisodeLogger"}


def lay(path: Path, place: str, content: dict) -> Path:
    file = path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    # rllm indents its episodes; the others write a line each.
    file.write_text(json.dumps(content, indent=2 if place.endswith(".json") else None) + "\n")
    return file


@pytest.mark.parametrize(("name", "place", "content"), LAID)
def test_each_is_named_and_answered(
    tmp_path: Path, name: str, place: str, content: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lay(tmp_path, place, content)
    assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path)] == [name]
    for command in ("inspect", "decompose"):
        assert main([command, str(tmp_path)]) == 5
        said = capsys.readouterr().err
        assert file.name in said and OPTION[name] in said and "log-probs" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", list(OPTION))
def test_the_format_can_be_named(tmp_path: Path, name: str) -> None:
    assert name in FORMATS
    with pytest.raises(NothingToJudgeError, match=OPTION[name]):
        open_run(tmp_path, format=name)


def test_retokenising_is_named_and_not_done(tmp_path: Path) -> None:
    lay(tmp_path, "rollout/2/7.jsonl", AREAL)
    with pytest.raises(NothingToJudgeError, match="no proof"):
        open_run(tmp_path)


@pytest.mark.parametrize("kind", ["gz", "zst", "bom", "crlf"])
def test_text_in_other_clothes_is_recognised(tmp_path: Path, kind: str) -> None:
    file = lay(tmp_path, "completions.jsonl", SWIFT)
    data = file.read_bytes()
    if kind in ("gz", "zst"):
        packed = gzip.compress(data) if kind == "gz" else pa.compress(data, codec="zstd", asbytes=True)
        file.with_name(f"completions.jsonl.{kind}").write_bytes(packed)
        file.unlink()
    else:
        file.write_bytes(b"\xef\xbb\xbf" + data if kind == "bom" else data.replace(b"\n", b"\r\n"))
    assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path)] == ["ms-swift"]


@pytest.mark.parametrize(
    "content",
    [
        {"step": 1, "prompt": "q", "completion": "a"},
        {"step": ["1"], "completion": "a", "prompt": ["q"]},
        {"completion": ["a"], "prompt": ["q"]},
        {"task_id": 7, "prompt": "q", "completion": "a"},
        {"trajectories": []},
        {},
    ],
)
def test_other_tables_are_not_recognised(tmp_path: Path, content: dict) -> None:
    for place in ("completions.jsonl", "2/7.jsonl", "episode_1.json"):
        lay(tmp_path, place, content)
    assert not any(reader.matches(tmp_path) for reader in _READERS)


@pytest.mark.parametrize(("name", "place", "content"), [LAID[0], LAID[2], LAID[-1]])
def test_damaged_files_are_recognised_or_not_and_never_crash(
    tmp_path: Path, name: str, place: str, content: dict
) -> None:
    file = lay(tmp_path, place, content)
    whole = file.read_bytes()

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(damage)
    def once(operations: list[tuple[str, int, int]]) -> None:
        file.write_bytes(damaged(whole, operations))
        assert [reader.FORMAT for reader in _READERS if reader.matches(tmp_path)] in ([], [name])

    once()
