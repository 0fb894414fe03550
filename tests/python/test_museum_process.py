"""Bug museum: faults that ended the process, made it hang, or made it leak. One named test a fault."""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, make_spec
from subprocesses import expect_ok, run

import remap
from remap import _core
from remap.internals import internals

NO_THREADS = """
import os, resource, signal
from remap import _core
from remap.errors import LimitExceeded

backend = _core.make_host_backend(1 << 20, 4096)
arena = _core.Arena(backend, 1 << 20, 4096, _core.Mode.aliased)
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # the limit does not bind root
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
for make in (lambda: _core.Executor(arena), lambda: _core.make_host_backend(1 << 20, 4096, 2), backend.create_stream):
    try:
        make()
        raise SystemExit("a thread was started in spite of the limit")
    except LimitExceeded as error:
        assert error.errno == 11, error.errno
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))

executor = _core.Executor(arena)
one = arena.add_layer_region(1, "one", arena.take(1, _core.Owner.params, 1))
two = arena.add_layer_region(1, "two", arena.take(1, _core.Owner.params, 1))
ring = arena.add_ring_region(1, 1)
plan = _core.Plan(arena.epoch)
plan.set_owner([0], _core.Owner.params, _core.Owner.ring, 1)
plan.point(ring, 0, [0], False, 0)
plan.point(two, 0, [0], True, 1)
plan.set_owner([1], _core.Owner.params, _core.Owner.free, 1)
executor.apply(plan)
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
executor.commit(None)
executor.drain()
assert executor.failed_points() == 0 and arena.shown(two) == [0]
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
executor.stop()
arena.check()
arena.close()
"""


def test_a_worker_that_cannot_be_started() -> None:
    """RLIMIT_NPROC refused the worker's thread inside commit(): signals stayed blocked, its jobs waited for ever."""
    expect_ok(NO_THREADS)


KEPT_TENSORS = """
import remap, torch
from arena_worlds import PAGE, forward, make_layers, make_spec
from remap.errors import InvalidArgument, InvalidState

for mode in ("aliased", "strict"):
    session = remap.Session(48 * PAGE, page_bytes=PAGE, mode=mode)
    backend = session._backend
    layers = make_layers([2] * 4)
    a = session.attach_bytes(layers, name="a", kv=make_spec(4))
    b = session.attach_bytes(layers, name="b", kv=make_spec(4))
    kept_a, kept_b, memory = a.kv.tensors[1], b.kv.tensors[0], b.kv.memory
    block = b.kv.allocate(1)[0]
    kept_b[:, block] = 3.0
    assert float(kept_b[:, block].sum()) > 0
    session.detach("a")
    assert str(kept_a) and float(kept_a.abs().sum()) == 0  # printing it read memory that nobody had
    kept_a.fill_(7.0)  # and this reaches nobody
    assert float(kept_b[0, block].min()) == 3.0
    forward(session, b, layers)
    remap.advanced.check(session)
    again = session.attach_bytes(layers, name="a", kv=make_spec(4))
    assert again.kv.tensors[1].data_ptr() != kept_a.data_ptr()
    forward(session, again, layers)
    for gone in (a.kv,):
        try:
            gone.tensors
            raise SystemExit("tensors of a tenant that is gone")
        except (InvalidArgument, InvalidState):
            pass
    session.close()
    assert float(kept_b.abs().sum()) == 0 and int(memory.max()) == 0
    memory.fill_(1)
    held = backend.usage()["reserved_bytes"]
    assert held > 0 and backend.usage()["page_bytes"] == 0
    del kept_a, kept_b, memory
    assert set(backend.usage().values()) == {0}, backend.usage()
"""


def test_tensors_kept_after_detach_and_close() -> None:
    """print(kv_tensor) after close() or detach() was a segmentation fault that ended the notebook."""
    expect_ok(KEPT_TENSORS)


KEPT_TO_THE_END = """
import threading
import remap
from arena_worlds import PAGE, make_layers, make_spec

session = remap.Session(48 * PAGE, page_bytes=PAGE)
tenant = session.attach_bytes(make_layers([2] * 4), name="a", kv=make_spec(4))
tensors = tenant.kv.tensors
threading.Thread(target=lambda kept: threading.Event().wait(), args=(list(tensors),), daemon=True).start()
session.close()
"""


