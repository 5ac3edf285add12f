"""``decompose --fresh-rollouts``: the full KL of planted networks, enumerated exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.folder import open_analysis
from mismatch_probe.reporters.plots import plot_prefix_kl
from mismatch_probe.scoring import sample, sample_cache
from tests.planted import VOCAB, log_softmax, write_bigram_checkpoint, write_rows, write_toml

END, GOOD, BAD, LONGEST = 0, 1, 2, 20
FULL = "full_kl_fresh_trainer_stale"


def chain(enter: float, bad_slope: float) -> np.ndarray:
    """Logits of a bigram model with a good and an absorbing bad region; either may end at each token.

    In the good one tokens 3 to 8 are alike and BAD is entered with probability ``enter``; in the bad one tokens 9 to 15
    follow, tilted by ``bad_slope``: that is where versions disagree.
    """
    p = np.full((VOCAB, VOCAB), 1e-9)
    for last in range(VOCAB):
        if last == BAD or last >= 9:
            p[last, 9:] += 0.9 * np.exp(bad_slope * np.arange(7)) / np.exp(bad_slope * np.arange(7)).sum()
            p[last, END] += 0.1
        else:
            p[last, 3:9] += (0.95 - enter) / 6
            p[last, BAD] += enter
            p[last, END] += 0.05
    return np.log(p)


def enumerated(trainer: np.ndarray, stale: np.ndarray, reach: np.ndarray) -> tuple[float, float]:
    """(mean KL(pi || pi_s) a prefix, of a whole response) over prefixes that ``reach`` draws, from GOOD, cut at
    LONGEST: the probability of every last token is carried along exactly.
    """
    p, q, r = (np.exp(log_softmax(table)) for table in (trainer, stale, reach))
    kl = (p * np.log(p / q)).sum(axis=1)
    here = np.zeros(VOCAB)
    here[GOOD] = 1.0
    total = tokens = 0.0
    for _ in range(LONGEST):
        total += here @ kl
        tokens += here.sum()
        here = here @ r
        here[END] = 0.0  # nothing follows the end
    return total / tokens, total


STALE, TRAINER = chain(1e-3, 0.0), chain(0.05, 1.5)


def write_run(path: Path, groups: int = 16, each: int = 8, versions: tuple[int, ...] = (0,), **toml) -> Path:
    """Step 2 updates version 2 (TRAINER); its rollouts are those of ``versions``, groups in turn: 0 is STALE, 1 is
    between the two.
    """
    tables = {0: STALE, 1: chain(0.01, 0.7), 2: TRAINER}
    for version, table in tables.items():
        write_bigram_checkpoint(path / "checkpoints" / f"step_{version:06d}", table)
    rng, rows = np.random.default_rng(5), []
    for group in range(groups):
        version = versions[group % len(versions)]
        logp = log_softmax(tables[version])
        for member in range(each):
            response = [GOOD]
            while len(response) <= LONGEST and response[-1] != END:
                response.append(int(rng.choice(VOCAB, p=np.exp(logp[response[-1]]))))
            row = {
                "sequence_id": f"{group}-{member}",
                "group_id": f"g{group}",
                "prompt_ids": [5] * (group % 3) + [GOOD],
            }
            row |= {"response_ids": response[1:], "loss_mask": [True] * (len(response) - 1)}
            row |= {"sampler_logprobs": logp[response[:-1], response[1:]].tolist(), "sampler_version": version}
            rows.append(row)
    write_rows(path / "rollouts" / "step_000002.parquet", rows)
    write_toml(path, **{"eos_token_id": END, "pad_token_id": END, "max_response_length": LONGEST, **toml})
    return path


def decomposed(path: Path, *options: str) -> pd.Series:
    assert main(["decompose", str(path), "--overwrite", "--quiet", *options]) == 0
    return open_analysis(path, None).steps.iloc[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("chain"))


def test_the_full_kl_of_the_chain_is_in_the_interval(run: Path) -> None:
    token, sequence = enumerated(TRAINER, STALE, TRAINER)
    blind, _ = enumerated(TRAINER, STALE, STALE)
    assert token > 2 * blind
    covered = [0, 0]
    for seed in range(8):
        row = decomposed(run, "--fresh-rollouts", "128", "--seed", str(seed))
        assert row["full_kl_fresh_sequences"] == 128
        for at, (name, truth) in enumerate(((FULL, token), ("full_kl_fresh_sequence_trainer_stale", sequence))):
            covered[at] += row[f"{name}_ci_low"] <= truth <= row[f"{name}_ci_high"]
            assert row[name] == pytest.approx(truth, rel=0.4)
        assert row["full_kl_fresh_prefix_trainer_stale"] == row["prefix_kl_trainer_stale"]
        assert row["prefix_kl_trainer_stale"] == pytest.approx(blind, rel=0.1)
        assert row["full_kl_fresh_ratio_ci_low"] > 1.5
        # The sampler's own sequences never went there: re-weighting them cannot tell, and does not claim to.
        assert math.isnan(row["full_kl_trainer_stale"])
        assert row["full_kl_fresh_gap_rms"] < 1e-5
    assert min(covered) >= 6  # of 8 at 95 %


def test_the_other_direction_is_over_the_trainers_prefixes_too(run: Path) -> None:
    row = decomposed(run, "--fresh-rollouts", "512")
    p, q = (np.exp(log_softmax(table)) for table in (TRAINER, STALE))
    bad = (q[BAD] * np.log(q[BAD] / p[BAD])).sum()
    assert 0.05 * bad < row["full_kl_fresh_stale_trainer"] < bad
    assert row["full_kl_fresh_sequences"] == 512


def test_the_end_token_counts_once_and_nothing_after_it(run: Path) -> None:
    row = decomposed(run, "--fresh-rollouts", "512")
    p = np.exp(log_softmax(TRAINER))
    here, tokens = np.eye(VOCAB)[GOOD], 0.0
    for _ in range(LONGEST):
        tokens += here.sum()
        here = here @ p
        here[END] = 0.0
    assert row["full_kl_fresh_tokens"] / 512 == pytest.approx(tokens, rel=0.1)


def test_reports_and_figure_put_it_beside_prefix_kl(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = decomposed(run, "--fresh-rollouts", "128")
    out = " ".join(capsys.readouterr().out.split())
    said = f"Full KL on fresh responses of the trainer: step 2 KL(pi || pi_s) {row[FULL]:.3g} ["
    assert said in out and "Prefix KL is too small at 1 and too large at 0 of 1 steps judged" in out
    for form in ("text", "markdown", "json"):
        main(["ess-report", str(run), "--format", form])
        assert said in " ".join(capsys.readouterr().out.split())
    figure = plot_prefix_kl(open_analysis(run, None), "sequence", 0.5)
    assert figure is not None and "full KL" in " ".join(text.get_text() for text in figure.axes[0].texts)
    record = open_analysis(run, None).record
    assert record["fresh_rollouts"]["eos"] == [END] and record["fresh_rollouts"]["steps"] == [2]
    assert record["options"]["fresh_rollouts"] == 128 and record["options"]["fresh_steps"] is None


def test_whole_prompt_groups_are_answered(run: Path) -> None:
    row = decomposed(run, "--fresh-rollouts", "30")
    assert row["full_kl_fresh_sequences"] == 24  # three groups of eight
    # Prefix KL beside it is that of the same three prompts.
    assert row["full_kl_fresh_prefix_trainer_stale"] != pytest.approx(row["prefix_kl_trainer_stale"], rel=1e-6)
    assert decomposed(run, "--fresh-rollouts", "3")["full_kl_fresh_sequences"] == 8


def test_the_same_seed_gives_the_same_bytes_and_draws_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, groups=4)
    options = ("--fresh-rollouts", "32")
    value = decomposed(run, *options, "--no-cache")[FULL]
    first = (run / "mismatch_probe" / "steps.parquet").read_bytes()
    decomposed(run, *options)
    assert (run / "mismatch_probe" / "steps.parquet").read_bytes() == first
    calls = []
    monkeypatch.setattr(sample_cache, "sample_fresh", lambda *args: calls.append(args) or sample.sample_fresh(*args))
    decomposed(run, *options)
    assert (run / "mismatch_probe" / "steps.parquet").read_bytes() == first and not calls
    assert decomposed(run, *options, "--seed", "1")[FULL] != value and len(calls) == 1
    for torn in (run / "mismatch_probe" / "scores").rglob("*.npz"):
        torn.write_bytes(torn.read_bytes()[:100])
    decomposed(run, *options)
    assert (run / "mismatch_probe" / "steps.parquet").read_bytes() == first and len(calls) == 2


def test_each_is_compared_with_the_version_of_its_counterpart(tmp_path: Path) -> None:
    row = decomposed(write_run(tmp_path, groups=32, versions=(0, 1)), "--fresh-rollouts", "512")
    assert any("compared with the version that drew its recorded counterpart (0, 1)" in why for why in row["reasons"])
    truth = np.mean([enumerated(TRAINER, table, TRAINER)[0] for table in (STALE, chain(0.01, 0.7))])
    assert row[FULL] == pytest.approx(truth, rel=0.2)
    assert abs(row[FULL] / enumerated(TRAINER, STALE, TRAINER)[0] - 1) > 0.2


def test_a_version_that_changes_on_the_way_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, groups=4)
    file = run / "rollouts" / "step_000002.parquet"
    rows = pd.read_parquet(file).to_dict("records")
    for row in rows:
        count = len(row["response_ids"])
        row["sampler_version"] = [1 if at == 0 and count > 2 else 0 for at in range(count)]
        row |= {name: list(row[name]) for name in ("prompt_ids", "response_ids", "loss_mask", "sampler_logprobs")}
    write_rows(file, rows)
    row = decomposed(run, "--fresh-rollouts", "32")
    assert any("changed version on the way" in why for why in row["reasons"])
    # Version 0 drew most of the tokens; against version 1 it would be a fifth.
    assert row[FULL] == pytest.approx(enumerated(TRAINER, STALE, TRAINER)[0], rel=0.5)


def test_missing_weights_make_it_null_with_a_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path, groups=4, versions=(0, 1))
    for name, said in (("step_000001", "no checkpoint for sampler version 1"), ("step_000002", "trainer's weights")):
        moved = (run / "checkpoints" / name).rename(tmp_path / "away")
        row = decomposed(run, "--fresh-rollouts", "16")
        assert math.isnan(row[FULL])
        assert any(why.startswith("fresh rollouts:") and said in why for why in row["reasons"])
        moved.rename(run / "checkpoints" / name)


def test_weights_that_give_no_number_end_the_run_unless_it_is_told_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, groups=4)
    write_bigram_checkpoint(run / "checkpoints" / "step_000002", np.full((VOCAB, VOCAB), np.nan))
    base = ["decompose", str(run), "--quiet", "--fresh-rollouts", "8"]
    assert main(base) == 2
    assert "not finite" in capsys.readouterr().err
    row = decomposed(run, "--fresh-rollouts", "8", "--skip-bad-rows")
    assert math.isnan(row[FULL]) and row["tokens_with_discrepancy"] > 0
    assert any("fresh rollouts:" in why and "not finite" in why for why in row["reasons"])


def test_responses_that_are_not_the_trainers_are_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an architecture goes wrong on padding or on its cache: the scorer does not agree with the sampling."""
    run = write_run(tmp_path, groups=4)
    monkeypatch.setattr(
        sample_cache, "sample_fresh", lambda path, *rest: sample.sample_fresh(path.with_name("step_000000"), *rest)
    )
    row = decomposed(run, "--fresh-rollouts", "32")
    assert row["full_kl_fresh_gap_rms"] > 0.2
    assert any("may not be the trainer's" in why for why in row["reasons"])


