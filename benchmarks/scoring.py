"""Speed, memory and agreement of the scorer against the obvious one, on a run that is there:

    python benchmarks/scoring.py RUN_DIR [--sequences N] [--rounds R]

RUN_DIR is a native run whose step 0 is on-policy and whose step 1 holds two versions of the weights, such as
``benchmarks/engine_gap.py record`` writes. The obvious scorer takes one sequence at a time, all its logits and a
float32 log_softmax, and at step 1 both versions and KL(pi_s || pi). ``StepScorer`` also gives entropies, the other KL,
total variation, the bias vectors and the noise floor. Each round runs each scorer in a process of its own, on float32
weights that are already loaded. Ratios are of the best times in R rounds, obvious over this; memory is what the
process holds before scoring and at most while scoring; the last columns are the largest differences from the obvious.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
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


def obvious(run: Run, step: int) -> Scorer:
    """One sequence at a time, full logits."""
    import torch
    from transformers import AutoModelForCausalLM

    paths = [run.sampler_checkpoint(0), run.trainer_checkpoint(step)]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in dict.fromkeys(paths)]

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
        return {name: torch.cat(values).numpy() for name, values in zip(NAMES, zip(*parts, strict=True), strict=False)}

    return score


def tool(run: Run, step: int, max_tokens: int = 16384) -> Scorer:
    """The scorer of ``decompose``, with its ``--max-tokens``."""
    from mismatch_probe.assemble import halves
    from mismatch_probe.scoring.network import ScoringOptions
    from mismatch_probe.scoring.score import StepScorer

    scorer = StepScorer(ScoringOptions(device="cpu", max_tokens=max_tokens))

    def score(rollouts: Rollouts) -> Columns:
        return vars(scorer.score(rollouts, halves(rollouts), run.trainer_checkpoint(step), run.sampler_checkpoint))

    return score


SCORERS: dict[str, Callable[[Run, int], Scorer]] = {
    "obvious": obvious,
    "StepScorer": tool,
    "StepScorer, max_tokens 4096": partial(tool, max_tokens=4096),
}


def mebibytes(field: str) -> float:
    """A line of ``/proc/self/status``; the kernel's own peak, as a child inherits getrusage's from its parent."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field)) / 1024


def measure(path: Path, which: str, step: int, sequences: int, out: Path) -> None:
    """In a process of its own: load, warm up, score once, and write what was found."""
    run = open_run(path)
    rollouts = run.steps[step].load()
    rollouts = rollouts.take(np.arange(min(sequences, len(rollouts))))
    score = SCORERS[which](run, step)
    score(rollouts.take(np.array([0])))
    loaded = mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    wall, cpu = time.perf_counter(), time.process_time()
    columns = score(rollouts)
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    found: dict[str, Any] = {name: columns[name] for name in NAMES if name in columns} | seconds
    found |= {"loaded": loaded, "peak": mebibytes("VmHWM"), "tokens": len(rollouts.response.values)}
    np.savez(out, **found)


def compare(options: argparse.Namespace, step: int, case: str) -> None:
    """Run the scorers in turn, as often as asked, and print the rows of one case."""
    found: dict[str, list[Columns]] = {which: [] for which in SCORERS}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.npz"
        for _ in range(options.rounds):
            for which, rounds in found.items():
                child = ["--child", which, str(step), str(options.sequences), str(out)]
                subprocess.run([sys.executable, __file__, str(options.run), *child], check=True)
                rounds.append(dict(np.load(out)))
    first = found["obvious"]
    for which, rounds in found.items():
        best = {kind: min(float(one[kind]) for one in rounds) for kind in ("wall", "cpu")}
        wall, cpu = (min(float(one[kind]) for one in first) / best[kind] for kind in best)
        memory = " | ".join(f"{max(float(one[kind]) for one in rounds):.0f}" for kind in ("loaded", "peak"))
        gaps = " | ".join(
            f"{np.abs(first[0][name] - rounds[0][name]).max():.1e}" if name in first[0] else "-" for name in NAMES
        )
        speed = float(rounds[0]["tokens"]) / best["wall"]
        print(f"| {case} | {which} | {speed:.0f} | {wall:.2f} | {cpu:.2f} | {memory} | {gaps} |", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        which, step, sequences, out = options.child
        measure(options.run, which, int(step), int(sequences), Path(out))
        return
    print("| step | scorer | tokens/s | wall ratio | CPU ratio | loaded, MiB | peak, MiB | log pi_s | log pi | KL |")
    print("|---|---" + "|---:" * 8 + "|")
    for case, step in CASES:
        compare(options, step, case)


if __name__ == "__main__":
    main()
