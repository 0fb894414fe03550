"""Museum of wrong bytes: failures that were found in the session's own bookkeeping, each replayed by a test of its name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from arena_worlds import PAGE, make_backend, read_block, session_on
from sharing_worlds import Engine, Faulty, attempt

import remap
from remap import _core
from remap.errors import InvalidState
from remap.internals import internals

MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])
WAIT_S = 20.0


@MODES
@pytest.mark.parametrize("other", ["attach", "detach"])
def test_settling_fails_once_and_then_a_tenant_comes_or_goes(mode: str, other: str) -> None:
    """The epoch moved, so the plan passed for committed: homes were overwritten by KV and passes read wrong weights."""
    with Faulty(mode, spare=20) as world:
        calls = world.fault.calls()
        world.remap("a", 3, 1, "nested")
        calls = world.fault.calls() - calls
    for nth in range(1, calls + 1):
        with Faulty(mode, spare=20) as world:
            a = world.engines["a"]
            a.fill()
            world.fault.arm_any(nth, False)
            attempt(lambda: world.remap("a", 3, 1, "nested"))
            world.fault.disarm()
            if other == "attach":
                world.attach("d", [2, 1, 2, 2], 7)
            else:
                world.detach("b")
            a.fill()
            attempt(world.works)  # which may tell of what was deferred
            world.works()


@MODES
def test_a_failed_attach_does_not_leave_its_weights_to_the_next_tenant(mode: str) -> None:
    """The number of the tenant that failed was used again, so its pages passed for the next one's own and were not zeroed."""
    for nth in range(1, 200, 3):
        fault = _core.make_fault_backend(make_backend(40 * PAGE))
        with session_on(fault, 40 * PAGE, mode=mode, config=remap.advanced.Knobs(max_layers=0)) as session:
            fault.arm_any(nth, False)
            failed = attempt(lambda: Engine(session, "m", [3, 2, 3, 3, 2, 3], 1))
            fault.disarm()
            if failed is None:
                break
            pages = session.snapshot().pages
            assert pages.free == pages.total, f"call {nth}: pages of a tenant that is not attached"
            engine = Engine(session, "x", [2, 1, 2, 2], 2)
            session.step({"x": remap.Demand(blocks=10**6)})
            for block in engine.kv.allocate(engine.kv.free_blocks):
                assert read_block(engine.tenant, block) == {0}, f"call {nth}: block {block} shows what the model left"
            engine.serve()
    assert failed is None, "the attach was not swept to its end"


@MODES
@pytest.mark.parametrize("call", [Engine.serve, lambda engine: engine.kv.free(engine.kv.allocate(1))])
def test_no_other_thread_comes_into_the_middle_of_a_change(mode: str, call: Callable[[Engine], None]) -> None:
    """_begin_pass took no lock: a step on another thread came between its check and the pass, whose layers were then others. A
    donor's allocate changed the pool between another tenant's look at it and its change."""
    with Faulty(mode) as world:
        changes, done = world.session._changes, threading.Event()
        make = changes._make
        thread = threading.Thread(target=lambda: (call(world.engines["a"]), done.set()))

        def acting() -> None:
            """The change is a draft, and not made."""
            changes._make = make  # type: ignore[method-assign]
            thread.start()
            assert not done.wait(0.2)
            make()

        changes._make = acting  # type: ignore[method-assign]
        world.remap("a", 3, 2, "nested")
        thread.join(WAIT_S)
        assert done.is_set()
        world.works()


@MODES
def test_a_change_leaves_a_tenant_inside_a_pass_alone(mode: str) -> None:
    """Passes of one tenant go on while another one's step runs, and what names a tenant inside a pass is refused."""
    with Faulty(mode) as world:
        session, a = world.session, world.engines["a"]
        world.remap("a", 3, 1, "nested")
        with a.tenant.forward():
            world.step(b=20)
            for call in (
                lambda: remap.advanced.remap(session, "a", 0),
                lambda: session.step({"a": remap.Demand(blocks=20)}),
                lambda: remap.advanced.lend(session, "a", 1),
                lambda: session.detach("a"),
                lambda: session.activate("b", alone=True),
                lambda: a.tenant.forward().__enter__(),
            ):
                with pytest.raises(InvalidState):
                    call()
            for layer in range(a.tenant.layers):
                a.tenant.wait(layer)
                a.tenant.done(layer)
        world.works()


def test_a_re_pointing_that_fails_just_before_a_pass_begins_is_told_by_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last change had left was finished, and its re-pointing failed at once: forward() blamed a listener."""
    with Faulty() as world:
        a, changes = world.engines["a"], world.session._changes
        executor = changes._executor
        world.remap("a", 3, 1, "nested")
        world.settle()
        internals(a.tenant)._state.rest, real = (None, False), changes.settle  # type: ignore[assignment]

        class Failing:
            """An executor of which one point has failed."""

            def __getattr__(self, name: str) -> Any:
                return (lambda tenant=None: 1) if name == "failed_points" else getattr(executor, name)

        def settled(each: Any) -> None:
            each.rest = None
            real(each)
            monkeypatch.setattr(changes, "_executor", Failing())

        monkeypatch.setattr(changes, "settle", settled)
        a.serve()
        monkeypatch.undo()
        world.works()
