"""Digests of checkpoints: every byte that decides a score, read once, ahead of its use."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mismatch_probe.checkpoints.fingerprint import Fingerprints
from tests.tiny import save_model


def test_fingerprints_cover_every_byte_and_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "qwen3")
    memo = tmp_path / "weights.json"
    prints = Fingerprints(memo)
    first = prints.of(tmp_path / "one")
    prints.close()
    assert json.loads(memo.read_text()) == {}  # written a moment ago, it may be written again unseen
    monkeypatch.setattr("mismatch_probe.checkpoints.fingerprint._SETTLED", -1.0)
    prints = Fingerprints(memo)
    assert prints.of(tmp_path / "one") == first
    prints.close()
    file = tmp_path / "one" / "model.safetensors"
    assert Fingerprints(memo).of(tmp_path / "one") == first
    (known,) = json.loads(memo.read_text()).items()
    memo.write_text(json.dumps({known[0]: "another"}))
    assert Fingerprints(memo).of(tmp_path / "one") != first  # the file was not read again
    data = bytearray(file.read_bytes())
    for place in (len(data) // 2, len(data) - 1):
        data[place] ^= 1
        file.write_bytes(bytes(data))
        assert Fingerprints(memo).of(tmp_path / "one") != first
    stat = file.stat()
    with file.open("r+b") as stream:  # rewritten in place, and its time put back
        stream.seek(len(data) // 3)
        stream.write(bytes([data[len(data) // 3] ^ 1]))
    before = Fingerprints(memo)
    kept = before.of(tmp_path / "one")
    before.close()
    file.write_bytes(bytes(data))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert Fingerprints(memo).of(tmp_path / "one") != kept
    assert Fingerprints(memo).of(tmp_path / "absent") is None
    memo.write_text("no json")
    assert Fingerprints(memo).of(tmp_path / "one") is not None


def test_fingerprints_cover_configuration_and_code_beside_it(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3")
    found = [Fingerprints().of(tmp_path / "one")]
    for name, text in (("modeling_own.py", "x = 1"), ("modeling_own.py", "x = 2"), ("config.json", "{ }")):
        (tmp_path / "one" / name).write_text(text)
        found.append(Fingerprints().of(tmp_path / "one"))
    assert len(set(found)) == len(found) and None not in found
    (tmp_path / "outer" / "actor").mkdir(parents=True)
    save_model(tmp_path / "outer" / "actor", "qwen3")
    (tmp_path / "outer" / "actor" / "config.json").rename(tmp_path / "outer" / "config.json")
    first = Fingerprints().of(tmp_path / "outer" / "actor")
    assert first is None  # no configuration, no digest: nothing is kept of it


def test_the_next_checkpoint_is_read_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "qwen3")
    readers: list[int] = []
    digest = Fingerprints._digest

    def noted(self: Fingerprints, path: Path) -> str:
        readers.append(threading.get_ident())
        return digest(self, path)

    monkeypatch.setattr(Fingerprints, "_digest", noted)
    prints = Fingerprints()
    prints.ahead([tmp_path / "one"])
    assert prints.of(tmp_path / "one") and prints.of(tmp_path / "one")
    assert len(readers) == 1 and readers[0] != threading.get_ident()


def test_nobody_waits_for_a_digest_that_is_not_wanted_any_more(tmp_path: Path, monkeypatch) -> None:
    save_model(tmp_path / "one", "qwen3")
    monkeypatch.setattr("mismatch_probe.checkpoints.fingerprint._BLOCK", 1000)
    prints = Fingerprints(tmp_path / "weights.json")
    prints.close()
    with pytest.raises(InterruptedError):
        prints._digest(tmp_path / "one")
    assert json.loads((tmp_path / "weights.json").read_text()) == {}
