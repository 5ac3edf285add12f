"""docs/frameworks.md: every command, option, key, format and import of ours that it names exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from itertools import pairwise

import pytest

from mismatch_probe.log import RolloutWriter, StepWriter
from mismatch_probe.log.arrays import PER_ROW, PER_TOKEN, PER_TOKEN_OR_ROW, padded_rows
from mismatch_probe.readers import FORMATS
from mismatch_probe.readers.settings import KEYS
from mismatch_probe.run import CheckpointPattern
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
FRAMEWORKS = (
    *("NeMo-RL", "slime", "prime-rl", "verl", "SkyRL", "PipelineRL", "open-instruct", "ROLL", "tinker-cookbook", "TRL"),
    *("OpenRLHF", "AReaL", "ms-swift", "torchforge", "rllm"),
)


def section(title: str) -> str:
    """The text below a framework's heading."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mismatch-probe ")]


def test_the_table_has_one_row_a_framework_and_each_a_section() -> None:
    rows = re.findall(r"^\| \[([^\]]+)\]\(#([^)]+)\) \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(FRAMEWORKS)
    assert all(anchor == name.lower() for name, anchor in rows)
    provenance = ("not run", "was run", "written by", "files of v0.3")
    assert all(any(said in section(name) for said in provenance) for name in FRAMEWORKS)


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """The help of each command that the page uses."""
    found = {}
    for name in sorted({command[0] for command in commands()}):
        made = subprocess.run(
            [sys.executable, "-m", "mismatch_probe", name, "--help"], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, f"{name}: {made.stderr}"
        found[name] = made.stdout
    return found


def test_commands_and_options_exist(options: dict[str, str]) -> None:
    assert {"inspect", "decompose"} <= set(options)
    for name, *arguments in commands():
        for argument in arguments:
            if argument.startswith("--"):
                assert re.search(rf"(^|[\s,]){re.escape(argument.split('=')[0])}\s", options[name]), (name, argument)


def test_values_of_options_are_ones_that_the_program_takes() -> None:
    for command in commands():
        for option, value in pairwise(command):
            if option == "--run-format":
                assert value in FORMATS
            if option == "--set":
                key, _, value = value.partition("=")
                assert key in KEYS
                if key in ("checkpoints", "sampler_checkpoints"):
                    CheckpointPattern(ROOT, value)


def test_tables_of_run_toml_hold_known_keys() -> None:
    keys = {line.split(" = ")[0] for block in blocks("toml") for line in block.splitlines()}
    assert keys and keys <= set(KEYS)


def test_hooks_are_python_and_use_what_there_is() -> None:
    assert len(blocks("python")) > 5
    known = set(inspect.signature(StepWriter.add).parameters) | set(inspect.signature(RolloutWriter).parameters)
    padded = {*PER_TOKEN, *PER_TOKEN_OR_ROW, *PER_ROW, *inspect.signature(padded_rows).parameters} - {"fields"}
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mismatch_probe"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            names = {keyword.arg for keyword in node.keywords if keyword.arg}
            if called == "RolloutWriter":
                assert names <= known | set(KEYS)
            elif called in ("add", "add_batch", "write_batch"):
                assert names <= known
            elif called in ("add_padded", "write_padded"):
                assert names <= padded
            elif called.startswith("rows_from_"):
                hook = getattr(importlib.import_module("mismatch_probe.log.hooks"), called)
                inspect.signature(hook).bind(*node.args, **{name: None for name in names})
