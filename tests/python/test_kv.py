"""KV geometry against byte-by-byte enumeration, and the block pool's contract call by call."""

from __future__ import annotations

import itertools

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import OwnPool

from reference.kv_model import chunk_offsets, pages_of_block
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.kv.spec import KVGeometry, KVSpec

LAYOUTS = ("block_major", "layer_major")


def make_spec(**changes: object) -> KVSpec:
    values: dict[str, object] = {"layers": 2, "kv_heads": 1, "head_dim": 2, "block_tokens": 2, "dtype": "float16"}
    values |= {"min_blocks": 0, "max_blocks": 12}
    return KVSpec(**(values | changes))  # type: ignore[arg-type]


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    spec = make_spec(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 3)),
        block_tokens=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        max_blocks=draw(st.integers(1, 14)),
        layout=draw(st.sampled_from(LAYOUTS)),
    )
    return KVGeometry(spec, spec.itemsize * draw(st.integers(1, 40)))


# Two layers of 16 + 16 bytes a block; pages of 48 bytes: in block_major 64-byte blocks straddle pages (0-1, 1-2, 2-3,
# 4-5, ...), and four pages hold three blocks; in layer_major (16-byte units) three blocks fill one page of each range.
def pool_of(layout: str = "block_major", pages: int | None = None, max_blocks: int = 12) -> OwnPool:
    spec = make_spec(block_tokens=4, layout=layout, max_blocks=max_blocks)
    pool = OwnPool(KVGeometry(spec, 48))
    pool.add_pages(pool.geometry.donation_slots(0, pool.geometry.region_pages if pages is None else pages))
    return pool


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_spec_of_llama_3_8b() -> None:
    spec = KVSpec(layers=32, kv_heads=8, head_dim=128, min_blocks=256, max_blocks=4096)
    assert (spec.itemsize, spec.block_bytes, KVGeometry(spec, 2 << 20).region_pages) == (2, 2 << 20, 4096)


BAD_SPECS = [
    *({"min_blocks": -1}, {"min_blocks": 13}, {"max_blocks": 0}, {"layers": 0}, {"layers": True}, {"kv_heads": 1.0}),
    *({"head_dim": -2}, {"block_tokens": 0}, {"dtype": "torch.float16"}, {"dtype": "float64"}, {"layout": "row_major"}),
]


