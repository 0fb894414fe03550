"""Museum of wrong bytes: failures that were found in the session's own bookkeeping, each replayed by a test of its name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_backend, make_layers, make_spec, read_block, session_on, write_block

import remap
from remap import _core
from remap.errors import Error, InvalidState

MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])
SIZES = [3, 2, 3, 3, 2, 3]
CAPACITY = 60 * PAGE
WAIT_S = 20.0


class World:
    """A session behind a fault decorator, with tenants of unequal layers and the bytes that they should have."""

    def __init__(self, mode: str, *names: str, capacity: int = CAPACITY) -> None:
        self.fault = _core.make_fault_backend(make_backend(capacity))
        self.session = session_on(self.fault, capacity, page_bytes=PAGE, mode=mode)
        self.layers: dict[str, list[bytes]] = {}
        self.held: dict[str, dict[int, int]] = {}
        for name in names:
            self.attach(name)

    def tenant(self, name: str) -> Any:
        return self.session._tenants[name].handle

    def attach(self, name: str) -> None:
        layers = make_layers(SIZES if name == "m" else [2, 1, 2, 2], ord(name[0]))
        self.session.attach_bytes(layers, name=name, kv=make_spec(len(layers), max_blocks=200))
        self.layers[name] = layers
        self.held[name] = {}

    def fill(self, name: str, count: int) -> None:
        tenant = self.tenant(name)
        for block in tenant.kv.allocate(min(count, tenant.kv.free_blocks)):
            self.held[name][block] = 100 + block % 100
            write_block(tenant, block, self.held[name][block])

    def patch(self, moved: Any) -> None:
        for name, moves in moved.items():
            self.held[name] = {moves.get(block, block): value for block, value in self.held[name].items()}

    def verify(self) -> None:
        remap.advanced.check(self.session)
        for name, layers in self.layers.items():
            for _ in range(2):
                forward(self.session, self.tenant(name), layers)
            for block, value in self.held[name].items():
                assert read_block(self.tenant(name), block) == {value}, f"block {block} of {name} has changed"

    def close(self) -> None:
        self.fault.disarm()
        self.session.close()


@contextmanager
def world(mode: str, *names: str) -> Iterator[World]:
    made = World(mode, *names)
    try:
        yield made
    finally:
        made.close()


def attempt(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Error as error:
        return error
    return None


# -- 1: settling fails once, and another call advances the epoch -----------------------------------------------------------


@MODES
@pytest.mark.parametrize("other", ["attach", "detach"])
def test_settling_fails_once_and_then_a_tenant_comes_or_goes(mode: str, other: str) -> None:
    """The epoch moved, so the plan passed for committed: homes were overwritten by KV and passes read wrong weights."""
    with world(mode, "m", "b") as w:
        before = w.fault.calls()
        remap.advanced.remap(w.session, "m", 3, 1, "nested")
        calls = w.fault.calls() - before
    for nth in range(1, calls + 1):
        with world(mode, "m", "b") as w:
            w.fill("m", 4)
            w.fault.arm_any(nth, False)
            attempt(lambda: w.patch(remap.advanced.remap(w.session, "m", 3, 1, "nested").moved))
            w.fault.disarm()
            if other == "attach":
                w.attach("c")
            else:
                w.session.detach("b")
                del w.layers["b"], w.held["b"]
            w.fill("m", 40)
            w.verify()


# -- 2: a tenant's number is used twice --------------------------------------------------------------------------------------


@MODES
def test_a_failed_attach_does_not_leave_its_weights_to_the_next_tenant(mode: str) -> None:
    """The number of the tenant that failed was used again, so its pages passed for the next one's own and were not zeroed."""
    for nth in range(1, 200, 3):
        w = World(mode)
        w.fault.arm_any(nth, False)
        failed = attempt(lambda: w.attach("m"))  # noqa: B023
        w.fault.disarm()
        if failed is None:
            w.close()
            break
        w.layers.clear()
        pages = w.session.snapshot().pages
        assert pages.free == pages.total, f"call {nth}: pages of a tenant that is not attached"
        w.attach("x")
        tenant = w.tenant("x")
        w.session.step({"x": remap.Demand(blocks=10**6)})
        for block in tenant.kv.allocate(tenant.kv.free_blocks):
            assert read_block(tenant, block) == {0}, f"call {nth}: block {block} shows what the failed model left"
        w.verify()
        w.close()
    assert failed is None, "the attach was not swept to its end"


# -- 3: threads ----------------------------------------------------------------------------------------------------------------


def in_the_middle(w: World, act: Callable[[], None]) -> None:
    """Have `act` run on this thread in the middle of the next change: it is applied, and not decided."""
    decide = w.session._changes._decide

    def acting(saved: Any) -> None:
        w.session._changes._decide = decide  # type: ignore[method-assign]
        act()
        decide(saved)

    w.session._changes._decide = acting  # type: ignore[method-assign]


