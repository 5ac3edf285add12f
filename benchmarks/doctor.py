"""``martingale doctor`` and the statistics of this project over the same tokens: seconds and peak memory of each.

    pip install --no-deps --target MARTINGALE martingale==0.2.0    # any folder; it needs click and nothing else here
    OMP_NUM_THREADS=1 python -m benchmarks.doctor MARTINGALE [million tokens, 0.1]

One step of responses of 500 tokens, eight to a prompt, sampled one update before they are scored. The doctor reads a
record that its own ``Recorder`` wrote (SQLite); writing it is not timed. Every job is a process of its own, imports
included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks import statistics

LENGTH = 500
_DOCTOR = """
import sys
sys.path.insert(0, sys.argv[1])
from martingale.cli import cli
cli(["doctor", "--dir", sys.argv[2], "--json", sys.argv[3]], standalone_mode=False)
"""
_OURS = """
import sys
from benchmarks import statistics
row = statistics.found(sys.argv[1], int(sys.argv[2]))
print(row["ess_total_token"])
"""
# Not ru_maxrss, which a child takes over from the process that started it.
_PEAK = """
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 2**20)
"""


def record(martingale: str, tokens: Path, workspace: Path) -> None:
    """The tokens in the doctor's format, in float64: the engine's log-probs, and the trainer's a step later."""
    sys.path.insert(0, martingale)
    from martingale.record import Recorder, SamplerConfig

    recorder = Recorder(workspace)
    sampler = SamplerConfig(temperature=1.0, logprobs_mode="processed_logprobs", temperature_applied=True)
    drew, trains = (recorder.publish_revision(f"{step:064x}", b"-", sampler, step=step) for step in (0, 1))
    table = pq.read_table(tokens, columns=["token_id", "stale_trainer_logprob", "discrepancy", "log_ratio"])
    ids = table["token_id"].to_numpy()
    logged = table["stale_trainer_logprob"].to_numpy() - table["discrepancy"].to_numpy()
    scored = logged + table["log_ratio"].to_numpy()
    for at in range(0, len(ids), LENGTH):
        span = slice(at, at + LENGTH)
        name = str(at // LENGTH)
        with recorder.sequence(actor_id=0, sequence_id=name, prompt_ids=[at // LENGTH // 8]) as sequence:
            for token, logprob in zip(ids[span].tolist(), logged[span].tolist(), strict=True):
                sequence.token(drew.digest, token, logprob, dtype="f64")
        recorder.score(sequence.record.digest, trains.digest, scored[span].tolist(), dtype="f64")
    recorder.ledger.close()


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Write the tokens both ways, and time both."""
    martingale, millions = sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else 0.1
    with tempfile.TemporaryDirectory() as folder:
        path, workspace = Path(folder) / "part-0.parquet", Path(folder) / "workspace"
        statistics.write(path, max(1, round(millions)), LENGTH)
        if millions < 1:
            pq.write_table(pq.read_table(path).slice(0, round(millions * 1e6)), path, row_group_size=131072)
        count = pq.read_metadata(path).num_rows
        start = time.perf_counter()
        record(martingale, path, workspace)
        sys.stdout.write(
            f"{count:,} tokens: Parquet {path.stat().st_size / 1e6:.0f} MB, the doctor's record "
            f"{(workspace / 'tokens.db').stat().st_size / 1e6:.0f} MB, written in {time.perf_counter() - start:.0f} s\n"
        )
        report = Path(folder) / "report.json"
        ours = [_OURS, str(path), str(count // LENGTH)]
        theirs = [_DOCTOR, martingale, str(workspace), str(report)]
        for name, (code, *given) in (("statistics", ours), ("martingale doctor", theirs)):
            start, before = time.perf_counter(), _processor()
            job = [sys.executable, "-c", code + _PEAK, *given]
            printed = subprocess.run(job, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            seconds, processor = time.perf_counter() - start, _processor() - before
            sys.stdout.write(
                f"{name:<20}{seconds:8.2f} s{processor:8.2f} s of the processor{float(printed[-1]):8.2f} GiB peak\n"
            )
            if code is _OURS:
                ess = float(printed[-2])
        (bucket,) = json.loads(report.read_text(encoding="utf-8"))["by_lag"]
        theirs_ess = bucket["float_informational"]["ess_fraction"]
        sys.stdout.write(f"token ESS of the whole log-ratio: {ess:.12f}, by the doctor {theirs_ess:.12f}\n")


if __name__ == "__main__":
    main()
