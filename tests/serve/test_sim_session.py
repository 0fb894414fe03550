"""Sessions in virtual time: the times of passes are those of the schedule's theory, and the same calls give the same bits.

A pass takes the way that a GPU takes: kernels are enqueued on a stream of the backend, and wait and done order copies and
kernels by events. Nothing here is measured.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from typing import Any

import pytest
from sim_models import kv_spec

import remap
from remap import _core
from remap.errors import DriverError, InvalidArgument, OutOfMemory
from remap.internals import internals
from remap.policy.hardware import machine
from remap_serve.sim.worlds import masters

MIB = 1 << 20
SMALL = 16 * MIB


def backend(**options: Any) -> Any:
    """Without set-up times, driver calls' times and contention, unless `options` has some."""
    fast = {"h2d_bytes_per_s": 400e9, "d2h_bytes_per_s": 400e9, "hbm_bytes_per_s": 4e12, "contention": False}
    return _core.make_sim_backend(**{"capacity_bytes": 96 << 30, **fast, **options})


def small(made: Any, layers: int = 8) -> tuple[remap.Session, Any]:
    """A few layers of 8 pages; a block of KV is a page in all."""
    session = remap.Session(layers * SMALL + 8 * 2 * MIB, platform=remap.advanced.Platform(backend=made))
    tokens = 2 * MIB // (layers * 2 * 64 * 2)
    return session, session.attach_bytes(
        masters([SMALL] * layers), kv=kv_spec(layers, 1, 64, tokens, 4, 16 + 8 * layers)
    )


def one_pass(made: Any, tenant: Any, stream: int, compute_s: float) -> float:
    """Serve one; the virtual seconds that it took. The host waits for its end."""
    begin: float = made.now
    with tenant.forward(stream=stream):
        for layer in range(tenant.layers):
            tenant.wait(layer)
            made.compute(stream, compute_s)
            tenant.done(layer)
    made.finish(stream)
    return float(made.now - begin)


def test_a_pass_on_another_stream_begins_behind_the_former_one() -> None:
    made = backend()
    session, tenant = small(made)
    with session:
        begin = made.now
        for turn in (1, 2, 3):
            stream = made.create_stream()
            with tenant.forward(stream=stream):
                for layer in range(tenant.layers):
                    tenant.wait(layer)
                    made.compute(stream, 1e-3)
                    tenant.done(layer)
            # No layer is streamed and the host waits for nothing: only the streams' order keeps the passes apart.
            assert made.stream_end(stream) == pytest.approx(begin + turn * 8e-3, rel=1e-9)


def test_growing_and_shrinking_by_steps() -> None:
    made = backend(create_page_s=2e-4, map_s=1e-6, set_access_s=4e-5, unmap_s=3e-5, copy_setup_s=1e-5)
    session, tenant = small(made)
    with session:
        # It has not been idle while it was attached: copying its weights takes longer than the reload of one layer.
        assert internals(tenant)._state.last_pass_s == session.clock() == made.now > 0.0
        stream = made.create_stream()
        for _ in range(8):
            one_pass(made, tenant, stream, 1e-3)  # a copy takes 52 us: much hides behind 8 ms
        before = tenant.kv.usable_blocks
        held = tenant.kv.allocate(before)
        now = made.now
        report = session.step({"model": remap.Demand(blocks=12)})
        assert report.added_blocks["model"] >= 12 and tenant.remapped >= 1
        assert made.now == now  # growing waits for nobody
        for _ in range(4):
            one_pass(made, tenant, stream, 1e-3)
        assert tenant.kv.usable_blocks >= before + 12
        tenant.kv.free(held)
        for _ in range(400):
            session.step({"model": remap.Demand(blocks=0)})
            one_pass(made, tenant, stream, 1e-3)
            if not tenant.streamed:
                break
        assert tenant.streamed == () and tenant.kv.usable_blocks == before + 4  # pages that were free are still KV
        remap.advanced.check(session)
        # Once the layers are home a pass costs what it did.
        assert one_pass(made, tenant, stream, 1e-3) == pytest.approx(8e-3, rel=1e-9)


def test_re_pointing_is_done_beside_the_host_and_the_pass_waits_where_it_needs_it() -> None:
    cost = {"unmap_s": 1e-3, "map_s": 5e-4, "set_access_s": 2e-3}
    made = backend(**cost)
    session, tenant = small(made)
    with session:
        stream = made.create_stream()
        one_pass(made, tenant, stream, 1e-3)
        begin = made.now
        remap.advanced.remap(session, "model", layers=1, buffers=1)
        assert made.now == begin and len(tenant.streamed) == 2
        # Of the two layers, the first shows its own pages still (they are the ring); the other was unmapped and mapped anew.
        shown = begin + 8 * 1e-3 + 8 * 5e-4 + 2e-3
        late = tenant.streamed[1]
        begin += SMALL / 400e9  # the first one is loaded all the same: nobody knows that its bytes are there
        with tenant.forward(stream=stream):
            for layer in range(8):
                tenant.wait(layer)
                if layer < late:
                    assert made.stream_end(stream) == pytest.approx(begin + layer * 1e-3, rel=1e-9)
                if layer == late:
                    assert made.stream_end(stream) == pytest.approx(shown, rel=1e-9)
                made.compute(stream, 1e-3)
                tenant.done(layer)
        made.finish(stream)
        assert one_pass(made, tenant, stream, 1e-3) == pytest.approx(8e-3, rel=1e-9)
        remap.advanced.settle(session)
        assert made.now >= shown