def test_on_policy_nothing_need_be_drawn(tmp_path: Path) -> None:
    row = decomposed(write_run(tmp_path, groups=4, versions=(2,)), "--fresh-rollouts", "16")
    assert row[FULL] == row[f"{FULL}_ci_high"] == 0.0 and math.isnan(row["full_kl_fresh_ratio"])
    assert math.isnan(row["full_kl_fresh_sequences"])
    assert any("none drawn" in why for why in row["reasons"])


def test_what_the_run_does_not_state_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path, groups=4)
    lines = [line for line in (run / "run.toml").read_text().splitlines() if "eos" not in line and "max_r" not in line]
    (run / "run.toml").write_text("\n".join(lines))
    reasons = " ".join(decomposed(run, "--fresh-rollouts", "16")["reasons"])
    assert "cut at 20 tokens" in reasons and "no end token is stated" in reasons


def test_raw_log_probs_are_drawn_hot_and_compared_cold(tmp_path: Path) -> None:
    row = decomposed(write_run(tmp_path, groups=4, temperature=0.5, logprobs_mode="raw"), "--fresh-rollouts", "16")
    assert row[FULL] > 0 and math.isnan(row["full_kl_fresh_gap_rms"])


def test_steps_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, groups=4)
    base = ["decompose", str(run), "--overwrite"]
    assert main([*base, "--fresh-steps", "2"]) == 2
    assert "pass --fresh-rollouts N" in capsys.readouterr().err
    assert main([*base, "--fresh-rollouts", "8", "--fresh-steps", "7"]) == 2
    assert "--fresh-steps 7: the run has no such step" in capsys.readouterr().err
    assert main([*base, "--fresh-rollouts", "8", "--fresh-steps", "2:3"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "8 responses at each of 1 steps are drawn token by token, up to 20 tokens each" in told
    assert json.loads((run / "mismatch_probe" / "run.json").read_text())["options"]["fresh_steps"] == "2:3"
