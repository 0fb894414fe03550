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
from effort import spread
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from remap_serve.engine import fused_triton, paged_triton, prefill_triton

NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INT32 = ("table", "rows", "lengths", "slots", "tiles", "source", "target")
FP32, FLOATS = ("partial", "sums"), ("scale", "eps")
# Shared memory of one program: GH100 and A100; Ada and consumer Ampere.
SHARED = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10}
PTXAS = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"


def checked(folder, kernel, constants, pointers, arch=90, dtype=torch.bfloat16):
    """Compiles as a launch would, with 16-byte aligned pointers and strides, and checks spills and shared memory. Its PTX."""
    constants = dict(constants)
    options = {name: constants.pop(name, most) for name, most in (("num_warps", 4), ("num_stages", 3))}
    signature, attributes = {}, {}
    for index, name in enumerate(parameter.name for parameter in kernel.params):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            pointer = "*i32" if name in INT32 else "*fp32" if name in FP32 else NAMES[dtype]
            signature[name] = pointer if name in pointers else "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert made.metadata.shared <= SHARED[arch]
    path, name = folder / "kernel.ptx", f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    path.write_text(made.asm["ptx"])
    command = [str(PTXAS), "-v", f"-arch={name}", str(path), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stored = re.findall(r"(\d+) bytes spill stores", said)
    assert stored and max(map(int, stored)) == 0
    return made.asm["ptx"]


DECODE = {"q", "keys", "values", "table", "rows", "lengths", "out", "partial", "sums"}
PREFILL = {"q", "keys", "values", "table", "tiles", "out"}


@pytest.mark.parametrize(
    ("dim", "group", "arch"), spread([(80, 5, 90), (64, 1, 90), (128, 4, 90), (256, 8, 90), (128, 8, 89)], 3)
)
def test_decode(dim, group, arch, tmp_path):
    join = {"DIM": dim, "DIM_PAD": paged_triton.padded_dim(dim), "SPLITS": 4}
    shape = {**join, "BLOCK_TOKENS": 16, "GROUP": group, "GROUP_PAD": 16, "INDIRECT": True, "WIDEN": False}
    shape |= paged_triton.decode_config(dim, torch.bfloat16)
    ptx = checked(tmp_path, paged_triton._decode, shape, DECODE, arch)
    assert "mma.sync" in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10", ptx)
    # One tile in flight while another is used: some wait leaves copies behind.
    assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)
    checked(tmp_path, paged_triton._join, {**join, "SPLITS_PAD": 4}, {"partial", "sums", "out"}, arch)


@pytest.mark.parametrize(
    ("dim", "group", "arch"), spread([(256, 8, 90), (64, 1, 90), (128, 4, 90), (128, 4, 80), (128, 4, 89)], 3)
)
def test_prefill(dim, group, arch, tmp_path):
    shape = {"BLOCK_TOKENS": 16, "GROUP": group, "DIM": dim, "DIM_PAD": dim, "WIDEN": False}
    shape |= prefill_triton.prefill_config(dim, torch.bfloat16, roomy=arch != 89)
    ptx = checked(tmp_path, prefill_triton._prefill, shape, PREFILL, arch)
    assert ("wgmma" if arch == 90 else "mma.sync") in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10", ptx)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_fp32(kernel, tmp_path):
    """Exact products, without the matrix units: right, not fast; but no spills."""
    shape = {"BLOCK_TOKENS": 16, "GROUP": 4, "DIM": 128, "DIM_PAD": 128, "WIDEN": False}
    if kernel == "decode":
        shape |= {"GROUP_PAD": 16, "SPLITS": 1, "INDIRECT": True, **paged_triton.decode_config(128, torch.float32)}
        ptx = checked(tmp_path, paged_triton._decode, shape, DECODE, dtype=torch.float32)
    else:
        shape |= prefill_triton.prefill_config(128, torch.float32)
        ptx = checked(tmp_path, prefill_triton._prefill, shape, PREFILL, dtype=torch.float32)
    assert "tf32" not in ptx


WRITE = {"BLOCK_TOKENS": 16, "HEADS": 8, "DIM": 128, "HEADS_PAD": 8, "DIM_PAD": 128}
ROTATE = {"HEADS": 32, "HEADS_PAD": 32, "HALF": 64, "HALF_PAD": 64}


@pytest.mark.parametrize(
    ("kernel", "constants", "pointers"),
    [
        (paged_triton._write, WRITE, {"k_from", "v_from", "k_to", "v_to", "slots"}),
        (fused_triton._rms_norm, {"DIM": 4096, "DIM_PAD": 4096}, {"x", "weight", "out"}),
        (fused_triton._rotate, ROTATE, {"x", "cos", "sin"}),
        (fused_triton._silu_mul, {"TILE": 1024}, {"gate", "up", "out"}),
        (paged_triton._fetch, {"TILE": 1024}, {"source", "target"}),
    ],
)
def test_the_small_kernels(kernel, constants, pointers, tmp_path):
    ptx = checked(tmp_path, kernel, constants, pointers)
    assert re.search(r"ld\.(volatile\.)?global[.a-z:]*\.v4\.b32", ptx)
