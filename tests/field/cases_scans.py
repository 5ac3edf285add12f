"""Field reports that a scan over version, temperature or shift names."""

from __future__ import annotations

from pathlib import Path

from tests.field.base import FieldRun, base, log_softmax
from tests.field.case import Build, Case, Variant


def raw_logged(temperature: float) -> Build:
    """Sampled at a temperature that is declared; the log holds raw log-probs."""

    def build(path: Path) -> object:
        run = base(draw=lambda z: log_softmax(z / temperature), log=log_softmax)
        run.toml["temperature"] = temperature
        return run.write(path)

    return build


def shifted(by: int, steps: tuple[int, ...] = (0, 1, 2, 3, 4), temperature: float = 1.0) -> Build:
    """The log-probs moved along the response; raw where sampling was at another temperature than 1."""

    def build(path: Path) -> object:
        run = base(draw=lambda z: log_softmax(z / temperature), log=log_softmax)
        run.toml["temperature"] = temperature
        for step in steps:
            for row in run.rows[step]:
                logged = row["sampler_logprobs"]
                row["sampler_logprobs"] = [0.0] * by + logged[:-by] if by > 0 else logged[-by:] + [0.0] * -by
                row["sampler_logprobs"] = row["sampler_logprobs"][: len(row["response_ids"])]
                row["sampler_logprobs"] += [0.0] * (len(row["response_ids"]) - len(row["sampler_logprobs"]))
        return run.write(path)

    return build


def relabelled(run: FieldRun, claims: dict[int, int]) -> FieldRun:
    """The rows of each step claim another version."""
    for step, claim in claims.items():
        for row in run.rows[step]:
            row["sampler_version"] = claim
    return run


def frozen(size: float = 0.002, since: int = 0) -> Build:
    """The sampler stays at version ``since``; every step claims its own."""

    def build(path: Path) -> object:
        run = base(version=lambda step: min(step, since), size=size)
        return relabelled(run, {step: step for step in run.rows}).write(path)

    return build


def labels_off(offsets: dict[int, int]) -> Build:
    """Labels differ from the version that sampled."""

    def build(path: Path) -> object:
        run = base()
        return relabelled(run, {step: step + offset for step, offset in offsets.items()}).write(path)

    return build


CASES = (
    Case(
        1,
        "raw log-probs logged at T = .6, trainer scales",
        "huggingface/trl#4159",
        "MP401",
        Variant("T = .6", raw_logged(0.6)),
        Variant("T = .5", raw_logged(0.5)),
        Variant("T = .9", raw_logged(0.9)),
    ),
    Case(
        6,
        "log-probs one place off",
        "modelscope/ms-swift#8196",
        "MP101",
        Variant("one place to the right, every step", shifted(1)),
        Variant("two places to the right", shifted(2)),
        Variant("one place to the left, one step only", shifted(-1, (2,))),
    ),
    Case(
        6,
        "one place off and raw log-probs at once",
        "modelscope/ms-swift#8427",
        "MP101",
        Variant("one place to the right, raw at T = .6", shifted(1, temperature=0.6)),
        Variant("one place to the right, raw at T = .5", shifted(1, temperature=0.5)),
        Variant("one place to the left, raw at T = .8", shifted(-1, temperature=0.8)),
        also=("MP401",),
    ),
    Case(
        18,
        "sleep mode: the engine generates from the first weights",
        "huggingface/trl#5312",
        "MP202",
        Variant("version 0 throughout", frozen()),
        Variant("version 0 throughout, updates five times as large", frozen(0.01)),
        Variant("lost from step 3 on", frozen(since=3)),
    ),
    Case(
        27,
        "what step_k means changed",
        "PrimeIntellect-ai/prime-rl#2896",
        "MP201",
        Variant("every label one too high", labels_off(dict.fromkeys(range(5), 1))),
        Variant("every label one too low, from step 1 on", labels_off(dict.fromkeys(range(1, 5), -1))),
        Variant("one too high from step 3 on", labels_off({3: 1, 4: 1})),
    ),
)
