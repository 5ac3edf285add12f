from __future__ import annotations

import pytest

from benchmarks import device_checks, gpu_check


def table(text: str) -> dict[tuple[str, str], list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_every_check_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--dtype", "float32", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    assert printed.endswith("all within their bounds\n")
    for dtype in ("float32", "bfloat16"):
        for check in ("packed, against one by one", "batched, sdpa, against one by one", "noise floor"):
            assert rows[check, dtype][-1] == "ok"
        for check in ("scoring, one version", "scoring, two versions", "head pass, torch"):
            result, ceiling, verdict = rows[check, dtype]
            assert "TFLOP/s" in result and "TFLOP/s" in ceiling
            assert float(result.split()[0]) > 0 and verdict.endswith("% of the ceiling")
        assert rows["batched, flash", dtype][0].startswith("not run: --attn flash: needs a CUDA device")
    exact = float(rows["packed, against one by one", "float32"][0].split()[0])
    rounded = float(rows["packed, against float32", "bfloat16"][0].split()[0])
    assert exact < 1e-5 < 1e-3 < rounded  # the numbers are differences that a precision makes


def test_a_result_beyond_its_bound_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_checks.BOUNDS, "bfloat16", 1e-9)
    assert gpu_check.main(["--device", "cpu", "--dtype", "bfloat16"]) == 1
    printed = capsys.readouterr().out
    assert table(printed)["noise floor", "bfloat16"][-1] == "FAILED"
    assert "beyond their bound" in printed.splitlines()[-1]


def test_a_machine_without_cuda_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([]) == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gpu-check: no CUDA device here") and printed.err.count("\n") == 1
