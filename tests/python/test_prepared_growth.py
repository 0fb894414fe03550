"""The next growth is planned at the end of a pass: the same growth, and only while what it was planned for still is so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from byte_world import HIDDEN, World

import remap
from remap.internals import internals
from remap.memory import restream
from remap.memory.state import Answers


def grown(prepared: bool, mode: str, buffers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """What a session is like after two growths by a layer each, and how many plans were made within the steps."""
    made = []

    def count(*args: object, **named: object) -> object:
        made.append(1)
        return plan_streaming(*args, **named)  # type: ignore[arg-type]

    plan_streaming = restream.plan_streaming
    with World(times=HIDDEN, mode=mode) as world:
        state = internals(world.tenant)._state
        remap.advanced.remap(world.session, "m", 1, buffers, "nested")
        within = 0
        for _ in range(2):
            world.forward()
            if not prepared:
                state.answers = Answers()
            world.kv.allocate(world.kv.free_blocks)
            monkeypatch.setattr(restream, "plan_streaming", count)
            before = len(made)
            report = world.step(blocks=1)
            within += len(made) - before
            monkeypatch.setattr(restream, "plan_streaming", plan_streaming)
            assert report.remapped == {"m": state.remapped}
        world.forward()
        snapshot = world.session.snapshot()
        seen = (state.pages, state.selection, snapshot.pages, snapshot.tenants["m"].predicted_stall_s, report)
        return within, *seen


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_growth_that_was_planned_ahead_is_the_same_growth(
    mode: str, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = grown(True, mode, buffers, monkeypatch)
    within = grown(False, mode, buffers, monkeypatch)
    assert (ahead[0], within[0]) == (0, 2)
    assert ahead[1:] == within[1:]


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


