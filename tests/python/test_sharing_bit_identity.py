"""Three models share an arena and lend each other their layers: whoever is active computes the same bits as without remap.

Free usable KV blocks are poisoned and live ones hold random bytes all the time, in pages that were somebody's weights a moment
ago: a stale read of weights or a stray copy shows at once.
"""

from __future__ import annotations

import ctypes
import random
import threading
from contextlib import ExitStack
from typing import Any

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from arena_worlds import PAGE, make_layers, make_spec, session_on  # noqa: E402
from cuda_streams import Driver  # noqa: E402
from models import (  # noqa: E402
    LAYERS,
    Served,
    kv_spec,
    layers_of,
    logits_of,
    make,
    minimum_bytes,
)

from remap import _core  # noqa: E402

KINDS = {"one": "llama-odd", "two": "qwen3", "three": "opt"}
SMALL = 16384


def spec_for(model: Any, layout: str) -> remap.KVSpec:
    return kv_spec(model, layout=layout, max_blocks=1600)  # so that there is a place for every page of the others


def serve(session: remap.Session, name: str, layout: str) -> Served:
    model = make(KINDS[name], seed=len(name))
    return Served(session, model, name, spec_for(model, layout))


def change(session: remap.Session, served: dict[str, Any], rng: random.Random) -> None:
    """One change at random."""
    name, other = rng.sample(sorted(served), 2)
    one = served[name]
    layers, buffers = one.tenant.layers, rng.choice([1, 2])
    kind = rng.choice(["lend", "lend", "activate", "deactivate", "step", "step", "remap", "blocks", "blocks"])
    report: Any = None
    if kind == "lend":
        most = layers - 1 - (internals(one.tenant).buffers == 2)
        report = remap.advanced.lend(session, name, rng.randint(0, most), to=other)
    elif kind == "activate":
        report = session.activate(name, alone=rng.random() < 0.3, partial=rng.random() < 0.6)
    elif kind == "deactivate":
        session.deactivate(name)
    elif kind == "step":
        report = session.step({each: remap.Demand(rng.randint(0, 60)) for each in served if served[each].tenant.active})
    elif kind == "remap":
        how = rng.choice(["uniform", "nested"])
        report = remap.advanced.remap(session, name, rng.randint(0, layers - buffers), buffers, how)
    elif one.live and rng.random() < 0.5:
        one.drop(rng.sample(sorted(one.live), rng.randint(1, len(one.live))))
    elif one.tenant.kv.free_blocks:
        one.fill_blocks(rng.randint(1, one.tenant.kv.free_blocks), rng)
    for each, moves in (report.moved if report else {}).items():
        served[each].patch(moves)
    if kind == "activate" and not report.activated:
        for holder, blocks in report.preempt.items():
            served[holder].drop(blocks)
        report = session.activate(name)
        for each, moves in report.moved.items():
            served[each].patch(moves)
        assert report.activated


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_active_models_compute_the_same_bits_at_every_moment(mode: str) -> None:
    rng = random.Random(mode)
    layouts = {name: rng.choice(["block_major", "layer_major"]) for name in KINDS}
    models = {name: make(kind) for name, kind in KINDS.items()}
    least = sum(minimum_bytes(model, spec_for(model, layouts[name]), SMALL) for name, model in models.items())
    config = remap.advanced.Knobs(min_idle=0.0, dwell=1, contention=1.0, map_s=0.0)
    with remap.Session(least + 12 * SMALL, page_bytes=SMALL, mode=mode, config=config) as session:
        served = {name: serve(session, name, layouts[name]) for name in KINDS}
        refused, lent, passes = 0, 0, 0
        for _ in range(45):
            try:
                change(session, served, rng)
            except remap.OutOfBlocks:
                refused += 1
            remap.advanced.check(session)
            for each in served.values():
                each.whole()
                passes += each.tenant.active and bool(each.tenant.streamed)
            lent += sum(seen.borrowed_pages for seen in session.snapshot().tenants.values())
        assert lent > 100
        assert passes > 10
        for each in served.values():
            each.drop(list(each.live))
        for name, each in served.items():
            assert session.activate(name).activated
            remap.advanced.remap(session, name, 0)
            each.whole()
        assert not any(seen.lent_pages for seen in session.snapshot().tenants.values())
        for each in served.values():
            each.hooks.remove()
    for each in served.values():
        each.right()


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
                    for stream in streams:
                        driver.synchronize(stream)
                    for each in served.values():
                        each.compare()
            assert borrowed > 60
            driver.open_gates()
            for stream in streams:
                driver.synchronize(stream)
            for each in served.values():
                each.compare()
        del session, backend, served, each, stream


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("by_step", [False, True])
def test_a_layer_that_was_written_is_found_when_it_would_be_lent_and_stays(mode: str, by_step: bool) -> None:
    models = [make(kind) for kind in KINDS.values()]
    least = sum(minimum_bytes(model, spec_for(model, "block_major"), SMALL) for model in models)
    config = remap.advanced.Knobs(min_idle=0.0, reload_s=1e9, reserve_blocks=0)
    with remap.Session(least, page_bytes=SMALL, mode=mode, config=config) as session:
        served = {name: serve(session, name, "block_major") for name in KINDS}
        one = served["one"]
        with torch.no_grad():
            next(layers_of(one.model)[LAYERS - 1].parameters()).mul_(1.5)
        one.expected = [logits_of(one.model, ids) for ids in one.batches]
        for name in ("one", "three"):
            session.deactivate(name)
        if by_step:
            for _ in range(30):
                two = served["two"]
                two.fill_blocks(two.kv.free_blocks, random.Random(0))
                session.step({"two": remap.Demand(3)})
        else:
            remap.advanced.lend(session, "one", 3, to="two")
        assert LAYERS - 1 in internals(one.tenant).pinned
        assert len(one.tenant.streamed) >= 2 and LAYERS - 1 not in one.tenant.streamed
        remap.advanced.check(session)
        served["two"].drop(list(served["two"].live))
        assert session.activate("one").activated
        for each in served.values():
            each.whole()
            each.hooks.remove()
