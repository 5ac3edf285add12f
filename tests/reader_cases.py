"""The same rollouts for every reader's test: each test writes them as its framework does, and reads them back.

``cases()`` is ragged multi-turn data with tool tokens in the middle, an EOS kept and an EOS dropped, a group of size
one, an empty response, and a version change inside a response. A format that cannot hold a field leaves it out, and
its test says so by leaving the field out of ``assert_same``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.run import UNKNOWN_VERSION, Rollouts

EOS = 2
FIELDS = (
    *("prompt", "response", "loss_mask", "sampler_logprob", "trainer_logprob"),
    *("sampler_version", "advantage", "reward", "finish_reason", "group"),
)


@dataclass
class Case:
    """One sequence. Lists over the response; log-probs are given at sampled tokens (mask 1), 0.0 elsewhere.

    Log-probs, advantages and rewards are exact in float32, so that no format rounds them.
    """

    name: str
    group: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    sampler: list[float]
    trainer: list[float]
    version: list[int]
    advantage: float
    reward: float
    finish_reason: str = "stop"
    turns: list[tuple[str, int]] = field(default_factory=list)
    """("assistant" | "tool", tokens), in order; they add up to the response."""


def cases(step: int = 3, seed: int = 0) -> list[Case]:
    """Six sequences in three groups; ``step`` is the version of the trainer's weights."""
    rng = np.random.default_rng(seed)

    def make(name: str, group: int, prompt: list[int], turns: list[tuple[str, int]], eos: bool, **more: object) -> Case:
        mask = [int(who == "assistant") for who, count in turns for _ in range(count)]
        n = len(mask)
        response = rng.integers(3, 60, size=n).tolist()
        if eos:
            response[-1] = EOS
        # Multiples of 1/1024: exact in float32 and in decimal text.
        sampler = (-rng.integers(1, 4096, size=n) / 1024.0) * np.array(mask)
        trainer = sampler + (rng.integers(-64, 64, size=n) / 1024.0) * np.array(mask)
        case = Case(
            name, group, prompt, response, mask, sampler.tolist(), np.minimum(trainer, 0.0).tolist(),
            version=[step] * n, advantage=float(rng.integers(-8, 8)) / 4 + 0.125, reward=float(group % 2),
            finish_reason="stop" if eos else "length", turns=turns,
        )  # fmt: skip
        for key, value in more.items():
            setattr(case, key, value)
        return case

    first, second, third = [5, 6, 7], [11, 12, 13, 14, 15], [21]
    return [
        make("single-turn", 0, first, [("assistant", 4)], True),
        make("tools", 0, first, [("assistant", 3), ("tool", 2), ("assistant", 2), ("tool", 1), ("assistant", 1)], True),
        make("no-eos", 1, second, [("assistant", 6)], False),
        make("in-flight", 1, second, [("assistant", 5)], True, version=[step - 2, step - 2, step - 1, step, step]),
        make("alone", 2, third, [("assistant", 1)], False),
        make("empty", 0, first, [], False, finish_reason="abort"),
    ]


def assert_same(rollouts: Rollouts, expected: list[Case], without: tuple[str, ...] = (), order: bool = True) -> None:
    """Every field of every non-empty sequence equals the writer's; an empty response is set aside with its reason.

    Log-probs are compared at loss tokens: elsewhere a writer's 0.0 is filler, which a reader may keep or null.
    ``without`` names FIELDS that the format does not hold; those must read as null. With ``order`` False sequences are
    matched by their tokens.
    """
    filled = [case for case in expected if case.response]
    assert len(rollouts) == len(filled), [str(name) for name in rollouts.sequence_id]
    tokens = [(rollouts.prompt[row].tolist(), rollouts.response[row].tolist()) for row in range(len(rollouts))]
    rows = list(range(len(filled))) if order else [tokens.index((case.prompt, case.response)) for case in filled]
    groups: dict[int, set[str]] = {}
    for row, case in zip(rows, filled, strict=True):
        part = slice(int(rollouts.response.offsets[row]), int(rollouts.response.offsets[row + 1]))
        mask = np.array(case.mask, dtype=bool)
        assert tokens[row] == (case.prompt, case.response), case.name
        if "loss_mask" not in without:
            assert rollouts.loss_mask[part].tolist() == mask.tolist(), case.name
        for key, column, wanted in (
            ("sampler_logprob", rollouts.sampler_logprob, case.sampler),
            ("trainer_logprob", rollouts.trainer_logprob, case.trainer),
            ("advantage", rollouts.advantage, [case.advantage] * len(mask)),
        ):
            values = column[part][mask]
            if key in without:
                assert np.isnan(values).all(), (case.name, key)
            else:
                assert values.tolist() == np.array(wanted)[mask].tolist(), (case.name, key)
        versions = rollouts.sampler_version[part][mask]
        if "sampler_version" in without:
            assert (versions == UNKNOWN_VERSION).all(), case.name
        else:
            assert versions.tolist() == np.array(case.version)[mask].tolist(), case.name
        if "reward" in without:
            assert np.isnan(rollouts.reward[row])
        else:
            assert rollouts.reward[row] == case.reward, case.name
        if "finish_reason" not in without:
            assert rollouts.finish_reason[row] == case.finish_reason, case.name
        groups.setdefault(case.group, set()).add(str(rollouts.group_id[row]))
    if "group" not in without:
        assert all(len(names) == 1 for names in groups.values()), groups
        assert len(set.union(*groups.values())) == len(groups), groups
