"""ESS from the tokens table against a bare pyarrow read of the same columns: seconds and peak memory of each.

    python benchmarks/statistics.py [million tokens, 10] [length of a response, 500]

One step, written to a temporary folder; each job is a process of its own.
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

from mismatch_probe.recompute import COLUMNS, ess_of_file

_PART = 1_000_000


def write(path: Path, millions: int, length: int) -> None:
    """A step of ``millions`` million tokens in responses of ``length`` tokens, eight to a prompt."""
    rng = np.random.default_rng(0)
    writer = None
    for part in range(millions):
        sequence = (part * _PART + np.arange(_PART)) // length
        low, low_group = int(sequence[0]), int(sequence[0]) // 8
        lag, discrepancy = rng.normal(scale=0.02, size=_PART), rng.normal(scale=0.01, size=_PART)
        columns = {
            "sequence_id": _names(sequence - low, low),
            "group_id": _names(sequence // 8 - low_group, low_group),
            "lag": lag,
            "discrepancy": discrepancy,
            "log_ratio": lag + discrepancy,
            "stale_trainer_logprob": rng.normal(size=_PART),
            "trainer_logprob_source": _constant("logged"),
        }
        table = pa.table({name: columns[name] for name in COLUMNS})
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=131072)
    if writer is not None:
        writer.close()


def _names(number: np.ndarray, low: int) -> pa.DictionaryArray:
    names = [str(low + i) for i in range(int(number.max()) + 1)]
    return pa.DictionaryArray.from_arrays(pa.array(number.astype(np.int32)), pa.array(names))


def _constant(name: str) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(_PART, np.int32)), pa.array([name]))


def _job(kind: str, path: Path) -> None:
    start = time.perf_counter()
    if kind == "read":
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for _ in file.iter_batches(1 << 17, columns=list(COLUMNS)):
                pass
    else:
        ess_of_file(path)
    seconds = time.perf_counter() - start
    # Not ru_maxrss, which a child takes over from the process that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    sys.stdout.write(f"{kind:<5}{seconds:8.2f} s{peak:8.2f} GiB peak\n")


def main() -> None:
    """Write the step and run both jobs."""
    given = [int(text) for text in sys.argv[1:3]]
    millions, length = [*given, *[10, 500][len(given) :]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0.parquet"
        write(path, millions, length)
        sys.stdout.write(f"{millions} million tokens, responses of {length}\n")
        sys.stdout.flush()
        for kind in ("read", "ess"):
            subprocess.run([sys.executable, __file__, "--job", kind, str(path)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        _job(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
