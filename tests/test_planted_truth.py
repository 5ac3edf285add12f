"""A constructed run, scored end to end in float64: every number is known beforehand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from polgrad.diagnostics import importance_ess

from mismatch_probe.entry import main
from tests.planted import Planted, plant

TOLERANCE = 1e-6


def tables(run: Planted) -> tuple[pd.DataFrame, pd.DataFrame]:
    folder = run.path / "mismatch_probe"
    parts = sorted(folder.glob("tokens/step=*/part-0.parquet"))
    tokens = pd.concat([pd.read_parquet(part).assign(step=int(part.parent.name[5:])) for part in parts])
    return tokens, pd.read_parquet(folder / "steps.parquet").set_index("step")


def truth(run: Planted, step: int) -> dict[str, np.ndarray]:
    """Every token's numbers straight from the tables that were planted."""
    rows = run.rows[step]
    prefix = np.array([t for row in rows for t in (row["prompt_ids"][-1], *row["response_ids"][:-1])])
    token = np.array([t for row in rows for t in row["response_ids"]])
    version = np.array([row["sampler_version"] for row in rows for _ in row["response_ids"]])
    stale = np.stack(run.trainer)[version, prefix]
    trainer, mu = run.trainer[step][prefix], np.stack(run.mu)[version, prefix]
    p_s, p = np.exp(stale), np.exp(trainer)
    at = np.arange(len(token))
    return {
        "discrepancy": (stale - mu)[at, token],
        "lag": (trainer - stale)[at, token],
        "log_ratio": (trainer - mu)[at, token],
        "kl_stale_trainer": (p_s * (stale - trainer)).sum(1),
        "kl_trainer_stale": (p * (trainer - stale)).sum(1),
        "total_variation": np.abs(p_s - p).sum(1) / 2,
        "entropy_stale": -(p_s * stale).sum(1),
        "entropy_trainer": -(p * trainer).sum(1),
        "bias": p_s - p,
        "sequence": np.repeat(np.arange(len(rows)), [len(row["response_ids"]) for row in rows]),
        "group": np.array([int(row["group_id"].split("-")[1]) for row in rows]),
    }


PER_TOKEN = (
    *("discrepancy", "lag", "log_ratio", "kl_stale_trainer", "kl_trainer_stale"),
    *("total_variation", "entropy_stale", "entropy_trainer"),
)


@pytest.mark.parametrize("column", PER_TOKEN)
def test_every_token_is_recovered(planted: Planted, column: str) -> None:
    tokens, _ = tables(planted)
    for step in planted.rows:
        found = tokens.loc[tokens["step"] == step, column].to_numpy()
        assert found == pytest.approx(truth(planted, step)[column], abs=TOLERANCE)


def test_the_parts_add_up_exactly(planted: Planted) -> None:
    tokens, _ = tables(planted)
    assert (tokens["discrepancy"] + tokens["lag"] == tokens["log_ratio"]).all()


def test_ess_at_every_level(planted: Planted) -> None:
    _, steps = tables(planted)
    for step in planted.rows:
        known = truth(planted, step)
        for ratio, column in (("lag", "lag"), ("discrepancy", "discrepancy"), ("total", "log_ratio")):
            x = known[column]
            sums = np.bincount(known["sequence"], weights=x)
            groups = np.array([np.exp(sums[known["group"] == g]).mean() for g in np.unique(known["group"])])
            for level, weights in (("token", np.exp(x)), ("sequence", np.exp(sums)), ("prompt", groups)):
                expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
                assert steps.loc[step, f"ess_{ratio}_{level}"] == pytest.approx(expected, abs=TOLERANCE)


def test_sequence_ess_agrees_with_polgrad(planted: Planted) -> None:
    _, steps = tables(planted)
    for step, rows in planted.rows.items():
        lag, width = truth(planted, step)["lag"], max(len(row["response_ids"]) for row in rows)
        lengths = [len(row["response_ids"]) for row in rows]
        mask = np.arange(width) < np.array(lengths)[:, None]
        padded = np.zeros(mask.shape)
        padded[mask] = lag
        new = torch.from_numpy(padded)
        oracle = importance_ess(new, torch.zeros_like(new), torch.from_numpy(mask), level="sequence")
        assert steps.loc[step, "ess_lag_sequence"] == pytest.approx(oracle.ess_ratio, abs=TOLERANCE)


