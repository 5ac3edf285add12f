"""The unpickler: everything a dump needs comes out, and nothing of the pickle's own ever runs."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.pickles import Stub, first_global, load_pickle, plain
from mismatch_probe.readers.torch_archive import load_torch
from tests.foreign_pickle import Batch, ListOf, Touch

FILE = Path("dump.pkl")


def nothing(_: str) -> bool:
    return False


def anything(_: str) -> bool:
    return True


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_numpy_arrays_of_every_kind_come_back(protocol: int) -> None:
    values = {
        "big endian": np.arange(4, dtype=">f4"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "objects": np.array([None, [1], "x"], dtype=object),
        "text": np.array(["ab", "c"]),
        "scalar": np.float32(2.5),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3)),
        "nested": {"a": [np.arange(2), (np.arange(3),)]},
        "plain": [1, 2.5, None, {1, 2}, bytearray(b"ab"), OrderedDict(a=1)],
    }
    found = plain(load_pickle(pickle.dumps(values, protocol=protocol), FILE, nothing))
    for key in ("big endian", "fortran", "text", "bool", "empty"):
        assert found[key].dtype == values[key].dtype
        np.testing.assert_array_equal(found[key], values[key])
    assert found["objects"].tolist() == [None, [1], "x"] and found["scalar"] == 2.5
    assert found["plain"] == values["plain"]
    np.testing.assert_array_equal(found["nested"]["a"][1][0], np.arange(3))


def test_a_frameworks_classes_are_kept_inert() -> None:
    batch = pickle.dumps([Batch({"x": np.arange(3)}), ListOf([1, 2])])
    found, items = load_pickle(batch, FILE, lambda name: name.startswith("tests.foreign_pickle."))
    assert isinstance(found, Stub) and found.name == "tests.foreign_pickle.Batch"
    np.testing.assert_array_equal(plain(found.state["batch"])["x"], np.arange(3))
    assert items.items == [1, 2]
    with pytest.raises(BadFileError, match=r"names tests\.foreign_pickle\.Batch"):
        load_pickle(batch, FILE, nothing)
    assert first_global(batch) == "tests.foreign_pickle.Batch"


@pytest.mark.parametrize("stubs", [nothing, anything])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, stubs) -> None:
    target = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps({"samples": Touch(str(target))}, protocol=protocol)
        if stubs is nothing:
            with pytest.raises(BadFileError, match="nothing was run"):
                load_pickle(data, FILE, stubs)
        else:
            assert isinstance(load_pickle(data, FILE, stubs)["samples"], Stub)
        assert not target.exists()
    pickle.loads(data)
    assert target.exists()  # the trap is real


def test_a_pickle_cannot_reach_attributes_of_what_is_allowed() -> None:
    # Protocol 4 lets a pickle name dotted attributes: collections -> OrderedDict.__init__.__globals__ and so on.
    data = b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93."
    with pytest.raises(BadFileError, match="nothing was run"):
        load_pickle(data, FILE, nothing)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02N\x94r\x00\x00\x00\x40.",
        b"",
        b"\x80",
        b"garbage",
        b"\x80\x04]\x94(K\x01",
    ],
)
def test_a_pickle_that_asks_for_gigabytes_or_is_cut_short_is_refused(data: bytes) -> None:
    with pytest.raises(BadFileError, match=r"dump\.pkl: (its pickle asks for more|not a readable pickle)"):
        load_pickle(data, FILE, nothing)


def test_torch_archives_give_what_torch_gives(tmp_path: Path) -> None:
    values = {
        "transposed": torch.arange(6).reshape(2, 3).T,
        "bfloat16": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "half": torch.randn(3).half(),
        "expanded": torch.ones(1).expand(5),
        "sliced": torch.arange(10)[2:8:3],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "uint8": torch.arange(3, dtype=torch.uint8),
    }
    file = tmp_path / "dump.pt"
    torch.save({**values, "array": np.arange(4.0), "size": torch.Size([1, 2])}, file)
    for source in (file, file.read_bytes()):
        found = plain(load_torch(source, file, nothing))
        for key, value in values.items():
            wanted = value.detach().float() if value.is_floating_point() else value
            assert found[key].shape == tuple(value.shape), key
            np.testing.assert_array_equal(found[key].astype(wanted.numpy().dtype), wanted.numpy())
        np.testing.assert_array_equal(found["array"], np.arange(4.0))
        assert found["size"] == (1, 2)


def test_a_hostile_torch_archive_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dump.pt"
    torch.save({"samples": Touch(str(tmp_path / "ran"))}, file)
    with pytest.raises(BadFileError, match="nothing was run"):
        load_torch(file, file, nothing)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((10**12,), (1,), 0), ((4,), (1,), 2), ((10**12,), (0,), 0), ((2,), (-1,), 0)]
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path, size, stride, offset) -> None:
    file = tmp_path / "dump.pt"
    torch.save(torch.arange(4), file)
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in members if name.endswith("data.pkl")]
    members[name] = _tensor_pickle(size, stride, offset)
    with zipfile.ZipFile(file, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    with pytest.raises(BadFileError, match=r"larger than its storage|negative sizes"):
        load_torch(file, file, nothing)


def test_an_archive_that_is_no_torch_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dump.pt"
    for data in (b"", b"PK\x03\x04", b"not a zip"):
        file.write_bytes(data)
        with pytest.raises(BadFileError, match="not a readable torch archive"):
            load_torch(file, file, nothing)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("dump/data.pkl", bytes(1 << 20))
    with pytest.raises(BadFileError, match="is compressed"):
        load_torch(file, file, nothing)


def _tensor_pickle(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", torch.LongStorage, "0", "cpu", 4) if obj == "STORAGE" else None

    class Tensor:
        def __reduce__(self) -> object:
            return torch._utils._rebuild_tensor_v2, ("STORAGE", offset, size, stride, False, OrderedDict())

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(Tensor())
    return stream.getvalue()
