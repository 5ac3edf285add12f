"""Peak memory of the head pass, over weights and hidden states, against tokens and vocabulary."""
# ruff: noqa: T201

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_MEASURE = """
import sys
from pathlib import Path
import torch
from mismatch_probe.scoring.head import compare
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.sketch import HeadSketch
vocab_size, tokens, width = map(int, sys.argv[1:4])

class Head:
    def __init__(self, seed):
        self.weight = torch.randn(vocab_size, width, generator=torch.Generator().manual_seed(seed)) * 0.1
        self.vocab_size, self.logits_dtype = vocab_size, torch.float32
    def logits(self, hidden, out=None):
        return torch.mm(hidden, self.weight.T, out=out)

heads = [Head(0), Head(1)]
states = [torch.randn(tokens, width) for _ in heads]
ids = torch.randint(0, vocab_size, (tokens,))
sketch = HeadSketch(heads[1].weight)

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

def reduce(n):
    pair = [(head, state[:n]) for head, state in zip(heads, states)]
    return compare(*pair, ids[:n], ids[:n] % 2, 1.0, ScoringOptions().chunk_elements, sketch)

reduce(1)
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
reduce(tokens)
print((kilobytes("VmHWM") - before) / 1024)
"""


def table() -> None:
    """Print a row for each vocabulary, a column for each number of tokens; MiB, with the gradient's factors."""
    root = Path(__file__).resolve().parent.parent
    counts = (2_000, 8_000, 32_000)
    print("| vocabulary | " + " | ".join(f"{n:,} tokens" for n in counts) + " |\n|---:" + "|---:" * len(counts) + "|")
    for vocab_size in (32_000, 64_000, 152_000):
        peaks = []
        for tokens in counts:
            command = [sys.executable, "-c", _MEASURE, str(vocab_size), str(tokens), "16"]
            made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
            peaks.append(float(made.stdout))
        print(f"| {vocab_size:,} | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |", flush=True)
