"""Children, signals and the end of the process (promises 8 and 9). Each in a process of its own, with a timeout."""

from __future__ import annotations

import pytest
from subprocesses import expect_ok

SESSION = """
import os, signal, sys, threading
import remap
from arena_worlds import PAGE, forward, make_layers, make_spec
from remap import _core
from remap.errors import ForkedProcess
from remap.internals import internals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children without it
session = remap.Session(40 * PAGE, page_bytes=PAGE, mode="aliased")
layers = make_layers([2] * 6)
tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=200))
remap.advanced.remap(session, "m", 3)
forward(session, tenant, layers)
"""

# What a forked child does, and how the parent hears of it. (Every public call there: test_argument_kinds.py.)
FORKED = """
child = os.fork()
if child == 0:
    {child}
    sys.exit(0)  # the ordinary end: destructors run, nothing hangs or crashes
_, status = os.waitpid(child, 0)
{after}
assert os.waitstatus_to_exitcode(status) == 0, status
forward(session, tenant, layers)  # the parent is as it was
remap.advanced.remap(session, "m", 0)
forward(session, tenant, layers)
remap.advanced.check(session)
"""
REFUSED = """
    for call in (session.snapshot, session.step, session.close, lambda: remap.advanced.remap(session, "m", 1)):
        try:
            call()
        except ForkedProcess as error:
            assert "spawn" in str(error)
        else:
            os._exit(3)
"""
OWN = """
    with remap.Session(40 * PAGE, page_bytes=PAGE) as own:
        mine = own.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=200))
        remap.advanced.remap(own, "m", 2, 2)
        forward(own, mine, layers)
    del session, tenant
"""
LOCKED = """
entered, leave = threading.Event(), threading.Event()
def hold():
    entered.set()
    leave.wait()
thread = threading.Thread(target=session._lock.run, args=(hold,))
thread.start()
entered.wait()
"""


@pytest.mark.parametrize(
    ("before", "child", "after"),
    [("", REFUSED, ""), (LOCKED, REFUSED, "leave.set(); thread.join()"), ("", OWN, "")],
    ids=["refused", "refused while another thread holds the lock", "with a session of its own"],
)
def test_a_forked_child_is_refused_and_ends_well(before: str, child: str, after: str) -> None:
    expect_ok(SESSION + before + FORKED.format(child=child, after=after))


BLOCKED = """
backend = session._backend
memory = backend.allocate_host(64 << 20)
slow, event = backend.create_stream(), backend.create_event()
for _ in range(4000):  # tens of seconds
    backend.fill(slow, memory, 1, 64 << 20)
backend.record(event, slow)
{block}
timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
timer.start()
try:
    {wait}
except KeyboardInterrupt:
    # What it waited for has not come, so the interrupt has ended the wait.
    os._exit(4 if backend.query(event) else 0)
os._exit(5)
"""


PASS = """
prefetcher = internals(tenant)._state.prefetcher
prefetcher.configure(tenant.streamed, [internals(tenant)._state.ring_address], 2 * PAGE, {behind})
prefetcher.begin_pass()
"""
HELD = PASS.format(behind="[tenant.streamed[0]]")  # the layer's region is being re-pointed


@pytest.mark.parametrize(
    ("block", "wait"),
    [
        (PASS.format(behind="[], event, True"), "tenant.wait(tenant.streamed[0])"),  # copies stand behind the event
        (HELD, "tenant.wait(tenant.streamed[0])"),
        ("", "backend.synchronize(event, 3600.0)"),
    ],
    ids=["copy", "held", "event"],
)
def test_an_interrupt_ends_a_blocked_wait(block: str, wait: str) -> None:
    expect_ok(SESSION + BLOCKED.format(block=block, wait=wait), timeout_s=30)


def test_a_blocked_wait_lets_other_threads_run() -> None:
    """Museum: a worker needs the GIL that its waiter holds (kvcached#371)."""
    program = """
ticks = []
def tick():
    for _ in range(50):
        ticks.append(sum(range(100)))
    assert not waited.is_set()
    session._executor.drain()
    # Somebody on a Python thread lets the waiter go; it could not if the waiter had kept the GIL.
    prefetcher.end_pass()
    prefetcher.configure((), (), 0)
    os._exit(0 if len(ticks) == 50 else 3)
waited = threading.Event()
threading.Timer(0.2, tick).start()
tenant.wait(tenant.streamed[0])
waited.set()
os._exit(4)
"""
    expect_ok(SESSION + HELD + program, timeout_s=30)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "pass_ = tenant.forward(); pass_.__enter__(); tenant.wait(0)",
        "remap.advanced.remap(session, 'm', 5); remap.advanced.remap(session, 'm', 1)",
        "tensors = tenant.kv.tensors",
        "import atexit; atexit.register(lambda: session.close())",
        "import gc; gc.disable(); loop = [session]; loop.append(loop)",
        "threading.Thread(target=lambda: [forward(session, tenant, layers) for _ in range(200)], daemon=True).start()",
    ],
    ids=["idle", "in a pass", "worker busy", "tensors", "atexit", "cycle", "daemon thread"],
)
def test_a_process_that_ends_with_an_open_session_ends_well(ending: str) -> None:
    """Museum: driver calls during exit crash (RMM #2367)."""
    if "tensors" in ending:
        pytest.importorskip("torch")
    expect_ok(SESSION + ending + "\n")
