"""Bug museum: faults that ended the process, made it hang, or made it leak. One named test a fault."""

from __future__ import annotations

from subprocesses import expect_ok

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
