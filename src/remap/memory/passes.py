# SPDX-License-Identifier: Apache-2.0
"""A pass begins and ends: the checks before its first layer, and the checks at its end.

    begin   no change in progress, none left to be finished -> Turn.enter -> Prefetcher.begin_pass
    end     layers that were not waited for -> Prefetcher.end_pass -> times are learnt -> bad results are refused

The thread of the tenant's engine runs this, under the turn's lock where a change might begin (locking.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from remap import nvtx
from remap.errors import ArenaBroken, Error, InvalidState
from remap.locking import SessionLock
from remap.memory.apply import Changes
from remap.memory.stall_watch import StallWatch
from remap.memory.state import TenantState
from remap.memory.trace import Trace

__all__ = ["Passes"]

_logger = logging.getLogger("remap.broker")


class Passes:
    """A session's passes. closed: set by the session; no pass begins any more."""

    def __init__(
        self,
        changes: Changes,
        tenants: Mapping[str, TenantState],
        lock: SessionLock,
        stalls: StallWatch,
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        self._changes = changes
        self._tenants = tenants
        self._lock = lock
        self._stalls = stalls
        self._clock = clock
        self._trace = trace
        self.closed = False
        # Of a tenant whose layers other processes have: asks for them; whether some have come (`OtherProcesses.serves`).
        self.serves: Callable[[TenantState], bool] | None = None
        self.come_home: Callable[[], None] | None = None

    def check_open(self, broken_too: bool = False) -> None:
        """Raises InvalidState if the session is closed, and ArenaBroken (field quarantined_pages) unless
        `broken_too`."""
        if self.closed:
            raise InvalidState("the session is closed; nothing changed; open a new one")
        if self._changes.arena.broken and not broken_too:
            quarantined = self._changes.arena.counts()["quarantine"]
            raise ArenaBroken(
                f"an earlier failure could not be undone, {quarantined} pages are quarantined; nothing changed; only "
                "snapshot() and close() are allowed",
                quarantined_pages=quarantined,
            )

    def active_numbers(self) -> set[int]:
        """Numbers of the tenants that may serve passes. Takes no lock: a tenant may come or go meanwhile."""
        return {tenant.number for tenant in tuple(self._tenants.values()) if tenant.active}

    def refuse_fork(self) -> None:
        """Raises ForkedProcess in a child made by fork."""
        self._lock.refuse_fork()

    # -- begin -----------------------------------------------------------------------------------------------------

    def begin(self, tenant: TenantState, stream: object, bracket: object, streamed: Sequence[int] = ()) -> None:
        """Begin a pass that reads these streamed blocks; `bracket` is the turn's `open_pass` while it is open. Raises as
        `Tenant.forward` says; if the pass had begun by then, the caller closes it."""
        self._lock.refuse_fork()
        if tenant.at_others and self.serves is not None:
            self._ask_for_layers(tenant, self.serves)
        if not self._try_begin(tenant, stream, bracket, streamed):
            self._lock.run(self._begin_behind_changes, tenant, stream, bracket, streamed)
        if tenant.parts > tenant.layers:
            # For what stands before the first layer and behind the last: no hook does, and it never streams.
            tenant.prefetcher.wait(tenant.layers)
            tenant.prefetcher.done(tenant.layers)
        tenant.began_s = self._trace.now()
        nvtx.push("remap.pass")

    def _ask_for_layers(self, tenant: TenantState, serves: Callable[[TenantState], bool]) -> None:
        """Other processes have some of its layers: ask for them, and bring home what has come. Waits for nothing: while another
        thread's call is under way, or if that fails, the layers stream in this pass too."""
        if tenant.turn.open_pass is not None or tenant.leaving or tenant.detached or self.closed or not tenant.active:
            return  # `_try_begin` says why
        if serves(tenant) and self._lock.free():
            assert self.come_home is not None
            try:
                tenant.turn.exclusively(self.come_home)
            except ArenaBroken:
                raise
            except Error as error:
                _logger.warning("tenant %r: layers that have come back stream on: %s", tenant.name, error)

    def _begin_behind_changes(
        self, tenant: TenantState, stream: object, bracket: object, streamed: Sequence[int]
    ) -> None:
        """Begin a pass after the change that was in progress, and finish first the rest of the last change."""
        self._changes.settle(tenant)
        self._changes.retry_failed(tenant)
        self._changes.wake(tenant)
        if not self._try_begin(tenant, stream, bracket, streamed, finished=True):
            raise InvalidState(
                f"tenant {tenant.name!r}: a listener cannot begin a pass while the call that it is told of is in "
                "progress; no pass was begun; begin it afterwards",
                tenant=tenant.name,
            )

    def _try_begin(
        self, tenant: TenantState, stream: object, bracket: object, streamed: Sequence[int], finished: bool = False
    ) -> bool:
        """Begin a pass, unless a change is in progress or has left something to finish first. finished: the caller has
        finished it just now; if a re-pointing has failed since, `wait` for its layer raises that."""
        turn = tenant.turn
        with turn.lock:
            if turn.open_pass is not None or tenant.leaving or tenant.detached or self.closed or not tenant.active:
                raise InvalidState(
                    f"tenant {tenant.name!r}: {self._why_not(tenant)}; no pass was begun", tenant=tenant.name
                )
            self.check_open()
            if tenant.source.verify is not None:
                tenant.from_masters = tenant.away()
                _verify_masters(tenant)
            if turn.claimed:
                return False
            unfinished = tenant.rest is not None or tenant.owed is not None or tenant.asleep
            if not finished and (unfinished or self._changes.failed_points(tenant)):
                return False
            run, filled = tenant.kv.reading(streamed) if streamed else (None, 0)
            turn.enter(bracket)  # before the pass begins, so that close() ends it even after an interrupt
            tenant.prefetcher.begin_pass(tenant.compute.begin(stream), [run] if run else [], filled)
            if tenant.unseen is not None:
                tenant.unseen.update(range(tenant.layers))
            return True

    def _why_not(self, tenant: TenantState) -> str:
        if self.closed:
            return "the session is closed"
        if tenant.detached:
            return "it was detached"
        if tenant.leaving:
            return "detaching it has failed; detach it again, or close the session"
        if tenant.turn.open_pass is not None:
            return "a pass is open"
        return "it is inactive; call session.activate() first"

    # -- end -------------------------------------------------------------------------------------------------------

    def close(self, tenant: TenantState) -> None:
        """Leave no pass open, however far it came. Can be called again."""
        try:
            prefetcher = tenant.live_prefetcher
            if prefetcher is not None and prefetcher.in_pass:
                tenant.timing.abandoned += 1  # without a shape its time teaches nothing
                prefetcher.end_pass()
        except Error:
            pass  # a stream that takes no events (it is being captured): the next pass abandons this one in the core
        finally:
            tenant.turn.leave()

    def end(self, tenant: TenantState, phase: str, tokens: int, kind: object, *error: object) -> None:
        """End the pass; kind, error: as for `__exit__`. Raises InvalidState as `Tenant.forward` says where its results must be
        discarded."""
        try:
            self._finish(tenant, phase, tokens, completed=kind is None)
        finally:
            nvtx.pop()
            # Last of all: from here on a change may claim this tenant and read the learnt times.
            self.close(tenant)

    def _traced(
        self, tenant: TenantState, phase: str, number: int, tokens: int, timings: Sequence[tuple[int, float, float]]
    ) -> None:
        """timings: of passes of which the times have come, this one's or earlier ones'."""
        stats, (copies, nbytes, copy_s) = tenant.prefetcher.stats(), tenant.traced
        tenant.traced = stats.copies, stats.copied_bytes, stats.copy_s
        self._trace.add(
            "pass",
            tenant.name,
            tenant.began_s,
            phase,
            number=number,
            tokens=tokens,
            timed_passes=len(timings),
            waited_ms=1e3 * sum(stall_s for _, _, stall_s in timings),
            timed_ms=1e3 * sum(seconds for _, seconds, _ in timings),
            copies=stats.copies - copies,
            copied_bytes=stats.copied_bytes - nbytes,
            copies_ms=1e3 * (stats.copy_s - copy_s),
        )

    def _finish(self, tenant: TenantState, phase: str, tokens: int, completed: bool) -> None:
        if tenant.detached:
            if not completed:
                return  # the caller has an exception already
            raise InvalidState(f"tenant {tenant.name!r}: the session was closed inside of the pass", tenant=tenant.name)
        tenant.last_pass_s = self._clock()
        # No local name for the prefetcher: a traceback that a caller keeps would keep its events beyond the session's
        # end.
        timing = tenant.timing
        missed = [*filter(tenant.pages.computes, tenant.prefetcher.unwaited())] if completed else []
        number = tenant.prefetcher.end_pass()
        tenant.bounds.plan_growth()
        if completed and not missed:
            timing.completed(number, phase, tokens)
        else:
            timing.abandoned += 1  # without a shape its time teaches nothing
        timings = tenant.prefetcher.take_timings()
        if tenant.began_s:
            self._traced(tenant, phase if completed else "abandoned", number, tokens, timings)
        for timed, seconds, stall_s in timings:
            compute_s = timing.take(tenant.prefetcher.stats(), timed, seconds, stall_s)
            if compute_s is not None and not tenant.by_hand:
                self._stalls.add(
                    tenant.number,
                    compute_s,
                    stall_s,
                    predicted_s=tenant.predicted_stall_s,
                    slowdown=tenant.config.slowdown,
                    active=self.active_numbers,
                )
        if not completed:
            return
        if missed:
            raise InvalidState(
                f"tenant {tenant.name!r}: the pass did not wait for layers {missed}, which were streamed or loading, "
                "so its results of them are not known; the pass has ended and its results, KV included, must be "
                "discarded; call the layers as modules, with their hooks in place, or call wait and done for every "
                "layer in every pass",
                tenant=tenant.name,
                layer=missed[0],
                layers=tuple(missed),
            )
        if tenant.unseen is not None and not tenant.unseen:
            tenant.unseen = None
            if tenant.handle is not None:
                tenant.handle.whole_pass_seen()
        if tenant.from_masters:
            _verify_masters(tenant)
        if tenant.streamed or tenant.pages.elsewhere:
            tenant.refuse_lost_writes()


def _verify_masters(tenant: TenantState) -> None:
    """Raises InvalidState (fields file, expected, found) if a weights file that layers of this pass come from has
    changed.

    The tenant can then only be detached: the bytes copied since are not known, so those layers count as not at home.
    """
    if tenant.changed_file is None and tenant.source.verify is not None:
        try:
            tenant.source.verify(tenant.from_masters)
        except InvalidState as error:
            tenant.absent.update(tenant.from_masters)
            tenant.changed_file = error
    if tenant.changed_file is not None:
        raise InvalidState(str(tenant.changed_file), **tenant.changed_file.fields, tenant=tenant.name)
