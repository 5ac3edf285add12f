"""The fused head pass against the torch version and against float64 numpy, run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from mismatch_probe.assemble import halves
from mismatch_probe.errors import UsageError
from mismatch_probe.scoring import head, head_triton, heads
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.plan import units
from mismatch_probe.scoring.score import UnitScorer
from mismatch_probe.scoring.scores import COLUMNS, joined
from mismatch_probe.scoring.sketch import HeadSketch
from tests.tiny import random_rollouts, save_model

TOKENS, VOCAB, WIDTH, TEMPERATURE = 150, 389, 48, 0.7
PLAIN: dict = {}
ALL = {"bias": True, "softcap": 4.0, "multiplier": 0.5}


def network(weight: torch.Tensor, bias: bool = False, softcap: float | None = None, multiplier: float = 1.0) -> Network:
    made = Network.__new__(Network)
    made.weight, made.softcap, made.multiplier, made._wide_weight = weight, softcap, multiplier, None
    made.bias = torch.linspace(-1, 1, len(weight)).to(weight.dtype) if bias else None
    made.fused = True
    return made


def case(dtype: torch.dtype, apart: float, **how) -> SimpleNamespace:
    torch.manual_seed(0)
    first = torch.randn(VOCAB, WIDTH) / WIDTH**0.5 * 2
    states = torch.randn(TOKENS, WIDTH)
    weights = [first.to(dtype), (first + apart * torch.randn(VOCAB, WIDTH) / WIDTH**0.5).to(dtype)]
    hidden = [states.to(dtype), (states + apart * torch.randn(TOKENS, WIDTH)).to(dtype)]
    pair = [(network(weight, **how), own) for weight, own in zip(weights, hidden, strict=True)]
    return SimpleNamespace(pair=pair, ids=torch.randint(0, VOCAB, (TOKENS,)), half=torch.randint(0, 2, (TOKENS,)))


def truth(made: SimpleNamespace) -> dict[str, np.ndarray]:
    """All of it from whole (tokens, vocabulary) arrays in float64."""
    logp = []
    for net, states in made.pair:
        z = states.double().numpy() @ net.weight.double().numpy().T
        z = (z + (0 if net.bias is None else net.bias.double().numpy())) * net.multiplier
        z = z if net.softcap is None else np.tanh(z / net.softcap) * net.softcap
        z /= TEMPERATURE
        z -= z.max(-1, keepdims=True)
        logp.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
    s, t = logp
    at = np.arange(TOKENS), made.ids.numpy()
    difference = np.exp(s) - np.exp(t)
    return {
        "stale_logprob": s[at],
        "trainer_logprob": t[at],
        "stale_entropy": -(np.exp(s) * s).sum(-1),
        "trainer_entropy": -(np.exp(t) * t).sum(-1),
        "kl_stale_trainer": (np.exp(s) * (s - t)).sum(-1),
        "kl_trainer_stale": (np.exp(t) * (t - s)).sum(-1),
        "total_variation": 0.5 * np.abs(difference).sum(-1),
        "bias_sum": np.stack([difference[made.half.numpy() == half].sum(0) for half in (0, 1)]),
    }


def values(pair: head.PairScores) -> dict[str, np.ndarray]:
    found = {name: getattr(pair, name).numpy() for name in ("kl_stale_trainer", "kl_trainer_stale", "total_variation")}
    for role in ("stale", "trainer"):
        found |= {f"{role}_{name}": getattr(getattr(pair, role), name).numpy() for name in ("logprob", "entropy")}
    return found | {"bias_sum": pair.bias_sum.numpy()}


@pytest.mark.parametrize("how", [PLAIN, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch_and_float64(dtype: torch.dtype, how: dict) -> None:
    made = case(dtype, 0.3, **how)
    sketch = HeadSketch(made.pair[1][0].weight)
    arguments = (*made.pair, made.ids, made.half, TEMPERATURE, 1 << 24)
    found, expected = head_triton.compare(*arguments, sketch), head.compare(*arguments, sketch)
    for name, true in truth(made).items():
        assert values(found)[name] == pytest.approx(true, rel=1e-5, abs=4e-6), name
        assert values(found)[name] == pytest.approx(values(expected)[name], rel=1e-5, abs=4e-6), name
    assert (found.same_top == expected.same_top).all()
    assert 0 < float(expected.same_top.mean()) < 1
    for name in ("score", "centred", "state"):
        assert getattr(found.factors, name).numpy() == pytest.approx(getattr(expected.factors, name).numpy(), abs=4e-6)


def test_small_differences_survive() -> None:
    """A KL of 4e-8 nats, to a thousandth of itself: what rounding does to a whole row must cancel."""
    made = case(torch.float32, 1e-4)
    found, true = values(head_triton.compare(*made.pair, made.ids, made.half, TEMPERATURE, 1 << 24)), truth(made)
    assert 1e-9 < true["kl_stale_trainer"].mean() < 1e-7
    for name in ("kl_stale_trainer", "kl_trainer_stale", "total_variation"):
        assert found[name].mean() == pytest.approx(true[name].mean(), rel=1e-3), name
    assert found["bias_sum"] == pytest.approx(true["bias_sum"], abs=4e-6)


def test_chunks_and_runs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(torch.float32, 0.3)
    sketch = HeadSketch(made.pair[1][0].weight)
    whole = head_triton.compare(*made.pair, made.ids, made.half, TEMPERATURE, 1 << 24, sketch)
    monkeypatch.setattr(head_triton, "_PROGRAMS", 1000)  # a tile a program
    cut = head_triton.compare(*made.pair, made.ids, made.half, TEMPERATURE, VOCAB, sketch)
    for name, one in values(whole).items():
        assert values(cut)[name] == pytest.approx(one, abs=1e-6), name
    assert cut.factors.centred.numpy() == pytest.approx(whole.factors.centred.numpy(), abs=1e-6)


def test_one_network_and_its_factors() -> None:
    made = case(torch.float32, 0.3, **ALL)
    net, states = made.pair[0]
    sketch = HeadSketch(net.weight)
    (found, factors), (expected, known) = (
        module.score(net, states, made.ids, TEMPERATURE, 1 << 24, sketch) for module in (head_triton, head)
    )
    assert found.logprob.numpy() == pytest.approx(expected.logprob.numpy(), abs=4e-6)
    assert found.entropy.numpy() == pytest.approx(expected.entropy.numpy(), abs=4e-6)
    for name in ("score", "centred", "state"):
        assert getattr(factors, name).numpy() == pytest.approx(getattr(known, name).numpy(), abs=4e-6)


def test_what_is_not_finite_stays_with_its_token() -> None:
    made = case(torch.float32, 0.3)
    made.pair[0][1][3, 0] = float("inf")
    arguments = (*made.pair, made.ids, made.half, TEMPERATURE, 1 << 24)
    with np.errstate(invalid="ignore"):
        found = values(head_triton.compare(*arguments))
    expected = values(head.compare(*arguments))
    for name in found:
        assert found[name] == pytest.approx(expected[name], abs=4e-6, nan_ok=True), name
    assert np.isnan(found["kl_stale_trainer"]).nonzero()[0].tolist() == [3]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "granite"])
def test_whole_steps_are_scored_the_same(tmp_path: Path, kind: str) -> None:
    for seed, name in enumerate("st"):
        save_model(tmp_path / name, kind, seed=seed, vocab_size=133)
    rollouts = random_rollouts(np.random.default_rng(0))
    found = {}
    for which in ("torch", "triton"):
        networks = Networks(options := ScoringOptions(device="cpu", temperature=0.9, head=which))
        cut = units(0, rollouts, halves(rollouts), tmp_path / "t", lambda _: tmp_path / "s", 10_000, rollouts.loss_mask)
        scorer = UnitScorer(options, networks, lambda _: None)
        found[which] = joined(len(rollouts.response.values), [(unit.place, scorer.score(unit)) for unit in cut])
        assert networks.get(tmp_path / "t").fused == (which == "triton")
    for name in COLUMNS:
        one, other = (getattr(scores, name) for scores in found.values())
        assert one == pytest.approx(other, abs=1e-5, nan_ok=True), name
    assert found["torch"].bias_lag_sum == pytest.approx(found["triton"].bias_lag_sum, abs=1e-5)


def test_what_the_kernels_cannot_take_is_said_or_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "qwen3", vocab_size=133)
    wide = Network(tmp_path / "one", ScoringOptions(device="cpu", dtype="float64"))
    with pytest.raises(UsageError, match="its weights are float64"):
        heads.choose(wide, "triton")
    plain = Network(tmp_path / "one", ScoringOptions(device="cpu"))
    assert heads.choose(plain, "auto") == ""
    assert not plain.fused  # not on CUDA
    monkeypatch.setattr(head_triton, "differ", None)
    with pytest.raises(UsageError, match=r"--head triton: TypeError.*Use --head torch"):
        heads.choose(plain, "triton")
    assert not plain.fused


def test_a_kernel_that_is_wrong_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "qwen3", vocab_size=133)
    network = Network(tmp_path / "one", ScoringOptions(device="cpu"))
    monkeypatch.setattr(head_triton, "CAP", 1.5)
    with pytest.raises(UsageError, match="the two differ by"):
        heads.choose(network, "triton")


def test_partial_sums_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """32,000 tokens at 152,000 words, with the sketch, on the device that needs most: at most 512 MB at a time."""
    tokens, vocab_size = 32_000, 152_000
    held: list[int] = []

    class Kernel:
        """Takes a kernel's place and weighs the arrays that it is given to fill."""

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(*arrays: Any, **_: Any) -> None:
                given = {id(one): one.nbytes for one in arrays if isinstance(one, torch.Tensor)}
                held.append(sum(given.values()))

            return launch

    monkeypatch.setattr(head_triton, "normalise", Kernel())
    monkeypatch.setattr(head_triton, "differ", Kernel())
    monkeypatch.setitem(head_triton.BLOCKS, ("sketch", True), head_triton.BLOCKS["sketch", False])
    monkeypatch.setattr(head_triton, "_PROGRAMS", 4 * 132)
    weight = torch.zeros(vocab_size, 1)
    pair = [(network(weight), torch.zeros(tokens, 1)) for _ in range(2)]
    ids = torch.zeros(tokens, dtype=torch.int64)
    head_triton.compare(*pair, ids, ids, 1.0, ScoringOptions().chunk_elements, HeadSketch(weight))
    assert 2**27 < max(held) < 2**29


def test_the_device_check_runs_both_head_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--dtype", "float32"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "Triton against torch" in line]
    assert len(lines) == 3
    assert all(line.endswith("| ok |") for line in lines)
