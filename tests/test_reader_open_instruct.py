"""open-instruct's traces. The fixture is what its own ``rl_utils.py`` wrote at e6c3044aa (2026-08-20): steps 3, 4."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import Rollouts
from tests.open_instruct_writer import RUN, lines, record, write
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz
from tests.tiny import save_model

FIXTURE = Path(__file__).parent / "fixtures" / "open_instruct"
NOT_HELD = ("sampler_version", "trainer_logprob")


def without_tools(step: int = 3, seed: int = 0) -> list[Case]:
    return [case for case in cases(step, seed) if all(who == "assistant" for who, _ in case.turns)]


def load(run_dir: Path, step: int = 0, **options: bool) -> Rollouts:
    return open_run(run_dir, ReadOptions(**options)).steps[step].load()


def test_what_its_own_code_wrote_is_read(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "traces")
    run = open_run(tmp_path / "traces")
    assert (run.format, run.settings.name) == ("open-instruct", "fixture__1__1700000000")
    assert (run.settings.model, run.trainer_version(4)) == ("org/model", 4)
    assert [step.index for step in run.steps] == [3, 4]
    for step in run.steps:
        rollouts = step.load()
        assert_same(rollouts, without_tools(step.index, step.index), without=NOT_HELD)
        assert rollouts.loss_mask.all()
        assert [r.row % 6 for r in rollouts.rejected] == [2, 0]
    assert sum(reader.matches(tmp_path / "traces") for reader in _READERS) == 1


def test_tool_masks_are_not_saved_so_tool_users_are_set_aside(tmp_path: Path) -> None:
    write(tmp_path, lines(cases(), 3))
    rollouts = load(tmp_path)
    assert "it called tools" in rollouts.rejected[0].reason and rollouts.rejected[0].sequence_id == "step3-1"
    assert any("1 sequences called tools" in text for text in rollouts.notices)


def test_an_eos_in_place_of_nothing_is_an_empty_response(tmp_path: Path) -> None:
    write(tmp_path, lines(cases(), 3))
    assert "the response is empty" in load(tmp_path).rejected[1].reason


def test_nan_literals_of_the_json_writer_are_read(tmp_path: Path) -> None:
    case = without_tools()[0]
    logprobs = [float("nan"), *case.sampler[1:]]
    write(tmp_path, json.dumps(record(case, 3, 0, logprobs=logprobs, reward=float("nan"))).encode() + b"\n")
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).tolist() == [True, False, False, False] and np.isnan(rollouts.reward[0])


def test_log_probs_may_be_null(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools()[:4], 3, logprobs=None))
    rollouts = load(tmp_path)
    assert np.isnan(rollouts.sampler_logprob).all()
    assert any("logprobs is null in 4 rows" in text for text in rollouts.notices)


def test_prompt_idx_is_unique_only_within_a_step(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools(), 3) + lines(without_tools(), 4))
    first, second = (load(tmp_path, step) for step in (0, 1))
    assert not set(first.group_id) & set(second.group_id)


def test_rows_that_do_not_fit_are_set_aside(tmp_path: Path) -> None:
    good, *others = without_tools()[:4]
    rows = [record(good, 3, 0), record(others[0], 3, 1, logprobs=[-1.0]), record(others[1], 3, 2, prompt_idx=None)]
    rows.append(record(others[2], 3, 3, response_tokens=None))
    write(tmp_path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    reasons = {r.row: r.reason for r in load(tmp_path).rejected}
    assert "1 values for" in reasons[2] and "group_id is missing" in reasons[3] and "response_ids" in reasons[4]


@pytest.mark.parametrize("again", [0, 1], ids=["same-shard", "lower-shard"])
def test_a_step_made_again_after_a_restart_counts_once(tmp_path: Path, again: int) -> None:
    """A restarted run counts its samples from 0, so it appends to the first shard again."""
    old, new = without_tools(seed=5), without_tools(seed=6)[:4]
    write(tmp_path, lines(without_tools(seed=4), 1) + (lines(old, 3) if not again else b""), 0)
    if again:
        write(tmp_path, lines(old, 3), 1)
    write(tmp_path, lines(new, 3), 0)
    rollouts = load(tmp_path, 1)
    assert_same(rollouts, new, without=NOT_HELD)
    assert any("made again after a restart" in text and " 5 of earlier" in text for text in rollouts.notices)
    assert_same(load(tmp_path, 0), without_tools(seed=4), without=NOT_HELD)


@pytest.mark.parametrize("shard", [0, 1], ids=["same-file", "another-file"])
def test_exact_copies_count_once(tmp_path: Path, shard: int) -> None:
    write(tmp_path, lines(without_tools(), 3))
    write(tmp_path, lines(without_tools(), 3), shard)
    rollouts = load(tmp_path)
    assert_same(rollouts, without_tools(), without=NOT_HELD)
    assert rollouts.notices == ("step 3: 5 rows are exact copies of others and count once",)


def test_each_line_twice_counts_once(tmp_path: Path) -> None:
    once = lines(without_tools(), 3).splitlines(keepends=True)
    write(tmp_path, b"".join(line * 2 for line in once))
    assert_same(load(tmp_path), without_tools(), without=NOT_HELD)


def test_torn_last_line_is_dropped_with_a_note(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools(), 3) + lines(without_tools(), 4)[:-90])
    rollouts = load(tmp_path, 1)
    assert any("torn last line dropped" in text and "row 10" in text for text in rollouts.notices)
    assert len(rollouts) == 4
    with pytest.raises(BadFileError, match="row 10: torn last line"):
        load(tmp_path, 1, strict=True)


def test_a_restart_that_appends_to_a_torn_line_loses_no_row(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools(), 3) + lines(without_tools(), 4)[:200])
    write(tmp_path, lines(without_tools(seed=8), 4))
    rollouts = load(tmp_path, 1)
    assert_same(rollouts, without_tools(seed=8), without=NOT_HELD)
    assert any("1 of earlier attempts are left out" in text for text in rollouts.notices)


def test_a_torn_middle_line_ends_the_command_unless_skipped(tmp_path: Path) -> None:
    rows = lines(without_tools(), 3).splitlines(keepends=True)
    file = write(tmp_path, rows[0] + rows[1][:60] + b"\n" + b"junk\n" + b"".join(rows[2:]))
    with pytest.raises(BadFileError, match=rf"{file.name}, row 2: not valid JSON"):
        load(tmp_path)
    rollouts = load(tmp_path, skip_bad_rows=True)
    assert [r.row for r in rollouts.rejected if "not valid JSON" in r.reason] == [2, 3] and len(rollouts) == 3


@pytest.mark.parametrize("form", ["crlf", "bom", "gzip", "zstd", "nul-tail", "blank-lines", "reordered"])
def test_forms_of_text_files(tmp_path: Path, form: str) -> None:
    data = lines(without_tools(), 3) + lines(without_tools(seed=1), 4)
    if form == "reordered":
        rows = [json.loads(line) for line in data.splitlines()]
        data = b"".join(json.dumps(dict(reversed(row.items()))).encode() + b"\n" for row in rows)
    made = {
        "crlf": data.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + data,
        "gzip": gzip.compress(data),
        "zstd": pa.compress(data, codec="zstd", asbytes=True),
        "nul-tail": data + b"\0" * 512,
        "blank-lines": b"\n" + data.replace(b"\n", b"\n\n"),
    }
    write(tmp_path, made.get(form, data), suffix={"gzip": ".gz", "zstd": ".zst"}.get(form, ""))
    assert_same(load(tmp_path, 0), without_tools(), without=NOT_HELD)
    assert_same(load(tmp_path, 1), without_tools(seed=1), without=NOT_HELD)


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b'{"a": 1}\n', "{}".encode("utf-16"), b"\xff\xfe\xfd"])
def test_files_of_others_are_not_taken(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    assert not any(reader.matches(tmp_path) for reader in _READERS)
    with pytest.raises(InputError, match="rollouts_save_path"):
        open_run(tmp_path, format="open-instruct")


def test_non_utf8_is_refused_with_file_and_line(tmp_path: Path) -> None:
    rows = lines(without_tools(), 3).splitlines(keepends=True)
    write(tmp_path, rows[0] + rows[1].replace(b"math", b"\xff\xfe") + rows[2])
    with pytest.raises(BadFileError, match="row 2: not valid JSON"):
        load(tmp_path)


def test_several_runs_in_one_directory_are_asked_about(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools(), 3))
    write(tmp_path, lines(without_tools(seed=1), 7), run="other")
    with pytest.raises(InputError, match=f"{RUN}, other"):
        open_run(tmp_path)
    chosen = open_run(tmp_path, ReadOptions(overrides=("name=other",)))
    assert [step.index for step in chosen.steps] == [7]


def test_checkpoints_and_versions(tmp_path: Path) -> None:
    """The trainer counts from 1 where the traces count from 0: step_3 holds the weights that trace step 3 updates."""
    write(tmp_path / "rollouts", lines(without_tools(), 3))
    (tmp_path / f"{RUN}_checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "another_checkpoints" / "step_3").mkdir(parents=True)
    run = open_run(tmp_path, ReadOptions(overrides=("sampler_lag=1",)))
    assert run.trainer_checkpoint(run.trainer_version(3)) == tmp_path / f"{RUN}_checkpoints" / "step_3"
    assert set(run.steps[0].load().sampler_version.tolist()) == {2}


def test_temperature_is_asked_for_until_it_is_known(tmp_path: Path) -> None:
    write(tmp_path, lines(without_tools(), 3))
    for given, asked in (((), True), (("temperature=1.0",), False), (("temperature=0.7",), True)):
        notices = open_run(tmp_path, ReadOptions(overrides=given)).notices
        assert any("logprobs_mode" in text for text in notices) == asked


def test_inspect_and_decompose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = without_tools()
    write(tmp_path, lines(rows, 3))
    # No trainer log-prob and no checkpoint: there is nothing to compare with.
    assert main(["inspect", str(tmp_path)]) == 5
    shown = " ".join(capsys.readouterr().out.split())
    assert "open-instruct" in shown and "saves no trainer log-prob" in shown
    model = save_model(tmp_path / f"{RUN}_checkpoints" / "step_3", "qwen3")
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    steps = pd.read_parquet(tmp_path / "mismatch_probe" / "steps.parquet")
    d = []
    for case in rows[:-1]:
        ids = torch.tensor([case.prompt + case.response])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
        places = range(len(case.prompt), ids.shape[1])
        d += [float(logp[at - 1, ids[0, at]]) - mu for at, mu in zip(places, case.sampler, strict=True)]
    weights = np.exp(np.array(d))
    assert steps.loc[0, "log_ratio_mean"] == pytest.approx(np.mean(d), abs=1e-5)
    assert steps.loc[0, "ess_total_token"] == pytest.approx(
        weights.sum() ** 2 / (len(d) * (weights**2).sum()), rel=1e-4
    )
    assert np.isnan(steps.loc[0, "discrepancy_mean"]), "the sampler's version is unknown, so there is no split"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("skip", [False, True])
def test_damaged_files_read_or_end_in_a_clean_error(suffix: str, skip: bool) -> None:
    def make(run_dir: Path) -> Path:
        data = lines(cases(), 3) + lines(cases(seed=1), 4)
        return write(run_dir, gzip.compress(data) if suffix else data, suffix=suffix)

    fuzz(make, skip_bad_rows=skip)