def test_a_named_machine() -> None:
    def on(backend: Any) -> Any:
        return remap.advanced.Platform(backend=backend)

    gh200 = "sim:GH200-96GB"
    with remap.Session("1GiB", device=gh200) as session:
        assert session.device == gh200
        assert session.clock() == pytest.approx(512 * machine("GH200-96GB").create_page_s)
    for wrong in ("sim:none-such", "sim:", "sim", "sim: GH200-96GB"):
        with pytest.raises(InvalidArgument):
            remap.Session("1GiB", device=wrong)
    with pytest.raises(InvalidArgument) as option:
        remap.Session("1GiB", device=gh200, platform=remap.advanced.Platform(gpu_direct_rdma=True))
    assert option.value.device == gh200
    with pytest.raises(OutOfMemory):
        remap.Session("200GiB", device=gh200)
    with pytest.raises(InvalidArgument):
        remap.Session("1GiB", device=gh200, platform=on(backend()))
    with remap.Session("1GiB", device="sim:custom", platform=on(backend())) as session:
        assert session.device == "sim:custom"
    with remap.Session("2MiB") as session:
        assert session.clock is time.monotonic  # elsewhere time is real


def test_there_are_no_tensors_over_memory_without_bytes_and_no_pass_without_a_stream() -> None:
    made = backend()
    session, tenant = small(made)
    with session:
        with pytest.raises(InvalidArgument) as tensors:
            _ = tenant.kv.tensors
        assert tensors.value.device == "sim:custom"
        with pytest.raises(InvalidArgument), tenant.forward():
            pass
        with pytest.raises(InvalidArgument), tenant.forward(stream=12345):
            pass
        pages = session.snapshot().pages
        with pytest.raises(InvalidArgument):  # before a master copy is made of it
            session.attach(object(), kv=tenant.kv.spec, name="other")
        assert session.snapshot().pages == pages
        one_pass(made, tenant, made.create_stream(), 1e-3)


def test_a_decorated_backend_is_simulated_all_the_same() -> None:
    made = backend(unmap_s=1e-3)
    fault = _core.make_fault_backend(made)
    session, tenant = small(fault)
    with session:
        stream = made.create_stream()
        one_pass(made, tenant, stream, 1e-3)
        assert session.clock() == made.now
        fault.arm(_core.Call.map, 1)  # of the worker's, at re-pointing
        remap.advanced.remap(session, "model", layers=1)
        assert remap.advanced.unsettled(session)
        remap.advanced.settle(session)
        assert not remap.advanced.unsettled(session)
        assert one_pass(made, tenant, stream, 1e-3) > 8e-3
        fault.fail_async_copy(1)
        with pytest.raises(DriverError):
            for _ in range(3):
                one_pass(made, tenant, stream, 1e-3)


def test_backed_memory_has_the_bytes_of_every_layer_in_every_pass() -> None:
    made = backend(capacity_bytes=64 << 20, granularity=64 << 10, backed=True)
    contents = [bytes([layer + 1]) * (200_000 + layer) for layer in range(8)]
    with remap.Session("4MiB", platform=remap.advanced.Platform(backend=made), page_bytes="64KiB") as session:
        tenant = session.attach_bytes(contents, kv=kv_spec(8, 1, 64, 16, 4, 200))
        stream = made.create_stream()
        for layers, buffers in ((0, 1), (3, 1), (4, 2), (1, 1), (0, 1)):
            remap.advanced.remap(session, "model", layers=layers, buffers=buffers)
            for _ in range(3):
                with tenant.forward(stream=stream):
                    for layer, content in enumerate(contents):
                        tenant.wait(layer)
                        made.compute(stream, 1e-4)
                        at = remap.advanced.layer_address(session, "model", layer)
                        assert ctypes.string_at(at, len(content)) == content
                        tenant.done(layer)
                made.finish(stream)
        assert tenant.kv.tensors[0].shape[1] == 200


def test_master_copies_without_bytes() -> None:
    made = masters([3 * MIB, 1, 2 * MIB])
    assert [view.nbytes for view in made] == [3 * MIB, 1, 2 * MIB]
    assert all(view.readonly and view.contiguous for view in made)
    assert len({_core.buffer_address(view) for view in made}) == 1
    assert made[2][-1] == 0
    for wrong in ([], [0], [5, -1]):
        with pytest.raises(InvalidArgument):
            masters(wrong)


def test_an_arena_of_96_gib_costs_no_memory() -> None:
    script = """
import remap
from remap import _core
from remap_serve.sim.worlds import masters

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
made = _core.make_sim_backend(capacity_bytes=96 << 30, h2d_bytes_per_s=4e11, d2h_bytes_per_s=4e11, hbm_bytes_per_s=4e12)
with remap.Session(96 << 30, platform=remap.advanced.Platform(backend=made)) as session:
    kv = remap.KVSpec(layers=40, kv_heads=40, head_dim=128, block_tokens=16, dtype="bfloat16", min_blocks=700, max_blocks=9000)
    tenant = session.attach_bytes(masters([629278720] * 40), kv=kv)
    remap.advanced.remap(session, "model", layers=6, buffers=2)
    stream = made.create_stream()
    for _ in range(3):
        with tenant.forward(stream=stream):
            for layer in range(40):
                tenant.wait(layer)
                made.compute(stream, 1e-3)
                tenant.done(layer)
        made.finish(stream)
    assert made.traffic()["h2d"]["bytes"] > 40e9
    assert resident() - before < 100e6, resident() - before
assert set(made.usage().values()) - {1} == {0}, made.usage()  # but the stream
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
