"""An interrupt at any point of any public call: it has happened or has not, and all works afterwards (interrupts.py).

In the suite a few points of every situation, always the same ones, in one of the four ways (aliased or strict, lines or signals),
and in all of them with REMAP_TEST_LONG; with REMAP_FUZZ set, every place.
"""

from __future__ import annotations

import itertools
import os
import sys

import interrupts
import pytest
from effort import LONG, some
from interrupts import CASES, prepared
from sharing_worlds import Faulty
from test_fault_sweep import Case

from remap.internals import internals

BUDGET = 0 if os.environ.get("REMAP_FUZZ") else int(os.environ.get("REMAP_INTERRUPTS") or some(2, 4))

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="exception tables say which points a signal can come to"
)


GROUPS = [[*CASES][start::4] for start in range(4)]  # one process each: it imports as long as it tries a case


@pytest.mark.parametrize("points", ["lines", "signals"])
@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_an_interrupted_call_has_happened_or_has_not(names: list[str], mode: str, points: str) -> None:
    if BUDGET and not LONG:
        names = names[2 * (mode == "strict") + (points == "signals") :: 4]
    # A call of several plans may leave the state between two of them ("between").
    findings, tried = interrupts.sweep(names, mode, points, BUDGET)
    wrong = {each.place: each.what[:700] for each in findings if each.kind != "between"}
    assert not wrong, "\n".join([f"{len(wrong)} places:", *[*wrong.values()][:12]])
    assert tried >= len(names)


def test_books_of_host_blocks_at_every_line() -> None:
    """Few lines, so all of them: host blocks were lost for ever."""
    findings, tried = interrupts.sweep(["copy out", "free host blocks", "stream"], "aliased", "lines", 0)
    assert not [each.what[:700] for each in findings]
    assert tried > 100


@pytest.mark.parametrize("points", ["lines", "signals"])
@pytest.mark.parametrize("name", ["allocate", "copy out", "stream"])
def test_what_nobody_got_is_free(name: str, points: str) -> None:
    """An interrupt when the books had changed already, and the call had not returned: nobody knew the host blocks."""
    case = CASES[name]
    change = case.change if name != "allocate" else lambda world: world.engines["a"].kv.allocate(3)
    files = ("kv/", "locking.py", "memory/kv_copies.py")
    world = prepared(case, "aliased")
    seen = interrupts.interrupted(lambda: change(world), -1, points, files)[0].seen
    world.close()
    last = {where: at for at, where in enumerate(seen)}
    for at in sorted(last.values()):
        world = prepared(case, "aliased")
        kv = world.engines["a"].kv
        before = kv.host.books, kv.streamed.books, kv.live_blocks
        interrupt, _, error = interrupts.interrupted(lambda world=world: change(world), at, points, files)
        if not interrupt.where:  # the core's threads were faster this time, and the call had fewer points
            world.close()
            continue
        assert isinstance(error, KeyboardInterrupt)
        after = kv.host.books, kv.streamed.books, kv.live_blocks
        assert after == before, interrupt.where
        world.close()
    assert len(last) > 10


def test_a_detach_at_any_line_keeps_no_stream() -> None:
    """A tenant that was gone had left its copy stream to the garbage collector."""

    def prepare(world: Faulty) -> None:
        world.place("b", 0, 3)
        world.place("b", 0, world.engines["b"].tenant.layers)

    case = Case("detach", prepare, lambda world: world.detach("b"), Faulty)
    files = ("session.py", "memory/apply.py", "memory/streams.py")
    world = prepared(case, "aliased")
    seen = interrupts.interrupted(lambda: case.change(world), -1, "lines", files)[0].seen
    left = world.backend.usage()["streams"]
    world.close()
    last = {where: at for at, where in enumerate(seen)}
    for at in sorted(last.values()):
        world = prepared(case, "aliased")
        interrupt, _, error = interrupts.interrupted(lambda world=world: case.change(world), at, "lines", files)
        assert isinstance(error, KeyboardInterrupt)
        for name in {*world.engines} & {*world.session._tenants}:
            if internals(world.engines[name].tenant)._state.leaving:
                world.session.detach(name)
        world.session.step()
        tenants = len(world.session._tenants)
        assert world.backend.usage()["streams"] == left + (tenants == len(world.SIZES)), interrupt.where
        world.close()
    assert len(last) > 20


@pytest.mark.parametrize("points", ["lines", "signals"])
def test_a_block_that_an_interrupt_ends_leaves_no_pass_open(points: str) -> None:
    """Ctrl-C as a pass began or ended: while the exception lived, as in the caller's `except`, every call said "inside a pass";
    and where `__del__` was to end the pass instead, the exception was lost."""
    world = prepared(CASES["up"], "aliased")
    tenant = world.engines["a"].tenant

    def one_pass(at: int) -> interrupts.Interrupt:
        interrupt = interrupts.Interrupt(at, points, ("tenant.py", "locking.py", "memory/passes.py"))
        sys.settrace(interrupt)
        with tenant.forward():
            for layer in range(tenant.layers):
                tenant.wait(layer)
                tenant.done(layer)
        sys.settrace(None)
        return interrupt

    for at in itertools.count():
        try:
            interrupt = one_pass(at)
        except KeyboardInterrupt:
            sys.settrace(None)
            assert not internals(tenant).in_pass
            world.tell(world.session.step({"a": 1}))
            world.remap("a", 3 * (at % 2))  # what the core calls a pass has ended as well
            world.check()
        else:
            assert not interrupt.where, f"{interrupt.where}: the interrupt was lost"
            break
    assert at > 20
    tenant.forward().__enter__()  # dropped
    world.tell(world.session.step({"a": 1}))
    world.close()
