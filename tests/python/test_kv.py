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
    assert (spec.itemsize, spec.block_bytes) == (2, 2 << 20)
    geometry = KVGeometry(spec, 2 << 20)
    assert geometry.region_pages == 4096
    assert geometry.slots_of_block(7) == (7,)
    spec = KVSpec(layers=32, kv_heads=8, head_dim=128, min_blocks=0, max_blocks=100, layout="layer_major")
    by_layer = KVGeometry(spec, 2 << 20)
    # theory 3A: a growth quantum of 2n pages; 64 blocks of 32 KiB in each
    assert by_layer.region_pages == 64 * 2
    assert [by_layer.blocks_for_pages(k) for k in (63, 64, 127, 128)] == [0, 64, 64, 100]


BAD_SPECS = [
    *({"min_blocks": value} for value in (-1, 13)),
    *({"max_blocks": 0}, {"layers": 0}, {"layers": True}, {"kv_heads": 1.0}, {"kv_heads": True}, {"head_dim": -2}),
    *(
        {"head_dim": 16.0},
        {"block_tokens": 0},
        {"dtype": "torch.float16"},
        {"dtype": "float64"},
        {"layout": "row_major"},
    ),
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
    for column in range(geometry.range_pages):
        for stop in range(column + 1, geometry.range_pages + 1):
            run = set(range(column, stop))
            touching = [b for b in range(spec.max_blocks) if run & set(geometry.columns_of_block(b))]
            assert list(geometry.blocks_of_columns(column, stop)) == touching


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
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [1, 3]
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(9)
    assert (caught.value.requested, caught.value.free, caught.value.usable) == (9, 8, 12)
    assert (pool.free_blocks, pool.live_ids()) == (8, (0, 1, 2, 3))
    pool.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gift_that_bridges_owned_pages_counts_each_block_once(layout: str) -> None:
    """One block spans three pages here; the outer two are given in one call around the inner one."""
    spec = make_spec(layers=1, head_dim=1, block_tokens=10, dtype="int8", max_blocks=8, layout=layout)
    geometry = KVGeometry(spec, 8 if layout == "block_major" else 4)
    pool = OwnPool(geometry)
    columns = geometry.range_pages
    ranges = [r * columns for r in range(geometry.ranges)]
    pool.add_pages([r + 1 for r in ranges])
    added = pool.add_pages([r + c for r in ranges for c in range(columns) if c != 1])
    assert list(added) == list(range(8))
    pool.check()
    pool.drain([r + 1 for r in ranges])
    pool.drain([r + c for r in ranges for c in range(columns) if c != 1])
    assert list(pool.cancel_drain([r + 1 for r in ranges])) == []
    assert list(pool.cancel_drain([r + c for r in ranges for c in range(columns) if c != 1])) == list(range(8))
    pool.check()


def test_blocks_that_straddle_wait_for_both_pages() -> None:
    pool = pool_of(pages=0)
    assert list(pool.add_pages([0])) == []  # block 0 reaches into page 1
    assert list(pool.add_pages([3, 2])) == [2]  # block 1 lies on pages 1 and 2
    assert list(pool.add_pages([1])) == [0, 1]  # the hole closes both neighbours
    assert pool.add_pages(range(4, 16)) == range(3, 12)
    pool.check()
    assert pool_of(pages=0).add_pages([5, 4, 0, 7, 6, 1]) == (0, 3, 4, 5)  # what is not contiguous is no range


def test_shrink_in_two_steps_with_compaction() -> None:
    pool = pool_of()
    ids = pool.allocate(12)
    pool.free(ids[1:9])  # 0, 9, 10, 11 are live
    assert list(pool.drain(range(12, 16))) == [9, 10, 11]
    assert (pool.free_blocks, pool.live_blocks, pool.withdrawn_blocks) == (8, 4, 3)
    assert pool.usable_blocks == 12
    with pytest.raises(InvalidState) as caught:
        pool.remove_pages(range(12, 16))
    assert caught.value.live == 3
    moves = pool.plan_moves(range(12, 16))
    assert moves == [(9, 1), (10, 2), (11, 3)]
    pool.free([10])
    assert pool.free_blocks == 8  # withdrawn: not handed out again
    with pytest.raises(InvalidArgument):
        pool.commit_moves(moves)  # 10 is gone, so the whole list is refused
    assert pool.pending(range(12, 16)) == (9, 11)
    pool.commit_moves(pool.plan_moves(range(12, 16)))
    assert (pool.live_ids(), pool.pending(range(12, 16))) == ((0, 1, 2), ())
    pool.remove_pages(range(12, 16))
    assert (pool.usable_blocks, pool.free_blocks, pool.withdrawn_blocks) == (9, 6, 0)
    assert pool.allocate(6) == [3, 4, 5, 6, 7, 8]
    pool.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_withdrawn_pages_keep_new_neighbours_closed(layout: str) -> None:
    pool = pool_of(layout, pages=0)
    order = list(pool.geometry.donation_slots(0, pool.geometry.region_pages))
    pool.add_pages(order[:1])
    pool.drain(order[:1])
    added = list(pool.add_pages(order[1:]))
    closed = [b for b in range(12) if order[0] in pool.geometry.slots_of_block(b)]
    assert closed
    assert added == [b for b in range(12) if b not in closed]
    assert (pool.usable_blocks, pool.withdrawn_blocks) == (12, len(closed))
    pool.check()
    assert list(pool.cancel_drain(order[:1])) == closed
    assert pool.allocate(1) == [0]
    pool.check()


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
    before = (pool.live_ids(), pool.open_ids(), pool.owned_slots(), pool.free_blocks, pool.withdrawn_blocks)
    with pytest.raises((InvalidArgument, InvalidState)):
        getattr(pool, call)(argument)
    assert before == (pool.live_ids(), pool.open_ids(), pool.owned_slots(), pool.free_blocks, pool.withdrawn_blocks)
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
    calls.clear()
    with pytest.raises(RuntimeError, match="first"):
        pool.add_pages(range(4, 8))
    assert calls == ["first", "second"]
    assert pool.usable_blocks == 6
    with pytest.raises(RuntimeError, match="first"):
        pool.drain([7])
    assert pool.withdrawn_blocks == 1
    pool.remove_pages([7])  # nothing to tell: the blocks were withdrawn before
    assert calls == ["first", "second"] * 2
    pool.check()


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
    held: set[int] = set()
    busy = {1, 2, 4}

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
    for call in (lambda: pool.allocate(1), lambda: pool.free([0])):
        with pytest.raises(InvalidState):
            call()
    with pytest.raises(InvalidState):
        pool.subscribe(print, external=True)
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
    assert pool.live_blocks == 4
    pool.check()
    late = pool_of()
    late.allocate(1)
    with pytest.raises(InvalidState) as caught:
        late.subscribe(engine, external=True)
    assert caught.value.live == 1
    assert not late.external


@given(st.data(), st.sampled_from(("block_major", "layer_major")), st.integers(1, 5))
def test_usable_with_and_vacant_are_what_a_pool_of_these_pages_would_have(
    data: st.DataObject, layout: str, heads: int
) -> None:
    spec = KVSpec(layers=2, kv_heads=heads, head_dim=16, block_tokens=16, min_blocks=0, max_blocks=23, layout=layout)
    geometry = KVGeometry(spec, 1024)
    every = range(geometry.region_pages)
    subset = st.sets(st.sampled_from(every))
    owned, lost, gained = data.draw(subset), data.draw(subset), data.draw(subset)
    pool = OwnPool(geometry)
    pool.add_pages(list(owned))
    pool.allocate(data.draw(st.integers(0, pool.free_blocks)))
    other = OwnPool(geometry)
    other.add_pages(list((owned | gained) - lost))
    assert pool.usable_with(list(lost), list(gained)) == other.usable_blocks
    order = data.draw(st.permutations(sorted(owned)))
    assert list(pool.vacant(order)) == [slot for slot in order if not pool.pending((slot,))]
    pool.check()
