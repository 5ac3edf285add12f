"""The update's bias, against enumeration of every response and against autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.corrections import CORRECTIONS, TARGETS, Bounds, target_log_weights
from mismatch_probe.stats.gradient import GradientBias, TokenGradients, gradient_bias
from mismatch_probe.stats.intervals import METHODS, ClusterIntervals
from mismatch_probe.stats.ratios import Levels
from tests.gradient_truth import all_responses, expected, tables, token_gradients, updates
from tests.planted import VOCAB
from tests.properties import covers

PROMPTS = [2, 5, 11]
COLUMNS = ("relative_size", "cosine", "bias_discrepancy", "bias_lag")


def found_by(tokens: TokenGradients, target: str = "token", method: str = "jackknife") -> GradientBias:
    return gradient_bias(tokens, ClusterIntervals(tokens.levels.n_groups, method=method), Bounds(), target)


def population(length: int, **kind: float) -> tuple[TokenGradients, np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Every response once. An update is linear in the advantage, so A mu(response) makes its sum an expectation."""
    mu, stale, trainer = tables(**kind)
    rows = all_responses(PROMPTS, length)
    group = np.repeat(np.arange(len(PROMPTS)), VOCAB**length)
    reward = np.random.default_rng(8).normal(size=len(rows))
    chance = np.exp(mu[rows[:, :-1], rows[:, 1:]].sum(axis=1))
    return token_gradients(rows, group, reward * chance, mu, stale, trainer), rows, reward, (mu, stale, trainer)


def gradient_of_expected_reward(rows: np.ndarray, reward: np.ndarray, trainer: np.ndarray) -> np.ndarray:
    """d/dW of the sum over prompts of E_pi[reward], by autograd through W x, (V, H)."""
    weight = torch.tensor(trainer.T / math.sqrt(VOCAB), requires_grad=True)
    logp = torch.log_softmax(weight @ (math.sqrt(VOCAB) * torch.eye(VOCAB, dtype=torch.float64)), dim=0).T
    chance = logp[torch.tensor(rows[:, :-1]), torch.tensor(rows[:, 1:])].sum(1).exp()
    (chance * torch.tensor(reward)).sum().backward()
    assert weight.grad is not None
    return weight.grad.numpy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [1, 2])
def test_every_number_is_that_of_enumeration(length: int, target: str) -> None:
    tokens, *_ = population(length, noise=0.2, drift=0.4)
    found = found_by(tokens, target)
    for name in CORRECTIONS:
        for column, value in expected(tokens, name, target).items():
            assert found.intervals[f"gradient_{name}_{column}"].value == pytest.approx(value, abs=1e-9, nan_ok=True), (
                name,
                column,
            )


@pytest.mark.parametrize(("length", "target"), [(1, "token"), (1, "sequence"), (2, "sequence")])
def test_full_importance_sampling_gives_the_true_gradient(length: int, target: str) -> None:
    """The target is the gradient of the expected reward itself, found by autograd; sequence IS meets it exactly."""
    tokens, rows, reward, (_, _, trainer) = population(length)
    true = gradient_of_expected_reward(rows, reward, trainer)
    found = found_by(tokens, target)
    assert updates(tokens, "none", target)["target"] == pytest.approx(true, abs=1e-12)
    plain = np.linalg.norm(updates(tokens, "none", target)["update"]) / np.linalg.norm(true)
    assert found.intervals["gradient_none_relative_size"].value == pytest.approx(plain, abs=1e-9)
    for column, value in zip(COLUMNS, (1, 1, 0, 0), strict=True):
        assert found.intervals[f"gradient_sequence_is_{column}"].value == pytest.approx(value, abs=1e-9)
    assert found.intervals["gradient_none_bias_lag"].value > 0.05


