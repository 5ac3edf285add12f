"""Compile the kernels for CUDA devices that need not be there, and print what they take, as JSON lines."""
# ruff: noqa: T201

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mismatch_probe.scoring import kernels
from mismatch_probe.scoring.head_triton import BLOCKS

INTEGERS = {"tokens", "vocab_size", "width", "tiles"}
FLOATS = {"multiplier", "multiplier_s", "multiplier_t", "cap", "cap_s", "cap_t", "temperature", "ratio_cap"}
IDS = {"token_ids", "half", "best_out"}
DOUBLES = {"mass_out", "weighted_out", "kl_s_out", "kl_t_out", "variation_out", "bias_out", "left_out"}
WEIGHTS = {f"{name}{role}" for name in ("hidden", "weight", "bias") for role in ("", "_s", "_t")}
PLAIN = {"BIASED_S": False, "CAPPED_S": False, "BIASED_T": False, "CAPPED_T": False}
HEAVY = {"BIASED_S": True, "CAPPED_S": True, "BIASED_T": True, "CAPPED_T": True}


def kind(name: str, dtype: str, constants: dict) -> str:
    if name in constants:
        return "constexpr"
    for names, found in (
        (INTEGERS, "i32"),
        (FLOATS, "fp32"),
        (IDS, "*i64"),
        (DOUBLES, "*fp64"),
        (WEIGHTS, f"*{dtype}"),
    ):
        if name in names:
            return found
    return "*fp32"


def measure(kernel, architecture: int, dtype: str, block: tuple[int, int], constants: dict) -> dict:
    sizes = {"BLOCK_T": block[0], "BLOCK_V": block[1], "BLOCK_H": 32 if dtype == "fp32" else 64}
    constants = {"WIDEN": False, **sizes, **constants}
    signature = {name: kind(name, dtype, constants) for name in kernel.arg_names}
    aligned = [at for at, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name == "width"]
    source = ASTSource(kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in aligned})
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    stack = max(int(found) for found in re.findall(r"STACK:(\d+)", said.stdout))
    product = next((name for name in ("wgmma", "mma.sync") if name in made.asm["ptx"]), "fma")
    return {"shared": made.metadata.shared, "stack": stack, "product": product}


def main() -> None:
    for architecture in (80, 90):
        for dtype in ("bf16", "fp32"):
            for name, kernel, work, constants in (
                ("normalise", kernels.normalise, "normalise", {"BIASED": True, "CAPPED": True}),
                ("differ", kernels.differ, "differ", {"PAIR": True, "SKETCH": False, "KEPT": 16, **PLAIN}),
                ("sketch", kernels.differ, "sketch", {"PAIR": True, "SKETCH": True, "KEPT": 64, **HEAVY}),
                ("single", kernels.differ, "sketch", {"PAIR": False, "SKETCH": True, "KEPT": 64, **PLAIN}),
            ):
                block = BLOCKS[work, architecture == 90]
                found = measure(kernel, architecture, dtype, block, constants)
                print(json.dumps({"kernel": name, "architecture": architecture, "dtype": dtype, **found}), flush=True)


if __name__ == "__main__":
    main()