def test_tensors_kept_until_the_interpreter_ends() -> None:
    """The end of a tensor asked for an interpreter that was ending."""
    expect_ok(KEPT_TO_THE_END)
    expect_ok(KEPT_TO_THE_END.replace("session.close()\n", ""))  # nobody closed


FORKED = """
import os, sys
import remap
from arena_worlds import PAGE, forward, make_layers, make_spec
from remap import _core
from remap.errors import ForkedProcess
from remap.internals import internals

session = remap.Session(48 * PAGE, page_bytes=PAGE)
layers = make_layers([2] * 4)
tenant = session.attach_bytes(layers, name="a", kv=make_spec(4, max_blocks=200))
kept = tenant.kv.tensors
remap.advanced.remap(session, "a", 2)
forward(session, tenant, layers)
prefetcher, executor, arena = internals(tenant)._state.prefetcher, session._executor, session._arena
draft = _core.Draft(arena)
resident = next(layer for layer in range(4) if prefetcher.ready(layer))
streamed = next(layer for layer in range(4) if not prefetcher.ready(layer))
child = os.fork()
if child == 0:
    calls = [
        lambda: prefetcher.wait(resident),
        lambda: prefetcher.done(resident),
        lambda: prefetcher.wait(streamed),
        lambda: prefetcher.done(streamed),
        lambda: prefetcher.ready(resident),
        lambda: prefetcher.begin_pass(),
        lambda: prefetcher.end_pass(),
        lambda: prefetcher.configure([], [], 0),
        lambda: prefetcher.drain(),
        lambda: prefetcher.stats(),
        lambda: prefetcher.take_timings(),
        lambda: prefetcher.loading(),
        lambda: prefetcher.in_pass,
        lambda: prefetcher.copy_stream,
        lambda: prefetcher.close(),
        lambda: executor.apply(_core.Plan(1)),
        lambda: executor.commit(None),
        lambda: executor.change(draft, []),
        lambda: executor.zero_due(),
        lambda: draft.add(_core.Plan(1)),
        lambda: draft.free_pages(),
        lambda: executor.undecided(),
        lambda: executor.drain(),
        lambda: executor.failed_points(),
        lambda: executor.failed_points(1),
        lambda: executor.retry_failed(),
        lambda: executor.retry_failed(1),
        lambda: executor.forget(1),
        lambda: executor.stop(),
        lambda: arena.check(),
        lambda: arena.hold(0, 1),
        lambda: arena.regions,
        lambda: _core.Executor(arena),
        lambda: tenant.wait(resident),
        lambda: tenant.done(resident),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedProcess as error:
            assert "spawn" in str(error)
        else:
            os._exit(100 + number)
    del kept, calls, call
    sys.exit(0)  # the ordinary end: tensors and destructors run, nothing hangs or crashes
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
forward(session, tenant, layers)
remap.advanced.check(session)
session.close()
"""


def test_every_call_of_the_core_is_refused_in_a_forked_child() -> None:
    """wait() and done() of a resident layer succeeded in a child, drain() hung there."""
    expect_ok(FORKED)


def fuzz_minutes() -> float:
    return float(os.environ.get("REMAP_FUZZ", "0"))


def test_hostile_calls_of_the_core() -> None:
    """Executor(None) and unchecked page ids were segmentation faults; take(owner=free) broke the tables."""
    seeds, first, until = 30, 0, time.monotonic() + 60 * fuzz_minutes()
    while True:
        done = run(f"import hostile_calls; hostile_calls.main({first}, {seeds})", timeout_s=300)
        assert done.returncode == 0, (f"seed {done.stdout.split()[-1:]}", done.returncode, done.stderr[-4000:])
        assert done.stdout.split() == [str(seed) for seed in range(first, first + seeds)]
        first, seeds = first + seeds, 300
        if time.monotonic() >= until:
            return