def test_token_weights_leave_the_prefixes_uncorrected() -> None:
    """With two tokens the token target is not the true gradient: the sequence correction differs from it."""
    tokens, rows, reward, (_, _, trainer) = population(2)
    true = gradient_of_expected_reward(rows, reward, trainer)
    target = updates(tokens, "none", "token")["target"]
    assert np.linalg.norm(target - true) > 0.05 * np.linalg.norm(true)
    assert found_by(tokens).intervals["gradient_sequence_is_bias_lag"].value > 0.05


@pytest.mark.parametrize("target", TARGETS)
def test_on_policy_every_correction_is_the_target_exactly(target: str) -> None:
    tokens, *_ = population(2, noise=0.0, drift=0.0)
    nothing = np.zeros_like(tokens.lag)
    found = found_by(replace(tokens, discrepancy=nothing, lag=nothing, centred=tokens.score), target)
    for name in CORRECTIONS:
        values = [found.intervals[f"gradient_{name}_{column}"].value for column in COLUMNS]
        assert values == pytest.approx([1, 1, 0, 0], abs=1e-15), name
    assert found.values["gradient_target_ess"] == 1.0


def test_the_centred_score_has_no_mean_where_pi_s_sampled() -> None:
    """With one advantage for all, the uncentred update off-policy is pure bias, and the centred one is zero."""
    tokens, *_, (mu, _, _) = population(1, noise=0.0)
    rows = all_responses(PROMPTS, 1)
    same = np.exp(mu[rows[:, 0], rows[:, 1]])
    tokens = replace(tokens, advantage=same)
    assert np.linalg.norm(updates(tokens, "dlc", "token")["update"]) < 1e-12
    assert np.linalg.norm(updates(tokens, "none", "token")["update"]) > 0.1


def drawn(groups: int, per_group: int, rng: np.random.Generator) -> TokenGradients:
    """One-token responses drawn from mu to prompts drawn from PROMPTS."""
    mu, stale, trainer = tables()
    prompt = np.repeat(rng.choice(PROMPTS, size=groups), per_group)
    token = np.array([rng.choice(VOCAB, p=np.exp(mu[p])) for p in prompt])
    reward = np.random.default_rng(8).normal(size=len(PROMPTS) * VOCAB)
    worth = {p: reward[at * VOCAB : (at + 1) * VOCAB] for at, p in enumerate(PROMPTS)}
    advantage = np.array([worth[p][t] for p, t in zip(prompt, token, strict=True)])
    group = np.repeat(np.arange(groups), per_group)
    return token_gradients(np.stack([prompt, token], 1), group, advantage, mu, stale, trainer)


def test_intervals_of_drawn_updates_cover_the_enumerated_truth() -> None:
    """Updates with a clear direction: of many prompts, the noise in their length is small."""
    population_tokens, *_ = population(1)
    truth = {name: expected(population_tokens, name, "token") for name in CORRECTIONS}
    rng = np.random.default_rng(3)
    watched = [(n, c) for n in ("none", "token_tis", "ppo_clip", "dlc") for c in ("relative_size", "cosine")]
    covered, trials, signal = dict.fromkeys(watched, 0), 60, []
    for _ in range(trials):
        found = found_by(drawn(150, 16, rng))
        signal.append(found.intervals["gradient_signal"].value)
        for name, column in watched:
            interval = found.intervals[f"gradient_{name}_{column}"]
            covered[name, column] += interval.low <= truth[name][column] <= interval.high
    assert np.mean(signal) > 0.9
    assert min(covered.values()) / trials >= 0.85, covered


def test_signal_is_the_share_of_the_expected_update() -> None:
    """Unbiased: its mean over draws is what the enumerated update says; without a direction it is about zero."""
    rng = np.random.default_rng(4)
    pure = []
    for _ in range(40):
        tokens = drawn(30, 4, rng)
        tokens = replace(tokens, advantage=np.repeat(rng.choice([-1.0, 1.0], size=30), 4))
        pure.append(found_by(tokens).intervals["gradient_signal"].value)
    assert abs(np.mean(pure)) < 3 * np.std(pure) / math.sqrt(len(pure))


