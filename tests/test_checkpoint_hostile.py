"""What a checkpoint must not do: run code, reach other files, or make the reader allocate what is not there."""

from __future__ import annotations

import builtins
import io
import json
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mismatch_probe.checkpoints.dcp import read_dcp
from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.checkpoints.files import safetensors_sources
from mismatch_probe.checkpoints.gguf import read_header
from mismatch_probe.checkpoints.pickles import TORCH_NAMES, Stub, read_pickle, stub
from mismatch_probe.checkpoints.sources import Stored
from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.checkpoints.torchfile import read_torch_file, tensor_sources
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import ROOT, Hostile, gap, load, save_dcp
from tests.test_checkpoint_gguf import F32, write_gguf
from tests.tiny import save_model


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """A directory with pytorch_model.bin instead of safetensors."""
    model = save_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    return tmp_path / "model"


def test_pytorch_model_bin_is_read(binary: Path) -> None:
    model = save_model(binary.parent / "again", "llama")
    assert gap(binary, model) <= 1e-6
    found = describe(binary)
    assert found.parameters == sum(p.numel() for p in model.parameters()) and found.dtypes == ("F32",)


def test_a_hostile_pytorch_model_bin_runs_nothing(binary: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    torch.save({"lm_head.weight": Hostile(witness)}, binary / "pytorch_model.bin")
    for attempt in (describe, load, open_tensors):
        with pytest.raises(CheckpointError, match="Nothing in it was run"):
            attempt(binary)
    assert not witness.exists()


class Call:
    """A pickle that calls ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


@pytest.mark.parametrize(
    "payload",
    [
        Call(eval, "1"),
        Call(getattr, OrderedDict, "fromkeys"),
        Call(builtins.__import__, "os"),
        Call(torch.load, "anything"),
        Call(torch.hub.load, "a/b", "c"),
        Call(io.open, "/etc/hostname"),
        Call(bytearray, 10**15),
        Call(torch.zeros, 10**15),
        Call(pickle.loads, b"N."),
    ],
    ids=lambda payload: payload._call[0].__name__,
)
def test_no_name_outside_the_list_is_looked_up(payload: Call) -> None:
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        read_pickle(pickle.dumps(payload), "file", TORCH_NAMES)


BUILD_ON_A_CLASS = b"ccollections\nOrderedDict\n(N}(X\x04\x00\x00\x00evilK\x01utb."
BUILD_ON_A_FUNCTION = b"ctorch\nSize\n}(X\x04\x00\x00\x00evilK\x01ub."
MEMO_OF_2_31 = b"\x80\x02Nr\xff\xff\xff\x7f."
BYTES_OF_2_40 = b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"ab."


@pytest.mark.parametrize(
    "data",
    [BUILD_ON_A_CLASS, BUILD_ON_A_FUNCTION, BYTES_OF_2_40, b"", b".", b"\x80\x04N", b"\x80\x63N.", b"(" * 10_000],
    ids=["class", "function", "bytes", "empty", "stop", "torn", "protocol", "marks"],
)
def test_forged_pickles_are_one_line(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="file: not read: ") as error:
        read_pickle(data, "file", TORCH_NAMES)
    assert "\n" not in str(error.value)
    assert not hasattr(OrderedDict, "evil") and not hasattr(Stub, "evil")


def test_a_state_reaches_a_stub_and_no_class() -> None:
    names = {"a B": stub("B")}
    made = read_pickle(b"ca\nB\n)\x81}(X\x01\x00\x00\x00xK\x05ub.", "file", names)
    assert (made.name, made.get("x"), made.get("y", 7)) == ("B", 5, 7)
    with pytest.raises(CheckpointError, match="sets a state on type"):
        read_pickle(b"ca\nB\n(N}(X\x03\x00\x00\x00getK\x05utb.", "file", names)


def test_a_memo_index_allocates_nothing() -> None:
    """CPython's unpickler in C grows a table to the index that a pickle declares: 32 GiB for these ten bytes."""
    program = f"""
import resource
from mismatch_probe.checkpoints.pickles import read_pickle
resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30}))
assert read_pickle({MEMO_OF_2_31!r}, "file", {{}}) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def forge_storage(file: Path, count: int, shape: tuple[int, ...]) -> None:
    """A torch file whose tensor declares ``count`` numbers and ``shape``, over 16 bytes of data."""
    torch.save({"w": torch.zeros(4)}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            if name.endswith("data.pkl"):
                wide = b"\x8a\x08" + struct.pack("<q", count)
                sizes = b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in shape)
                data = data.replace(b"K\x04tq", wide + b"tq").replace(b"K\x00K\x04\x85", b"K\x00(" + sizes + b"t")
                data = data.replace(b"K\x01\x85", b"(" + b"K\x01" * len(shape) + b"t")
            archive.writestr(name, data)


@pytest.mark.parametrize("shape", [(10**15,), (10**6, 10**6, 10**6), (5,), (-1,)])
def test_sizes_in_torch_files_are_held_against_their_data(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Whatever torch version wrote the file or is installed: shapes are checked before any is asked to allocate."""
    file = tmp_path / "pytorch_model.bin"
    forge_storage(file, 4, (4,))
    assert tensor_sources(file)["w"].shape == (4,)  # the forgery is a readable file
    forge_storage(file, 10**15, shape)
    with pytest.raises(CheckpointError, match=r"is declared, and 16 bytes|makes no sense") as error:
        tensor_sources(file)
    assert str(file) in str(error.value)


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    """A zip bomb: a megabyte that unfolds to a gigabyte."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(4)}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data + bytes(1 << 20))
    with pytest.raises(CheckpointError, match="is compressed, which torch"):
        read_torch_file(file)


def test_an_expanded_tensor_is_refused() -> None:
    """Stride 0 reads one number 10^15 times; whatever copies it would need the memory."""
    with pytest.raises(CheckpointError, match="is declared"):
        Stored(Path("file"), 0, 16, (10**15,), "F32", (0,))


def test_safetensors_headers_are_held_against_the_file(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [10**15]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    for attempt in (describe, load):
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight: shape \[10{15}\] does not fill its 128 bytes"):
            attempt(tmp_path / "model")
    file.write_bytes(struct.pack("<Q", 10**15) + data[8:])
    with pytest.raises(CheckpointError, match="its header is longer than the file"):
        describe(tmp_path / "model")


def test_a_deep_json_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be parsed"):
        describe(tmp_path / "model")


def test_names_from_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    name = "w\n\x1b[31m" + 2000 * "x"
    header = json.dumps({name: {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError) as error:
        safetensors_sources(file)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    assert str(error.value).endswith("Copy it anew from the run")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory, sharded: Path) -> dict[str, bytes]:
    """A small whole file of each format."""
    folder = tmp_path_factory.mktemp("seeds")
    tensors = {"model.embed_tokens.weight": torch.arange(6.0).reshape(2, 3), "w": torch.ones(3).bfloat16()}
    save_file(tensors, folder / "a.safetensors")
    torch.save(tensors, folder / "a.bin")
    save_dcp(tensors, folder)
    write_gguf(folder / "a.gguf", save_model(folder / "model", "llama"), F32)
    shutil.copy(sharded / "untied" / "fsdp" / "model_world_size_4_rank_1.pt", folder / "rank.pt")
    names = ("a.safetensors", "a.bin", ".metadata", "__0_0.distcp", "a.gguf", "rank.pt")
    return {name: (folder / name).read_bytes() for name in names}


def read_all(file: Path) -> int:
    """Read everything in a file of any format; bytes of its tensors."""
    match file.name:
        case "a.safetensors":
            found = safetensors_sources(file)
        case "a.bin":
            found = tensor_sources(file)
        case "a.gguf":
            return read_header(file).parameters // 8
        case "rank.pt":
            read_torch_file(file)
            return 0
        case _:
            found = read_dcp(file.parent).sources
    return sum(source.load().nbytes for source in found.values())


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", ".metadata", "__0_0.distcp", "a.gguf", "rank.pt"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_an_error_or_a_read(
    tmp_path: Path, seeds: dict[str, bytes], name: str, data: st.DataObject
) -> None:
    """Bytes flipped, cut and spliced: a CheckpointError, or tensors within what the file holds; never anything else."""
    for other in (".metadata", "__0_0.distcp"):
        (tmp_path / other).write_bytes(seeds[other])
    damaged = bytearray(seeds[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 6000) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "splice", "huge"])):
            case "flip":
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 40))]
            case "splice":
                damaged[at:at] = damaged[:at][-20:]
            case _:
                damaged[at : at + 8] = struct.pack("<q", data.draw(st.sampled_from([10**15, 2**31, -1])))
        if not damaged:
            break
    (tmp_path / name).write_bytes(damaged)
    try:
        total = read_all(tmp_path / name)
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        assert total <= 2 * (len(damaged) + sum(map(len, seeds.values())))
