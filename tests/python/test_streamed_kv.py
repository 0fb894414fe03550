"""KV blocks that show host blocks: the books, the bytes that each layer finds, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, write_block
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.internals import internals
from remap.kv.spec import KVGeometry, KVSpec
from remap.kv.streamed import StreamedBlocks

MODES = ("aliased", "strict")


def spec(layers: int = 5, most: int = 8, host: int = 12, streamed: int = 7, **other: Any) -> KVSpec:
    settings: dict[str, Any] = {"kv_heads": 1, "head_dim": 64, "min_blocks": most, "max_blocks": most}
    settings |= {"layout": "layer_major", "host_blocks": host, "streamed_blocks": streamed}
    return KVSpec(layers=layers, **{**settings, **other})


# -- books -------------------------------------------------------------------------------------------------------------


@given(
    layers=st.integers(1, 4),
    head_dim=st.sampled_from([4, 12, 64, 80]),
    most=st.integers(1, 30),
    streamed=st.integers(0, 30),
    page=st.sampled_from([256, 1024, 4096]),
)
def test_streamed_blocks_lie_behind_the_pools_in_every_range(
    layers: int, head_dim: int, most: int, streamed: int, page: int
) -> None:
    wide, plain = (
        KVGeometry(spec(layers, most, streamed, shown, head_dim=head_dim, block_tokens=4), page)
        for shown in (streamed, 0)
    )
    # The pool's blocks lie in their ranges as without streamed ones.
    assert (wide.columns, wide.donation_pages) == (plain.columns, plain.donation_pages)
    assert plain.range_pages == plain.columns and plain.tensor_blocks == most
    assert all(wide.blocks_for_pages(n) == plain.blocks_for_pages(n) for n in range(wide.donation_pages + 1))
    if streamed:
        begin = wide.first_streamed * wide.unit_bytes
        assert begin % page == 0 and begin >= wide.columns * page and wide.first_streamed >= most
        assert begin + streamed * wide.unit_bytes <= wide.range_bytes
        assert wide.range_bytes == begin + wide.streamed_columns * page
        assert wide.streamed_columns * page - streamed * wide.unit_bytes < page
    slots = [wide.donation_slot(index) for index in range(wide.donation_pages)]
    assert len(set(slots)) == len(slots) and all(slot % wide.range_pages < wide.columns for slot in slots)
    assert [wide.donation_index(slot) for slot in slots] == list(range(wide.donation_pages))


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4)), max_size=30))
def test_each_streamed_block_shows_the_host_block_of_its_number(steps: list[tuple[bool, list[int]]]) -> None:
    books, shown = StreamedBlocks(KVGeometry(spec(), 4096)), dict[int, int]()
    for shows, numbers in steps:
        wrong = any(n >= 7 or n in shown.values() for n in numbers) or len(set(numbers)) < len(numbers)
        if shows and wrong:
            with pytest.raises(InvalidArgument):
                books.show(numbers)
        elif shows:
            got = books.show(numbers)
            assert got == [books.first + n for n in numbers]
            shown |= dict(zip(got, numbers))
        else:
            gone = sorted(shown)[: len(numbers)]
            books.release(gone)
            for block in gone:
                del shown[block]
        assert books.used_blocks == len(shown)
        assert books.shows(range(12)) == tuple(sorted(set(shown.values())))
        assert books.hosts(shown) == list(shown.values())
        if shown:
            low, high = min(shown.values()), max(shown.values())
            assert books.run(books.hosts(shown)) == (books.first + low, low, high - low + 1)
        for refused in ([books.first + 7], [0], sorted(shown)[:1] * 2 if shown else [books.first]):
            with pytest.raises(InvalidArgument):
                books.release(refused)


@pytest.mark.parametrize(
    "wrong",
    [{"layout": "block_major"}, {"streamed": 13}, {"host_blocks": None}, {"streamed": -1, "layout": "block_major"}],
)
def test_a_spec_that_cannot_stream_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spec(**wrong)
    assert caught.value.fields["field"] == "streamed_blocks"


# -- bytes -------------------------------------------------------------------------------------------------------------


def part(tenant: remap.Tenant, block: int, layer: int) -> bytes:
    """Keys and values of one layer of a block, as its tensor's addresses show them now."""
    geometry = internals(tenant).kv.geometry
    at = [(2 * layer + kind) * geometry.range_bytes + block * geometry.unit_bytes for kind in (0, 1)]
    return b"".join(ctypes.string_at(internals(tenant).kv.address + offset, geometry.unit_bytes) for offset in at)


