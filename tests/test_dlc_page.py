"""docs/dlc.md: its code blocks run: the plain loop, the TRL trainer in TRL, verl's loss as verl calls it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_probe.remedies import CORRECTIONS, Batch, dlc_loss, reinforce_loss
from tests.conftest import ROOT
from tests.tiny import save_model

PAGE = (ROOT / "docs" / "dlc.md").read_text()


def block(title: str) -> str:
    """The Python below a heading."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


def test_the_page_names_every_correction() -> None:
    section = PAGE.split("## The other corrections")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])] == list(CORRECTIONS)


class Engine:
    """Samples in bfloat16 from weights of its own; rewards even tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.syncs, self.rewards = model.bfloat16(), 0, []

    @torch.no_grad()
    def draw(self) -> SimpleNamespace:
        ids = torch.arange(16)[:, None] % 4 + 3
        logprobs, heads = [], []
        for _ in range(6):
            logp = self.model(ids).logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1)
            logprobs.append(logp.gather(-1, token))
            heads.append(logp.topk(20))
            ids = torch.cat([ids, token], dim=1)
        reward = (ids[:, 1:] % 2 == 0).float().mean(-1)
        self.rewards.append(float(reward.mean()))
        return SimpleNamespace(
            input_ids=ids,
            response_ids=ids[:, 1:],
            logprobs=torch.cat(logprobs, dim=1),
            head_ids=torch.stack([head.indices for head in heads], dim=1),
            head_logprobs=torch.stack([head.values for head in heads], dim=1),
            mask=torch.ones(16, 6, dtype=torch.bool),
            advantages=reward - reward.mean(),
        )

    def sync(self, model: Any) -> None:
        self.syncs += 1
        self.model.load_state_dict(model.state_dict())


def test_the_plain_loop_learns_and_resynchronises(tmp_path: Path) -> None:
    model, stale, sampled = (save_model(tmp_path, "qwen3") for _ in range(3))
    engine, parts = Engine(sampled), {}
    exec(block("A plain loop"), parts)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    parts["train"](model, stale, optimizer, engine.draw, engine.sync, 40)
    first, last = sum(engine.rewards[:5]) / 5, sum(engine.rewards[-5:]) / 5
    assert last > first + 0.2
    assert 2 <= engine.syncs < 39


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trl")
    (folder / "recipe.py").write_text(block("TRL"))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "tests.trl_dlc_run", str(folder / "recipe.py"), str(folder)]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return {file.stem: torch.load(file, weights_only=True) for file in folder.glob("*.pt")}


def test_in_trl_on_policy_it_is_trls_own_update(trained) -> None:
    """The same draws, the same weights after six steps, up to rounding that Adam magnifies."""
    plain, mine = trained["plain"], trained["dlc"]
    assert torch.equal(plain["seen"][0]["completion_ids"], mine["seen"][0]["completion_ids"])
    assert plain["drawn"] == mine["drawn"] == list(range(6))
    assert mine["ess"] == [1.0] * 6
    moved = (plain["weights"] - trained["lag"]["weights"]).norm()
    assert (plain["weights"] - mine["weights"]).norm() < 1e-3 * moved


def test_in_trl_a_spread_lag_draws_anew(trained) -> None:
    """Six steps of one generation were planned; below an ESS of 1/2 the next step draws again."""
    found = trained["lag"]
    assert len(found["ess"]) == 6 and found["ess"][0] == 1.0
    below = [step + 1 for step, value in enumerate(found["ess"]) if value < 0.5 and step < 5]
    assert below and found["drawn"] == [0, *below]
    for step in below:
        assert found["ess"][step] == pytest.approx(1.0, abs=1e-5)  # drawn by the weights that are trained


def test_in_trl_the_loss_has_both_log_probs_and_leaves_out_what_vllm_could_not_score(trained) -> None:
    found = trained["discrepancy"]
    assert found["drawn"] == [0] and found["weights"].isfinite().all()
    assert len(found["seen"]) == 6 and len(found["ess"]) == 3  # two batches an update, one reading
    first = found["seen"][0]
    mask = first["completion_mask"].bool()
    mask[:, 0] = False
    stale = first["old_per_token_logps"]
    batch = Batch(first["sampling_per_token_logps"], first["advantages"], stale, mask)
    torch.testing.assert_close(first["loss"], dlc_loss(stale, batch) / 2, rtol=1e-4, atol=1e-6)
    assert not torch.isclose(first["loss"], reinforce_loss(stale, batch) / 2, rtol=1e-3)


@pytest.fixture
def verl(monkeypatch) -> Any:
    """verl.trainer.ppo.core_algos where verl is installed, else a module with the parts of it that the block uses."""
    name = "verl.trainer.ppo.core_algos"
    try:
        return importlib.import_module(name)
    except ImportError:
        made, registry = types.ModuleType(name), {}

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, **_):
        assert loss_agg_mode == "token-mean"
        return (loss_mat * loss_mask).sum() / (batch_num_tokens or loss_mask.sum()) * dp_size

    made.register_policy_loss = lambda key: lambda function: registry.setdefault(key, function)
    made.get_policy_loss_fn = registry.__getitem__
    made.agg_loss = agg_loss
    for parent in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_verl_calls_it_by_its_name(verl) -> None:
    """With the keywords of verl's actor, weights that are 0 in padding, and the normalisers of a global batch."""
    exec(block("verl"), {})
    generator = torch.Generator().manual_seed(2)
    log_prob, discrepancy, lag, advantages = (torch.randn(4, 6, generator=generator) for _ in range(4))
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [1]])
    old = log_prob - 0.3 * lag
    log_prob = log_prob.requires_grad_()
    given = {
        "old_log_prob": old,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": mask,
        "loss_agg_mode": "token-mean",
        "config": SimpleNamespace(global_batch_info={"dp_size": 2, "batch_num_tokens": 20}),
    }
    loss_function = verl.get_policy_loss_fn("dlc")
    loss, metrics = loss_function(**given, rollout_is_weights=(0.1 * discrepancy).exp() * mask)
    batch = Batch(old - 0.1 * discrepancy, advantages, old, mask)
    wanted = dlc_loss(log_prob, batch, reduction="sum") / 20 * 2
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    pair = [torch.autograd.grad(each, log_prob, retain_graph=True)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)
    sums = ((log_prob.detach() - old) * mask).sum(-1).double().exp()
    assert metrics["actor/ess_lag"] == pytest.approx(float(sums.sum() ** 2 / (4 * sums.square().sum())), rel=1e-5)
    assert metrics["actor/resync"] == float(metrics["actor/ess_lag"] < 0.5)
    with pytest.raises(ValueError, match="rollout_is=token"):
        loss_function(**given)
