"""The promises that the project makes about itself."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mismatch_probe.config import Thresholds, load_thresholds
from mismatch_probe.tables import REJECTED, SEQUENCES, STEPS, TOKENS, markdown
from tests.conftest import ROOT, SAMPLE

README = ROOT / "README.md"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_has_the_commands_of_every_job() -> None:
    heads = {" ".join(command.split()[:2]) for command in commands()}
    assert {"make demo", "make test", "mismatch-probe inspect", "mismatch-probe decompose"} <= heads
    assert {"mismatch-probe ess-report", "mismatch-probe plot", "mismatch-probe gate"} <= heads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where README's commands run: RUN_DIR is a copy of the shipped healthy run."""
    shutil.copytree(SAMPLE / "synced_run", tmp_path / "RUN_DIR")
    return tmp_path


def test_commands_of_the_readme_run(folder: Path) -> None:
    """In the order in which a reader types them."""
    failed = {}
    for command in commands():
        if command.startswith("mismatch-probe"):
            made = subprocess.run(
                [sys.executable, "-m", "mismatch_probe", *shlex.split(command)[1:]],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode:
                failed[command] = made.stderr
    assert not failed


def test_make_demo_runs_and_says_what_to_try_next(tmp_path: Path) -> None:
    ready = f"{sys.prefix}/.ready"
    made = subprocess.run(
        ["make", "-o", ready, "demo", f"VENV={sys.prefix}", f"DEMO={tmp_path / 'demo'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "breaks down at step 8 and stays broken" in " ".join(made.stdout.split())
    assert "What to try next" in made.stdout
    assert (tmp_path / "demo" / "plots" / "ess.png").is_file()


def test_make_test_and_ci_run_what_they_say() -> None:
    planned = subprocess.run(
        ["make", "-n", "-o", f"{sys.prefix}/.ready", "test", f"VENV={sys.prefix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"-m pytest -n auto$", planned.stdout, re.MULTILINE)
    assert "make check test" in (ROOT / ".ci" / "run").read_text()


def test_installing_leaves_an_installed_torch_alone(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), str(ROOT)],
        check=True,
        capture_output=True,
    )
    names = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert "torch" not in names and "mismatch-probe" in names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("<" in need or "==" in need for need in project["dependencies"])


def test_modules_stay_small() -> None:
    long = {str(p): n for p in ROOT.glob("mismatch_probe/**/*.py") if (n := len(p.read_text().splitlines())) > 300}
    assert not long


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("stats", ("torch", "pandas", "pyarrow", "pathlib")),
        ("readers", ("torch", "mismatch_probe.scoring", "mismatch_probe.stats")),
        ("scoring", ("pandas", "mismatch_probe.reporters", "mismatch_probe.readers")),
        ("reporters", ("torch", "mismatch_probe.readers", "mismatch_probe.scoring")),
    ],
)
def test_data_flows_one_way(module: str, forbidden: tuple[str, ...]) -> None:
    for path in (ROOT / "mismatch_probe" / module).glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE):
            assert not name.startswith(forbidden), f"{path.name} imports {name}"


def test_the_page_of_tables_is_the_schema() -> None:
    assert (ROOT / "docs" / "tables.md").read_text() == markdown()
    for columns in (TOKENS, SEQUENCES, STEPS, REJECTED):
        names = [column.name for column in columns]
        assert len(names) == len(set(names)) and all(column.definition for column in columns)


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (README, ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *SAMPLE.rglob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_thresholds_of_the_readme_are_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "mismatch-probe.toml").write_text(block)
    found, _ = load_thresholds(tmp_path, None, {})
    assert found == Thresholds(max_discrepancy_k3=0.005)