EDITED_TRACES = """
import random, sys
from remap import _core
from remap.errors import Error
from test_trace_replay import CAPACITY, PAGE, traced_session

first, batches = {first}, {batches}
texts = [traced_session(mode)[1] for mode in ("aliased", "strict")]
NUMBERS = [0, 1, 2, 255, 4096, 65535, 65536, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 47, 1 << 63]
NUMBERS += [(1 << 64) - 65536, (1 << 64) - 1]
refused = diverged = whole = 0
for seed in range(first, first + batches):
    print(seed, flush=True)
    rng = random.Random(seed)
    lines = rng.choice(texts).splitlines()
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        words = lines[at].split()
        if kind == 0:
            words[rng.randrange(len(words))] = str(rng.choice(NUMBERS))
            lines[at] = " ".join(words)
        elif kind == 1:
            other = lines[rng.randrange(len(lines))].split()
            word = rng.randrange(2, len(words))
            words[word] = rng.choice(other[2:])
            lines[at] = " ".join(words)
        elif kind == 2:
            word = rng.randrange(2, len(words))
            if words[word].isdigit():
                words[word] = str(max(0, int(words[word]) + rng.choice([-65536, -1, 1, 65536])))
            lines[at] = " ".join(words)
        elif kind == 3:
            lines[at : at + 1] = []
        elif kind == 4:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 5:
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
        elif kind == 6:
            lines[at:] = []
        else:
            place = rng.randrange(len(lines[at]))
            lines[at] = lines[at][:place] + rng.choice("0123456789 -abcdef") + lines[at][place + 1 :]
        if not lines:
            break
    try:
        log = _core.parse_trace("\\n".join(lines))
    except Error:
        refused += 1
        continue
    backend = rng.choice([
        lambda: _core.make_host_backend(CAPACITY, PAGE, 1),
        lambda: _core.make_sim_backend(capacity_bytes=CAPACITY, granularity=PAGE, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9,
                                       hbm_bytes_per_s=1e12, backed=bool(rng.randrange(2))),
    ])()
    result = _core.replay(log, backend)
    if result.ok:
        whole += 1
    else:
        diverged += 1
        assert 0 <= result.divergence < len(log) and result.message
print("refused", refused, "diverged", diverged, "whole", whole)
"""


def test_edited_traces() -> None:
    """replay() of an edited trace was a segmentation fault in 49 of 168 batches."""
    batches, first, until = 200, 0, time.monotonic() + 60 * fuzz_minutes()
    while True:
        done = run(EDITED_TRACES.replace("{first}", str(first)).replace("{batches}", str(batches)), timeout_s=300)
        assert done.returncode == 0, (f"seed {done.stdout.split()[-1:]}", done.returncode, done.stderr[-4000:])
        counts = done.stdout.split()[-6:]
        assert counts[::2] == ["refused", "diverged", "whole"] and int(counts[3]) > batches / 4, counts
        first, batches = first + batches, 1000
        if time.monotonic() >= until:
            return


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_looking_at_all_of_a_kv_tensor_does_not_end_the_process(layout: str) -> None:
    """print(kv.tensors[0]), .isnan() and .zero_() came to places that no page stands behind: SIGSEGV, in aliased mode."""
    expect_ok(f"""
import torch, remap
from arena_worlds import PAGE, make_layers, make_spec
from remap.internals import internals
layers = make_layers([2] * 4)
with remap.Session(20 * PAGE, page_bytes=PAGE) as session:
    tenant = session.attach_bytes(layers, name="m", kv=make_spec(4, max_blocks=4000, layout={layout!r}))
    tensors = tenant.kv.tensors
    used = sum(len(layer) for layer in layers) + session.capacity_bytes
    assert internals(tenant).kv.geometry.region_bytes > 2 * used  # most of it has no page
    for tensor in tensors:
        assert repr(tensor) and not tensor.isnan().all()
        assert tensor[:, -1].abs().sum() == 0
        tensor.zero_()
    remap.advanced.check(session)
""")


def test_master_copies_outlive_the_copies_of_a_session_that_nobody_closed() -> None:
    """A collected session let go of its master copies while its prefetcher could still read them (found by ThreadSanitizer)."""

    class Buffer(bytearray):
        """Can be referred to weakly."""

    layers = [Buffer(layer) for layer in make_layers([1, 1])]
    session = remap.Session(8 * PAGE, page_bytes=PAGE)
    prefetcher = internals(session.attach_bytes(layers, name="m", kv=make_spec(2, min_blocks=1)))._state.prefetcher
    master = weakref.ref(layers[0])
    del layers, session
    gc.collect()
    assert master() is not None
    del prefetcher
    gc.collect()
    assert master() is None


def test_an_interrupt_while_an_error_of_the_core_is_made_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt inside of the error's own constructor came out as a RuntimeError (found by the fuzzer)."""

    def interrupted(self: Any, *args: Any, **fields: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remap.Error, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _core.make_host_backend(0, 4096)