def test_means_kl_and_mass_of_each_step(planted: Planted) -> None:
    _, steps = tables(planted)
    for step in planted.rows:
        known = truth(planted, step)
        expected = {
            "discrepancy_mean": known["discrepancy"].mean(),
            "lag_rms": np.sqrt((known["lag"] ** 2).mean()),
            "log_ratio_mean_abs": np.abs(known["log_ratio"]).mean(),
            "discrepancy_k1": -known["discrepancy"].mean(),
            "log_ratio_k3": (np.expm1(known["log_ratio"]) - known["log_ratio"]).mean(),
            "discrepancy_mean_weight": np.exp(known["discrepancy"]).mean(),
            "prefix_kl_stale_trainer": known["kl_stale_trainer"].mean(),
            "prefix_kl_trainer_stale": known["kl_trainer_stale"].mean(),
            "discrepancy_lag_covariance": np.cov(known["discrepancy"], known["lag"], bias=True)[0, 1],
        }
        for name, value in expected.items():
            assert steps.loc[step, name] == pytest.approx(value, abs=TOLERANCE), name
            if f"{name}_ci_low" in steps:
                assert steps.loc[step, f"{name}_ci_low"] <= value <= steps.loc[step, f"{name}_ci_high"]


def test_bias_of_the_lag_is_exact(planted: Planted) -> None:
    _, steps = tables(planted)
    previous = None
    for step in planted.rows:
        known = truth(planted, step)
        vector = known["bias"].mean(axis=0)
        half = known["group"][known["sequence"]] % 2
        first, second = known["bias"][half == 0], known["bias"][half == 1]
        n = len(half)
        assert steps.loc[step, "bias_lag_tv"] == pytest.approx(known["total_variation"].mean(), abs=TOLERANCE)
        assert steps.loc[step, "bias_lag_norm"] == pytest.approx(np.linalg.norm(vector), abs=TOLERANCE)
        gap = np.linalg.norm(first.mean(0) - second.mean(0))
        noise = np.sqrt(len(first) * len(second)) / n * gap
        assert steps.loc[step, "bias_lag_noise"] == pytest.approx(noise, abs=TOLERANCE)
        if previous is not None and np.linalg.norm(previous) > 0:
            cosine = vector @ previous / np.linalg.norm(vector) / np.linalg.norm(previous)
            assert steps.loc[step, "bias_lag_cosine_previous"] == pytest.approx(cosine, abs=TOLERANCE)
        previous = vector


def test_bias_of_the_discrepancy_comes_from_the_sampled_tokens(planted: Planted) -> None:
    tokens, steps = tables(planted)
    for step in planted.rows:
        own = tokens[tokens["step"] == step]
        vector = np.bincount(own["token_id"], weights=-np.expm1(own["discrepancy"]), minlength=16) / len(own)
        assert steps.loc[step, "bias_discrepancy_norm"] == pytest.approx(np.linalg.norm(vector), abs=1e-12)
        assert steps.loc[step, "bias_discrepancy_tv"] == pytest.approx(
            np.abs(np.expm1(own["discrepancy"])).mean() / 2, abs=1e-12
        )


def test_identical_policies_give_ess_one_and_kl_zero_exactly(planted: Planted) -> None:
    _, steps = tables(planted)
    step = steps.loc[0]  # sampled by version 0, which step 0 updates
    for level in ("token", "sequence", "prompt"):
        assert step[f"ess_lag_{level}"] == 1.0
    for name in ("lag_mean", "lag_rms", "prefix_kl_stale_trainer", "prefix_kl_trainer_stale", "bias_lag_tv"):
        assert step[name] == 0.0


def test_identical_weights_under_two_names_give_exactly_zero(tmp_path) -> None:
    """Two checkpoint directories with the same tensors: now zero is measured, not assumed."""
    run = plant(tmp_path / "run", steps=2, drift=0.0, noise=0.0)
    assert main(["decompose", str(run.path), "-q"]) == 0
    tokens, steps = tables(run)
    assert (tokens["lag"] == 0).all()
    assert (tokens[["kl_stale_trainer", "kl_trainer_stale", "total_variation"]] == 0).all(axis=None)
    assert steps.loc[1, "ess_lag_sequence"] == 1.0
    assert np.abs(tokens["discrepancy"]).max() < 1e-12


