# SPDX-License-Identifier: Apache-2.0
"""One instance of a cluster: a stage of a group, always, if only of a group of one.

One thread, the loop, owns everything that computes: the member that the instance is now (`member`), with its passes, its
scheduler, its KV and its exchange. Calls of control and messages of peers come as entries of one queue, and each entry is
carried out between two passes; so nothing here is shared but the queue, what control has decided (`change`), and what `poll`
takes, which has a lock. In each round the loop does the following, work that others wait for first:

    1. commands, and messages of the ring (activations), that are there
    2. messages of the mesh (KV that comes, or layers), and pieces to send or to copy: about as many bytes as the network
       sends while a stage computes (KunServe, section 4.2)
    3. a microbatch to launch, if it is a head

So activations wait for a chunk of KV at most, and KV for one pass and the activations that are there; neither starves.

Each entry goes one way, down: from here to `passes` (microbatches), `own_layers` and `room` (layers that leave and come home),
`switch` (the next member) or the member's exchange; its result is returned.

`prepare` runs in its caller's thread, for it waits for others, and hands the loop two links that are ready. Peers may switch
sooner than this instance: messages for an epoch that is still to come wait in `_early`.

What can go wrong: a peer that is gone leaves the instance as it is, waiting for `recover`. An error of its own (the model's, the
session's) is raised by `poll`, again and again, until `recover`; and so is the loss of a peer when control has not said `recover`
for `timeout_s`: control sees processes that end, not connections that break. `poll` raises as well when the loop has been at one
thing for `HUNG` times as long: its reports are from before then.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from remap.cluster import beside, own_layers, passes, room
from remap.cluster.change import InstanceChanges
from remap.cluster.member import Member, alone
from remap.cluster.messages import Description, GroupPlan, InstanceReport, Tokens
from remap.cluster.prepared import Ears
from remap.cluster.resources import KVLost, Resources
from remap.cluster.switch import switch
from remap.cluster.transport import PeerLost, ServedStore
from remap.cluster.wire import (
    Cannot,
    Chosen,
    End,
    LayerPart,
    Microbatch,
    Room,
    Shrink,
    WantLayer,
    decode,
    encode,
    require_sendable,
)
from remap.errors import Error, InvalidArgument, InvalidState
from remap.inside import inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from remap.cluster.own_layers import ReportT
    from remap.cluster.prepared import PreparedGroup
    from remap.cluster.resources import Others
    from remap.engine.request import Request
    from remap.policy.cluster.pipeline import Network
    from remap.policy.cluster.restore import Copy

__all__ = ["ClusterInstance"]

STUCK_S = 0.02
"""Between two tries of a head whose requests find no blocks; after `engine.STUCK_STEPS` of them the first is stuck."""

HALTED_S = 1.0
"""Between two looks of an instance that waits for `recover` at how long it has."""

HUNG = 10
"""Times `timeout_s` that one round of the loop takes at most: else it hangs, in a driver or in a lock."""

IDLE_S = 0.1
"""Between two looks of an idle instance at its session, which may want to give pages back."""


class ClusterInstance:
    """See the module. model: a transformers causal LM whose layers the tenant owns, attached with hooks=False and KV in
    block_major layout. network: to other instances. host: under which others reach it. timeout_s: for others to come, and
    to take a message. others(tenant, moved): is called by the loop, between two passes, when the instance's own calls of the
    session have moved live blocks (old -> new) of another tenant; without it such a move fails the instance. The other arguments
    are the scheduler's.

    Measures some short passes. Raises InvalidArgument (field layout) for another layout, and (fields max_blocks, needed) if the
    KV region could not take the pages of all layers.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        session: Any,
        tenant: Any,
        network: Network,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 30.0,
        max_num_seqs: int = 32,
        max_batch_tokens: int = 512,
        decode_cost: int = 0,
        others: Others | None = None,
    ) -> None:
        self.name = name
        self._has = Resources(
            name, model, session, tenant, network, max_num_seqs, max_batch_tokens, decode_cost, others
        )
        self._store = ServedStore(host)
        self._timeout_s = timeout_s
        self._changes = InstanceChanges(name, host, Ears(self._from_ring, self._from_mesh, self._peer_lost), timeout_s)
        # Shared with callers' threads, under this lock: what `poll` takes.
        self._lock = threading.Condition()
        self._outputs: list[Tokens] = []
        self._report_taken = False
        self._failed: BaseException | None = None
        # When the loop began its round; inf while it waits. The loop writes it, `poll` reads it: one number.
        self._round_s = math.inf
        # The loop's.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._mesh_inbox: deque[tuple[int, Callable[[], None]]] = deque()  # with the bytes of each
        self._early: dict[int, list[Callable[[], None]]] = {}
        self._unmoved = 0  # microbatches that were launched since KV moved, during an exchange
        self._lost_s = 0.0
        self._recovered = 0  # the epoch of the last `recover`
        self._closing = False
        self._now = alone(self._has, 0)
        self._report = self._now.report()
        self._thread = threading.Thread(target=self._loop, name=f"instance {name}", daemon=True)
        self._thread.start()
        # A thread that computes while the interpreter ends aborts the process (see transport.py).
        atexit.register(self.close)

    # -- what control asks ---------------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """The instance's name and capacity."""
        has = self._has
        return Description(
            self.name,
            has.fingerprint,
            has.model,
            has.memory_bytes,
            self._store.address,
            os.getpid(),
            has.host_bytes_per_s,
            epoch=self._changes.newest,
        )

    def prepare(self, plan: GroupPlan) -> None:
        """Check the plan and meet the other instances of the change; go on serving as before. Waits for them.

        Raises, with nothing changed: StalePlan (fields plan_epoch, epoch) for an epoch that is over or was aborted;
        InvalidArgument (field instance; or differs, expected, got) for a plan without this instance, of another model, or
        from groups other than the present ones; IncompleteCopy; InvalidState while KV still moves, (field layers) if it
        does not hold the layers that it is to compute, or (field neighbours) if another model's KV lies in its layers' pages;
        PeerLost if the others do not come.
        """
        self._changes.prepare(plan, self._now, lambda: self._ask(lambda: beside.check(self._now)))

    def commit(self, epoch: int) -> None:
        """Switch to the prepared plan at the next pass boundary; the reports show when it has. A second call does nothing. Raises
        StalePlan (fields plan_epoch, epoch) if this epoch is not prepared; nothing changed then."""
        prepared = self._changes.commit(epoch)
        if prepared is not None:
            self._inbox.put(partial(self._begin_switch, prepared))
            self._store.forget(epoch)

    def abort(self, epoch: int) -> None:
        """Undo the preparations for this epoch, and refuse it from now on. Nothing else happens; an epoch that was
        committed goes on."""
        if self._changes.abort(epoch):
            self._store.forget(epoch)
            self._inbox.put(lambda: own_layers.unfetch(self._now, epoch))

    def fetch(self, epoch: int, copies: Iterable[Copy]) -> None:
        """Make room for the layers that `copies` names for this instance and bring them home, while it serves; the reports show
        when they are. Each comes from the source that is named, if that is in its group; else from the host's master copy.

        Raises StalePlan as `prepare` does, and InvalidState while KV still moves.
        """
        self._changes.require_newer(epoch)
        named = {each.layer: each.source for each in copies if each.instance == self.name and each.source is not None}
        self._ask(partial(self._fetch, epoch, named))

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Forget every request and serve alone from this epoch on. Returns the ids of the requests that were here. Raises
        StalePlan (fields plan_epoch, epoch) unless it is above the instance's own; nothing changed then."""
        ids: tuple[str, ...] = self._ask(partial(self._recover, epoch))
        return ids

    def submit(self, request: Request, attempt: int, tokens: Sequence[int] = (), epoch: int | None = None) -> None:
        """Queue a request behind the tokens that it has generated until now. epoch: of this instance, when the request was sent
        to it; None: now.

        Raises, with nothing queued: InvalidState (field instance) if this is no head, is about to hand over, has recovered since
        that epoch (fields epoch, recovered), or still has an older attempt; InvalidArgument for a request that the model cannot
        serve, or whose id is in use.
        """
        self._ask(partial(self._submit, request, attempt, tuple(tokens), epoch))

    def cancel(self, id: str, attempt: int | None = None) -> None:
        """Take a request out; its end comes with the reason "abort". attempt: not if a later one is here. Unknown ids are
        ignored."""
        self._inbox.put(partial(self._cancel, id, attempt))

    def release(self, id: str) -> int | None:
        """Forget a request without an answer, if it is still stuck (`InstanceReport.stuck`): its attempt. None for others."""
        attempt: int | None = self._ask(partial(self._release, id))
        return attempt

    def give_up(self, id: str) -> None:
        """End a request with the reason "out_of_blocks", if it is still stuck (`InstanceReport.stuck`). Others are ignored."""
        self._inbox.put(partial(self._give_up, id))

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Tokens], InstanceReport]:
        """The tokens computed since the last call, and a report. Waits for `timeout_s` for any tokens.

        Raises what ended the loop's work, after the tokens before it were taken: the instance has to `recover`, or go. And
        InvalidState (fields instance, busy_s) if the loop hangs: it has to go.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._outputs or self._failed is not None, timeout_s)
            outputs, self._outputs = self._outputs, []
            if self._failed is not None and not outputs:
                raise self._failed
            busy_s = time.monotonic() - self._round_s
            if busy_s > HUNG * self._timeout_s and not outputs:
                raise InvalidState(
                    f"instance {self.name!r} has been in one round of its loop for {busy_s:.0f} s: it hangs; end its process",
                    instance=self.name,
                    busy_s=busy_s,
                )
            self._report_taken = True
            return outputs, self._report

    def counts(self) -> dict[str, float]:
        """Since this instance began: passes, computing_s (pipeline_computing_s of it as a stage of several), pipeline_s (for
        which it was one), activation_bytes, kv_sent_bytes and layers_sent_bytes (sent to others), layer_bytes (copied from the
        host's master copies), swapped_bytes (KV to host memory and back); started_requests, queue_s and preemptions (`Counts`).
        As of now, or of a moment ago."""
        tenant = inside(self._has.tenant)
        kv = tenant.kv
        return self._has.counts.as_dict(tenant.stats().copied_bytes, kv.copied_out_bytes + kv.copied_in_bytes)

    def exclusively(self, call: Callable[[], ReportT]) -> ReportT:
        """Carry out a call of the session for its other tenants, `activate` or `step`: its report. When they take back pages that
        they lent, this instance's blocks move: that has to happen between two of its passes, and be followed. Where blocks have
        no room any more, the youngest requests lose theirs.

        Raises what the call raises, but OutOfBlocks only where no request of this instance has blocks any more; KVLost (fields
        instance, moved) if blocks moved that cannot be followed, and then `poll` raises that as well. And InvalidState (field
        instance), with nothing changed, while a change of groups is prepared or carried out: it goes by what the
        others have now.
        """

        def between() -> ReportT:
            if self._changes.pending(self._now.epoch):
                raise InvalidState(
                    f"{self.name!r} is about to change its group; nothing changed; call again when it serves",
                    instance=self.name,
                )
            return own_layers.following(self._now, call)

        report: ReportT = self._ask(between)
        return report

    def close(self) -> None:
        """End the loop and leave the group. The session and its tenant stay the caller's. A second call does nothing; at the
        interpreter's end it is called, if it was not before. Raises InvalidState (field instance) if the loop hangs (see
        `poll`)."""
        self._inbox.put(self._close)
        self._thread.join(HUNG * self._timeout_s)
        if self._thread.is_alive():
            raise InvalidState(
                f"instance {self.name!r} did not end its loop within {HUNG * self._timeout_s:g} s: it hangs; end its process",
                instance=self.name,
            )
        atexit.unregister(self.close)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Carry this out in the loop, between two passes: its result, or what it raises."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except KVLost as error:
                self._fail(error)
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001
                answer.set_exception(error)  # the caller's, whatever it is; the loop goes on

        self._inbox.put(run)
        while not answer.done() and self._thread.is_alive():
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                continue  # the loop is in a long pass, or has ended
        if not answer.done():
            raise InvalidState(f"instance {self.name!r} is closed; nothing changed", instance=self.name)
        return answer.result()

    # -- in threads of links -------------------------------------------------------------------------------------------------

    def _from_ring(self, epoch: int, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        self._inbox.put(partial(self._when, epoch, partial(self._on_ring, header, payload)))

    def _from_mesh(self, epoch: int, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        item = partial(self._when, epoch, partial(self._on_mesh, source, header, payload))
        self._inbox.put(partial(self._mesh_inbox.append, (0 if payload is None else payload.numel(), item)))

    def _peer_lost(self, epoch: int, error: PeerLost) -> None:
        self._inbox.put(partial(self._when, epoch, partial(self._on_lost, error)))

    def _piece_sent(self, epoch: int) -> None:
        self._inbox.put(partial(self._when, epoch, self._on_sent))

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            self._round_s = time.monotonic()
            try:
                if self._round():
                    self._update_report(busy=True)
                else:
                    self._update_report()
                    self._wait()
            except PeerLost as error:
                self._on_lost(error)
            except Exception as error:  # noqa: BLE001
                # Whatever it was, the state of the group is not known now: nothing goes on before `recover`.
                self._fail(error)

    def _wait(self) -> None:
        """Until something comes; or for a short time, where time alone may change something."""
        now = self._now
        head, exchange, timeout_s = now.head, now.exchange, None
        if self._halted:
            timeout_s = HALTED_S if self._failed is None else None
        elif head is not None and not head.in_flight and (exchange is not None or not head.idle):
            timeout_s = STUCK_S
        elif now.alone and self._has.tenant.remapped:
            timeout_s = IDLE_S
        self._round_s = math.inf
        try:
            item = self._inbox.get(timeout=timeout_s)
        except Empty:
            self._round_s = time.monotonic()
            if self._halted:
                pass
            elif exchange is not None:
                exchange.pump(give_up=True)
            elif head is not None and head.idle and now.alone:
                head.rest()
        else:
            self._round_s = time.monotonic()
            item()

    @property
    def _halted(self) -> bool:
        return self._now.lost is not None or self._failed is not None

    def _round(self) -> bool:
        """One round, as the module says; whether there may be more to do at once."""
        count = self._inbox.qsize()
        for _ in range(count):
            self._inbox.get_nowait()()
        if self._halted or self._closing:
            self._mesh_inbox.clear()
            self._tell_broken()
            return count > 0
        self._boundary()
        moved = self._move()
        tokens = passes.launch(self._now)
        self._emit(tokens or [])
        self._unmoved = 0 if moved else self._unmoved + (tokens is not None)
        if tokens is not None and not moved and self._now.exchange is not None:
            # Blocks that one request gave up have come round when as many microbatches as stages have.
            late = self._unmoved > len(self._now.stages)
            self._unmoved = 0 if late else self._unmoved
            self._now.exchange.pump(give_up=late)
        return moved or tokens is not None or count > 0

    def _move(self) -> bool:
        """KV that comes and goes, or layers that do, a chunk of it; whether there was any. Without either, what comes is for a
        later epoch, or for none."""
        exchange = self._now.exchange
        moving = self._now.copies if exchange is None else exchange
        did, left = False, 1 if moving is None else moving.chunk_bytes
        while left > 0:
            if self._mesh_inbox:
                nbytes, item = self._mesh_inbox.popleft()
                item()
            elif moving is not None and moving.busy:
                nbytes = moving.step()
            else:
                break
            left -= nbytes
            did = True
        did = room.reuse(self._now) or did
        if exchange is not None and exchange.over:
            self._now.end_exchange()
            return True
        return did

    def _boundary(self) -> None:
        """Carry out what waits for the end of all passes."""
        now = self._now
        head = now.head
        if head is not None and head.draining and not head.in_flight:
            if now.shrinking:
                own_layers.shrink(now)
            elif now.next is not None:
                if now.ring is not None:
                    now.forward(encode(End(now.next.plan.epoch)))
                self._switch(now.next)
        elif head is None and now.next is not None and now.ended == now.next.plan.epoch:
            self._switch(now.next)

    def _when(self, epoch: int, item: Callable[[], None]) -> None:
        """Carry out what belongs to this epoch: now, when it has come, or never."""
        if epoch == self._now.epoch:
            if not self._halted:
                item()
        elif epoch > self._now.epoch:
            self._early.setdefault(epoch, []).append(item)

    def _update_report(self, busy: bool = False) -> None:
        """Say how things are; while busy only if control took the last report, for that takes as long as there are requests."""
        if busy and not self._report_taken:
            return
        report = replace(self._now.report(), counts=self._report.counts if self._halted else self.counts())
        if self._now.alone and not self._halted:
            report = replace(report, offers=beside.offers(self._now))
        with self._lock:
            self._report, self._report_taken = report, False

    def _emit(self, tokens: list[Tokens]) -> None:
        if tokens:
            with self._lock:
                self._outputs += tokens
                self._lock.notify_all()

    # -- messages, one by one --------------------------------------------------------------------------------------------------

    def _on_ring(self, header: bytes, payload: torch.Tensor | None) -> None:
        now, message = self._now, decode(header)
        match message:
            case Microbatch() if payload is not None and now.part.first < now.part.end:
                self._emit(passes.compute(now, message, payload))
            case Chosen(lane, choice) if now.head is not None:
                self._emit(passes.land(now, lane, choice))
            case Room() if now.head is not None:
                room.hear(now, message)
                if now.exchange is not None:
                    now.exchange.pump()
            case Shrink() if now.head is not None:
                pass  # it has been round: every stage has done it
            case Shrink():
                own_layers.give_up(now, message)
                now.forward(header)
            case End(epoch):
                if now.place + 1 < len(now.stages):
                    now.forward(header)
                now.ended = epoch
                prepared = self._changes.ended(epoch)
                if prepared is not None:
                    self._begin_switch(prepared)
            case _:
                now.forward(header, payload)  # not for a stage without layers, or for the head

    def _on_mesh(self, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        now, message = self._now, decode(header)
        if isinstance(message, WantLayer | LayerPart | Cannot):
            came = None if now.copies is None else now.copies.on(source, message, payload)
            if came is not None:
                own_layers.came(now, *came)
        elif now.exchange is not None:
            now.exchange.on(source, message, payload)

    def _on_sent(self) -> None:
        now = self._now
        if now.exchange is not None:
            now.exchange.sent()
        elif now.copies is not None:
            now.copies.sent()

    def _on_lost(self, error: PeerLost) -> None:
        if self._now.lost is None:
            self._now.lost, self._lost_s = error, time.monotonic()

    def _tell_broken(self) -> None:
        """A peer is gone and control does not say `recover`: perhaps it lives, and the connection alone is broken. `poll` says so
        then."""
        lost = self._now.lost
        if lost is not None and self._failed is None and time.monotonic() - self._lost_s > self._timeout_s:
            self._fail(lost)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed = error
            self._lock.notify_all()

    # -- commands, one by one --------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, attempt: int, tokens: tuple[int, ...], epoch: int | None) -> None:
        now = self._now
        if now.head is None or now.next is not None or self._halted:
            raise InvalidState(
                f"instance {self.name!r} schedules nothing now: it is no head, or hands over; nothing was queued; submit "
                "to the head of its group",
                instance=self.name,
            )
        if epoch is not None and epoch < self._recovered:
            # It came after `recover`, which was to forget it: the sender has started it again elsewhere since.
            raise InvalidState(
                f"instance {self.name!r} has recovered at epoch {self._recovered}, and request {request.id!r} was sent to it "
                f"at {epoch}; nothing was queued; submit it again",
                instance=self.name,
                epoch=epoch,
                recovered=self._recovered,
            )
        require_sendable(request)
        here = self._attempt(request.id)
        if here is not None and here < attempt:
            self._cancel(request.id)
            raise InvalidState(
                f"an older attempt of request {request.id!r} was here and is cancelled; nothing was queued; submit it again",
                instance=self.name,
            )
        if here is not None:
            raise InvalidArgument(f"request id {request.id!r} is in use; nothing was queued", id=request.id)
        now.head.submit(request, attempt, tokens)

    def _attempt(self, id: str) -> int | None:
        """Of a request that is here; None for others."""
        now = self._now
        waits = None if now.exchange is None else now.exchange.attempt(id)
        return waits if waits is not None or now.head is None else now.head.attempt(id)

    def _cancel(self, id: str, attempt: int | None = None) -> None:
        now, here = self._now, self._attempt(id)
        if self._halted or (attempt is not None and here is not None and here > attempt):
            return
        handed = None if now.exchange is None else now.exchange.cancel(id)
        if handed is not None:
            self._emit([Tokens(id, handed.attempt, len(handed.tokens), (), "abort")])
        elif now.head is not None:
            self._emit(now.head.cancel(id))

    def _release(self, id: str) -> int | None:
        ends = [] if self._now.head is None or self._halted else self._now.head.give_up(id)
        return ends[0].attempt if ends else None

    def _give_up(self, id: str) -> None:
        if self._now.head is not None and not self._halted:
            self._emit(self._now.head.give_up(id))

    def _fetch(self, epoch: int, named: dict[int, str]) -> None:
        now = self._now
        if now.exchange is not None or now.next is not None:
            raise InvalidState(
                f"KV of the last change still moves at {self.name!r}; nothing changed; fetch when it serves",
                instance=self.name,
            )
        ranks = {} if now.mesh is None else {name: rank for rank, name in enumerate(now.mesh.names)}
        mine = range(now.part.first, now.part.end)
        sources = {
            layer: ranks[name]
            for layer, name in named.items()
            if name in ranks and layer not in mine and self._has.layer_bytes(layer)
        }
        own_layers.fetch(now, epoch, sources)

    def _begin_switch(self, prepared: PreparedGroup) -> None:
        if prepared.plan.epoch <= self._now.epoch:  # it has recovered since
            prepared.close()
            return
        self._now.next = prepared
        if self._now.head is not None:
            self._now.head.draining = True

    def _switch(self, prepared: PreparedGroup) -> None:
        epoch = prepared.plan.epoch
        self._become(switch(self._now, prepared, partial(self._piece_sent, epoch)))
        for item in self._early.pop(epoch, ()):
            item()
        self._early = {later: items for later, items in self._early.items() if later > epoch}

    def _recover(self, epoch: int) -> tuple[str, ...]:
        self._changes.recover(epoch)
        self._recovered = epoch
        self._store.forget(epoch)
        old, kv = self._now, inside(self._has.tenant).kv
        ids = [] if old.head is None else [id for id, _ in old.head.requests]
        ids += [] if old.exchange is None else [each.id for each in old.exchange.stalled]
        old.leave()
        self._mesh_inbox.clear()
        self._early.clear()
        try:
            kv.free(kv.pool.live_ids())
        except Error:
            # A copy to or from host memory has failed, of KV that no request needs any more. None is in flight now.
            kv.free(kv.pool.live_ids())
        kv.free_host(kv.host.live_ids())
        self._become(alone(self._has, epoch))
        with self._lock:
            self._failed = None
        own_layers.hold(self._now, 0, self._has.layers)
        return tuple(ids)

    def _become(self, member: Member) -> None:
        self._now = member
        self._has.counts.note_group(member.alone)

    def _close(self) -> None:
        self._closing = True
        self._changes.close()
        self._now.leave()