@pytest.mark.parametrize("changes", BAD_SPECS)
def test_bad_specs_are_refused_with_the_field(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_spec(**changes)
    field = "max_blocks" if changes.get("min_blocks") == 13 else next(iter(changes))
    assert (caught.value.field, caught.value.value) == (field, changes.get(field, 12))


@settings(max_examples=examples(120), deadline=None)
@given(geometries())
def test_every_element_has_its_own_bytes_on_its_blocks_pages(geometry: KVGeometry) -> None:
    spec, page = geometry.spec, geometry.page_bytes
    seen: set[int] = set()
    of_block: dict[int, set[int]] = {b: set() for b in range(spec.max_blocks)}
    for layer in range(spec.layers):
        offset, shape, stride = geometry.tensor_layout(layer)
        assert shape == (2, spec.max_blocks, spec.block_tokens, spec.kv_heads, spec.head_dim)
        for place in itertools.product(*map(range, shape)):
            byte = offset + spec.itemsize * sum(i * s for i, s in zip(place, stride, strict=True))
            assert byte not in seen
            assert byte % spec.itemsize == 0
            seen.add(byte)
            of_block[place[1]].add(byte)
    assert max(seen) + spec.itemsize <= geometry.region_bytes == geometry.region_pages * page
    for block, starts in of_block.items():
        assert {b // page for b in starts} <= set(geometry.slots_of_block(block)) == pages_of_block(spec, page, block)
        ranges = geometry.byte_ranges_of_block(block)
        covered = {b for start, size in ranges for b in range(start, start + size)}
        assert covered == {b + i for b in starts for i in range(spec.itemsize)}
        assert len(ranges) == (1 if spec.layout == "block_major" else 2 * spec.layers)
        if spec.layout == "layer_major":
            assert [start for start, _ in ranges] == chunk_offsets(spec, page, block)


@settings(max_examples=examples(120), deadline=None)
@given(geometries())
def test_giving_order(geometry: KVGeometry) -> None:
    spec, page = geometry.spec, geometry.page_bytes
    order = [geometry.donation_slot(i) for i in range(geometry.region_pages)]
    assert sorted(order) == list(range(geometry.region_pages))
    assert [geometry.donation_index(slot) for slot in order] == list(range(geometry.region_pages))
    assert list(geometry.donation_slots(0, len(order))) == order
    needs = [pages_of_block(spec, page, b) for b in range(spec.max_blocks)]
    usable = [sum(need <= set(order[:k]) for need in needs) for k in range(len(order) + 1)]
    assert [geometry.blocks_for_pages(k) for k in range(len(order) + 1)] == usable
    for blocks in range(spec.max_blocks + 1):
        assert geometry.pages_for_blocks(blocks) == next(k for k, count in enumerate(usable) if count >= blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry_refuses_what_lies_outside(layout: str) -> None:
    geometry = KVGeometry(make_spec(layout=layout), 16)
    for call in (
        *(lambda size=size: KVGeometry(make_spec(), size) for size in (0, -2, 3, 2.0)),
        lambda: geometry.tensor_layout(2),
        lambda: geometry.slots_of_block(12),
        lambda: geometry.byte_ranges_of_block(-1),
        lambda: geometry.donation_slot(geometry.region_pages),
        lambda: geometry.donation_index(-1),
        lambda: geometry.pages_for_blocks(13),
        lambda: geometry.blocks_for_pages(geometry.region_pages + 1),
        lambda: geometry.donation_slots(1, geometry.region_pages),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert list(geometry.donation_slots(geometry.region_pages, 0)) == []


# -- pool --------------------------------------------------------------------------------------------------------------


def test_allocates_lowest_ids_and_refuses_more_than_it_has() -> None:
    pool = pool_of()
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    assert (pool.allocate(0), pool.allocate(2)) == ([], [1, 3])
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(9)
    assert (caught.value.requested, caught.value.free, caught.value.usable) == (9, 8, 12)
    assert (pool.free_blocks, pool.live_ids()) == (8, (0, 1, 2, 3))
    assert pool_of(pages=0).add_pages([5, 4, 0, 7, 6, 1]) == (0, 3, 4, 5)  # what is not contiguous is no range


BAD_SLOTS = [[16], [2, 2], range(14, 18)]
BAD_CALLS = [  # of a pool of pages 0 to 7, of which 6 is withdrawn, and of six blocks, of which 0 and 1 are live
    *((call, slots) for call in ("add_pages", "drain", "cancel_drain") for slots in BAD_SLOTS),
    *((call, slots) for call in ("remove_pages", "pending", "plan_moves") for slots in BAD_SLOTS),
    *(("free", ids) for ids in ([0, 0], [0, 5], [5], [99], [-1], [0, "1"], [True])),
    *(("commit_moves", moves) for moves in ([(0, 5), (0, 6)], [(0, 5), (1, 5)], [(0, 1)], [(5, 6)], [(0, 99)])),
    *(("add_pages", slots) for slots in ([7, 8], [6, 7])),
    *(("drain", slots) for slots in ([7, 8], [6, 7])),
    *(("cancel_drain", [0]), ("remove_pages", [7]), ("plan_moves", [7]), ("returned", [0])),
    *(("allocate", count) for count in (-1, 1.0, True, None)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument"), BAD_CALLS)
def test_bad_calls_change_nothing(call: str, argument: object) -> None:
    pool = pool_of(pages=8)
    pool.allocate(2)
    pool.drain([6])

    def seen() -> tuple[object, ...]:
        return pool.live_ids(), pool.open_ids(), pool.owned_slots(), pool.free_blocks, pool.withdrawn_blocks

    before = seen()
    with pytest.raises((InvalidArgument, InvalidState)):
        getattr(pool, call)(argument)
    assert before == seen()
    pool.check()


# -- listeners ---------------------------------------------------------------------------------------------------------


def test_errors_of_listeners_come_last_and_change_nothing() -> None:
    pool = pool_of(pages=4)
    calls: list[str] = []

    def failing(name: str) -> None:
        def listen(added: object, withdrawn: object) -> None:
            calls.append(name)
            pool.check()
            raise RuntimeError(name)

        with pytest.raises(RuntimeError):
            pool.subscribe(listen)

    failing("first")
    failing("second")
    for change, left in ((lambda: pool.add_pages(range(4, 8)), (6, 0)), (lambda: pool.drain([7]), (6, 1))):
        calls.clear()
        with pytest.raises(RuntimeError, match="first"):
            change()
        assert calls == ["first", "second"] and (pool.usable_blocks, pool.withdrawn_blocks) == left
    pool.remove_pages([7])  # nothing to tell: the blocks were withdrawn before
    assert calls == ["first", "second"]


def test_a_listener_that_changes_the_pool_is_told_in_order() -> None:
    pool = pool_of(pages=4)
    log: list[tuple[list[int], list[int]]] = []
    pool.subscribe(lambda added, withdrawn: pool.drain([4]) and None if 3 in added else None)
    pool.subscribe(lambda added, withdrawn: log.append((list(added), list(withdrawn))))
    pool.add_pages(range(4, 8))
    assert log == [([0, 1, 2], []), ([3, 4, 5], []), ([], [3])]
    with pytest.raises(InvalidState):  # delivered while telling, so the error surfaces at the outer call
        pool.subscribe(lambda added, withdrawn: pool.subscribe(print))
    pool.check()


def test_an_external_engine_holds_the_blocks() -> None:
    pool = pool_of(pages=4)
    held, busy = set[int](), {1, 2, 4}

    def engine(added: list[int], withdrawn: list[int]) -> None:
        held.update(added)
        idle = set(withdrawn) - busy
        held.difference_update(idle)
        if idle:
            pool.returned(idle)

    pool.subscribe(engine, external=True)
    pool.add_pages(range(4, 8))
    assert held == set(range(6))
    assert (pool.live_blocks, pool.free_blocks, pool.external) == (6, 0, True)
    for call in (lambda: pool.allocate(1), lambda: pool.free([0]), lambda: pool.subscribe(print, external=True)):
        with pytest.raises(InvalidState):
            call()
    assert list(pool.drain(range(4, 8))) == [3, 4, 5]
    assert (pool.live_blocks, pool.withdrawn_blocks) == (4, 3)
    assert pool.plan_moves(range(4, 8)) == []
    with pytest.raises(InvalidState) as caught:
        pool.remove_pages(range(4, 8))
    assert caught.value.live == 1
    for bad in ([0], [3], [4, 4]):
        with pytest.raises(InvalidArgument):
            pool.returned(bad)
    assert list(pool.cancel_drain([4, 5])) == [3]
    busy.clear()
    pool.returned([4])
    pool.remove_pages([6, 7])
    late = pool_of()
    late.allocate(1)
    with pytest.raises(InvalidState) as caught:
        late.subscribe(engine, external=True)
    assert caught.value.live == 1 and not late.external