def test_signal_is_the_mean_product_of_different_groups() -> None:
    tokens = drawn(5, 3, np.random.default_rng(9))
    weights = tokens.advantage * np.exp(tokens.discrepancy + tokens.lag)
    each = np.einsum("n,ni,nj->nij", weights, tokens.score, tokens.state).reshape(5, 3, -1).sum(axis=1)
    pairs = each @ each.T
    between = (pairs.sum() - np.trace(pairs)) / (5 * 4)
    assert found_by(tokens).intervals["gradient_signal"].value == pytest.approx(between / (pairs.sum() / 25), abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_every_interval_method_works(method: str) -> None:
    found = found_by(drawn(12, 8, np.random.default_rng(5)), method=method)
    interval = found.intervals["gradient_none_relative_size"]
    assert interval.low < interval.value < interval.high and interval.method == method


def test_a_target_that_few_weights_carry_is_refused() -> None:
    tokens = drawn(10, 8, np.random.default_rng(6))
    tokens.lag[0] = 9.0
    found = found_by(tokens)
    assert not found.intervals and found.values["gradient_target_ess"] < 0.5
    assert "no on-policy target, the ESS of its token weights pi / mu is" in found.reasons[0]


def test_no_update_and_no_tokens_are_said() -> None:
    tokens = drawn(4, 4, np.random.default_rng(7))
    assert "zero" in found_by(replace(tokens, advantage=0 * tokens.advantage)).reasons[0]
    none = {
        name: getattr(tokens, name)[:0] for name in ("discrepancy", "lag", "advantage", "score", "centred", "state")
    }
    empty = replace(tokens, **none, levels=Levels(tokens.levels.sequence[:0], tokens.levels.group_of_sequence))
    assert "no sequence" in found_by(empty).reasons[0]


def test_a_sequence_weight_beyond_float64_is_null_with_its_reason() -> None:
    tokens, *_ = population(2)
    tokens = replace(tokens, lag=tokens.lag + 300.0)  # e^600 over two tokens, squared too much
    found = found_by(tokens)
    assert "gradient_sequence_is_cosine" not in found.intervals
    assert any("sequence_is: beyond float64" in reason for reason in found.reasons)
    assert found.intervals["gradient_none_relative_size"].value < 1e-100
    beyond = found_by(replace(tokens, lag=tokens.lag + 200.0))
    assert not beyond.intervals and "target is beyond float64" in beyond.reasons[0]


@covers(gradient_bias)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]))
def test_extreme_log_ratios_give_finite_numbers_or_null(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = drawn(5, 4, rng)
    tokens = replace(tokens, lag=scale * rng.normal(size=20), discrepancy=scale * rng.normal(size=20))
    found = found_by(tokens)
    assert found.intervals or found.reasons
    for name, interval in found.intervals.items():
        assert not math.isinf(interval.value), name


@covers(gradient_bias)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_sequences_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = drawn(6, 4, rng)
    order = rng.permutation(24)
    moved = replace(
        tokens,
        **{n: getattr(tokens, n)[order] for n in ("discrepancy", "lag", "advantage", "score", "centred", "state")},
        levels=Levels(np.arange(24), tokens.levels.group_of_sequence[order]),
    )
    one, two = found_by(tokens).intervals, found_by(moved).intervals
    for name in one:
        assert (one[name].value, one[name].low) == pytest.approx(
            (two[name].value, two[name].low), nan_ok=True, abs=1e-7
        )


def test_running_weights_start_anew_in_each_response() -> None:
    levels = Levels(np.array([0, 0, 1, 1, 1]), np.array([0, 0]))
    x = np.array([0.1, 0.2, -1.0, 0.5, 0.25])
    assert target_log_weights(x, levels, "per-decision") == pytest.approx([0.1, 0.3, -1.0, -0.5, -0.25])
    assert target_log_weights(x, levels, "sequence") == pytest.approx([0.3, 0.3, -0.25, -0.25, -0.25])
    with pytest.raises(ValueError, match="none of token, per-decision, sequence"):
        target_log_weights(x, levels, "turn")
