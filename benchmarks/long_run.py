"""Memory and time of ``decompose`` as a run grows: steps of a million tokens, nothing to score.

    OMP_NUM_THREADS=1 python -m benchmarks.long_run [steps, 10,100] [length of a response, 500]

Both log-probs are logged, eight responses to a prompt. Each run is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TOKENS = 1_000_000


def write(run_dir: Path, steps: int, length: int) -> None:
    """Native step files of TOKENS response tokens."""
    (run_dir / "rollouts").mkdir(parents=True)
    rows = TOKENS // length
    for step in range(steps):
        rng = np.random.default_rng(step)
        sampler = rng.normal(-1, 0.3, TOKENS).clip(max=-1e-3).astype(np.float32)
        trainer = (sampler + rng.normal(0, 0.01, TOKENS)).astype(np.float32)
        columns = {
            "sequence_id": pa.array([f"s{row}" for row in range(rows)]),
            "group_id": pa.array([f"g{row // 8}" for row in range(rows)]),
            "prompt_ids": _lists(rng.integers(0, 150_000, rows * 10), rows),
            "response_ids": _lists(rng.integers(0, 150_000, rows * length), rows),
            "sampler_logprobs": _lists(sampler[: rows * length], rows),
            "trainer_logprobs": _lists(trainer[: rows * length], rows),
            "sampler_version": pa.array([step] * rows),
            "reward": pa.array(rng.random(rows)),
        }
        pq.write_table(pa.table(columns), run_dir / "rollouts" / f"step_{step:06d}.parquet", compression="zstd")


def _lists(values: np.ndarray, rows: int) -> pa.Array:
    offsets = np.arange(rows + 1, dtype=np.int32) * (len(values) // rows)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _job(run_dir: Path) -> None:
    from mismatch_probe.entry import main as command

    start, before = time.perf_counter(), time.process_time()
    if command(["decompose", str(run_dir), "-q", "--overwrite"]):
        sys.exit("decompose failed")
    seconds, processor = time.perf_counter() - start, time.process_time() - before
    # Not ru_maxrss, which a child takes over from the process that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    sys.stderr.write(f"{seconds:9.1f} s{processor:9.1f} s of the processor{peak:8.2f} GiB peak\n")


def main() -> None:
    """Write and decompose a run for each number of steps."""
    counts = [int(text) for text in sys.argv[1].split(",")] if sys.argv[1:] else [10, 100]
    length = int(sys.argv[2]) if sys.argv[2:] else 500
    for steps in counts:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), steps, length)
            sys.stderr.write(f"{steps:>4} steps of {TOKENS:,} tokens, responses of {length}: ")
            sys.stderr.flush()
            job = [sys.executable, "-m", "benchmarks.long_run", "--job", folder]
            subprocess.run(job, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        _job(Path(sys.argv[2]))
    else:
        main()
