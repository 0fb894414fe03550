"""The next growth is planned at the end of a pass: the same growth, and only while what it was planned for still is so."""

from __future__ import annotations

from dataclasses import replace

from byte_world import HIDDEN, World

import remap
from remap.internals import internals
from remap.memory import restream


def test_a_layer_that_was_written_since_is_pinned_and_does_not_stream() -> None:
    with World(times=HIDDEN) as world:
        state = internals(world.tenant)._state
        remap.advanced.remap(world.session, "m", 1, 1, "nested")
        world.forward()
        planned = restream.next_growth(state, 1)
        assert planned is not None
        (written,) = set(planned.streamed) - set(world.tenant.streamed)
        state.source = replace(state.source, watch=lambda layers: {written: ["w"]} if written in layers else {})
        world.kv.allocate(world.kv.free_blocks)
        world.step(blocks=1)
        assert world.tenant.remapped == 2 and written in internals(world.tenant).pinned
        assert written not in world.tenant.streamed
        world.forward()
