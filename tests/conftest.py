from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

# Two threads that wait for each other on a busy machine are slower than one on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers.utils import logging as transformers_logging

from mismatch_probe.entry import main
from tests.checkpoints import write_sharded
from tests.planted import Planted, plant

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "sample_data"


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A run of four steps with known tables, sampled by version 0 throughout, decomposed once."""
    made = plant(tmp_path_factory.mktemp("planted") / "run", steps=4)
    assert main(["decompose", str(made.path), "-q"]) == 0
    return made


@pytest.fixture
def run(planted: Planted, tmp_path: Path) -> Planted:
    """A copy of the planted run, without its analysis."""
    shutil.copytree(planted.path, tmp_path / "run", ignore=shutil.ignore_patterns("mismatch_probe"))
    return Planted(tmp_path / "run", planted.trainer, planted.mu, copy.deepcopy(planted.rows))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints as torch's own sharding writes them on four ranks: see tests/write_sharded.py."""
    folder = tmp_path_factory.mktemp("sharded")
    write_sharded(folder)
    return folder


@pytest.fixture(scope="session")
def stale_analysis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped stale run, decomposed once."""
    folder = tmp_path_factory.mktemp("stale") / "analysis"
    assert main(["decompose", str(SAMPLE / "stale_run"), "-o", str(folder), "-q"]) == 0
    return folder
