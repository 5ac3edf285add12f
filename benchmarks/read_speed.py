"""How long a step of a million response tokens takes to read, against the plain parser of its format.

Run: python -m benchmarks.read_speed [FORMAT ...]. Prints one line a format; both are timed in turn, best of three.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import readers
from mismatch_probe.readers import open_run

TOKENS = 1_000_000
REPEATS = 3


def main() -> None:
    """Time every format, or those named."""
    names = sys.argv[1:] or sorted(module.name for module in pkgutil.iter_modules(readers.__path__))
    sys.stdout.write(f"{'format':<22}{'MB':>8}{'plain s':>10}{'reader s':>10}{'ratio':>8}\n")
    for name in names:
        module = importlib.import_module(f"benchmarks.readers.{name}")
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            run_dir.mkdir()
            files = module.write(run_dir, TOKENS)
            plain, ours = [], []
            for _ in range(REPEATS):
                start = time.perf_counter()
                module.parse(files)
                plain.append(time.perf_counter() - start)
                start = time.perf_counter()
                tokens = sum(len(step.load().response.values) for step in open_run(run_dir).steps)
                ours.append(time.perf_counter() - start)
            assert tokens >= TOKENS, f"{name}: {tokens} tokens read"
            size = sum(file.stat().st_size for file in files) / 1e6
            ratio = min(ours) / min(plain)
            sys.stdout.write(f"{name:<22}{size:>8.1f}{min(plain):>10.3f}{min(ours):>10.3f}{ratio:>8.2f}\n")


if __name__ == "__main__":
    main()
