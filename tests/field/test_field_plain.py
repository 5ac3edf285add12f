"""Field reports of which the probe itself must be free, and the comparison of two runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Severity
from mismatch_probe.diagnosis.job import collect
from mismatch_probe.diagnosis.numerics_levels import with_baseline
from mismatch_probe.folder import open_analysis
from mismatch_probe.log import RolloutWriter
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import Ragged
from mismatch_probe.scoring.candidates import CandidateScorer
from mismatch_probe.scoring.network import ScoringOptions
from tests.field.base import ROWS, FieldRun, base, codes, find

EXACT = ScoringOptions(device="cpu", dtype="float64")


def scores(path: Path, rows: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    prompt, response = (Ragged.of([np.array(row[at]) for row in rows]) for at in (0, 1))
    found = CandidateScorer(EXACT).score(path, prompt, response, np.ones(len(response.values), dtype=bool), [1.0])
    return np.split(found.logprob[0], response.offsets[1:-1])


@pytest.fixture(scope="module")
def absolute_positions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose states depend on the position number itself, with large weights there."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=ROWS, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=1)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        model.transformer.wpe.weight.normal_(0.0, 1.0)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def test_rows_of_unequal_length_score_in_a_batch_as_they_do_alone(absolute_positions: Path) -> None:
    """Case 32: no row sees another."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, 30, p).tolist(), rng.integers(3, 30, r).tolist()) for p, r in ((1, 30), (9, 1), (4, 7))]
    together = scores(absolute_positions, rows)
    for row, found in zip(rows, together, strict=True):
        assert np.abs(found - scores(absolute_positions, [row])[0]).max() < 1e-9


def test_left_padding_does_not_change_the_scores(tmp_path: Path, absolute_positions: Path) -> None:
    """Case 37: rows padded by 0 to 7 on the left are the rows themselves."""
    rng = np.random.default_rng(1)
    prompt, response = rng.integers(3, 30, 5).tolist(), rng.integers(3, 30, 9).tolist()
    alone = scores(absolute_positions, [(prompt, response)])[0]
    for pad in range(8):
        writer = RolloutWriter(tmp_path / str(pad), temperature=1.0, vocab_size=ROWS)
        ids = np.array([[0] * pad + prompt + response])
        writer.write_padded(
            0,
            input_ids=ids,
            attention_mask=(np.arange(ids.shape[1]) >= pad)[None],
            response_mask=np.ones((1, 9), dtype=bool),
            sampler_logprobs=alone[None],
            sampler_version=0,
        )
        read = open_run(tmp_path / str(pad), ReadOptions(), None).steps[0].load()
        found = scores(absolute_positions, [(read.prompt[0].tolist(), read.response[0].tolist())])[0]
        assert (found == alone).all() and (read.sampler_logprob == alone).all()


def test_dropout_in_the_config_does_not_change_the_scores(tmp_path: Path) -> None:
    """Case 33: the probe scores in evaluation mode."""
    run = base(steps=1)
    run.write(tmp_path / "without")
    run.write(tmp_path / "with")
    for file in (tmp_path / "with").glob("checkpoints/*/config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.1, "dropout": 0.1}))
    assert find(tmp_path / "without").gap == find(tmp_path / "with").gap


def test_rows_without_a_counted_token_leave_every_number_as_it_is(tmp_path: Path) -> None:
    """Case 51: one row with a gap of 1.0 beside 0, 1 and 3 masked rows."""
    gaps = []
    for masked in (0, 1, 3):
        run = base(steps=1, groups=4, members=1)
        row = max(run.rows[0], key=lambda one: len(one["response_ids"]))
        row["sampler_logprobs"] = [min(one - 1.0, -1e-6) for one in row["sampler_logprobs"]]
        others = [one for one in run.rows[0] if one is not row]
        for one in others[:masked]:
            one["loss_mask"] = [False] * len(one["response_ids"])
        run.rows[0] = [row, *others[:masked]]
        diagnosis = find(run.write(tmp_path / str(masked)))
        gaps.append(diagnosis.gap)
        assert ("MP701" in codes(diagnosis, least=0)) == (masked > 0)
    assert gaps[0] == pytest.approx(1.0, abs=0.05)
    assert gaps[1] == pytest.approx(gaps[0], rel=1e-12) and gaps[2] == pytest.approx(gaps[0], rel=1e-12)


def test_a_run_is_compared_with_a_baseline_of_ones_own(tmp_path: Path) -> None:
    """Case 38: the same tokens under two engines, of which one spans nodes."""
    quiet = base(noise=0.013)
    loud = copy.deepcopy(quiet)
    rng = np.random.default_rng(0)
    for row in loud:
        row["sampler_logprobs"] = [min(one + 0.05 * rng.normal(), -1e-6) for one in row["sampler_logprobs"]]
    quiet.toml |= {"name": "one node", "about": ["tensor_parallel=8"]}
    loud.toml |= {"name": "two nodes", "about": ["tensor_parallel=16"]}
    evidence = {name: collected(run, tmp_path / name) for name, run in (("quiet", quiet), ("loud", loud))}
    worse = with_baseline(evidence["loud"], evidence["quiet"])
    assert (worse.code, worse.severity) == ("MP309", Severity.WARNING)
    assert worse.summary.startswith("larger than in the baseline: they differ in tensor_parallel: 16, 8; mean |D|")
    assert with_baseline(evidence["quiet"], evidence["loud"]).severity == Severity.INFO
    by_analysis = with_baseline(evidence["loud"], open_analysis(tmp_path / "quiet", None))
    assert by_analysis.summary == worse.summary
    assert by_analysis.numbers == worse.numbers


def collected(run: FieldRun, path: Path) -> Evidence:
    run.write(path)
    find(path)
    return collect(open_run(path, ReadOptions(), None), open_analysis(path, None), CandidateScorer(EXACT))
