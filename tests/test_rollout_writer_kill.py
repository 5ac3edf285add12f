"""SIGKILL at any moment leaves whole files or none."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from mismatch_probe.log import RolloutWriter
from mismatch_probe.readers import open_run

ROWS, TOKENS = 40, 200
WRITE = f"""
import sys
import numpy as np
from mismatch_probe.log import RolloutWriter

with RolloutWriter(sys.argv[1] + "_first").step(int(sys.argv[2])):
    pass  # the first write imports much; what is to be hit are the writes
writer = RolloutWriter(sys.argv[1], temperature=1.0)
print("open", flush=True)
for step in range(int(sys.argv[2]), 100_000):
    with writer.step(step) as block:
        for at in range({ROWS}):
            ids, logprobs = np.full({TOKENS}, step), -np.arange({TOKENS}) / 8.0
            block.add(prompt_ids=[at + 1], response_ids=ids, sampler_logprobs=logprobs, sampler_version=step)
    print(step, flush=True)
"""


def killed_while_writing(path: Path, first: int, delay: float) -> int:
    """Write steps from ``first`` on, be killed after ``delay`` seconds; the last step said to be written."""
    with subprocess.Popen([sys.executable, "-c", WRITE, str(path), str(first)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        said = [int(line) for line in child.stdout.read().splitlines() if line]
    assert child.returncode == -signal.SIGKILL
    return said[-1] if said else first - 1


def test_no_kill_tears_a_file_or_loses_a_written_step(tmp_path: Path) -> None:
    rng = random.Random(5)
    said = -1
    for _ in range(8):
        said = killed_while_writing(tmp_path, said + 1, rng.uniform(0.0, 0.15))
    run = open_run(tmp_path)
    assert said > 8  # several steps a life on average, or the kills hit nothing but the start
    assert {step.index for step in run.steps} >= set(range(said + 1))
    for step in run.steps:
        rollouts = step.load()
        assert len(rollouts) == ROWS and not rollouts.rejected, step.files
        assert (rollouts.response.values == step.index).all() and len(rollouts.response.values) == ROWS * TOKENS
        assert (rollouts.sampler_version == step.index).all()
    RolloutWriter(tmp_path)
    assert all(entry.suffix == ".parquet" for entry in (tmp_path / "rollouts").iterdir())
