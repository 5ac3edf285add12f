"""Statistics of one step from its tokens table against a bare pyarrow read of the same columns: seconds, peak memory.

    OMP_NUM_THREADS=1 python -m benchmarks.statistics [million tokens, 10] [length of a response, 500]

One step, written to a temporary folder; each job is a process of its own. The command that does this for every step is
``ess-report --recompute``.
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

from mismatch_probe.recompute import stats_of_file
from mismatch_probe.token_chunks import COLUMNS, StepIndex, TokenFile

_PART = 1_000_000
_OPTIONS = {"seed": 0, "resamples": 2000, "confidence": 0.95, "intervals": "jackknife"}


def write(path: Path, millions: int, length: int) -> None:
    """A step of ``millions`` million tokens in responses of ``length`` tokens."""
    rng = np.random.default_rng(0)
    lag, discrepancy = rng.normal(scale=0.02, size=_PART), rng.normal(scale=0.01, size=_PART)
    stale, entropy, kl = rng.normal(-1, 0.3, size=_PART), rng.random(_PART), rng.random(_PART) * 1e-3
    writer = None
    for part in range(millions):
        sequence = (part * _PART + np.arange(_PART)) // length
        low = int(sequence[0])
        lag, discrepancy = np.roll(lag, 977), np.roll(discrepancy, 1009)
        columns = {
            "sequence_id": _names(sequence - low, low),
            "token_id": pa.array(rng.integers(0, 150_000, _PART), pa.int32()),
            "lag": lag,
            "discrepancy": discrepancy,
            "log_ratio": lag + discrepancy,
            "stale_trainer_logprob": np.roll(stale, part),
            "trainer_logprob_source": _constant("rescored"),
            "entropy_stale": np.roll(entropy, part),
            "entropy_trainer": np.roll(entropy, 2 * part + 1),
            "kl_stale_trainer": np.roll(kl, part),
            "kl_trainer_stale": np.roll(kl, 2 * part + 1),
            "total_variation": np.abs(np.roll(lag, part)),
            "same_top": (np.roll(entropy, part) < 0.99).astype(np.float64),
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


def found(path: Path, sequences: int) -> dict[str, float]:
    """The step's statistics; eight responses to a prompt, all of one length."""
    names = [str(sequence) for sequence in range(sequences)]
    length = pq.read_metadata(path).num_rows // sequences
    groups = [f"{sequence // 8:08d}" for sequence in range(sequences)]
    return stats_of_file(TokenFile(path, StepIndex.of(names, groups, [length])), _OPTIONS)[0]


def _job(kind: str, path: Path, sequences: int) -> None:
    start, before = time.perf_counter(), time.process_time()
    if kind == "read":
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for _ in file.iter_batches(1 << 17, columns=list(COLUMNS)):
                pass
    else:
        sys.stdout.write(f"{len(found(path, sequences))} numbers of the steps table\n")
    seconds, processor = time.perf_counter() - start, time.process_time() - before
    # Not ru_maxrss, which a child takes over from the process that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    sys.stdout.write(f"{kind:<11}{seconds:8.2f} s{processor:8.2f} s of the processor{peak:8.2f} GiB peak\n")


def main() -> None:
    """Write the step and run both jobs."""
    given = [int(text) for text in sys.argv[1:3]]
    millions, length = [*given, *[10, 500][len(given) :]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0.parquet"
        write(path, millions, length)
        size = path.stat().st_size / 1e9
        sys.stdout.write(f"{millions} million tokens, responses of {length}, {size:.1f} GB\n")
        sys.stdout.flush()
        sequences = -(-millions * _PART // length)
        for kind in ("read", "statistics", "read"):
            job = [sys.executable, "-m", "benchmarks.statistics", "--job", kind, str(path), str(sequences)]
            subprocess.run(job, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        _job(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