def test_temperature_is_applied_as_declared(tmp_path) -> None:
    run = plant(tmp_path / "run", steps=2, temperature=0.7)
    assert main(["decompose", str(run.path), "-q"]) == 0
    tokens, _ = tables(run)
    for step in run.rows:
        found = tokens[tokens["step"] == step]
        known = truth(run, step)
        for column in PER_TOKEN:
            assert found[column].to_numpy() == pytest.approx(known[column], abs=TOLERANCE)


def test_float32_scoring_is_close_to_the_truth(tmp_path) -> None:
    run = plant(tmp_path / "run", steps=2)
    assert main(["decompose", str(run.path), "-q", "--dtype", "float32"]) == 0
    tokens, _ = tables(run)
    known = truth(run, 1)
    found = tokens[tokens["step"] == 1]
    assert found["kl_stale_trainer"].to_numpy() == pytest.approx(known["kl_stale_trainer"], abs=1e-5)
    assert found["lag"].to_numpy() == pytest.approx(known["lag"], abs=1e-5)


def test_running_weights_by_place(planted: Planted) -> None:
    """The places table against a plain loop over the sequences."""
    places = pd.read_parquet(planted.path / "mismatch_probe" / "places.parquet")
    for step in planted.rows:
        known = truth(planted, step)
        sequences = [np.flatnonzero(known["sequence"] == s) for s in range(known["sequence"].max() + 1)]
        own = places[places["step"] == step].set_index("place")
        for place, row in own.iterrows():
            weights = np.array([np.exp(known["log_ratio"][tokens[:place]].sum()) for tokens in sequences])
            alive = np.array([len(tokens) > place for tokens in sequences])
            kl = np.array(
                [known["kl_trainer_stale"][tokens[place]] if len(tokens) > place else 0 for tokens in sequences]
            )
            assert row["alive"] == alive.sum()
            assert row["mean_weight"] == pytest.approx(weights.mean(), abs=TOLERANCE)
            assert row["prefix_kl_trainer_stale"] == pytest.approx(kl[alive].mean(), abs=TOLERANCE)
            if row["identifiable"]:
                expected = (weights * kl)[alive].sum() / weights[alive].sum()
                assert row["full_kl_trainer_stale"] == pytest.approx(expected, abs=TOLERANCE)
            else:
                assert np.isnan(row["full_kl_trainer_stale"])


def test_health_of_the_weights(planted: Planted) -> None:
    _, steps = tables(planted)
    for step in planted.rows:
        known = truth(planted, step)
        lag, sums = known["lag"], np.bincount(known["sequence"], weights=known["lag"])
        assert steps.loc[step, "max_weight_share_lag_sequence"] == pytest.approx(
            np.exp(sums).max() / np.exp(sums).sum()
        )
        assert steps.loc[step, "share_outside_band_lag"] == pytest.approx((np.abs(lag) > np.log(1.25)).mean())
        law = np.exp(-len(lag) / len(sums) * lag.var())
        assert steps.loc[step, "predicted_ess_lag_sequence"] == pytest.approx(law, abs=TOLERANCE)


def test_kl_of_whole_responses_is_the_sum_over_their_tokens(planted: Planted) -> None:
    _, steps = tables(planted)
    for step in planted.rows:
        wanted = truth(planted, step)
        n = wanted["sequence"].max() + 1
        for name, values in (
            ("discrepancy_sequence_kl", -wanted["discrepancy"]),
            ("log_ratio_sequence_kl", -wanted["log_ratio"]),
            ("prefix_kl_sequence_stale_trainer", wanted["kl_stale_trainer"]),
        ):
            assert steps.loc[step, name] == pytest.approx(values.sum() / n, abs=TOLERANCE)
        assert steps.loc[step, "lag_mean_weight"] == pytest.approx(np.exp(wanted["lag"]).mean(), abs=TOLERANCE)
