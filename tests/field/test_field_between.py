from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.field.base import UPDATE, base, codes, find


@torch.no_grad()
def between(models: list[LlamaForCausalLM], step: int, share: float) -> LlamaForCausalLM:
    """Part of the way from the version before to that of the step."""
    found = copy.deepcopy(models[max(0, step - 1)])
    for parameter, end in zip(found.parameters(), models[step].parameters(), strict=True):
        parameter += share * (end - parameter)
    return found


@pytest.mark.parametrize(("share", "size"), [(0.5, UPDATE), (0.3, UPDATE), (0.5, 2 * UPDATE)])
def test_weights_on_the_way_from_one_version_to_the_next(share: float, size: float, tmp_path: Path) -> None:
    run = base(engine=lambda models, step: between(models, step, share), size=size)
    diagnosis = find(run.write(tmp_path / "run"))
    assert codes(diagnosis) == ["MP213"]
    assert abs(diagnosis.findings[0].numbers[0].value - share) < 0.1
    assert diagnosis.findings[0].steps == (1, 2, 3, 4)


def test_a_claimed_version_without_a_checkpoint_is_no_fault(tmp_path: Path) -> None:
    """Half of the way between two saved versions is where the one that was not saved lies."""
    run = base(engine=lambda models, step: between(models, step, 0.5), version=lambda step: step)
    for step, rows in run.rows.items():
        for row in rows:
            row["sampler_version"] = max(0, 2 * step - 1)
    run.weights = {f"checkpoints/step_{2 * v:06d}": model for v, model in enumerate(run.models)}
    run.rows = {2 * step: rows for step, rows in run.rows.items()}
    assert codes(find(run.write(tmp_path / "run"), "--nearest")) == []