@MODES
def test_a_pass_does_not_begin_in_the_middle_of_a_change(mode: str) -> None:
    """_begin_pass took no lock: a step on another thread came between its check and the pass, whose layers were then others."""
    with world(mode, "m", "b") as w:
        begun = threading.Event()

        def serve() -> None:
            tenant = w.tenant("m")
            with tenant.forward():
                begun.set()
                for layer in range(len(SIZES)):
                    tenant.wait(layer)
                    tenant.done(layer)

        thread = threading.Thread(target=serve)

        def act() -> None:
            thread.start()
            assert not begun.wait(0.2)

        in_the_middle(w, act)
        remap.advanced.remap(w.session, "m", 3, 2, "nested")
        thread.join(WAIT_S)
        assert begun.is_set()
        w.verify()


@MODES
def test_no_block_is_handed_out_in_the_middle_of_a_change(mode: str) -> None:
    """A donor's allocate beside another tenant's step changed the pool between its look at it and its change."""
    with world(mode, "m", "b") as w:
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.extend(w.tenant("m").kv.allocate(1)))

        def act() -> None:
            thread.start()
            thread.join(0.2)
            assert not got

        in_the_middle(w, act)
        remap.advanced.remap(w.session, "m", 3, 2, "nested")
        thread.join(WAIT_S)
        assert len(got) == 1
        remap.advanced.check(w.session)


@MODES
def test_a_change_leaves_a_tenant_inside_a_pass_alone(mode: str) -> None:
    """Passes of one tenant go on while another one's step runs, and what names a tenant inside a pass is refused."""
    with world(mode, "m", "b") as w:
        remap.advanced.remap(w.session, "m", 3, 1, "nested")
        inside, leave = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                tenant = w.tenant("m")
                with tenant.forward():
                    inside.set()
                    leave.wait(WAIT_S)
                    for layer in range(len(SIZES)):
                        tenant.wait(layer)
                        tenant.done(layer)
            except BaseException as error:  # noqa: BLE001  it is shown below
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        assert inside.wait(WAIT_S)
        w.patch(w.session.step({"b": remap.Demand(blocks=20)}).moved)
        for call in (
            lambda: remap.advanced.remap(w.session, "m", 0),
            lambda: w.session.step({"m": remap.Demand(blocks=20)}),
            lambda: remap.advanced.lend(w.session, "m", 1),
            lambda: w.session.detach("m"),
            lambda: w.session.activate("b", alone=True),
        ):
            with pytest.raises(InvalidState):
                call()
        leave.set()
        thread.join(WAIT_S)
        assert not failures
        w.verify()


@MODES
def test_engines_on_threads_of_their_own(mode: str) -> None:
    """Two engines, two threads, one session: 590 wrong layer reads in 28,980 passes, segfaults at a short switch interval."""
    interval = sys.getswitchinterval()
    hand_over = threading.Lock()  # the engines': reports are handed to whom they name
    failures: list[BaseException] = []
    with world(mode, "m", "b") as w:

        def serve(name: str, seed: int) -> None:
            try:
                tenant = w.tenant(name)
                for turn in range(60):
                    with hand_over:
                        w.patch(w.session.step({name: remap.Demand(blocks=(turn * 7 + seed) % 40)}).moved)
                    free = tenant.kv.allocate(min(2, tenant.kv.free_blocks)) if turn % 3 else []
                    forward(w.session, tenant, w.layers[name])
                    tenant.kv.free(free)
            except BaseException as error:  # noqa: BLE001  it is shown below
                failures.append(error)

        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=serve, args=(name, seed)) for seed, name in enumerate(("m", "b"))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in threads), "an engine hangs"
        assert not failures, failures
        w.verify()


# -- found by the fuzzer since -----------------------------------------------------------------------------------------------


def test_a_re_pointing_that_fails_just_before_a_pass_begins_is_told_by_wait() -> None:
    """What the last change had left was finished, and its re-pointing failed at once: forward() blamed a listener."""
    with world("aliased", "m") as w:
        tenant = w.tenant("m")
        remap.advanced.remap(w.session, "m", 3, 1, "nested")
        remap.advanced.settle(w.session)
        tenant._state.unsettled, real = (None, False), w.session._changes.settle  # type: ignore[assignment]

        def settled(each: Any) -> None:
            each.unsettled = None
            real(each)
            w.session._changes._executor = Failing(executor)  # from here on one of its points has failed

        class Failing:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def failed_points(self, tenant: int | None = None) -> int:
                return 1

        executor = w.session._changes._executor
        w.session._changes.settle = settled  # type: ignore[method-assign]
        forward(w.session, tenant, w.layers["m"])
        w.session._changes.settle, w.session._changes._executor = real, executor  # type: ignore[method-assign]
        w.verify()
