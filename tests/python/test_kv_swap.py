"""KV in host memory: the books, the bytes, and an engine whose requests come and go without being recomputed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, write_block
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import _core
from remap.errors import InvalidArgument, OutOfBlocks
from remap.internals import internals
from remap.kv.host import HostBlocks
from remap.kv.spec import KVGeometry, KVSpec
from remap.memory.device import simulated
from remap.policy.hardware import machine
from remap_serve.engine.request import Sequence
from remap_serve.sim.worlds import masters

LAYOUTS = ("block_major", "layer_major")
MODES = ("aliased", "strict")


def store(blocks: int, layout: str = "block_major", layers: int = 3) -> HostBlocks:
    spec = KVSpec(layers=layers, kv_heads=1, head_dim=4, min_blocks=0, max_blocks=20, layout=layout, host_blocks=blocks)
    return HostBlocks(KVGeometry(spec, 256), blocks)


# -- books -------------------------------------------------------------------------------------------------------------


@given(layout=st.sampled_from(LAYOUTS), data=st.data())
def test_ranges_are_those_of_each_block(layout: str, data: st.DataObject) -> None:
    """Against each block by itself: the same bytes, in the same place of every range, in no more copies than runs."""
    books = store(12, layout)
    blocks = data.draw(st.lists(st.integers(0, 19), unique=True, max_size=12))
    pairs = list(zip(blocks, books.allocate(len(blocks))))
    unit, geometry = books.geometry.unit_bytes, books.geometry
    obvious = {
        (offset + i, r * 12 * unit + host * unit + i)
        for block, host in pairs
        for r, (offset, nbytes) in enumerate(geometry.byte_ranges_of_block(block))
        for i in range(nbytes)
    }
    found = books.ranges(pairs)
    assert {(region + i, host + i) for region, host, nbytes in found for i in range(nbytes)} == obvious
    assert sum(nbytes for _, _, nbytes in found) == len(obvious) == len(blocks) * geometry.spec.block_bytes
    ordered = sorted(pairs)
    breaks = sum(b != a + 1 or d != c + 1 for (a, c), (b, d) in itertools.pairwise(ordered))
    assert len(found) == (geometry.ranges * (breaks + 1) if pairs else 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_host_blocks_are_one_holders_at_a_time(steps: list[tuple[bool, int]]) -> None:
    books, held = store(8), list[int]()
    for takes, count in steps:
        if takes and count <= books.free_blocks:
            got = books.allocate(count)
            assert len(got) == count and not set(got) & set(held) and set(got) <= set(range(8))
            held += got
        elif takes:
            with pytest.raises(OutOfBlocks) as caught:
                books.allocate(count)
            assert caught.value.fields["free"] == books.free_blocks
        else:
            books.free(held[:count])
            held = held[count:]
        assert books.free_blocks == 8 - len(held)
    for wrong in ([*held, 8], [99], [held[0], held[0]] if held else [0]):
        with pytest.raises(InvalidArgument):
            books.free(wrong)
    assert books.free_blocks == 8 - len(held)


# -- bytes -------------------------------------------------------------------------------------------------------------


def content(tenant: remap.Tenant, block: int) -> bytes:
    ranges = internals(tenant).kv.geometry.byte_ranges_of_block(block)
    return b"".join(ctypes.string_at(internals(tenant).kv.address + offset, nbytes) for offset, nbytes in ranges)


def session_of(
    layout: str = "block_major", mode: str = "aliased", host: int = 6, **how: Any
) -> tuple[remap.Session, remap.Tenant]:
    session = remap.Session(64 * PAGE, page_bytes=PAGE, mode=mode, **how)
    spec = KVSpec(layers=2, kv_heads=1, head_dim=64, min_blocks=8, max_blocks=8, layout=layout, host_blocks=host)
    return session, session.attach_bytes(make_layers((1, 1)), name="m", kv=spec)


def faulty() -> tuple[Any, remap.Session, remap.Tenant]:
    backend = _core.make_fault_backend(_core.make_host_backend(64 * PAGE, PAGE, 1))
    return (backend, *session_of(platform=remap.advanced.Platform(backend=backend)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_come_back_into_any_blocks(layout: str, mode: str) -> None:
    session, tenant = session_of(layout, mode)
    with session:
        kv = internals(tenant).kv
        first = kv.allocate(5)
        for block in first:
            write_block(tenant, block, 40 + block)
        chosen = [first[3], first[0], first[4]]
        expected = [content(tenant, block) for block in chosen]
        hosts = kv.copy_out(chosen)
        assert kv.copied_out_bytes == 3 * kv.spec.block_bytes and kv.host.free_blocks == 3
        early = kv.copy_in(hosts[:1], first[1:2])  # behind the copy out
        kv.join(early)
        assert content(tenant, first[1]) == expected[0]
        kv.free(first)
        second = kv.allocate(6)
        for block in second:
            write_block(tenant, block, 7)
        into = second[2:5]
        ticket = kv.copy_in(hosts, into)
        kv.join()
        assert kv.arrived(ticket)
        assert [content(tenant, block) for block in into] == expected
        assert {*content(tenant, second[0]), *content(tenant, second[5])} == {7}
        kv.free_host(hosts)
        assert kv.host.free_blocks == 6 and kv.copied_in_bytes == 4 * kv.spec.block_bytes
        seen = session.snapshot().tenants["m"]
        assert (seen.host_blocks, seen.kv_out_bytes, seen.kv_in_bytes) == (0, kv.copied_out_bytes, kv.copied_in_bytes)
        session.detach("m")
        for call in (lambda: kv.copy_out(second), lambda: kv.copy_in(hosts, into)):
            with pytest.raises(remap.InvalidState):
                call()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_is_freed_waits_for_its_own_copies_alone(order: tuple[int, int]) -> None:
    """In virtual time: the next pass begins at once, or when the block has been copied, in whichever direction."""
    backend = simulated(machine("GH200-96GB"))
    platform = remap.advanced.Platform(backend=backend)
    spec = KVSpec(layers=2, kv_heads=8, head_dim=128, min_blocks=8, max_blocks=8, host_blocks=8)
    with remap.Session(64 << 20, page_bytes=2 << 20, platform=platform) as session:
        tenant = session.attach_bytes(masters([2 << 20] * 2), name="m", kv=spec)
        kv, stream = internals(tenant).kv, backend.create_stream()
        with tenant.forward(phase="decode", tokens=1, stream=stream):
            backend.compute(stream, 1e-3)
        comes, goes, stays = (kv.allocate(2) for _ in range(3))
        hosts = kv.copy_out(comes)
        kv.join()
        idle = backend.stream_end(stream)
        backend.advance_to(idle)
        ticket = kv.copy_in(hosts, comes)
        left = kv.copy_out(goes)
        kv.free(stays)
        assert backend.stream_end(stream) == idle and not kv.arrived(ticket)
        waits = []
        for which in order:
            kv.free((comes, goes)[which])
            waits.append(backend.stream_end(stream) - idle)
        assert 0 < waits[0] <= waits[1]
        backend.advance_to(idle + waits[1])
        assert kv.arrived(ticket) and kv.kept(left)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv, live, hosts: kv.copy_out([7]), InvalidArgument),
        (lambda kv, live, hosts: kv.copy_out([live[0], live[0]]), InvalidArgument),
        (lambda kv, live, hosts: kv.copy_out(live), OutOfBlocks),
        (lambda kv, live, hosts: kv.copy_in([5], [live[0]]), InvalidArgument),
        (lambda kv, live, hosts: kv.copy_in(hosts, live), InvalidArgument),
        (lambda kv, live, hosts: kv.copy_in(hosts, [7]), InvalidArgument),
        (lambda kv, live, hosts: kv.free_host([3]), InvalidArgument),
    ],
)
def test_a_refused_call_changes_nothing(call, error) -> None:
    session, tenant = session_of(host=2)
    with session:
        kv = internals(tenant).kv
        live = kv.allocate(3)
        hosts = kv.copy_out(live[:1])
        before = kv.host.free_blocks, kv.copied_out_bytes, kv.copied_in_bytes, kv.live_blocks
        with pytest.raises(error):
            call(kv, live, hosts)
        assert (kv.host.free_blocks, kv.copied_out_bytes, kv.copied_in_bytes, kv.live_blocks) == before


def test_what_never_was_has_not_arrived_and_is_not_kept() -> None:
    """`arrived` of a ticket that never was, and `kept` of host blocks that were freed, or that there are not: all True."""
    session, tenant = session_of()
    with session:
        host = tenant.kv.host
        freed = host.copy_out(tenant.kv.allocate(1))
        host.join()
        assert host.kept(freed)
        host.free(freed)
        assert host.free_blocks == 6
        for ask in (host.arrived, host.join):
            with pytest.raises(InvalidArgument, match="what `copy_in` returned"):
                ask(1)
        for blocks in (freed, [99], "ab"):
            with pytest.raises(InvalidArgument, match="not in use"):
                host.kept(blocks)


# -- copies that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mended", ["freed", "copied in again", "moved, then freed"])
def test_a_join_is_not_silent_about_a_copy_in_that_failed(mended: str) -> None:
    """Of two copies in the first failed, and its join said so. The join of the second, whose block was zeros, said nothing, nor
    did a join of all, nor the same join once more."""
    backend, session, tenant = faulty()
    with session:
        kv = tenant.kv
        first, second, other, *_ = kv.allocate(8)
        write_block(tenant, first, 9)
        hosts = kv.host.copy_out([first])
        kv.host.join()
        backend.fail_async_copy(1)
        tickets = [kv.host.copy_in(hosts, [block]) for block in (first, second)]
        while mended == "copied in again":  # the first to hear of it
            with contextlib.suppress(remap.DriverError):
                kv.host.arrived(tickets[0])
                continue
            break
        for ask in (*(partial(kv.host.join, each) for each in tickets), kv.host.join) * 2:
            with pytest.raises(remap.DriverError):
                ask()
        with pytest.raises(remap.DriverError):
            kv.host.arrived(tickets[0])
        with pytest.raises(remap.InvalidArgument):
            kv.free([first, 99])
        with tenant.forward():  # what others join and compute is not held up
            kv.free([other])
        if mended == "copied in again":
            kv.host.copy_in(hosts, [first])
            kv.host.copy_in(hosts, [second])
        else:
            kv.free([first])
            with pytest.raises(remap.DriverError):
                kv.host.join()
            if mended == "moved, then freed":
                internals(tenant).kv.move([(second, other)])
                internals(tenant).kv.pool.commit_moves([(second, other)])
                with pytest.raises(remap.DriverError):
                    kv.host.join()
                kv.free([other])
                kv.allocate(3)
            else:
                kv.free([second])
        kv.host.join()
        for each in tickets:
            with pytest.raises(remap.DriverError):
                kv.host.join(each)
        assert mended != "copied in again" or set(content(tenant, first) + content(tenant, second)) == {9}


def test_host_blocks_that_a_failed_copy_should_have_filled_are_known() -> None:
    """A request whose KV never reached host memory would come back with whatever lay there."""
    backend, session, tenant = faulty()
    with session:
        kv = internals(tenant).kv
        good, bad = kv.allocate(2)
        (kept,) = kv.copy_out([good])
        kv.join()
        backend.fail_async_copy(1)
        (lost,) = kv.copy_out([bad])
        with pytest.raises(remap.DriverError):
            kv.free([bad])
        assert kv.live_blocks == 2 and kv.kept([kept]) and not kv.kept([kept, lost])
        with pytest.raises(remap.InvalidState) as caught:
            kv.copy_in([lost], [bad])
        assert caught.value.fields["host_blocks"] == (lost,)
        kv.free_host([lost])
        (again,) = kv.copy_out([bad])  # the same host block, written this time
        kv.free([bad])
        assert again == lost and kv.kept([again])


# -- an engine that swaps ----------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import kv_spec, make  # noqa: E402
from test_engine_on_session import STEADY, reference, requests_for, run, unhooked  # noqa: E402


class Watch:
    """Sees every block that goes out. A complete block may go out once in its request's life."""

    def __init__(self, kv: Any) -> None:
        self.kv, self.live = kv, dict[str, Sequence]()
        self.whole: set[tuple[str, int]] = set()
        self.parts = self.blocks = self.streamed = 0
        self._copy_out, kv.copy_out = kv.copy_out, self

    def each_step(self, engine: Any) -> None:
        self.live = engine._live
        self.streamed = max(self.streamed, self.kv.streamed.used_blocks if self.kv.streamed else 0)

    def __call__(self, ids: list[int], below: int | None = None) -> list[int]:
        hosts = self._copy_out(ids, below)
        owner = next(s for s in self.live.values() if set(ids) <= set(s.blocks))
        for block in ids:
            index = owner.blocks.index(block)
            if (index + 1) * self.kv.block_tokens <= owner.computed:
                assert (owner.id, index) not in self.whole, "a complete block went out twice"
                self.whole.add((owner.id, index))
            else:
                self.parts += 1
        self.blocks += len(ids)
        return hosts


