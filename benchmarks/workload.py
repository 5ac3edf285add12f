"""Groups of responses to one prompt, cut from a text: the sequences that the scoring benchmark scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch_probe.run import Ragged, Rollouts

ROOT = Path(__file__).resolve().parent.parent
PROMPT, SHORTEST, LONGEST, GROUP = 512, 64, 256, 8


@dataclass(frozen=True)
class Workload:
    """Prompts (groups,) of PROMPT tokens and GROUP responses to each, of SHORTEST to LONGEST tokens."""

    prompts: list[np.ndarray]
    responses: list[list[np.ndarray]]

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every (prompt, response)."""
        return [(p, r) for p, rows in zip(self.prompts, self.responses, strict=True) for r in rows]

    @property
    def tokens(self) -> int:
        """Response tokens: those whose log-probs are wanted."""
        return sum(len(response) for _, response in self.pairs)

    @property
    def unique(self) -> int:
        """Tokens of every prompt once and of every response."""
        return self.tokens + sum(map(len, self.prompts))

    def rollouts(self) -> Rollouts:
        """The same as a step of a run, sampled by version 0."""
        pairs = self.pairs
        n, tokens = len(pairs), self.tokens
        return Rollouts(
            sequence_id=np.array([f"s{i}" for i in range(n)], dtype=object),
            group_id=np.array([f"g{i // GROUP}" for i in range(n)], dtype=object),
            origin=np.array([*(("text", i) for i in range(n)), None], dtype=object)[:-1],
            prompt=Ragged.of([prompt for prompt, _ in pairs]),
            response=Ragged.of([response for _, response in pairs]),
            sampler_logprob=np.full(tokens, np.nan),
            trainer_logprob=np.full(tokens, np.nan),
            loss_mask=np.ones(tokens, dtype=np.bool_),
            sampler_version=np.zeros(tokens, dtype=np.int64),
            advantage=np.full(tokens, np.nan),
            reward=np.full(n, np.nan),
            finish_reason=np.full(n, None, dtype=object),
        )


def workload(model: Path, groups: int, seed: int = 0) -> Workload:
    """Cut this project's own pages into prompts and responses, with the model's tokenizer."""
    from transformers import AutoTokenizer

    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = np.array(AutoTokenizer.from_pretrained(model)(text)["input_ids"], dtype=np.int64)
    rng = np.random.default_rng(seed)

    def cut(length: int) -> np.ndarray:
        start = int(rng.integers(0, len(ids) - length))
        return ids[start : start + length]

    prompts = [cut(PROMPT) for _ in range(groups)]
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=(groups, GROUP))
    return Workload(prompts, [[cut(int(length)) for length in row] for row in lengths])
