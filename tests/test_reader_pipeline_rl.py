"""PipelineRL: a run that its own code wrote (see fixtures/pipeline_rl/write.py), and one of each trap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION, Run
from tests.pipeline_rl_writer import batch, text, write_actor, write_config, write_lines, write_training
from tests.reader_cases import Case, assert_same, cases
from tests.tiny import save_model

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "pipeline_rl"


def expected(step: int) -> list[Case]:
    """What fixtures/pipeline_rl/write.py gave the framework."""
    chosen = [case for case in cases(step + 2, seed=step) if case.response]
    extra = [case for case in cases(step + 2, seed=step + 100) if case.name == "single-turn"]
    for case in (*chosen, *extra):
        case.version = [max(0, min(case.version) - 2)] * len(case.response)
    return chosen + extra


def notices(run: Run) -> str:
    return " ".join([*run.notices, *(text for step in run.steps for text in step.load().notices)])


def two_steps(out: Path, size: int = 2) -> Path:
    """Four sequences, two an update: version 0 sampled both steps."""
    rows = [case for case in cases(seed=4) if case.response][:4]
    texts = [text(case, at, 0) for at, case in enumerate(rows)]
    write_actor(out, [texts])
    write_training(out, [batch(texts[:2]), batch(texts[2:])])
    write_config(out, size)
    return out


@pytest.mark.parametrize("name", ["packed", "padded_right", "padded_left"])
def test_what_the_trainer_read_is_what_the_framework_wrote(name: str) -> None:
    run = open_run(FIXTURES / name)
    assert run.format == "pipeline-rl" and run.versions_known and run.first_version == 0
    assert [step.index for step in run.steps] == [0, 1]
    for step in run.steps:
        rollouts = step.load()
        assert_same(rollouts, expected(step.index), without=("trainer_logprob",))
        assert not rollouts.rejected and not rollouts.notices
    settings = run.settings
    assert (settings.temperature, settings.logprobs_mode, settings.top_p) == (0.7, "processed", 1.0)
    assert settings.sources["temperature"] == "conf/exp_config.yaml: llm.parameters.temperature"


def test_the_actor_stream_alone_is_read_by_sampler_version(tmp_path: Path) -> None:
    rows = cases(seed=5)
    for case in rows:
        case.version = [6] * len(case.response)
    groups = [[text(c, i, 12) for i, c in enumerate(rows) if c.group == group] for group in (0, 1, 2)]
    write_actor(tmp_path, groups)
    write_config(tmp_path, 2)
    run = open_run(tmp_path)
    assert not run.versions_known and [step.index for step in run.steps] == [6]
    rollouts = run.steps[0].load()
    assert_same(rollouts, rows, without=("trainer_logprob", "advantage"))
    assert [rejected.reason for rejected in rollouts.rejected] == ["text 2: labels mark no sampled token"]
    assert "training_data holds nothing" in notices(run) and "trained on them is not known" in notices(run)


def test_compact_logprobs_are_spread_over_the_sampled_tokens(tmp_path: Path) -> None:
    tools = next(case for case in cases() if case.name == "tools")
    write_actor(tmp_path, [[text(tools, 0, 0)]])
    write_training(tmp_path, [batch([text(tools, 0, 0)])])
    write_config(tmp_path, 1)
    rollouts = open_run(tmp_path).steps[0].load()
    mask = np.array(tools.mask, dtype=bool)
    assert rollouts.sampler_logprob[mask].tolist() == np.array(tools.sampler)[mask].tolist()
    assert np.isnan(rollouts.sampler_logprob[~mask]).all() and rollouts.loss_mask.tolist() == mask.tolist()


def test_model_version_is_a_count_of_samples_not_a_step(tmp_path: Path) -> None:
    rows = [case for case in cases(seed=6) if case.response][:4]
    texts = [text(case, at, version) for at, (case, version) in enumerate(zip(rows, (64, 64, 64, 128), strict=True))]
    write_actor(tmp_path, [texts])
    write_training(tmp_path, [batch(texts)])
    write_config(tmp_path, 64)
    write_lines(tmp_path / "streams/weight_update_request/0/0/0.jsonl", [{"samples_processed": 128}])
    (tmp_path / "finetune" / "intermediate" / "2").mkdir(parents=True)
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [2] and run.trainer_version(2) == 2
    rollouts = run.steps[0].load()
    versions = [set(rollouts.sampler_version[rollouts.sequence_of_token == row]) for row in range(4)]
    assert versions == [{1}, {1}, {1}, {2}]
    assert run.trainer_checkpoint(2) == tmp_path / "finetune" / "intermediate" / "2"
    assert "finetune/intermediate/N" in notices(run)


@pytest.mark.parametrize(
    ("samples", "more", "said"),
    [
        (None, {}, "does not give train_batch_size"),
        (3, {}, "model_version 4 is no multiple of the 3 samples"),
    ],
)
def test_versions_stay_counts_where_the_files_give_no_mapping(tmp_path: Path, samples: int, more, said: str) -> None:
    case = cases()[0]
    write_actor(tmp_path, [[text(case, 0, 4)]])
    if samples:
        write_config(tmp_path, samples, **more)
    run = open_run(tmp_path)
    assert [step.index for step in run.steps] == [4] and not run.versions_known and run.trainer_checkpoints is None
    assert set(run.steps[0].load().sampler_version) == {4}
    assert said in notices(run)


def test_batches_that_cross_a_step_are_not_cut(tmp_path: Path) -> None:
    texts = [text(case, at, 0) for at, case in enumerate(cases()[:3])]
    write_actor(tmp_path, [texts])
    write_training(tmp_path, [batch(texts)])
    write_config(tmp_path, 2)
    run = open_run(tmp_path)
    assert not run.versions_known and "crosses the end of a step of 2 samples" in notices(run)


def test_filler_and_sentinels_are_no_samples(tmp_path: Path) -> None:
    texts = [text(case, at, 0) for at, case in enumerate(cases()[:4])]
    sentinel = batch([text(cases()[0], 0, 0, labels=[-100] * 7, logprobs=[])]) | {"sentinel": True}
    write_actor(tmp_path, [texts])
    write_training(tmp_path, [batch(texts[:2], padding=3), sentinel, batch(texts[2:], padding=1)])
    write_config(tmp_path, 2)
    run = open_run(tmp_path)
    assert [(step.index, len(step.load())) for step in run.steps] == [(0, 2), (1, 2)]
    assert not any(step.load().rejected for step in run.steps)


def test_ref_logprobs_are_never_the_trainers(tmp_path: Path) -> None:
    assert all(np.isnan(step.load().trainer_logprob).all() for step in open_run(two_steps(tmp_path)).steps)


def test_sequences_that_the_actor_stream_lacks_have_no_version(tmp_path: Path) -> None:
    two_steps(tmp_path)
    texts = [text(case, at, 2 * at) for at, case in enumerate(cases()[:2])]
    write_actor(tmp_path, [[text(cases()[4], 0, 0)]])
    write_training(tmp_path, [batch(texts), batch(texts[1:]), batch(texts[:1])])
    run = open_run(tmp_path)
    first, second = (step.load() for step in run.steps)
    # A batch names its oldest version: exact for all where it is the current one, or where it stands alone.
    assert (first.sampler_version == 0).all() and set(second.sampler_version) == {0, 1}
    assert len(set(first.group_id)) == 1 and "not in streams/actor" in first.notices[0]
    write_training(tmp_path, [batch(texts), batch([text(c, 0, 0) for c in cases()[2:4]])])
    assert (open_run(tmp_path).steps[1].load().sampler_version == UNKNOWN_VERSION).all()


def test_tokens_that_were_replaced_are_set_aside(tmp_path: Path) -> None:
    entry = text(cases()[0], 0, 0)
    entry["input_ids"] = [*entry["input_ids"][:-1], 58]
    write_actor(tmp_path, [[entry, text(cases()[2], 1, 0)]])
    rollouts = open_run(tmp_path).steps[0].load()
    assert len(rollouts) == 1 and "not in its vocabulary" in rollouts.rejected[0].reason


def test_a_split_sequence_is_said(tmp_path: Path) -> None:
    two_steps(tmp_path)
    write_config(tmp_path, 2, finetune={"train_batch_size": 1, "gradient_accumulation_passes": 2, "seq_parallel": 2})
    run = open_run(tmp_path)
    assert not run.versions_known and "seq_parallel" in notices(run)


def test_the_streams_directory_itself_is_read(tmp_path: Path) -> None:
    run = open_run(two_steps(tmp_path) / "streams")
    assert run.versions_known and len(run.steps) == 2


def test_training_data_alone_needs_the_samples_of_a_step(tmp_path: Path) -> None:
    write_training(tmp_path, [batch([text(cases()[0], 0, 0)])])
    with pytest.raises(NothingToJudgeError, match="gradient_accumulation_passes"):
        open_run(tmp_path)


def test_inspect_and_decompose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_steps(tmp_path)
    # No trainer log-probs and no checkpoint: nothing can be compared.
    assert main(["inspect", str(tmp_path)]) == 5
    assert "finetune/intermediate/0" in capsys.readouterr().out
    models = [save_model(tmp_path / "finetune" / "intermediate" / str(v), "llama", seed=v) for v in (0, 1)]
    assert main(["inspect", str(tmp_path)]) == 0
    assert "pipeline-rl" in capsys.readouterr().out
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    table = tmp_path / "mismatch_probe" / "tokens"
    assert (pd.read_parquet(table / "step=0" / "part-0.parquet")["lag"] == 0.0).all()
    case = [case for case in cases(seed=4) if case.response][2]
    ids = torch.tensor([case.prompt + case.response])
    start = len(case.prompt)
    stale, trainer = (
        model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0] for model in models
    )
    tokens = pd.read_parquet(table / "step=1" / "part-0.parquet").query("sequence_id == '0/2/0'")
    assert tokens["lag"].tolist() == pytest.approx((trainer - stale).tolist(), abs=1e-5)
    assert tokens["discrepancy"].tolist() == pytest.approx((stale - torch.tensor(case.sampler)).tolist(), abs=1e-5)


def test_only_this_reader_matches(tmp_path: Path) -> None:
    places = [FIXTURES / "packed", FIXTURES / "padded_left", two_steps(tmp_path)]
    write_training(tmp_path / "alone", [batch([text(cases()[0], 0, 0)])])
    for place in (*places, tmp_path / "alone"):
        assert [reader.FORMAT for reader in _READERS if reader.matches(place)] == ["pipeline-rl"]


def test_strict_refuses_a_row_that_does_not_fit(tmp_path: Path) -> None:
    write_actor(tmp_path, [[text(cases()[0], 0, 0, logprobs=[-1.0])]])
    step = open_run(tmp_path, ReadOptions(strict=True)).steps[0]
    with pytest.raises(Exception, match="1 logprobs for 4 sampled tokens"):
        step.load()