def served(kind: str, layout: str, host: int, *, streamed: int = 0, remapped: int = 0, runner: str = "cpu") -> Any:
    """Serves on too few blocks; the tokens are right, and all of host memory is free then. The metrics, the KV, what was seen."""
    model, requests = make(kind), requests_for(kind)
    expected = reference(model, requests, layout=layout)
    spec = kv_spec(model, min_blocks=14, layout=layout, host_blocks=host, streamed_blocks=streamed)
    with unhooked(model, kv=spec, config=STEADY if remapped else None) as rig:
        kv = internals(rig.tenant).kv
        watch = Watch(kv)
        if remapped:
            remap.advanced.remap(rig.session, "m", layers=remapped, buffers=2)
        tokens, metrics, _ = run(rig, requests, each_step=watch.each_step, runner=runner)
        assert tokens == expected
        assert kv.host.free_blocks == host and kv.copied_out_bytes == watch.blocks * kv.spec.block_bytes
        return metrics, kv, watch, internals(rig.tenant).stats().block_bytes


@pytest.mark.parametrize(("kind", "layout"), [("llama", "layer_major"), ("opt", "block_major")])
def test_a_scarce_engine_swaps_and_recomputes_nothing(kind: str, layout: str) -> None:
    """Written out: what is new, and nothing else: each complete block once, and a tail for each time that a request leaves."""
    metrics, kv, watch, _ = served(kind, layout, 200)
    assert metrics.pauses > 0 == metrics.preemptions == metrics.recomputed_tokens
    assert watch.parts <= metrics.pauses and kv.copied_in_bytes >= kv.copied_out_bytes > 0


