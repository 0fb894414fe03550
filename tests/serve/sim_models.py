"""A small model for the simulator, and a recorded run of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.lab.twin.calibrated import MeasuredPass, Recording

import remap
from remap.policy.hardware import Model

MIB = 1 << 20


def tiny(layers: int = 8, **changes: Any) -> Model:
    """16 MiB a layer; KV of one token in one layer is 2 KiB, so a block of 16 tokens is 256 KiB with 8 layers."""
    model = Model(
        name="tiny",
        layers=layers,
        hidden=512,
        heads=8,
        kv_heads=8,
        head_dim=64,
        vocab=32000,
        dtype_bytes=2,
        layer_bytes=16 * MIB,
        resident_bytes=0,
        linear_ops=(("all", 512, 16384),),
        head=(512, 32000),
        context=1024,
    )
    return replace(model, **changes)


def recording(passes: tuple[MeasuredPass, ...] = ()) -> Recording:
    """20 requests of a tiny model on an arena that has 10 pages, 80 blocks, beside its weights."""
    return Recording(
        model=tiny(),
        capacity_bytes=(8 * 8 + 10) * 2 * MIB,
        kv_blocks=80,
        block_tokens=16,
        page_bytes=2 * MIB,
        warm=((100, 4), (99, 4)),
        requests=tuple((40 + 50 * (i % 9), 20 + 17 * (i % 7)) for i in range(20)),
        passes=passes,
        gap_s=0.001,
        copy_bytes_per_s=4e9,
        scheduling={"max_num_seqs": 8, "max_batch_tokens": 128, "chunk_align": 32, "decode_cost": 3},
    )


def kv_spec(layers: int, heads: int, size: int, tokens: int, least: int, most: int) -> remap.KVSpec:
    shape = {"layers": layers, "kv_heads": heads, "head_dim": size, "block_tokens": tokens, "dtype": "bfloat16"}
    return remap.KVSpec(**shape, min_blocks=least, max_blocks=most)  # type: ignore[arg-type]
