"""Speed, memory and agreement of the scorer against the obvious one, on a run that is there:

    python benchmarks/scoring.py RUN_DIR [--sequences N] [--repeats R]

RUN_DIR is a native run whose step 0 is on-policy and whose step 1 holds two versions of the weights, such as
``benchmarks/engine_gap.py record`` writes. The obvious scorer takes one sequence at a time, all its logits and a
float32 log_softmax, and at step 1 both versions and KL(pi_s || pi). ``StepScorer`` also gives entropies, the other KL,
total variation, the bias vectors and the noise floor. Each runs in a process of its own, in turn, on float32 weights
that are already loaded; the best of R times counts.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.readers import open_run
from mismatch_probe.run import Rollouts, Run

Columns = dict[str, np.ndarray]
Scorer = Callable[[Rollouts], Columns]
CASES = (("one version", 0), ("two versions", 1))
NAMES = ("stale_logprob", "trainer_logprob", "kl_stale_trainer")
STATUS = Path("/proc/self/status")


def naive(run: Run, step: int) -> Scorer:
    """One sequence at a time, full logits."""
    import torch
    from transformers import AutoModelForCausalLM

    paths = [run.sampler_checkpoint(0), run.trainer_checkpoint(step)]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in dict.fromkeys(paths)
    ]

    @torch.inference_mode()
    def score(rollouts: Rollouts) -> Columns:
        parts: list[list[torch.Tensor]] = []
        for row in range(len(rollouts)):
            prompt, response = rollouts.prompt[row], torch.from_numpy(rollouts.response[row])
            ids = torch.cat([torch.from_numpy(prompt), response])[None]
            logps = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
            values = [logp.gather(-1, response[:, None])[:, 0] for logp in logps]
            if len(logps) == 2:
                values.append((logps[0].exp() * (logps[0] - logps[1])).sum(-1))
            parts.append(values)
        names = ("stale_logprob", "trainer_logprob", "kl_stale_trainer")
        return {name: torch.cat(tensors).numpy() for name, tensors in zip(names, zip(*parts, strict=True), strict=False)}

    return score


def tool(run: Run, step: int) -> Scorer:
    """The scorer of ``decompose``."""
    from mismatch_probe.assemble import halves
    from mismatch_probe.scoring.network import ScoringOptions
    from mismatch_probe.scoring.score import StepScorer

    scorer = StepScorer(ScoringOptions(device="cpu"))

    def score(rollouts: Rollouts) -> Columns:
        return vars(scorer.score(rollouts, halves(rollouts), run.trainer_checkpoint(step), run.sampler_checkpoint))

    return score


def mebibytes(field: str) -> float:
    """A line of ``/proc/self/status``; the kernel's own peak, as a child inherits getrusage's from its parent."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field)) / 1024


def measure(path: Path, which: str, step: int, sequences: int, repeats: int, out: Path) -> None:
    """In a process of its own: load, warm up, time, and write what was found."""
    run = open_run(path)
    rollouts = run.steps[step].load()
    rollouts = rollouts.take(np.arange(min(sequences, len(rollouts))))
    score = {"naive": naive, "tool": tool}[which](run, step)
    score(rollouts.take(np.array([0])))
    loaded = mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    seconds, columns = [], {}
    for _ in range(repeats):
        start = time.perf_counter()
        columns = score(rollouts)
        seconds.append(time.perf_counter() - start)
    kept = {name: columns[name] for name in ("stale_logprob", "trainer_logprob", "kl_stale_trainer") if name in columns}
    numbers = {"seconds": np.array(seconds), "loaded": np.array(loaded), "peak": np.array(mebibytes("VmHWM"))}
    np.savez(out, **kept, **numbers, tokens=np.array(len(rollouts.response.values)))


def compare(options: argparse.Namespace, step: int, case: str) -> None:
    """Print the rows of one case."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for which in ("naive", "tool"):
            out = Path(folder) / f"{which}.npz"
            limits = [str(step), str(options.sequences), str(options.repeats)]
            subprocess.run([sys.executable, __file__, str(options.run), "--child", which, *limits, str(out)], check=True)
            found[which] = dict(np.load(out))
    slow, fast = found["naive"], found["tool"]
    for which, numbers in found.items():
        best, spread = numbers["seconds"].min(), numbers["seconds"].max() / numbers["seconds"].min()
        print(
            f"| {case} | {which} | {numbers['tokens'] / best:.0f} | {slow['seconds'].min() / best:.2f} | {spread:.2f} "
            f"| {numbers['loaded']:.0f} | {numbers['peak']:.0f} | "
            + (", ".join(f"{name} {np.abs(slow[name] - fast[name]).max():.1e}" for name in slow if name in NAMES))
            + " |",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        which, step, sequences, repeats, out = options.child
        measure(options.run, which, int(step), int(sequences), int(repeats), Path(out))
        return
    print("| case | scorer | tokens/s | speed-up | slowest / best | RSS loaded, MiB | peak RSS, MiB | largest difference |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for case, step in CASES:
        compare(options, step, case)


if __name__ == "__main__":
    main()
