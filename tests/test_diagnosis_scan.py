"""The scans on planted log-probs: no model, every number known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.diagnosis.evidence import Evidence, Sequences, Tokens
from mismatch_probe.diagnosis.finding import Severity
from mismatch_probe.diagnosis.scan import Candidate, Scan, fit_step, unshifted
from mismatch_probe.diagnosis.scanning import Budget, scan
from mismatch_probe.diagnosis.scans import check_scans
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Ragged, Settings

NOISE = 0.01


def evidence(steps: int = 2, groups: int = 8, members: int = 4, length: int = 12, seed: int = 0) -> Evidence:
    """Sequences whose token ids number the tokens of the run, so that a table gives their log-probs."""
    rng = np.random.default_rng(seed)
    rows = steps * groups * members
    sequence = np.repeat(np.arange(rows), length)
    total = len(sequence)
    group = np.arange(rows) // members
    truth = -rng.exponential(1.5, total)
    tokens = Tokens(
        sequence=sequence,
        position=np.tile(np.arange(length), rows),
        token_id=np.arange(total),
        counted=np.ones(total, dtype=bool),
        sampler=truth + NOISE * rng.normal(size=total),
        stale=truth,
        trainer=truth,
        trainer_logged=np.full(total, np.nan),
        entropy=np.full(total, 1.5),
        claimed=np.repeat(np.arange(rows) // (groups * members), length),
        trainer_version=np.repeat(np.arange(rows) // (groups * members), length),
    )
    sequences = Sequences(
        step=np.arange(rows) // (groups * members),
        sequence_id=np.array([f"s{row}" for row in range(rows)], dtype=object),
        group=group,
        prompt=group,
        prompt_ids=tuple(np.array([0]) for _ in range(rows)),
        first=np.arange(rows + 1) * length,
        file=np.array(["file"] * rows, dtype=object),
        row=np.arange(rows) + 1,
        reward=np.zeros(rows),
        finish_reason=np.array([None] * rows, dtype=object),
    )
    return Evidence(Settings(), sequences, tokens, np.ones(total, dtype=bool), versions=(0, 1))


@dataclass
class Scored:
    logprob: np.ndarray
    entropy: np.ndarray


class Tables:
    """A scorer that looks log-probs up: ``tables[path]`` (total,); counts the tokens that it is asked for."""

    def __init__(self, tables: dict[str, np.ndarray]) -> None:
        self.tables, self.asked = tables, 0

    def score(
        self, body: Path, prompt: Ragged, response: Ragged, wanted: np.ndarray, temperatures: Sequence[float]
    ) -> Scored:
        if body.name not in self.tables:
            raise CheckpointError(f"{body}: torn")
        ids = response.values[wanted]
        self.asked += len(ids)
        found = np.array([self.tables[body.name][ids] / temperature for temperature in temperatures])
        return Scored(found, np.ones_like(found))


def candidates(count: int) -> list[Candidate]:
    return [Candidate(f"version {version}", version, Path(str(version))) for version in range(count)]


def scanned(of: Evidence, tables: dict[str, np.ndarray], count: int) -> tuple[Scan, Tables]:
    scorer = Tables(tables)
    found = scan(of, candidates(count), of.tokens.claimed, np.ones(len(of.sequences), dtype=bool), scorer)
    assert found is not None
    return found, scorer


def tables(of: Evidence, count: int, true: dict[int, int], apart: float = 0.3) -> dict[str, np.ndarray]:
    """Log-probs of every version: ``true[step]`` has the step's own, each other lies ``apart`` from it."""
    rng = np.random.default_rng(9)
    out = {str(version): of.tokens.stale + apart * rng.normal(size=len(of.tokens)) for version in range(count)}
    for step, version in true.items():
        mine = of.step_of_token == step
        out[str(version)][mine] = of.tokens.stale[mine]
    return out


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_shift_is_undone_exactly_within_each_sequence(shift: int) -> None:
    of = evidence()
    position, length = of.tokens.position, 12
    # What is logged at p belongs to the token at p + shift.
    moved = np.roll(of.tokens.sampler, -shift)
    inside = (position + shift >= 0) & (position + shift < length)
    logged = np.where(inside, moved, 0.0)
    wrong = replace(of, tokens=replace(of.tokens, sampler=logged))
    mended = unshifted(wrong, shift, np.ones(len(position), dtype=bool))
    known = ~np.isnan(mended)
    assert (~known).sum() == abs(shift) * len(of.sequences)
    np.testing.assert_array_equal(mended[known], of.tokens.sampler[known])
    found, _ = scanned(wrong, tables(of, 2, {0: 0, 1: 1}), 2)
    result = check_scans(replace(wrong, scan=found))
    assert [finding.code for finding in result.findings] == ["MP101"]
    assert f"at shift {shift:+d}" in result.findings[0].summary
    assert result.evidence is not None
    assert result.evidence.gap() < 2 * NOISE


