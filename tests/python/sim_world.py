"""What tests of the simulation share: a sim backend with simple numbers, and a small model with a recorded run of it.

The backend's unit is a page: the link moves one page a second to the device and half a page back, the device's memory moves
eight. All these are powers of two, so times are exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.lab.twin.calibrated import MeasuredPass, Recording

import remap
from remap import _core
from remap.policy.hardware import Model

MIB = 1 << 20
PAGE = 4096
UNIT = {"h2d_bytes_per_s": PAGE, "d2h_bytes_per_s": PAGE / 2, "hbm_bytes_per_s": 8 * PAGE}
ROOM = 64  # pages


class World:
    """A backend with `ROOM` accessible pages in one region, and host memory to copy from and to. All driver calls are free
    unless `times` says otherwise; `begin` is when everything was ready."""

    def __init__(self, **times: Any) -> None:
        self.backend = _core.make_sim_backend(**{"capacity_bytes": ROOM * PAGE, "granularity": PAGE, **UNIT, **times})
        self.at = self.backend.reserve(ROOM * PAGE, PAGE)
        self.pages = [self.backend.create_page(PAGE) for _ in range(ROOM)]
        self.backend.map(self.at, self.pages, PAGE)
        self.backend.set_access(self.at, ROOM * PAGE, _core.Access.read_write)
        self.host = self.backend.allocate_host(ROOM * PAGE)
        self.begin = self.backend.now

    def stream(self, after: float = 0.0) -> int:
        """A new stream; what is enqueued on it waits for an event that completes at `after`."""
        stream: int = self.backend.create_stream()
        if after:
            other, event = self.backend.create_stream(), self.backend.create_event()
            self.backend.hold(other, after)
            self.backend.record(event, other)
            self.backend.stream_wait(stream, event)
        return stream

    def down(self, stream: int, pages: float) -> float:
        """Enqueue a copy to the device; when it will be done."""
        self.backend.copy(stream, self.at, self.host, int(pages * PAGE))
        return self.backend.stream_end(stream)

    def up(self, stream: int, pages: float) -> float:
        self.backend.copy(stream, self.host, self.at, int(pages * PAGE))
        return self.backend.stream_end(stream)

    def event(self, stream: int) -> int:
        event: int = self.backend.create_event()
        self.backend.record(event, stream)
        return event


def on_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns on another thread, which ends then."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


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
