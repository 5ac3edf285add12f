"""``diagnose`` and ``explain`` at the command line, and the findings that end other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mismatch_probe.diagnosis.catalogue import pages
from mismatch_probe.diagnosis.stored import as_content, read_findings
from mismatch_probe.entry import main
from tests.field.base import base
from tests.field.cases_scans import frozen


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sampler never got new weights, decomposed."""
    path = tmp_path_factory.mktemp("faulty") / "run"
    frozen()(path)
    assert main(["decompose", str(path), "-q"]) == 0
    return path


def test_decompose_ends_with_the_findings_and_keeps_them(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(faulty, tmp_path / "run")
    assert main(["decompose", str(tmp_path / "run"), "-q", "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert "MP202 error: steps 1 to 4: the engine really sampled from version 0" in " ".join(out.split())
    kept = (faulty / "mismatch_probe" / "findings.json").read_bytes()
    assert (tmp_path / "run" / "mismatch_probe" / "findings.json").read_bytes() == kept


def test_no_diagnose_makes_none(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decompose", str(faulty), "-q", "--no-diagnose", "-o", str(tmp_path / "out")]) == 0
    assert "Findings" not in capsys.readouterr().out
    assert read_findings(tmp_path / "out") is None


@pytest.mark.parametrize("command", ["ess-report", "gate"])
def test_other_commands_end_with_them(faulty: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, str(faulty)])
    assert "MP202 error: " in capsys.readouterr().out
    main([command, str(faulty), "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["code"] for finding in findings] == ["MP202"]


def test_findings_survive_the_file(faulty: Path) -> None:
    folder = faulty / "mismatch_probe"
    found = read_findings(folder)
    assert found is not None
    assert as_content(found) == json.loads((folder / "findings.json").read_text())


def test_text_fits_80_columns_and_holds_evidence_refutation_and_remedy(
    faulty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(faulty), "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line or line.endswith(" ") for line in lines)
    for part in ("Findings: 1 error", "  evidence: ", "  refuted by: ", "  remedy: "):
        assert any(line.startswith(part) for line in lines), part


def test_select_ignore_and_fail_on(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def codes(*options: str) -> tuple[int, list[str]]:
        code = main(["diagnose", str(faulty), "-q", "--format", "json", *options])
        return code, [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]]

    assert codes("--select", "MP2") == (0, ["MP202"])
    assert codes("--select", "mp101") == (0, [])
    assert codes("--ignore", "MP202", "--fail-on", "error") == (0, ["MP301"])
    assert codes("--fail-on", "error") == (1, ["MP202", "MP301"])
    assert codes("--fail-on", "warning") == (1, ["MP202", "MP301"])
    assert main(["diagnose", str(faulty), "--select", "MP999"]) == 2
    assert "MP999: names no finding" in capsys.readouterr().err


def test_markdown_has_the_same(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(faulty), "-q", "--format", "markdown"]) == 0
    assert "#### MP202 error: the sampler holds older weights than claimed" in capsys.readouterr().out


def test_a_run_without_an_analysis_is_decomposed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base(steps=1).write(tmp_path / "run")
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "decomposed first" in captured.err
    assert captured.out.startswith("Findings: 1 info\n\nMP301 ")
    assert (tmp_path / "run" / "mismatch_probe" / "steps.parquet").exists()


def test_where_nothing_can_be_compared_the_files_are_diagnosed_and_the_exit_code_is_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base(steps=1)
    for row in run:
        del row["sampler_logprobs"]
    run.weights.clear()
    run.write(tmp_path / "run")
    assert main(["diagnose", str(tmp_path / "run")]) == 5
    captured = capsys.readouterr()
    assert "rests on the files alone" in captured.err
    assert "Not testable here" in captured.out


def test_a_damaged_findings_file_is_one_line(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(faulty / "mismatch_probe", tmp_path / "out")
    (tmp_path / "out" / "findings.json").write_text("{}")
    assert main(["ess-report", "-o", str(tmp_path / "out")]) == 2
    assert "findings.json: not readable" in capsys.readouterr().err


def test_explain_prints_every_page_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    for code, page in pages().items():
        assert f"{code}  {page.name}" in " ".join(listed.split("\n"))
        assert main(["explain", code.lower()]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{code}  ")
        assert "What would refute it" in shown
        assert max(map(len, shown.splitlines())) <= 80
    assert main(["explain", "MP000"]) == 2


def test_a_baseline_of_ones_own_says_what_is_normal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, noise, nodes in (("mine", 0.05, 16), ("before", 0.013, 4)):
        run = base(steps=2, noise=noise)
        run.toml["about"] = [f"tp={nodes}"]
        assert main(["decompose", str(run.write(tmp_path / name)), "-q", "--no-gradient", "--no-diagnose"]) == 0
    capsys.readouterr()
    arguments = ["diagnose", str(tmp_path / "mine"), "-q", "--select", "MP309", "--format", "json"]
    assert main([*arguments, "--baseline", str(tmp_path / "before")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert "tp" in found["summary"]
    (gap,) = [number for number in found["numbers"] if number["name"] == "mean |D| minus the baseline's"]
    assert 0 < gap["low"] < gap["value"] < gap["high"]
    assert main([*arguments, "--baseline", str(tmp_path / "nowhere")]) == 2


def test_where_the_gap_lives_is_shown(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(faulty), "-q"]) == 0
    assert "share of |D| in the worst 1 % of tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["diagnose", str(faulty), "-q", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"position", "probability"} <= {bucket["bucket"] for bucket in found["buckets"]}
    tokens = {bucket["level"]: bucket["tokens"] for bucket in found["buckets"] if bucket["bucket"] == "position"}
    assert sum(tokens.values()) > 400
