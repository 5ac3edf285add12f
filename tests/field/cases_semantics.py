"""Field reports in which the logged log-probs are of another distribution than the trained one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.field.base import UPDATE, Transform, base, log_softmax
from tests.field.case import Build, Case, Variant
from tests.field.cases_scans import raw_logged, relabelled


def top_p(share: float) -> Transform:
    """Logits -> log-probs over the smallest set of tokens whose mass reaches ``share``."""

    def cut(table: np.ndarray) -> np.ndarray:
        logprob = log_softmax(table)
        order = np.argsort(-logprob, axis=1)
        mass = np.cumsum(np.exp(np.take_along_axis(logprob, order, axis=1)), axis=1)
        out = mass - np.exp(np.take_along_axis(logprob, order, axis=1)) >= share
        gone = np.zeros_like(out)
        np.put_along_axis(gone, order, out, axis=1)
        return log_softmax(np.where(gone, -1e9, logprob))

    return cut


def top_k(count: int) -> Transform:
    """Logits -> log-probs over the most probable tokens."""

    def cut(table: np.ndarray) -> np.ndarray:
        lowest = np.sort(table, axis=1)[:, -count][:, None]
        return log_softmax(np.where(table < lowest, -1e9, table))

    return cut


def truncated(draw: Transform, noise: float = 0.01, **declared: float) -> Build:
    """Sampled and logged through a cut."""

    def build(path: Path) -> object:
        run = base(draw=draw, noise=noise)
        run.toml.update(declared)
        return run.write(path)

    return build


def stale_and_cut(share: float, since: int = 0, size: float = UPDATE) -> Build:
    """The sampler is frozen at one version, and top-p is on."""

    def build(path: Path) -> object:
        run = base(version=lambda step: min(step, since), size=size, draw=top_p(share))
        run.toml["top_p"] = share
        return relabelled(run, {step: step for step in run.rows}).write(path)

    return build


def invisible(temperature: float, responses: int = 4) -> Build:
    """Sampled at a temperature; both sides are raw, and the temperature is not declared."""

    def build(path: Path) -> object:
        return base(draw=lambda z: log_softmax(z / temperature), log=log_softmax, members=responses).write(path)

    return build


CASES = (
    Case(
        2,
        "top-p renormalises the log-probs",
        "huggingface/trl#6789",
        "MP402",
        Variant("top_p .9, declared", truncated(top_p(0.9), top_p=0.9)),
        Variant("top_k 8, declared", truncated(top_k(8), top_k=8)),
        Variant("top_p .98, declared as 1", truncated(top_p(0.98))),
    ),
    Case(
        2,
        "the settings that are logged deny it",
        "vllm-project/vllm#49577",
        "MP402",
        Variant("top_p .9, declared as 1", truncated(top_p(0.9))),
        Variant("top_p .7, declared as 1", truncated(top_p(0.7))),
        Variant("top_p .9, logit noise .03", truncated(top_p(0.9), noise=0.03)),
    ),
    Case(
        4,
        "correlation is low because one side is tempered",
        "verl-project/verl#4162",
        "MP401",
        Variant("T = 1.2", raw_logged(1.2)),
        Variant("T = 1.5", raw_logged(1.5)),
        Variant("T = 1.1", raw_logged(1.1)),
    ),
    Case(
        2,
        "a lost synchronisation and top-p at once",
        "huggingface/trl#6789",
        "MP402",
        Variant("version 0 throughout, top_p .9", stale_and_cut(0.9)),
        Variant("version 0 throughout, top_p .8", stale_and_cut(0.8)),
        Variant("lost from step 3 on, top_p .9", stale_and_cut(0.9, since=2)),
        also=("MP202",),
    ),
    Case(
        5,
        "sampling is tempered, both sides log raw log-probs",
        "thinking-machines-lab/tinker-feedback#148",
        "MP404",
        Variant("T = .6, T = 1 declared", invisible(0.6)),
        Variant("T = .5", invisible(0.5)),
        Variant("T = .8, 16 responses a prompt", invisible(0.8, 16)),
    ),
)
