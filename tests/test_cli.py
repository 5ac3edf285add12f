from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe import __version__
from mismatch_probe.cli import app
from mismatch_probe.entry import main
from mismatch_probe.errors import ExitCode
from mismatch_probe.inspection import Missing, inspect_run
from mismatch_probe.readers import open_run
from tests.conftest import SAMPLE
from tests.planted import Planted, write_rows, write_toml

COMMANDS = ("inspect", "decompose", "ess-report", "plot", "gate")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_exit_codes_are_public() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "GATE_FAILED": 1,
        "USAGE": 2,
        "INTERNAL": 3,
        "NOTHING_TO_JUDGE": 5,
        "INTERRUPTED": 130,
    }


def test_help_takes_under_a_third_of_a_second() -> None:
    """Processor time, best of several: what is measured is the program, not the machine's other work."""
    command = [sys.executable, "-m", "mismatch_probe", "--help"]
    best = 9.0
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.3


@pytest.mark.parametrize("command", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_no_torch(command: list[str]) -> None:
    heavy = ("torch", "transformers", "pandas", "matplotlib", "pyarrow")
    code = f"import sys; from mismatch_probe.entry import main; main({command!r}); print(*sys.modules)"
    made = run_python(code)
    assert made.returncode == 0, made.stderr
    assert not set(heavy) & set(made.stdout.split("\n")[-2].split())


def test_tables_are_reported_without_torch(planted: Planted, tmp_path: Path) -> None:
    for command in (["inspect"], ["ess-report"], ["gate"], ["plot", "--only", "ess"]):
        arguments = [command[0], str(planted.path), *command[1:]]
        code = (
            f"import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
            f"from mismatch_probe.entry import main; sys.exit(main({arguments!r}))"
        )
        made = run_python(code)
        assert made.returncode in (0, 1), made.stderr


def test_version_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mismatch-probe {__version__}\n"
    for wrong in (["--bogus"], ["decompose"], ["nonsense"], ["gate", "--min-ess", "x"]):
        assert main(wrong) == 2


def test_no_run_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main([command, str(tmp_path / "nowhere")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and "nowhere" in error


def test_a_fault_of_the_program_is_exit_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted fault")

    monkeypatch.setattr("mismatch_probe.folder.open_analysis", fail)
    assert main(["gate"]) == 3
    assert "planted fault" in capsys.readouterr().err


def test_a_missing_file_of_the_program_is_its_own_fault(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/internal")

    monkeypatch.setattr("mismatch_probe.folder.open_analysis", fail)
    assert main(["gate"]) == 3
    assert "internal error" in capsys.readouterr().err


def test_an_interrupt_is_exit_130_and_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mismatch_probe.folder.open_analysis", interrupt)
    assert main(["gate"]) == 130
    assert capsys.readouterr().err == "error: interrupted; earlier results are as they were\n"


def test_inspect_says_what_is_there(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(planted.path)]) == 0
    out = capsys.readouterr().out
    for text in ("native", "4 (0-3)", "96", "mu", "D, L, d, KL", "rescored", "forward passes", "(assumed)"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("run", ["stale_run", "synced_run", "broken_sync_run"])
def test_inspect_fits_a_terminal_of_80_columns(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(SAMPLE / run)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out and "D, L, d, KL" in out


def test_inspect_applies_the_checkpoints_limits(planted: Planted, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(planted.path, tmp_path / "run")
    rows = [{**row, "response_ids": [99] * len(row["response_ids"])} for row in planted.rows[1]]
    write_rows(tmp_path / "run" / "rollouts" / "step_000001.parquet", rows)
    write_toml(tmp_path / "run", vocab_size=100)
    (tmp_path / "run" / "checkpoints" / "step_000003" / "model.safetensors").unlink()
    found = inspect_run(open_run(tmp_path / "run"))
    assert found.steps[1].sequences == 0 and found.steps[1].rejected == 24
    assert "outside the checkpoint's vocabulary" in found.rejected[0].reason
    assert found.steps[3].can["lag"] == 0 and any("no weights" in notice for notice in found.notices)


def test_like_gaps_are_one_line(planted: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(planted.path, tmp_path / "run")
    for version in (1, 2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{version:06d}")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "missing at step 1-3: trainer checkpoint checkpoints/step_000001 and 2 more" in out


def test_a_full_device_for_the_output_is_one_line(planted: Planted) -> None:
    command = f"{sys.executable} -m mismatch_probe ess-report {planted.path} > /dev/full"
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=os.environ)
    assert made.returncode == 2 and made.stderr.startswith("error: ") and "No space left" in made.stderr
    assert made.stderr.count("\n") == 1


def test_inspect_json_counts_exactly(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(planted.path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = [sum(len(row["response_ids"]) for row in rows) for rows in planted.rows.values()]
    assert [step["tokens"] for step in found["steps"]] == tokens
    # A prompt once for all its responses, each response but for its last token, which predicts nothing.
    run = [
        sum(map(len, {tuple(row["prompt_ids"]) for row in rows})) + sum(len(row["response_ids"]) - 1 for row in rows)
        for rows in planted.rows.values()
    ]
    # Step 0 is scored under one version, the others under two.
    assert found["cost"]["forward_tokens"] == run[0] + 2 * sum(run[1:])
    assert found["cost"]["checkpoints"] == 4 and found["cost"]["seconds"] > 0
    assert found["checkpoint_versions"] == [0, 1, 2, 3, 4]


def test_inspect_says_what_is_missing(planted: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(planted.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    found = inspect_run(open_run(tmp_path / "run"))
    assert found.steps[2].missing == (Missing("trainer checkpoint", "checkpoints/step_000002"),)
    assert found.steps[2].can == {"discrepancy": 1.0, "lag": 0.0, "log_ratio": 0.0, "full_vocabulary": 0.0}
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main(["inspect", str(tmp_path / "run")]) == 5
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing to score" in out and "sampler checkpoint checkpoints/step_000000" in out


def test_ess_report_formats(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ess-report", str(planted.path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--format", "json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(parsed["verdict"].split()) in " ".join(text.split()) and parsed["verdict"] in markdown
    assert len(parsed["steps"]) == 4 and set(parsed["steps"][0]["ess"]) == {"lag", "discrepancy", "total"}
    one = parsed["steps"][1]["ess"]["lag"]["sequence"]
    assert 0 < one["ci_low"] <= one["value"] <= one["ci_high"] <= 1
    assert markdown.count("| 3 |") == 3


def test_ess_report_takes_another_level_and_threshold(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ess-report", str(planted.path), "--format", "json", "--ess-threshold", "0.999", "--ess-level", "token"])
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["first_breakdown_step"] == 1
    assert [step["status"] for step in parsed["steps"]] == ["ok", "breakdown", "breakdown", "breakdown"]


def test_run_dir_defaults_to_the_current_directory(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(planted.path)
    assert main(["inspect"]) == 0
    assert main(["ess-report"]) == 0


@pytest.mark.parametrize(("threshold", "code"), [("0.01", 0), ("0.999", 1)])
def test_a_closed_pipe_never_changes_the_answer(planted: Planted, threshold: str, code: int) -> None:
    """The reader is gone before the first line: the process ends by SIGPIPE (141), or had already given its answer."""
    gate = f"{sys.executable} -m mismatch_probe gate {planted.path} --min-ess {threshold} --format json"
    command = f"{gate} | (exec 0<&-; sleep 0); exit ${{PIPESTATUS[0]}}"
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=planted.path.parent)
    assert made.returncode in (141, code) and made.stderr == ""


def test_an_analysis_of_a_newer_program_is_refused(planted: Planted, tmp_path: Path, capsys) -> None:
    import shutil

    import pyarrow.parquet as pq

    shutil.copytree(planted.path / "mismatch_probe", tmp_path / "analysis")
    file = tmp_path / "analysis" / "steps.parquet"
    table = pq.read_table(file)
    table = table.replace_schema_metadata({**table.schema.metadata, b"mismatch_probe.schema_version": b"99"})
    pq.write_table(table, file)
    assert main(["ess-report", "-o", str(tmp_path / "analysis")]) == 2
    assert "schema version 99" in capsys.readouterr().err


def test_every_command_has_a_sentence_of_help() -> None:
    for command in app.registered_commands:
        assert command.callback is not None and re.match(r"[A-Z].*\.$", command.callback.__doc__ or "")
