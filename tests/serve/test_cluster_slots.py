"""Places of logical blocks, against a model that knows every slot's owner; and the views of a stage's layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.errors import InvalidArgument, OutOfBlocks
from remap_serve.cluster.slots import Departure, Slots, Whole
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.placement import Instance, Layer, PlannedStage, ServedLayers

GROWTHS = st.lists(st.sets(st.integers(0, 30), max_size=12), max_size=5)


def owners(slots):
    """Slot -> logical block; no slot twice, and all of them in held blocks."""
    found = {}
    for block, first in enumerate(slots.table(range(slots.capacity))):
        for slot in range(first, first + slots.count):
            assert slot not in found, f"slot {slot} is of {found[slot]} and of {block}"
            assert slot // slots.layers in slots.held
            found[slot] = block
        assert set(slots.spans(block)) == {slot // slots.layers for slot in range(first, first + slots.count)}
    return found


def runs(held):
    return sum(block - 1 not in held for block in held)


@given(st.integers(1, 6), st.data(), GROWTHS)
def test_places_never_share_a_slot_and_stay(layers, data, growths):
    slots = Slots(layers, data.draw(st.integers(1, layers)))
    pieces = 0
    for blocks in growths:
        new, before = blocks - slots.held, slots.table(range(slots.capacity))
        assert slots.grow(new) == slots.capacity
        assert slots.table(range(len(before))) == before
        pieces += runs(new)
        owners(slots)
        # Each run of blocks that came at once leaves less than one place.
        assert slots.capacity * slots.count >= len(slots.held) * layers - pieces * (slots.count - 1)


@given(st.integers(1, 6), st.data(), st.integers(1, 40))
def test_capacity_is_that_of_the_placement(layers, data, blocks):
    """One run of blocks: tokens as `policy.cluster.placement` counts them, to one block."""
    count = data.draw(st.integers(1, layers))
    slots = Slots(layers, count)
    for block in range(blocks):  # one after another, as they become free
        slots.grow([block])
    model = ServedLayers(tuple(Layer(0, 1, Line(0.0, 0.0)) for _ in range(layers)))
    # Memory for so many blocks of all layers, with one byte of KV a token and layer.
    assert slots.capacity == PlannedStage(Instance("i", blocks * layers), 0, count).capacity(model)


@given(st.integers(1, 5), st.data(), GROWTHS, st.sets(st.integers(0, 30), max_size=10))
def test_shrinking_moves_what_stays_and_gives_up_the_rest(layers, data, growths, again):
    slots = Slots(layers, data.draw(st.integers(1, layers)))
    for blocks in growths:
        slots.grow(blocks - slots.held)
    leaving = data.draw(st.sets(st.sampled_from(sorted(slots.held)))) if slots.held else set()
    before, content = slots.table(range(slots.capacity)), owners(slots)
    room = slots.room_without(leaving)
    with pytest.raises(OutOfBlocks) as refused:
        slots.shrink(room + 1, leaving)
    assert (refused.value.requested, refused.value.free) == (room + 1, room)
    assert owners(slots) == content
    limit = data.draw(st.integers(0, room))
    moves = slots.shrink(limit, leaving)
    memory = dict(content)
    for source, target in moves:
        for offset in range(slots.count):
            # A target holds nothing that is kept, so the order of the copies does not matter.
            assert content.get(target + offset, limit) >= limit
            memory[target + offset] = content[source + offset]
    kept = owners(slots)
    assert slots.capacity == limit and not slots.held & leaving
    assert all(memory[slot] == block for slot, block in kept.items())
    assert len(moves) == sum(a != b for a, b in zip(before, slots.table(range(limit))))
    # What is left serves again, in old places and in new blocks.
    slots.grow(again - slots.held)
    owners(slots)
    assert slots.capacity >= room


def test_bad_numbers_change_nothing():
    for count in (0, 4):
        with pytest.raises(InvalidArgument) as refused:
            Slots(3, count)
        assert refused.value.count == count
    slots = Slots(3, 2)
    slots.grow([1, 2])
    for bad in ([2, 3], [5, 5]):
        with pytest.raises(InvalidArgument) as refused:
            slots.grow(bad)
        assert refused.value.blocks == (bad[0] if bad[0] == 2 else 5,)
        assert slots.held == {1, 2} and slots.capacity == 3


@given(st.integers(1, 5), st.data(), st.sets(st.integers(0, 20), min_size=1))
def test_a_departure_gives_each_block_back_once(layers, data, held):
    count = data.draw(st.integers(1, layers))
    whole = count == layers and data.draw(st.booleans())
    places = Whole(layers) if whole else Slots(layers, count)
    if not whole:
        places.grow(held)
    ids = sorted(held) if whole else list(range(places.capacity))
    order = data.draw(st.permutations(ids))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    live = {f"r{n}": order[a:b] for n, (a, b) in enumerate(zip([0, *cuts], cuts))}
    needed = {id: {span for block in blocks for span in places.spans(block)} for id, blocks in live.items()}
    departure = Departure(places, held, dict(live))
    given = departure.unused()
    assert set(given) == held - set().union(*needed.values())
    for id in data.draw(st.permutations(sorted(live))):
        new = departure.leave(id)
        del needed[id]
        assert not set(new) & set(given)
        given += new
        assert set(given) == held - set().union(*needed.values())
        assert departure.leave(id) == []
    assert sorted(given) == sorted(held) and not departure.live
