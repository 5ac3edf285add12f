"""What a CPU can say of the kernels on a GPU: they compile, fit the smallest shared memory, and spill little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALLEST = 99 * 1024
"""Shared memory that one block can have on devices of compute capability 8.6 and 8.9."""


def test_kernels_compile_for_cuda_without_a_device(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton.compile_kernels"]
    root = Path(__file__).parents[2]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    found = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(found) == 16
    for one in found:
        assert one["stack"] <= 800, one  # bytes a thread that do not fit the registers
        assert one["architecture"] == 90 or one["shared"] <= SMALLEST, one
        if one["dtype"] == "bf16":
            assert one["product"] == ("wgmma" if one["architecture"] == 90 else "mma.sync"), one