@pytest.mark.parametrize(("kind", "runner"), [("llama", "gpu"), ("opt", "cpu")])
def test_complete_blocks_stream_rather_than_that_anybody_is_preempted(kind: str, runner: str) -> None:
    """Blocks and layers stream side by side: the same tokens, fewer pauses than by swapping whole requests, and no
    complete block goes out twice."""
    pauses = []
    for streamed in (60, 0):
        metrics, kv, watch, passed = served(kind, "layer_major", 200, streamed=streamed, remapped=1, runner=runner)
        assert metrics.recomputed_tokens == 0 and kv.streamed.used_blocks == 0
        assert (watch.streamed > 0) == (passed > 0) == (streamed > 0)
        pauses.append(metrics.pauses)
    assert pauses[0] < pauses[1]


def test_without_room_in_host_memory_requests_are_recomputed() -> None:
    metrics, *_ = served("llama", "block_major", 3)
    assert metrics.recomputed_tokens > 0


def test_copies_in_that_fail_are_made_again() -> None:
    backend = _core.make_fault_backend(_core.make_host_backend(64 * PAGE, PAGE, 1))
    spec = KVSpec(layers=2, kv_heads=1, head_dim=64, min_blocks=8, max_blocks=8, host_blocks=4)
    with remap.Session(64 * PAGE, page_bytes=PAGE, platform=remap.advanced.Platform(backend=backend)) as session:
        tenant = session.attach_bytes(make_layers((1, 1)), name="m", kv=spec)
        kv = internals(tenant).kv
        ids = kv.allocate(2)
        for block in ids:
            write_block(tenant, block, 60 + block)
        expected = [content(tenant, block) for block in ids]
        hosts = kv.copy_out(ids)
        kv.join()
        for block in ids:
            write_block(tenant, block, 1)
        backend.fail_async_copy(1)
        ticket = kv.copy_in(hosts, ids)
        with pytest.raises(remap.DriverError):
            while not kv.arrived(ticket):
                pass
        with pytest.raises(remap.DriverError):
            kv.arrived(ticket)  # it stays failed
        again = kv.copy_in(hosts, ids)
        kv.join()
        assert kv.arrived(again)
        assert [content(tenant, block) for block in ids] == expected
