"""A step of prime-rl's rank file: packed micro batches of 16 fields, as msgpack."""

from __future__ import annotations

from pathlib import Path

import msgpack
import numpy as np

PROMPT, RESPONSE, PACKED = 100, 1000, 16


def write(run_dir: Path, tokens: int) -> list[Path]:
    """Write one step of ``tokens`` response tokens; returns its files."""
    rng = np.random.default_rng(0)
    file = run_dir / "rollouts" / "step_1" / "rank_0.bin"
    file.parent.mkdir(parents=True)
    n = PROMPT + RESPONSE
    sequences = tokens // RESPONSE
    rows = []
    for start in range(0, sequences, PACKED):
        count = min(PACKED, sequences - start)
        total = count * n
        mask = ([False] * PROMPT + [True] * RESPONSE) * count
        logprobs = rng.normal(-1, 0.3, total).tolist()
        positions, lengths = list(range(n)) * count, [n] * count
        row = [rng.integers(0, 150_000, total).tolist(), mask, [0.5] * total, logprobs, positions, lengths]
        rows.append([*row, [1.0] * total, ["math"] * total, lengths, *[None] * 7])
    file.write_bytes(msgpack.packb(rows))
    return [file]


def parse(files: list[Path]) -> None:
    """The fastest plain parser: msgpack's own."""
    for file in files:
        data = file.read_bytes()
        msgpack.unpackb(data, max_array_len=len(data))
