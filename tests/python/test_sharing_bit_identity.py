"""Tenants share an arena and lend each other their layers, while kernels that read them are in flight on streams."""

from __future__ import annotations

import ctypes
import random
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, make_spec, session_on
from cuda_streams import Driver

import remap
from remap import _core
from remap.internals import internals


def change(session: remap.Session, served: dict[str, OnDevice], rng: random.Random) -> None:
    """One change at random."""
    name, other = rng.sample(sorted(served), 2)
    one = served[name]
    kind = rng.choice(["lend", "lend", "activate", "deactivate", "step", "step", "remap", "blocks", "blocks"])
    report: Any = None
    if kind == "lend":
        most = one.tenant.layers - 1 - (internals(one.tenant).buffers == 2)
        report = remap.advanced.lend(session, name, rng.randint(0, most), to=other)
    elif kind == "activate":
        report = session.activate(name, alone=rng.random() < 0.3, partial=True)
    elif kind == "deactivate":
        session.deactivate(name)
    elif kind == "step":
        report = session.step({each: remap.Demand(rng.randint(0, 60)) for each in served if served[each].tenant.active})
    elif kind == "remap":
        report = remap.advanced.remap(session, name, rng.randint(0, one.tenant.layers - 2), rng.choice([1, 2]))
    elif one.live and rng.random() < 0.5:
        one.drop(rng.sample(sorted(one.live), rng.randint(1, len(one.live))))
    elif one.tenant.kv.free_blocks:
        one.fill_blocks(rng.randint(1, one.tenant.kv.free_blocks), rng)
    for each, moves in (report.moved if report else {}).items():
        served[each].patch(moves)


class OnDevice:
    """A tenant over plain bytes whose kernels are copies on a stream of its own: they read every layer and every live block."""

    def __init__(
        self, session: remap.Session, backend: Any, name: str, sizes: list[int], tag: int, stream: int
    ) -> None:
        self.session, self.backend, self.name, self.stream = session, backend, name, stream
        self.layers = make_layers(sizes, tag)
        self.tenant = session.attach_bytes(self.layers, name=name, kv=make_spec(len(sizes), max_blocks=300))
        self.live: dict[int, int] = {}
        self.reads: list[tuple[int, bytes, str]] = []

    def a_pass(self) -> None:
        """Enqueued; nobody waits for it here."""
        with self.tenant.forward(stream=self.stream):
            for layer, expected in enumerate(self.layers):
                self.tenant.wait(layer)
                self.read(remap.advanced.layer_address(self.session, self.name, layer), expected, f"layer {layer}")
                self.tenant.done(layer)
            for block, value in self.live.items():
                for offset, nbytes in internals(self.tenant).kv.geometry.byte_ranges_of_block(block):
                    self.read(internals(self.tenant).kv.address + offset, bytes([value]) * nbytes, f"block {block}")

    def read(self, address: int, expected: bytes, what: str) -> None:
        to = self.backend.allocate_host(len(expected))
        self.backend.copy(self.stream, to, address, len(expected))
        self.reads.append((to, expected, what))

    def fill_blocks(self, count: int, rng: random.Random) -> None:
        for block in self.tenant.kv.allocate(count):
            self.live[block] = rng.randint(1, 255)
            for offset, nbytes in internals(self.tenant).kv.geometry.byte_ranges_of_block(block):
                self.backend.fill(self.stream, internals(self.tenant).kv.address + offset, self.live[block], nbytes)

    def drop(self, blocks: Any) -> None:
        for block in list(blocks):
            self.tenant.kv.free([block])
            del self.live[block]

    def patch(self, moves: Any) -> None:
        self.live = {moves.get(block, block): value for block, value in self.live.items()}

    def compare(self) -> None:
        for at, expected, what in self.reads:
            got = ctypes.string_at(at, len(expected))
            self.backend.free_host(at, len(expected))
            assert got == expected, f"{self.name}: {what}"
        self.reads.clear()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_what_kernels_in_flight_read_is_still_there_when_pages_change_tenant(emulated: Any, mode: str) -> None:
    """Each tenant computes on a stream of its own, and is often far behind: nobody waits for it between changes."""
    emulated.configure(granularity=PAGE, memory=256 << 20, jitter_us=20)
    rng = random.Random(f"device {mode}")
    driver = Driver(emulated.path)
    with ExitStack() as stack:
        stack.callback(driver.close)
        backend = _core.make_cuda_backend(library=emulated.path)
        streams = [stack.enter_context(driver.stream()) for _ in range(3)]
        config = remap.advanced.Knobs(min_idle=0.0, dwell=1, contention=1.0, map_s=0.0)
        with session_on(backend, 60 * PAGE, page_bytes=PAGE, mode=mode, config=config) as session:
            shapes = {"a": [2] * 5, "b": [3, 2, 3, 3, 2, 3], "c": [1] * 4}
            served = {
                name: OnDevice(session, backend, name, sizes, tag, streams[tag - 1])
                for tag, (name, sizes) in enumerate(shapes.items(), 1)
            }
            for each in served.values():
                each.a_pass()
            borrowed = 0
            for turn in range(60):
                if rng.random() < 0.3:  # far behind: what follows is enqueued, and runs later
                    driver.hold(rng.choice(streams)).open_once(threading.Event(), 0.01)
                try:
                    change(session, served, rng)
                except remap.OutOfBlocks:
                    assert any(each.live for each in served.values())
                remap.advanced.check(session)
                borrowed += sum(seen.borrowed_pages for seen in session.snapshot().tenants.values())
                for each in served.values():
                    if each.tenant.active and rng.random() < 0.7:
                        each.a_pass()
                if turn % 12 == 11:
                    for each in served.values():
                        driver.synchronize(each.stream)
                        each.compare()
            assert borrowed > 60
        del session, backend, served, each
