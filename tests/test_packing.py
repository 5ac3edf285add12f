"""Packed passes: every prompt once for all its responses, and the scores of each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from mismatch_probe.assemble import halves
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Ragged, Rollouts
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.packing import packs, sharing_rows, unique_tokens
from mismatch_probe.scoring.proof import looks_ahead
from mismatch_probe.scoring.score import StepScorer
from mismatch_probe.scoring.states import hidden_states
from tests.tiny import VOCAB, random_rollouts, save_model

PACKED = {
    **{name: {} for name in ("llama", "qwen2", "qwen3", "gpt2", "cohere", "granite", "opt")},
    "gemma2": {"attn_logit_softcapping": 3.0},
    **{name: {} for name in ("gemma3_text", "mistral", "mixtral", "qwen3_moe")},
}


def groups(
    rng: np.random.Generator, prompts: tuple[int, ...] = (15, 9, 3), each: int = 4, longest: int = 30
) -> Rollouts:
    """``each`` responses to every prompt, some of one token, in mixed order, some tokens masked."""
    rows = rng.permutation(np.repeat(np.arange(len(prompts)), each))
    drawn = [rng.integers(0, VOCAB, size) for size in prompts]
    plain = random_rollouts(rng, n=len(rows), longest=longest)
    return replace(
        plain, prompt=Ragged.of([drawn[row] for row in rows]), group_id=np.array([f"g{r}" for r in rows], dtype=object)
    )


def alone(path: Path, rollouts: Rollouts, attention: str | None = "eager") -> torch.Tensor:
    """Hidden states of every sequence on its own, with the attention that is written out in transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval().base_model
    states = []
    for row in range(len(rollouts)):
        ids = torch.from_numpy(np.concatenate([rollouts.prompt[row], rollouts.response[row]]))[None]
        with torch.no_grad():
            states.append(
                model(input_ids=ids, use_cache=False).last_hidden_state[0, len(rollouts.prompt[row]) - 1 : -1]
            )
    return torch.cat(states)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_states_are_those_of_each_sequence_alone(tmp_path: Path, kind: str) -> None:
    """Windows shorter than the prompts, capped scores, experts; groups whole, cut, and cut to pieces."""
    save_model(tmp_path, kind, **PACKED[kind])
    network = Network(tmp_path, ScoringOptions(device="cpu"))
    assert network.no_packing == ""
    rollouts = groups(np.random.default_rng(1))
    expected = alone(tmp_path, rollouts)[torch.from_numpy(rollouts.loss_mask)]
    sequences = rollouts.prompt, rollouts.response, rollouts.loss_mask
    for budget in (10_000, 60, 20, 1):
        forwarded: list[int] = []
        found = hidden_states(network, *sequences, budget, forwarded.append)
        assert float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max())), budget
        # Whatever the budget no prompt is run twice.
        assert sum(forwarded) == unique_tokens(*sequences) < 0.7 * sum(map(len, (rollouts.response.values,))) + 200


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_scores_of_shared_prompts_equal_those_of_a_shuffled_run_in_small_passes(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "one", kind, seed=1, **PACKED[kind])
    save_model(tmp_path / "two", kind, seed=2, **PACKED[kind])
    rollouts = groups(np.random.default_rng(2))

    def scored(rollouts: Rollouts, **options):
        scorer = StepScorer(ScoringOptions(device="cpu", **options))
        return scorer.score(rollouts, halves(rollouts), tmp_path / "one", lambda _: tmp_path / "two")

    order = np.random.default_rng(3).permutation(len(rollouts))
    token = np.concatenate([np.arange(rollouts.response.offsets[r], rollouts.response.offsets[r + 1]) for r in order])
    whole, pieces = scored(rollouts), scored(rollouts.take(order), max_tokens=17)
    for name in ("trainer_logprob", "stale_logprob", "kl_stale_trainer", "total_variation"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name)[token], abs=1e-5, nan_ok=True)
    assert np.isfinite(whole.trainer_logprob[rollouts.loss_mask]).all()


@pytest.mark.parametrize("kind", ["gpt_oss", "falcon", "bloom"])
def test_attention_that_is_not_understood_is_run_in_batches_and_said(tmp_path: Path, kind: str) -> None:
    """Sinks, and positions that enter through a mask: packed they would be wrong, so they are not packed."""
    save_model(tmp_path, kind)
    said: list[str] = []
    network = Networks(ScoringOptions(device="cpu"), on_notice=said.append).get(tmp_path)
    assert network.no_packing and "prompts are not shared" in said[0] and network.no_packing in said[0]
    rollouts = groups(np.random.default_rng(4))
    wanted = rollouts.loss_mask
    found = hidden_states(network, rollouts.prompt, rollouts.response, wanted, 60, lambda _: None)
    # Falcon's own two implementations give its positions different weights: its default counts.
    expected = alone(tmp_path, rollouts, None)[torch.from_numpy(wanted)]
    assert float((found - expected).abs().max()) < 2e-5 * max(1.0, float(expected.abs().max()))


