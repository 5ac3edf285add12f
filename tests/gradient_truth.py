"""The policy gradient of an output head by brute force: every token's outer product, every correction spelled out."""

from __future__ import annotations

import itertools

import numpy as np

from mismatch_probe.stats.gradient import TokenGradients
from mismatch_probe.stats.ratios import Levels
from tests.planted import VOCAB, log_softmax

CAP, MASK, GEOMETRIC, CLIP = 2.0, (0.5, 5.0), (0.99, 1.01), 0.2


def tables(seed: int = 0, noise: float = 0.1, drift: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log mu, log pi_s and log pi of a bigram language model, (V, V) each: row = the token before."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(VOCAB, VOCAB))
    mu = log_softmax(logits + noise * rng.normal(size=logits.shape))
    return mu, log_softmax(logits), log_softmax(logits + drift * rng.normal(size=logits.shape))


def all_responses(prompts: list[int], length: int) -> np.ndarray:
    """Every response to every prompt, the prompt's last token first, (N, 1 + length)."""
    return np.array([[p, *rest] for p in prompts for rest in itertools.product(range(VOCAB), repeat=length)])


def token_gradients(
    rows: np.ndarray, group: np.ndarray, advantage: np.ndarray, mu: np.ndarray, stale: np.ndarray, trainer: np.ndarray
) -> TokenGradients:
    """Whole factors of the responses in ``rows``, (N, 1 + T), with one advantage each; x = sqrt(V) e_before."""
    before, drawn = rows[:, :-1].ravel(), rows[:, 1:].ravel()
    q, p = np.exp(stale[before]), np.exp(trainer[before])
    at, one_hot = np.arange(len(drawn)), np.eye(VOCAB)[drawn]
    mass = np.minimum(p, CAP * q)
    weight = np.minimum((p / q)[at, drawn], CAP)[:, None]
    # Each score e_v - p on its own: the mean under pi_s is a sum over the vocabulary.
    scores = np.eye(VOCAB)[None] - p[:, None, :]
    centred = weight * (one_hot - p) - np.einsum("nv,nvk->nk", mass, scores)
    length = rows.shape[1] - 1
    return TokenGradients(
        discrepancy=(stale - mu)[before, drawn],
        lag=(trainer - stale)[before, drawn],
        advantage=np.repeat(advantage, length),
        score=one_hot - p,
        centred=centred,
        state=np.sqrt(VOCAB) * np.eye(VOCAB)[before],
        levels=Levels(np.repeat(np.arange(len(rows)), length), group),
        exact=True,
    )


def weight(name: str, d: np.ndarray, lag: np.ndarray, advantage: float) -> np.ndarray:
    """Weights of one response's tokens under a correction."""
    if name == "none":
        return np.ones(len(d))
    if name == "token_tis":
        return np.array([min(np.exp(x), CAP) for x in d])
    if name == "token_mask":
        return np.array([np.exp(x) if MASK[0] <= np.exp(x) <= MASK[1] else 0.0 for x in d])
    if name == "sequence_is":
        return np.full(len(d), np.prod(np.exp(d)))
    if name == "geometric_mask":
        return np.full(len(d), float(GEOMETRIC[0] <= np.prod(np.exp(d)) ** (1 / len(d)) <= GEOMETRIC[1]))
    assert name == "ppo_clip"
    ratio = np.exp(lag)
    clipped = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
    return np.where(clipped, 0.0, ratio)


def target_weight(target: str, x: np.ndarray) -> np.ndarray:
    return {
        "token": np.exp(x),
        "per-decision": np.cumprod(np.exp(x)),
        "sequence": np.full(len(x), np.prod(np.exp(x))),
    }[target]


def updates(tokens: TokenGradients, name: str, target: str) -> dict[str, np.ndarray]:
    """The target, the update under a correction, and the update had pi_s drawn the tokens; (V, H) each."""
    shape = tokens.score.shape[1], tokens.state.shape[1]
    out = {key: np.zeros(shape) for key in ("target", "update", "without_discrepancy")}
    for row in np.unique(tokens.levels.sequence):
        mine = np.flatnonzero(tokens.levels.sequence == row)
        big, small, advantage = tokens.discrepancy[mine], tokens.lag[mine], float(tokens.advantage[mine[0]])
        ideal = target_weight(target, big)
        if name == "dlc":
            source, with_d, without_d = tokens.centred, np.ones(len(mine)), np.ones(len(mine))
        else:
            source = tokens.score
            with_d = weight(name, big + small, small, advantage)
            without_d = weight(name, small, small, advantage)
        for at, token in enumerate(mine):
            x = tokens.state[token]
            out["target"] += advantage * target_weight(target, big + small)[at] * np.outer(tokens.score[token], x)
            out["update"] += advantage * with_d[at] * np.outer(source[token], x)
            out["without_discrepancy"] += advantage * ideal[at] * without_d[at] * np.outer(source[token], x)
    return out


def expected(tokens: TokenGradients, name: str, target: str) -> dict[str, float]:
    """The four numbers of a correction, from whole matrices."""
    found = updates(tokens, name, target)
    goal, update, clean = found["target"], found["update"], found["without_discrepancy"]
    size = np.linalg.norm(goal)
    return {
        "relative_size": float(np.linalg.norm(update) / size),
        "cosine": float((update * goal).sum() / (np.linalg.norm(update) * size)) if update.any() else np.nan,
        "bias_discrepancy": float(np.linalg.norm(update - clean) / size),
        "bias_lag": float(np.linalg.norm(clean - goal) / size),
    }
