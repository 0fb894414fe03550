"""What is carried of vLLM to a machine with a GPU: device code of its architecture stays, all else is zeros of the same size."""

from __future__ import annotations

import struct

import pytest
from bench.gpu.vllm import pack


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_other_architectures_becomes_zeros_and_nothing_moves() -> None:
    first = fat(entry(2, 80, b"ampere.."), entry(2, 90, b"hopper.."), entry(1, 90, b"text...."))
    second = fat(entry(1, 70, b"oldtext."), entry(1, 80, b"newtext."), entry(2, 100, b"later..."))
    data = b"head" + first + b"between" + second + b"tail"
    made = bytes(pack.pruned(data, 4, len(data) - 4))
    assert len(made) == len(data) and made.startswith(b"head") and made.endswith(b"tail") and b"between" in made
    assert {word: word in made for word in (b"hopper", b"ampere", b"text....", b"newtext", b"oldtext", b"later")} == {
        b"hopper": True, b"ampere": False, b"text....": False, b"newtext": True, b"oldtext": False, b"later": False,
    }  # fmt: skip
    assert made.replace(b"\0", b"") != data.replace(b"\0", b"")
    kinds = [[each[:2] for each in found] for found in pack.fat_entries(made, 4, len(made) - 4)]
    assert kinds == [[(2, 80), (2, 90), (1, 90)], [(1, 70), (1, 80), (2, 100)]]


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/_flashmla_C.abi3.so", False),
        ("vllm/model_executor/layers/fused_moe/configs/E=8,device_name=NVIDIA_H200.json", True),
        ("vllm/model_executor/layers/fused_moe/configs/E=8,device_name=NVIDIA_L40S.json", False),
        ("vllm/worker.py", True),
        ("vllm/third_party/cutlass/gemm.h", False),
        ("vllm/kernels/a.cuh", False),
    ],
)
def test_what_is_carried(name: str, carried: bool) -> None:
    assert pack.wanted(name, 10) is carried
