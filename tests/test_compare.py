"""Differences planted into checkpoints must be found, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.checkpoints.compare import State, TensorComparison, WeightComparison, compare_checkpoints
from mismatch_probe.checkpoints.difference import content, difference
from tests.conftest import SAMPLE
from tests.tiny import save_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "a"
    save_model(path, "qwen3")
    return path


@pytest.fixture
def planted(a: Path, tmp_path: Path) -> Callable[..., WeightComparison]:
    """Copy A, change it, compare."""

    def plant(change: Callable[[Tensors], object], **config: object) -> WeightComparison:
        write(tmp_path / "b", a, change, **config)
        return compare_checkpoints(a, tmp_path / "b")

    return plant


def write(path: Path, source: Path, change: Callable[[Tensors], object], **config: object) -> None:
    shutil.copytree(source, path)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    fields = {**json.loads((path / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps(fields))


def named(found: WeightComparison, name: str) -> TensorComparison:
    return next(tensor for tensor in found.tensors if tensor.name == name)


def test_a_checkpoint_is_identical_to_itself(a: Path) -> None:
    found = compare_checkpoints(a, a)
    assert len(found.tensors) == len(load_file(a / "model.safetensors"))
    assert found.of(State.IDENTICAL) == list(found.tensors)
    assert found.unmoved_families == found.config == found.notices == ()
    assert all(t.difference and t.difference.largest == t.difference.relative == 0.0 for t in found.tensors)


def test_one_changed_element_is_found_with_place_and_size(planted: Callable[..., WeightComparison]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name][5, 7] += 0.5

    found = planted(change)
    assert [tensor.name for tensor in found.of(State.CHANGED)] == [name]
    moved = named(found, name).difference
    assert moved is not None and moved.largest_at == (5, 7) and moved.unchanged == moved.elements - 1
    assert moved.largest == pytest.approx(0.5) and moved.rms_change == pytest.approx(0.5 / moved.elements**0.5)
    family = next(family for family in found.families if family.family == "model.layers.*.mlp.up_proj.weight")
    assert family.states == {State.IDENTICAL: 1, State.CHANGED: 1} and family.largest_in == name
    # Half of the family moved: it is not among those that did not.
    assert family.family not in found.unmoved_families and HEAD in found.unmoved_families


def test_relative_change_is_rms_over_rms(planted: Callable[..., WeightComparison]) -> None:
    found = planted(lambda tensors: [tensor.mul_(1.01) for tensor in tensors.values()])
    assert len(found.of(State.CHANGED)) == len(found.tensors)
    for part in (*found.families, *(t.difference for t in found.tensors)):
        assert part is not None and part.relative == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored_as", ["itself", "float32"])
def test_rounding_is_recognised(planted: Callable[..., WeightComparison], dtype: str, stored_as: str) -> None:
    """Samplers get rounded weights, stored either way."""

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            rounded = tensor.to(getattr(torch, dtype))
            tensors[name] = rounded.float() if stored_as == "float32" else rounded

    found = planted(change)
    assert {tensor.state for tensor in found.tensors} == {State.ROUNDED}
    assert {t.difference.rounding for t in found.tensors if t.difference} == {f"B = {dtype}(A)"}
    assert found.unmoved_families == ()


def test_rounding_is_recognised_on_either_side() -> None:
    exact = torch.linspace(-3, 3, 1001)
    assert difference(exact.bfloat16(), exact).rounding == "A = bfloat16(B)"
    nearly = exact.bfloat16()
    nearly[500] += 0.25
    assert difference(exact, nearly).rounding is None


def test_a_stale_family_stands_out_also_through_rounding(planted: Callable[..., WeightComparison]) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (tensor if name == HEAD else tensor + 0.01).bfloat16()

    found = planted(change)
    assert found.unmoved_families == (HEAD,)
    assert named(found, HEAD).state is State.ROUNDED


def test_a_missing_and_a_new_tensor_are_named(planted: Callable[..., WeightComparison]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.extra.weight"] = tensors.pop("model.norm.weight")

    found = planted(change)
    assert [t.name for t in found.of(State.ONLY_IN_A)] == ["model.norm.weight"]
    (new,) = found.of(State.ONLY_IN_B)
    assert new.name == "model.extra.weight" and new.a is None and new.b is not None and new.difference is None


def test_another_shape_is_said_not_compared(planted: Callable[..., WeightComparison]) -> None:
    def change(tensors: Tensors) -> None:
        tensors[EMBEDDING] = torch.nn.functional.pad(tensors[EMBEDDING], (0, 0, 0, 3))

    tensor = named(planted(change), EMBEDDING)
    assert tensor.state is State.SHAPE_DIFFERS and tensor.difference is None
    assert tensor.a is not None and tensor.b is not None and tensor.b.shape[0] == tensor.a.shape[0] + 3


def test_values_that_are_not_finite_are_counted_and_left_out(planted: Callable[..., WeightComparison]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name][0, :3] = torch.nan
        tensors[name][1, 0] = torch.inf
        tensors[name][2, 1] += 0.25

    tensor = named(planted(change), name)
    assert tensor.b is not None and (tensor.b.nan, tensor.b.inf) == (3, 1)
    assert tensor.a is not None and (tensor.a.nan, tensor.a.inf) == (0, 0)
    found = tensor.difference
    assert found is not None and found.finite == found.elements - 4 and found.unchanged == found.elements - 5
    assert found.largest == pytest.approx(0.25) and found.largest_at == (2, 1)


def test_nan_on_both_sides_is_no_change() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    found = difference(x, x.clone())
    assert (found.unchanged, found.finite, found.largest, found.largest_at) == (3, 1, 0.0, None)
    nothing = difference(x[1:], x[1:])
    assert nothing.finite == 0 and nothing.largest is nothing.relative is nothing.rms_a is None


def test_change_from_zero_has_no_relative_size() -> None:
    assert difference(torch.zeros(4), torch.ones(4)).relative is None
    assert difference(torch.zeros(4), torch.zeros(4)).relative == 0.0
    assert difference(torch.zeros(0), torch.zeros(0)).relative is None


def test_a_tied_head_is_compared_as_the_embedding_it_is(tmp_path: Path) -> None:
    save_model(tmp_path / "tied", "qwen3", tied=True)

    def untie(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[EMBEDDING] += 0.125

    write(tmp_path / "untied", tmp_path / "tied", untie, tie_word_embeddings=False)
    found = compare_checkpoints(tmp_path / "tied", tmp_path / "untied")
    head = named(found, HEAD)
    assert head.state is State.IDENTICAL and head.tied == "a"
    assert found.notices == (f"{HEAD} is absent in A because it is tied: {EMBEDDING} is the head",)
    both = compare_checkpoints(tmp_path / "tied", tmp_path / "tied")
    assert both.notices == (f"{HEAD} is absent in A and B because it is tied: {EMBEDDING} is the head",)
    assert HEAD not in [tensor.name for tensor in both.tensors]


def test_a_head_that_is_absent_and_not_tied_is_missing(planted: Callable[..., WeightComparison]) -> None:
    found = planted(lambda tensors: tensors.pop(HEAD))
    assert named(found, HEAD).state is State.ONLY_IN_A
    assert found.notices == (f"{HEAD} is absent in B, and its config.json does not say that it is tied",)


def test_fields_of_the_config_that_differ(planted: Callable[..., WeightComparison]) -> None:
    found = planted(lambda tensors: None, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5.0}, new=None)
    fields = {field.field: (field.value_a, field.value_b) for field in found.config}
    assert fields["rms_norm_eps"] == ("1e-06", "1e-05") and fields["new"] == (None, "null")
    assert fields["rope_parameters.rope_theta"][1] == "5.0"


def test_hashes_are_stable_and_tell_dtypes_and_shapes_apart() -> None:
    ones = torch.ones(2, 3)
    assert content(ones).hash == "d72c1e8e51107faf60e907a71384b2d2"
    others = [ones.half(), ones.bfloat16(), ones.view(3, 2), ones.view(torch.int32), ones.double(), ones.bool()]
    assert len({content(tensor).hash for tensor in [ones, *others]}) == 7
    # What counts are the values in order, not the strides.
    assert content(ones.t().contiguous().t()).hash == content(ones).hash


def test_zero_signs_and_dtypes_alone_are_the_same_values() -> None:
    x = torch.tensor([0.0, 1.5])
    assert content(x).hash != content(torch.tensor([-0.0, 1.5])).hash
    assert difference(x, torch.tensor([-0.0, 1.5])).unchanged == 2
    assert difference(x, x.bfloat16()).unchanged == 2 and difference(x, x.bfloat16()).rounding is None
    large = torch.tensor([2**60, 7])
    assert difference(large, large + torch.tensor([1, 0])).unchanged == 1


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(60, dtype=torch.float32).view(4, 15)
    y = x.clone()
    y[2, 11] -= 8
    y[3, 14] += 8
    whole, hashed = difference(x, y), content(y)
    monkeypatch.setattr("mismatch_probe.checkpoints.difference._PIECE", 7)
    assert difference(x, y) == whole and content(y) == hashed
    assert whole.largest == 8.0 and whole.largest_at == (2, 11)


def test_the_shipped_run_with_a_stale_head_is_recognised(tmp_path: Path) -> None:
    """broken_sync_run's engine: the body of version 40, and the head (tied in the files) of version 0."""
    run = SAMPLE / "broken_sync_run" / "checkpoints"
    start, step = run / "step_000000", run / "step_000040"
    old = load_file(start / "model.safetensors")[EMBEDDING]
    write(tmp_path / "engine", step, lambda tensors: tensors.update({HEAD: old}), tie_word_embeddings=False)
    trained = compare_checkpoints(start, step)
    assert len(trained.of(State.CHANGED)) == len(trained.tensors) == 24 and trained.unmoved_families == ()
    since_start = compare_checkpoints(start, tmp_path / "engine")
    assert since_start.unmoved_families == (HEAD,) and named(since_start, HEAD).tied == "a"
    against_trainer = compare_checkpoints(step, tmp_path / "engine")
    assert [tensor.name for tensor in against_trainer.of(State.CHANGED)] == [HEAD]