def fill(tenant: remap.Tenant, block: int, tag: int) -> list[bytes]:
    """Writes other bytes into every layer of a block; returns them."""
    kv, layers = internals(tenant).kv, range(tenant.kv.spec.layers)
    for at in range(2 * len(layers)):
        offset = at * kv.geometry.range_bytes + block * kv.geometry.unit_bytes
        ctypes.memset(kv.address + offset, (tag * 31 + at) % 251 + 1, kv.geometry.unit_bytes)
    return [part(tenant, block, layer) for layer in layers]


def session_of(
    mode: str = "aliased", layers: int = 5, platform: Any = None, **settings
) -> tuple[remap.Session, remap.Tenant]:
    session = remap.Session(160 * PAGE, page_bytes=PAGE, mode=mode, platform=platform)
    return session, session.attach_bytes(make_layers((2,) * layers), name="m", kv=spec(layers, **settings))


def read(tenant: remap.Tenant, blocks: list[int], expected: dict[int, list[bytes]]) -> None:
    with tenant.forward(streamed=blocks):
        for layer in range(tenant.layers):
            tenant.wait(layer)
            for block in blocks:
                assert part(tenant, block, layer) == expected[block][layer], (block, layer)
            tenant.done(layer)


@pytest.mark.parametrize("remapped", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_each_layer_finds_its_part_of_the_host_blocks(mode: str, remapped: int) -> None:
    """Beside layers whose weights stream too; the pool's blocks stay as they are."""
    session, tenant = session_of(mode, max_blocks=1008)
    with session:
        kv = internals(tenant).kv
        pages = 2 * 2 * kv.geometry.streamed_columns
        assert pages and session.snapshot().pages.ring == pages
        if remapped:
            remap.advanced.remap(session, "m", layers=remapped, buffers=2)
        live = kv.allocate(6)
        written = {block: fill(tenant, block, block) for block in live}
        hosts = kv.copy_out(live)
        assert hosts == list(range(6))
        shown = kv.stream([hosts[4], hosts[1], hosts[2], hosts[3]])
        assert min(shown) >= kv.geometry.first_streamed and kv.streamed.used_blocks == 4 and tenant.streaming
        expected = {block: written[live[index]] for block, index in zip(shown, (4, 1, 2, 3))}
        # What lies between the blocks of a pass is copied too.
        for blocks, copied in ((shown, 4), (shown[1:3], 2), (shown[:2], 4), ([], 0)):
            before = internals(tenant).stats().block_bytes
            read(tenant, blocks, expected)
            assert internals(tenant).stats().block_bytes - before == copied * kv.spec.block_bytes
        for block in live:
            assert [part(tenant, block, layer) for layer in range(tenant.layers)] == written[block]
        kv.free(live)
        read(tenant, shown, expected)
        kv.free(shown)
        kv.free_host(hosts)
        assert kv.streamed.used_blocks == 0 and kv.host.free_blocks == 12
        assert not tenant.streaming or remapped
        session.detach("m")
        assert session.snapshot().pages.free == 160


def begin(tenant: remap.Tenant, blocks: list[int]) -> None:
    with tenant.forward(streamed=blocks):
        pytest.fail("it began")


REFUSED = {
    InvalidArgument: [
        lambda kv, live, hosts, shown: kv.stream([11]),
        lambda kv, live, hosts, shown: kv.stream(hosts[:1]),
        lambda kv, live, hosts, shown: kv.stream([hosts[0], hosts[0]]),
        lambda kv, live, hosts, shown: kv.free([live[0], shown[0], shown[0]]),
        lambda kv, live, hosts, shown: kv.free([live[0], live[0], shown[0]]),
        lambda kv, live, hosts, shown: kv.copy_out(shown),
        lambda kv, live, hosts, shown: kv.copy_in(hosts[:1], shown),
    ],
    OutOfBlocks: [lambda kv, live, hosts, shown: kv.copy_out(live, below=3)],
    InvalidState: [lambda kv, live, hosts, shown: kv.free_host([hosts[0]])],
}


@pytest.mark.parametrize(("error", "call"), [(error, call) for error, calls in REFUSED.items() for call in calls])
def test_a_refused_call_changes_nothing(error, call) -> None:
    session, tenant = session_of()
    with session:
        kv = internals(tenant).kv
        live = kv.allocate(2)
        hosts = kv.copy_out(live)
        shown = kv.stream(hosts[:1])
        before = kv.streamed.used_blocks, kv.host.free_blocks, kv.live_blocks, kv.copied_in_bytes
        with pytest.raises(error):
            call(kv, live, hosts, shown)
        for blocks in ([0], [99], shown * 2):  # of which a pass could not read
            with pytest.raises(InvalidArgument):
                begin(tenant, blocks)
        assert (kv.streamed.used_blocks, kv.host.free_blocks, kv.live_blocks, kv.copied_in_bytes) == before


def test_a_tenant_without_streamed_blocks_has_none() -> None:
    session, tenant = session_of(streamed=0)
    with session:
        with pytest.raises(InvalidArgument):
            tenant.kv.host.stream(tenant.kv.host.copy_out(tenant.kv.allocate(1)))
        with pytest.raises(OutOfBlocks):
            tenant.kv.host.copy_out(tenant.kv.allocate(1), below=4)


def test_a_pass_that_did_not_wait_is_refused() -> None:
    session, tenant = session_of()
    with session:
        kv = internals(tenant).kv
        live = kv.allocate(1)
        fill(tenant, live[0], 3)
        shown = kv.stream(kv.copy_out(live))
        with pytest.raises(InvalidState) as caught, tenant.forward(streamed=shown):
            for layer in (0, 1, 3, 4):
                tenant.wait(layer)
                tenant.done(layer)
        assert caught.value.fields["layers"] == (2,)
        with tenant.forward():  # it names none: nothing to wait for
            pass


def test_nobody_elses_bytes_are_in_them() -> None:
    """Pages that another tenant has written are zeroed before they become buffers."""
    session, first = session_of(streamed=0, layers=8)
    with session:
        for block in first.kv.allocate(8):
            write_block(first, block, 0x5A)
        session.detach("m")
        kv = internals(session.attach_bytes(make_layers((1, 1)), name="n", kv=spec(2, host=20, streamed=20))).kv
        region = ctypes.string_at(kv.address + kv.geometry.first_streamed * kv.geometry.unit_bytes, PAGE)
        assert set(region) <= {0}


# -- failures ----------------------------------------------------------------------------------------------------------


def faulty() -> tuple:
    backend = _core.make_fault_backend(_core.make_host_backend(160 * PAGE, PAGE, 1))
    return (backend, *session_of(platform=remap.advanced.Platform(backend=backend)))


@pytest.mark.parametrize("nth", range(1, 6))  # a batch for each of five layers
def test_a_copy_that_fails_ends_the_pass_and_the_next_one_is_right(nth: int) -> None:
    backend, session, tenant = faulty()
    with session:
        kv = internals(tenant).kv
        live = kv.allocate(1)
        expected = fill(tenant, live[0], 7)
        hosts = kv.copy_out(live)
        kv.join()
        shown = kv.stream(hosts)
        backend.fail_async_copy(nth)
        with pytest.raises(remap.DriverError):
            read(tenant, shown, {shown[0]: expected})
        read(tenant, shown, {shown[0]: expected})


def test_host_blocks_that_were_never_filled_cannot_stream() -> None:
    backend, session, tenant = faulty()
    with session:
        kv = internals(tenant).kv
        backend.fail_async_copy(1)
        hosts = kv.copy_out(kv.allocate(1))
        shown = kv.stream(hosts)  # nobody knows yet
        with pytest.raises(remap.DriverError):
            kv.join()
        with pytest.raises(InvalidState) as caught:
            begin(tenant, shown)
        assert caught.value.fields["host_blocks"] == tuple(hosts)
        with pytest.raises(InvalidState):
            kv.stream(hosts)


def test_other_bytes_in_every_pass() -> None:
    """What a buffer has from the pass before, or from one that was given up, is never taken for the present one's."""
    session, tenant = session_of(layers=2, host=7)
    with session:
        kv = internals(tenant).kv
        (block,) = kv.allocate(1)
        for tag in range(20):
            expected = fill(tenant, block, tag)
            hosts = kv.copy_out([block])
            shown = kv.stream(hosts)
            if tag % 3 == 1:
                with pytest.raises(KeyError), tenant.forward(streamed=shown):
                    tenant.wait(0)
                    raise KeyError
            read(tenant, shown, {shown[0]: expected})
            kv.free(shown)
            kv.free_host(hosts)