def test_a_healthy_log_is_read_as_claimed() -> None:
    of = evidence()
    found, _ = scanned(of, tables(of, 2, {0: 0, 1: 1}), 2)
    result = check_scans(replace(of, scan=found))
    assert result.findings == ()
    fit = fit_step(of, found, 1)
    assert fit is not None
    assert (fit.choice.candidate, fit.choice.shift, fit.gap) == (None, 0, fit.gap_claimed)


def test_versions_that_hardly_differ_are_not_told_apart() -> None:
    of = evidence()
    # Version 0 fits a little better than the claimed 1, by less than anything that matters.
    found, _ = scanned(of, tables(of, 2, {0: 0, 1: 0}, apart=0.003), 2)
    assert check_scans(replace(of, scan=found)).findings == ()


def test_shift_temperature_and_version_at_once_are_all_named() -> None:
    of = evidence(steps=3)
    truth = tables(of, 3, {0: 0, 1: 0, 2: 0})
    logged = np.where(of.tokens.position > 0, np.roll(of.tokens.stale / 0.6, 1), 0.0)
    wrong = replace(of, tokens=replace(of.tokens, sampler=logged))
    found, _ = scanned(wrong, truth, 3)
    result = check_scans(replace(wrong, scan=found))
    assert {finding.code for finding in result.findings} == {"MP101", "MP401", "MP202"}
    assert all(finding.severity is Severity.ERROR for finding in result.findings)
    assert result.evidence is not None
    assert result.evidence.gap() < 1e-9


def test_the_coarse_pass_finds_one_version_of_sixty_and_stays_cheap() -> None:
    of = evidence(steps=4, groups=32, members=4, length=20)
    truth = tables(of, 60, {0: 41, 1: 17, 2: 59, 3: 5})
    found, scorer = scanned(of, truth, 60)
    for step, version in ((0, 41), (1, 17), (2, 59), (3, 5)):
        fit = fit_step(of, found, step)
        assert fit is not None
        assert fit.choice.candidate == version
    budget = Budget.for_run(len(of.tokens), 4, 60)
    # A sample ends with a whole sequence, so it may be one longer.
    assert scorer.asked <= 60 * 4 * (budget.coarse + 20) + 7 * 4 * (budget.fine + 20)


def test_on_a_large_run_the_scan_takes_a_fifth_of_what_decompose_takes() -> None:
    tokens, steps, versions = 20_000_000, 50, 50
    budget = Budget.for_run(tokens, steps, versions)
    assert steps * (versions * budget.coarse + 4 * budget.fine) <= 0.2 * 2 * tokens * 1.01


def test_a_checkpoint_that_cannot_be_loaded_is_left_out_and_told() -> None:
    of = evidence()
    truth = tables(of, 3, {0: 0, 1: 1})
    del truth["2"]
    found, _ = scanned(of, truth, 3)
    assert found.unread == ("not tried in the scans: 2: torn",)
    assert check_scans(replace(of, scan=found)).findings == ()
    many = tables(of, 12, {0: 0, 1: 1})
    del many["7"]
    assert check_scans(replace(of, scan=scanned(of, many, 12)[0])).findings == ()


def test_one_set_of_weights_cannot_be_scanned_for_versions() -> None:
    of = evidence(steps=1)
    found, _ = scanned(of, tables(of, 1, {0: 0}), 1)
    (entry,) = check_scans(replace(of, scan=found)).not_testable
    assert {"MP201", "MP202", "MP204"} <= set(entry.codes)
    (entry,) = check_scans(of).not_testable
    assert "MP401" in entry.codes
