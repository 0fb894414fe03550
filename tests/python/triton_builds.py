"""The Triton kernels compiled for real GPUs, without one. Run by test_triton_attention.py in a process of its own.

What is checked is what can be read off the result: that it compiles at all, spills no registers, fits into shared memory,
loads keys and values in 16-byte asynchronous copies, and multiplies on the matrix units.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from remap.engine import fused_triton, paged_triton, prefill_triton

NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INT32 = ("table", "rows", "lengths", "slots", "tiles", "source", "target")
FP32 = ("partial", "sums")
# Shared memory of one program: GH100 and A100; Ada and consumer Ampere.
SHARED = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10}
PTXAS = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"


def build(kernel, dtype, constants, arch, *, floats=(), pointers, num_warps=4, num_stages=3):
    """Compile as a launch would, with 16-byte aligned pointers and strides. Returns (what was compiled, ptxas' report)."""
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in pointers:
            signature[name] = "*i32" if name in INT32 else "*fp32" if name in FP32 else NAMES[dtype]
        else:
            signature[name] = "fp32" if name in floats else "i32"
        if name not in floats:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return made, made.asm["ptx"]


def report_of(ptx, arch, folder):
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    name = f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    command = [str(PTXAS), "-v", f"-arch={name}", str(path), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check(made, ptx, arch, folder):
    assert made.metadata.shared <= SHARED[arch]
    stored = re.findall(r"(\d+) bytes spill stores", report_of(ptx, arch, folder))
    assert stored and max(map(int, stored)) == 0


DECODE = {"q", "keys", "values", "table", "rows", "lengths", "out", "partial", "sums"}


@pytest.mark.parametrize(("dim", "group", "arch"), [(64, 1, 90), (80, 5, 90), (128, 4, 90), (256, 8, 90), (128, 8, 89)])
def test_decode(dim, group, arch, tmp_path):
    constants = {
        "BLOCK_TOKENS": 16, "GROUP": group, "GROUP_PAD": 16, "DIM": dim, "DIM_PAD": paged_triton.padded_dim(dim),
        "SPLITS": 4, "INDIRECT": True, "WIDEN": False, **paged_triton.decode_config(dim, torch.bfloat16),
    }  # fmt: skip
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    made, ptx = build(
        paged_triton._decode, torch.bfloat16, constants, arch, floats=("scale",), pointers=DECODE, **options
    )
    check(made, ptx, arch, tmp_path)
    assert "mma.sync" in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10", ptx)
    # One tile in flight while another is used: some wait leaves copies behind.
    assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)
    constants = {"DIM": dim, "DIM_PAD": paged_triton.padded_dim(dim), "SPLITS": 4, "SPLITS_PAD": 4}
    made, ptx = build(paged_triton._join, torch.bfloat16, constants, arch, pointers={"partial", "sums", "out"})
    check(made, ptx, arch, tmp_path)


@pytest.mark.parametrize(
    ("dim", "group", "arch"), [(64, 1, 90), (128, 4, 90), (256, 8, 90), (128, 4, 80), (128, 4, 89)]
)
def test_prefill(dim, group, arch, tmp_path):
    constants = {
        "BLOCK_TOKENS": 16, "GROUP": group, "DIM": dim, "DIM_PAD": dim, "WIDEN": False,
        **prefill_triton.prefill_config(dim, torch.bfloat16, roomy=arch != 89),
    }  # fmt: skip
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    pointers = {"q", "keys", "values", "table", "tiles", "out"}
    made, ptx = build(
        prefill_triton._prefill, torch.bfloat16, constants, arch, floats=("scale",), pointers=pointers, **options
    )
    check(made, ptx, arch, tmp_path)
    assert ("wgmma" if arch == 90 else "mma.sync") in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10", ptx)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_fp32(kernel, tmp_path):
    """Exact products, without the matrix units: right, not fast; but no spills."""
    constants = {"BLOCK_TOKENS": 16, "GROUP": 4, "DIM": 128, "DIM_PAD": 128, "WIDEN": False}
    if kernel == "decode":
        constants |= {"GROUP_PAD": 16, "SPLITS": 1, "INDIRECT": True}
        constants |= paged_triton.decode_config(128, torch.float32)
        function, pointers = paged_triton._decode, DECODE
    else:
        constants |= prefill_triton.prefill_config(128, torch.float32)
        function, pointers = prefill_triton._prefill, {"q", "keys", "values", "table", "tiles", "out"}
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    made, ptx = build(function, torch.float32, constants, 90, floats=("scale",), pointers=pointers, **options)
    check(made, ptx, 90, tmp_path)
    assert "tf32" not in ptx


def test_the_small_kernels(tmp_path):
    for kernel, constants, pointers, floats in (
        (
            paged_triton._write,
            {"BLOCK_TOKENS": 16, "HEADS": 8, "DIM": 128, "HEADS_PAD": 8, "DIM_PAD": 128},
            {"k_from", "v_from", "k_to", "v_to", "slots"},
            (),
        ),
        (fused_triton._rms_norm, {"DIM": 4096, "DIM_PAD": 4096}, {"x", "weight", "out"}, ("eps",)),
        (
            fused_triton._rotate,
            {"HEADS": 32, "HEADS_PAD": 32, "HALF": 64, "HALF_PAD": 64},
            {"x", "cos", "sin"},
            (),
        ),
        (fused_triton._silu_mul, {"TILE": 1024}, {"gate", "up", "out"}, ()),
        (paged_triton._fetch, {"TILE": 1024}, {"source", "target"}, ()),
    ):
        made, ptx = build(kernel, torch.bfloat16, constants, 90, floats=floats, pointers=pointers)
        check(made, ptx, 90, tmp_path)
        assert re.search(r"ld\.(volatile\.)?global[.a-z:]*\.v4\.b32", ptx)
