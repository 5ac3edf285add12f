"""Fresh responses: drawn from the distribution they should be, alone or in a batch, and ended where they end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Ragged, Rollouts
from mismatch_probe.scoring import sample
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.sample import Sampling, cut, sample_fresh
from tests.planted import VOCAB, log_softmax, write_bigram_checkpoint
from tests.tiny import VOCAB as TINY
from tests.tiny import save_model

CPU = ScoringOptions(device="cpu")


def responses(rollouts: Rollouts) -> list[list[int]]:
    return [rollouts.response[row].tolist() for row in range(len(rollouts))]


def bigram(path: Path, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    table = scale * np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
    write_bigram_checkpoint(path, table)
    return table


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.6, -1, 1.0), (1.3, 5, 1.0), (1.0, -1, 0.7), (0.8, 8, 0.8)]
)
def test_tokens_come_from_the_planted_distribution(
    tmp_path: Path, temperature: float, top_k: int, top_p: float
) -> None:
    """Frequencies after each token against softmax, cut by hand, within 5 standard errors."""
    table = bigram(tmp_path / "one") / temperature
    prompts = Ragged.of([np.array([3]), np.array([1, 2, 5])])
    settings = Sampling(temperature, top_p, top_k, 6, (), CPU)
    drawn = sample_fresh(tmp_path / "one", prompts, settings, 3000, [7])
    counts = np.zeros((VOCAB, VOCAB))
    for row in range(len(drawn)):
        before = [int(drawn.prompt[row][-1]), *drawn.response[row][:-1].tolist()]
        np.add.at(counts, (before, drawn.response[row]), 1)
    for last in range(VOCAB):
        p = np.exp(log_softmax(table[last]))
        if top_k > 0:
            p[np.argsort(-p)[top_k:]] = 0
        order = np.argsort(-p)
        before = np.cumsum(p[order]) / p.sum() - p[order] / p.sum()
        p[order[before >= top_p]] = 0
        p /= p.sum()
        n = counts[last].sum()
        assert (np.abs(counts[last] - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all()
    assert (counts.sum(axis=1) > 100).sum() >= 5 and counts[2].sum() == 0  # Llama's own end token is 2
    before = np.concatenate([[drawn.prompt[row][-1], *drawn.response[row][:-1]] for row in range(len(drawn))])
    assert drawn.sampler_logprob == pytest.approx(log_softmax(table)[before, drawn.response.values], abs=1e-5)


KINDS = ["qwen3", "gpt2", "gemma2", "gemma3_text", "mixtral", "opt", "mistral", "bloom"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_ragged_prompts_says_what_each_prompt_alone_says(tmp_path: Path, kind: str) -> None:
    """Also: the recorded log-probs are those of plain forward passes, so cache and padding change nothing."""
    model = save_model(tmp_path / "one", kind, seed=1)
    rng = np.random.default_rng(0)
    prompts = Ragged.of([rng.integers(0, TINY, size) for size in (9, 1, 4, 4, 7)])
    settings = Sampling(longest=14, eos=(3, 5), scoring=CPU)
    together = sample_fresh(tmp_path / "one", prompts, settings, 2, [1, 2])
    small = Sampling(longest=14, eos=(3, 5), scoring=ScoringOptions(device="cpu", max_tokens=1))
    assert responses(sample_fresh(tmp_path / "one", prompts, small, 2, [1, 2])) == responses(together)
    assert len({tuple(found) for found in responses(together)}) == 10
    at = 0
    for row in range(len(together)):
        prompt, response = together.prompt[row], together.response[row]
        with torch.no_grad():
            logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(-1, torch.from_numpy(response)[:, None])[:, 0].numpy()
        assert together.sampler_logprob[at : at + len(response)] == pytest.approx(expected, abs=1e-5)
        at += len(response)


def test_the_seed_decides(tmp_path: Path) -> None:
    bigram(tmp_path / "one")
    prompts = Ragged.of([np.array([3]), np.array([3])])
    settings = Sampling(longest=8, scoring=CPU)
    torch.manual_seed(0)
    first = responses(sample_fresh(tmp_path / "one", prompts, settings, 3, [1]))
    torch.manual_seed(1)
    assert responses(sample_fresh(tmp_path / "one", prompts, settings, 3, [1])) == first
    assert responses(sample_fresh(tmp_path / "one", prompts, settings, 3, [2])) != first
    # Copies of one prompt, and rows that hold the same prompt, differ.
    assert len({tuple(found) for found in first}) == 6


def test_nothing_after_the_end_is_kept(tmp_path: Path) -> None:
    """Padding is a token of the vocabulary; it may also be the end token or occur in the middle of a response."""
    table = np.zeros((VOCAB, VOCAB))
    table[:, [4, 9]] = 1.5  # both end a response
    write_bigram_checkpoint(tmp_path / "one", table)
    prompts = Ragged.of([np.array([3, 4, 9]), np.array([9])])
    drawn = sample_fresh(tmp_path / "one", prompts, Sampling(longest=10, eos=(4, 9), scoring=CPU), 200, [0])
    lengths = drawn.response.lengths
    assert lengths.min() == 1 and lengths.max() == 10 and len(drawn.sampler_logprob) == lengths.sum()
    for row in range(len(drawn)):
        response = drawn.response[row]
        ends = np.isin(response, (4, 9))
        assert not ends[:-1].any()
        assert drawn.finish_reason[row] == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(response) == 10
    # P(end) is the same at each place: lengths are geometric, cut at 10.
    p = 2 * np.exp(1.5) / (2 * np.exp(1.5) + VOCAB - 2)
    assert lengths.mean() == pytest.approx((1 - (1 - p) ** 10) / p, rel=0.15)


def test_the_end_token_of_the_checkpoint_stands_in(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3", eos_token_id=[7, 8])
    prompts = Ragged.of([np.array([1])])
    drawn = sample_fresh(tmp_path / "one", prompts, Sampling(longest=20, scoring=CPU), 200, [0])
    stopped = drawn.finish_reason == "stop"
    assert stopped.any()
    assert all(int(drawn.response[row][-1]) in (7, 8) for row in np.flatnonzero(stopped))


def test_penalties_beside_the_weights_are_not_the_runs(tmp_path: Path) -> None:
    """generation_config.json of a published model often changes temperature, penalties and top-k."""
    bigram(tmp_path / "one")
    prompts = Ragged.of([np.array([3])])
    settings = Sampling(longest=8, scoring=CPU)
    plain = responses(sample_fresh(tmp_path / "one", prompts, settings, 20, [1]))
    (tmp_path / "one" / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.1, "repetition_penalty": 3.0, "suppress_tokens": [1, 2], "top_k": 1}'
    )
    assert responses(sample_fresh(tmp_path / "one", prompts, settings, 20, [1])) == plain


def test_a_table_of_positions_bounds_the_response(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "gpt2")
    prompts = Ragged.of([np.ones(60, dtype=int), np.ones(2, dtype=int)])
    settings = Sampling(longest=500, eos=(TINY - 1,), scoring=ScoringOptions(device="cpu", max_tokens=1))
    drawn = sample_fresh(tmp_path / "one", prompts, settings, 3, [0])
    assert (drawn.response.lengths[:3] <= 4).all() and (drawn.response.lengths[3:] <= 62).all()
    assert drawn.response.lengths[3:].max() > 4


def test_a_batch_that_memory_does_not_hold_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bigram(tmp_path / "one")
    prompts = Ragged.of([np.array([row]) for row in range(5)])
    settings = Sampling(longest=8, scoring=CPU)
    whole = responses(sample_fresh(tmp_path / "one", prompts, settings, 1, [1]))
    generate = sample._Sampler._generate

    def small(self, rows):
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return generate(self, rows)

    monkeypatch.setattr(sample._Sampler, "_generate", small)
    assert responses(sample_fresh(tmp_path / "one", prompts, settings, 1, [1])) == whole


def test_architectures_that_cannot_pad_answer_one_length_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bigram(tmp_path / "one")
    prompts = Ragged.of([np.array([1, 2]), np.array([3]), np.array([4, 5])])
    settings = Sampling(longest=8, scoring=CPU)
    whole = responses(sample_fresh(tmp_path / "one", prompts, settings, 1, [1]))
    generate = sample._Sampler._generate

    def spoilt(self, rows):
        found = generate(self, rows)
        ragged = len(np.unique(self._prompts.lengths[rows])) > 1
        return {row: (ids, logprob * np.nan) for row, (ids, logprob) in found.items()} if ragged else found

    monkeypatch.setattr(sample._Sampler, "_generate", spoilt)
    assert responses(sample_fresh(tmp_path / "one", prompts, settings, 1, [1])) == whole


def test_weights_that_give_no_number_are_refused(tmp_path: Path) -> None:
    table = np.zeros((VOCAB, VOCAB))
    table[3, 3] = np.nan
    write_bigram_checkpoint(tmp_path / "one", table)
    with pytest.raises(CheckpointError, match="not finite"):
        sample_fresh(tmp_path / "one", Ragged.of([np.array([3])]), Sampling(longest=4, scoring=CPU), 1, [0])


def test_a_token_of_probability_0_is_never_drawn() -> None:
    """Not even by the uniform number 0, at the head of the vocabulary, nor by the largest, at its tail."""
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    uniform = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    drawn = sample._Pick(uniform, Sampling())(torch.zeros(2, 1), scores)
    assert drawn.argmax(dim=-1).tolist() == [1, 2]


def test_cuts_keep_what_they_should() -> None:
    log_p = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()

    def kept(top_k: int, top_p: float) -> list[int]:
        return torch.isfinite(cut(log_p, top_k, top_p))[0].nonzero()[:, 0].tolist()

    assert kept(-1, 1.0) == kept(0, 1.0) == kept(9, 1.0) == [0, 1, 2, 3]
    assert kept(2, 1.0) == [0, 1] and kept(1, 0.01) == [0]
    assert kept(3, 1.0) == [0, 1, 2, 3]  # a tie at the third place
    assert kept(-1, 0.45) == [0] and kept(-1, 0.6) == [0, 1] and kept(-1, 0.85) == [0, 1, 2]
    assert kept(-1, 0.0) == [0]  # one always stays
    assert kept(2, 0.6) == [0] and kept(2, 0.65) == [0, 1]  # top-p of what top-k leaves: 0.625, 0.375