def test_a_window_that_is_in_the_mask_alone_is_not_lost(tmp_path: Path) -> None:
    """Qwen2-MoE's layers do not tell their attention of the window, and a few tokens do not show it."""
    save_model(tmp_path, "qwen2_moe")
    network = Network(tmp_path, ScoringOptions(device="cpu"))
    assert "window of 12 tokens is in a mask alone" in network.no_packing
    rollouts = groups(np.random.default_rng(5))
    found = hidden_states(network, rollouts.prompt, rollouts.response, rollouts.loss_mask, 200, lambda _: None)
    expected = alone(tmp_path, rollouts)[torch.from_numpy(rollouts.loss_mask)]
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


ROPES = {
    "llama": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "phi3": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 8.0,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_positions_that_depend_on_the_longest_sequence_are_run_one_at_a_time(tmp_path: Path, kind: str) -> None:
    extra = {"max_position_embeddings": 16} if kind == "llama" else {"original_max_position_embeddings": 16}
    save_model(tmp_path, kind, rope_parameters=ROPES[kind], **extra)
    network = Network(tmp_path, ScoringOptions(device="cpu"))
    assert "longest sequence" in network.no_packing and network.one_at_a_time
    rollouts = groups(np.random.default_rng(6))
    wanted = np.ones(len(rollouts.response.values), dtype=np.bool_)
    found = hidden_states(network, rollouts.prompt, rollouts.response, wanted, 400, lambda _: None)
    # A model of its own for each sequence: what ran before must not matter.
    fresh = [alone(tmp_path, rollouts.take(np.array([row]))) for row in range(len(rollouts))]
    expected = torch.cat(fresh)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks_ahead(save_model(tmp_path / "bert", "bert"))
    assert not looks_ahead(save_model(tmp_path / "bloom", "bloom"))
    monkeypatch.setattr("mismatch_probe.scoring.network.looks_ahead", lambda _: True)
    with pytest.raises(CheckpointError, match="looks at tokens that follow"):
        Network(tmp_path / "bloom", ScoringOptions(device="cpu"))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_in_float64(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path, kind)
    rollouts = groups(np.random.default_rng(7))
    states = [
        hidden_states(
            Network(tmp_path, ScoringOptions(device="cpu", dtype=dtype)),
            *(rollouts.prompt, rollouts.response, rollouts.loss_mask, 100, lambda _: None),
        )
        for dtype in ("float64", "float32")
    ]
    assert states[0].dtype == torch.float64
    assert float((states[0] - states[1]).abs().max()) < 1e-5 * float(states[0].abs().max())


def test_what_was_planned_is_reported_by_batches_too(tmp_path: Path) -> None:
    save_model(tmp_path, "bloom")
    rollouts = groups(np.random.default_rng(8))
    forwarded: list[int] = []
    sequences = rollouts.prompt, rollouts.response, rollouts.loss_mask
    hidden_states(Network(tmp_path, ScoringOptions(device="cpu")), *sequences, 60, forwarded.append)
    assert len(forwarded) > 2 and sum(forwarded) == unique_tokens(*sequences)


@st.composite
def some_groups(draw) -> tuple[Ragged, Ragged, np.ndarray, int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts = [rng.integers(0, 9, rng.integers(1, 12)) for _ in range(draw(st.integers(1, 4)))]
    rows = draw(st.integers(1, 12))
    prompt = Ragged.of([prompts[rng.integers(len(prompts))] for _ in range(rows)])
    response = Ragged.of([rng.integers(0, 9, rng.integers(1, 14)) for _ in range(rows)])
    return prompt, response, rng.random(len(response.values)) < rng.choice([0.1, 0.6, 1.0]), draw(st.integers(1, 60))


@settings(max_examples=200, deadline=None)
@given(some_groups())
def test_every_wanted_token_hangs_on_its_own_prefix_once(given_: tuple[Ragged, Ragged, np.ndarray, int]) -> None:
    """The layout, token by token, as attention will see it."""
    prompt, response, wanted, budget = given_
    place = np.flatnonzero(wanted)
    row_of = np.repeat(np.arange(len(response)), response.lengths)
    seen, trunk_ids = [], np.zeros(0, np.int64)
    for pack in packs(prompt, response, wanted, budget):
        prefix: dict[int, list[int]] = {}
        for trunk in pack.trunks:
            if not trunk.kept:
                trunk_ids = pack.ids[trunk.start : trunk.stop]
            assert len(trunk_ids) == trunk.length
            for at in range(trunk.start, trunk.stop):
                prefix[at] = trunk_ids[: at - trunk.start + 1].tolist()
            for start, stop in trunk.branches:
                for at in range(start, stop):
                    prefix[at] = [*trunk_ids.tolist(), *pack.ids[start : at + 1].tolist()]
        assert sorted(prefix) == list(range(len(pack.ids)))
        assert all(pack.places[at] == len(ids) - 1 for at, ids in prefix.items())
        for source, target in zip(pack.source, pack.target, strict=True):
            token = place[target]
            row = row_of[token]
            own = response.values[response.offsets[row] : token]
            assert prefix[source] == [*prompt[row].tolist(), *own.tolist()]
            seen.append(target)
        least = len(pack.trunks) == 1 and len(pack.trunks[0].branches) <= 1  # what cannot be cut any more
        assert least or len(pack.ids) <= budget
    assert sorted(seen) == list(range(len(place)))
    assert set(sharing_rows(prompt, response, wanted, budget)) <= set(row_of[place])
