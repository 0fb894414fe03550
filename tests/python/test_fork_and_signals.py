"""Children, signals and the end of the process (promises 8 and 9). Each in a process of its own, with a timeout."""

from __future__ import annotations

import pytest
from subprocesses import expect_ok, run

SESSION = """
import os, signal, sys, threading
import remap
from arena_worlds import PAGE, forward, make_layers, make_spec
from remap import _core
from remap.errors import ForkedProcess

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children without it
session = remap.Session(40 * PAGE, page_bytes=PAGE, mode="aliased")
layers = make_layers([2] * 6)
tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=200))
remap.advanced.remap(session, "m", 3)
forward(session, tenant, layers)
"""

CHILD = """
child = os.fork()
if child == 0:
    calls = [
        lambda: session.snapshot(),
        lambda: session.step({"m": remap.Demand(blocks=4)}),
        lambda: remap.advanced.remap(session, "m", 1),
        lambda: remap.advanced.settle(session),
        lambda: remap.advanced.check(session),
        lambda: session.detach("m"),
        lambda: session.attach_bytes(layers, name="n", kv=make_spec(6)),
        lambda: remap.advanced.layer_address(session, "m", 0),
        lambda: tenant.forward().__enter__(),
        lambda: session.close(),
    ]
    for call in calls:
        try:
            call()
        except ForkedProcess as error:
            assert "spawn" in str(error)
        else:
            os._exit(3)
    sys.exit(0)  # the ordinary end: destructors run, nothing hangs or crashes
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
forward(session, tenant, layers)  # the parent is as it was
remap.advanced.remap(session, "m", 0)
forward(session, tenant, layers)
remap.advanced.check(session)
"""


def test_a_forked_child_is_refused_and_ends_well() -> None:
    expect_ok(SESSION + CHILD)


def test_a_child_forked_while_another_thread_holds_the_lock_is_refused_too() -> None:
    program = """
entered, leave = threading.Event(), threading.Event()
def hold():
    entered.set()
    leave.wait()
thread = threading.Thread(target=session._lock.run, args=(hold,))
thread.start()
entered.wait()
child = os.fork()
if child == 0:
    try:
        session.snapshot()
    except ForkedProcess:
        os._exit(0)
    os._exit(3)
_, status = os.waitpid(child, 0)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 0, status
"""
    expect_ok(SESSION + program)


def test_a_child_can_open_a_session_of_its_own() -> None:
    program = """
child = os.fork()
if child == 0:
    with remap.Session(40 * PAGE, page_bytes=PAGE) as own:
        mine = own.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=200))
        remap.advanced.remap(own, "m", 2, 2)
        forward(own, mine, layers)
    del session, tenant
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""
    expect_ok(SESSION + program)


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


@pytest.mark.parametrize("what", ["copy", "held", "event"])
def test_an_interrupt_ends_a_blocked_wait(what: str) -> None:
    ring = "[tenant._state.ring_address], 2 * PAGE"
    if what == "copy":  # the copies stand behind the event
        block = (
            f"tenant._state.prefetcher.configure(tenant.streamed, {ring}, [], event, True)\n"
            "tenant._state.prefetcher.begin_pass()"
        )
        wait = "tenant.wait(tenant.streamed[0])"
    elif what == "held":  # the layer's region is being re-pointed, behind the event
        block = f"tenant._state.prefetcher.configure(tenant.streamed, {ring}, [tenant.streamed[0]])\n"
        block += "tenant._state.prefetcher.begin_pass()"
        wait = "tenant.wait(tenant.streamed[0])"
    else:
        block, wait = "", "backend.synchronize(event, 3600.0)"
    done = run(SESSION + BLOCKED.format(block=block, wait=wait), timeout_s=30)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_blocked_wait_lets_other_threads_run() -> None:
    """Museum: a worker needs the GIL that its waiter holds (kvcached#371)."""
    program = """
prefetcher = tenant._state.prefetcher
first = tenant.streamed[0]
prefetcher.configure(tenant.streamed, [tenant._state.ring_address], 2 * PAGE, [first])
prefetcher.begin_pass()
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
tenant.wait(first)
waited.set()
os._exit(4)
"""
    done = run(SESSION + program, timeout_s=30)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_the_harness_notices_a_deadlock() -> None:
    """A deliberate deadlock, so that the timeouts above are known to work."""
    import subprocess

    with pytest.raises(subprocess.TimeoutExpired):
        run("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", timeout_s=2)


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
    expect_ok(SESSION + ending + "\n")
