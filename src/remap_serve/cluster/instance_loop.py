# SPDX-License-Identifier: Apache-2.0
"""The loop of one instance, in which everything happens that computes.

One thread owns the member that the instance is now (`member`), with its passes, its scheduler, its KV and its exchange. Calls of
control and messages of peers come as entries of one queue, and each entry is carried out between two passes. In each round the
loop does the following, work that others wait for first:

    1. commands, and messages of the ring (activations), that are there
    2. messages of the mesh (KV that comes, or layers), and pieces to send or to copy: about as many bytes as the network
       sends while a stage computes (KunServe, section 4.2)
    3. a microbatch to launch, if it is a head

So activations wait for a chunk of KV at most, and KV for one pass and the activations that are there; neither starves. Peers may
switch sooner than this instance: messages for an epoch that is still to come wait in `_early`.

What can go wrong: a peer that is gone leaves the instance as it is, waiting for `recover`. An error of its own (the model's, the
session's) is raised by `poll`, again and again, until `recover`; and so is the loss of a peer when control has not said `recover`
for `timeout_s`: control sees processes that end, not connections that break. `poll` raises as well when the loop has been at one
thing for `HUNG` times as long: its reports are from before then.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from remap.errors import Error, InvalidState
from remap.internals import internals
from remap_serve.cluster import beside, own_layers, passes, room
from remap_serve.cluster.change import InstanceChanges
from remap_serve.cluster.member import Member, alone
from remap_serve.cluster.outbox import Outbox
from remap_serve.cluster.prepared import Ears
from remap_serve.cluster.resources import KVLost
from remap_serve.cluster.switch import switch
from remap_serve.cluster.transport import PeerLost
from remap_serve.cluster.wire import (
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
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from remap_serve.cluster.messages import Tokens
    from remap_serve.cluster.prepared import PreparedGroup
    from remap_serve.cluster.resources import Resources

__all__ = ["InstanceLoop"]

STUCK_S = 0.02
"""Between two tries of a head whose requests find no blocks; after `engine.STUCK_STEPS` of them the first is stuck."""

HALTED_S = 1.0
"""Between two looks of an instance that waits for `recover` at how long it has."""

IDLE_S = 0.1
"""Between two looks of an idle instance at its session, which may want to give pages back."""


class InstanceLoop:
    """Of an instance with these resources. host, timeout_s: see `ClusterInstance`. `begin_switch`, `recover` and `close` are
    for entries of the queue alone."""

    def __init__(self, has: Resources, host: str, timeout_s: float) -> None:
        self.name = has.name
        self.now = alone(has, 0)
        """The member that the instance is."""
        self.changes = InstanceChanges(
            has.name, host, Ears(self._from_ring, self._from_mesh, self._peer_lost), timeout_s
        )
        self.outbox = Outbox(has.name, self.now.report())
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.recovered = 0
        """The epoch of the last `recover`."""
        self._has = has
        self._timeout_s = timeout_s
        self._mesh_inbox: deque[tuple[int, Callable[[], None]]] = deque()  # with the bytes of each
        self._early: dict[int, list[Callable[[], None]]] = {}
        self._unmoved = 0  # microbatches that were launched since KV moved, during an exchange
        self._lost_s = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"instance {has.name}", daemon=True)
        self._thread.start()

    @property
    def halted(self) -> bool:
        """Nothing goes on before `recover`."""
        return self.now.lost is not None or self.outbox.failed is not None

    def join(self, timeout_s: float) -> bool:
        """Wait for its end. Whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def counts(self) -> dict[str, float]:
        """See `ClusterInstance.counts`."""
        tenant = internals(self._has.tenant)
        kv = tenant.kv
        return self._has.counts.as_dict(tenant.stats().copied_bytes, kv.copied_out_bytes + kv.copied_in_bytes)

    def ask(self, call: Callable[[], Any]) -> Any:
        """Carry this out in the loop, between two passes: its result, or what it raises."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except KVLost as error:
                self.outbox.fail(error)
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001
                answer.set_exception(error)  # the caller's, whatever it is; the loop goes on

        self.inbox.put(run)
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
        self.inbox.put(partial(self._when, epoch, partial(self._on_ring, header, payload)))

    def _from_mesh(self, epoch: int, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        item = partial(self._when, epoch, partial(self._on_mesh, source, header, payload))
        self.inbox.put(partial(self._mesh_inbox.append, (0 if payload is None else payload.numel(), item)))

    def _peer_lost(self, epoch: int, error: PeerLost) -> None:
        self.inbox.put(partial(self._when, epoch, partial(self._on_lost, error)))

    def _piece_sent(self, epoch: int) -> None:
        self.inbox.put(partial(self._when, epoch, self._on_sent))

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self.outbox.round_s = time.monotonic()
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
                self.outbox.fail(error)

    def _wait(self) -> None:
        """Until something comes; or for a short time, where time alone may change something."""
        now = self.now
        head, exchange, timeout_s = now.head, now.exchange, None
        if self.halted:
            timeout_s = HALTED_S if self.outbox.failed is None else None
        elif head is not None and not head.in_flight and (exchange is not None or not head.idle):
            timeout_s = STUCK_S
        elif now.alone and self._has.tenant.remapped:
            timeout_s = IDLE_S
        self.outbox.round_s = math.inf
        try:
            item = self.inbox.get(timeout=timeout_s)
        except Empty:
            self.outbox.round_s = time.monotonic()
            if self.halted:
                pass
            elif exchange is not None:
                exchange.pump(give_up=True)
            elif head is not None and head.idle and now.alone:
                head.rest()
        else:
            self.outbox.round_s = time.monotonic()
            item()

    def _round(self) -> bool:
        """One round, as the module says; whether there may be more to do at once."""
        count = self.inbox.qsize()
        for _ in range(count):
            self.inbox.get_nowait()()
        if self.halted or self._closing:
            self._mesh_inbox.clear()
            self._tell_broken()
            return count > 0
        self._boundary()
        moved = self._move()
        tokens = passes.launch(self.now)
        self.outbox.put(tokens or [])
        self._unmoved = 0 if moved else self._unmoved + (tokens is not None)
        if tokens is not None and not moved and self.now.exchange is not None:
            # Blocks that one request gave up have come round when as many microbatches as stages have.
            late = self._unmoved > len(self.now.stages)
            self._unmoved = 0 if late else self._unmoved
            self.now.exchange.pump(give_up=late)
        return moved or tokens is not None or count > 0

    def _move(self) -> bool:
        """KV that comes and goes, or layers that do, a chunk of it; whether there was any. Without either, what comes is for a
        later epoch, or for none."""
        exchange = self.now.exchange
        moving = self.now.copies if exchange is None else exchange
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
        did = room.reuse(self.now) or did
        if exchange is not None and exchange.over:
            self.now.end_exchange()
            return True
        return did

    def _boundary(self) -> None:
        """Carry out what waits for the end of all passes."""
        now = self.now
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
        if epoch == self.now.epoch:
            if not self.halted:
                item()
        elif epoch > self.now.epoch:
            self._early.setdefault(epoch, []).append(item)

    def _update_report(self, busy: bool = False) -> None:
        """Say how things are; while busy only if control took the last report, for that takes as long as there are requests."""
        if busy and not self.outbox.taken:
            return
        report = replace(self.now.report(), counts=self.outbox.report.counts if self.halted else self.counts())
        if self.now.alone and not self.halted:
            report = replace(report, offers=beside.offers(self.now))
        self.outbox.show(report)

    # -- messages, one by one --------------------------------------------------------------------------------------------------

    def _on_ring(self, header: bytes, payload: torch.Tensor | None) -> None:
        message = decode(header)
        if isinstance(message, End):
            self._on_end(header, message.epoch)
        else:
            self.outbox.put(_from_ring(self.now, message, header, payload))

    def _on_end(self, header: bytes, epoch: int) -> None:
        """The ring is at its end, for this epoch: nothing of the group comes behind it."""
        now = self.now
        if now.place + 1 < len(now.stages):
            now.forward(header)
        now.ended = epoch
        prepared = self.changes.ended(epoch)
        if prepared is not None:
            self.begin_switch(prepared)

    def _on_mesh(self, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        """Of any instance of the change, by its rank: KV, or layers."""
        member, message = self.now, decode(header)
        if isinstance(message, WantLayer | LayerPart | Cannot):
            came = None if member.copies is None else member.copies.on(source, message, payload)
            if came is not None:
                own_layers.came(member, *came)
        elif member.exchange is not None:
            member.exchange.on(source, message, payload)

    def _on_sent(self) -> None:
        """A piece that this member sent is on its way."""
        if self.now.exchange is not None:
            self.now.exchange.sent()
        elif self.now.copies is not None:
            self.now.copies.sent()

    def _on_lost(self, error: PeerLost) -> None:
        if self.now.lost is None:
            self.now.lost, self._lost_s = error, time.monotonic()

    def _tell_broken(self) -> None:
        """A peer is gone and control does not say `recover`: perhaps it lives, and the connection alone is broken. `poll` says so
        then."""
        lost = self.now.lost
        if lost is not None and self.outbox.failed is None and time.monotonic() - self._lost_s > self._timeout_s:
            self.outbox.fail(lost)

    # -- commands, one by one --------------------------------------------------------------------------------------------------

    def begin_switch(self, prepared: PreparedGroup) -> None:
        """Become a member of this group at the end of all passes; not if the instance has recovered since."""
        if prepared.plan.epoch <= self.now.epoch:
            prepared.close()
            return
        self.now.next = prepared
        if self.now.head is not None:
            self.now.head.draining = True

    def _switch(self, prepared: PreparedGroup) -> None:
        epoch = prepared.plan.epoch
        self._become(switch(self.now, prepared, partial(self._piece_sent, epoch)))
        for item in self._early.pop(epoch, ()):
            item()
        self._early = {later: items for later, items in self._early.items() if later > epoch}

    def recover(self, epoch: int) -> tuple[str, ...]:
        """See `ClusterInstance.recover`."""
        self.changes.recover(epoch)
        self.recovered = epoch
        old, kv = self.now, internals(self._has.tenant).kv
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
        self.outbox.fail(None)
        own_layers.hold(self.now, 0, self._has.layers)
        return tuple(ids)

    def _become(self, member: Member) -> None:
        self.now = member
        self._has.counts.note_group(member.alone)

    def close(self) -> None:
        """The last entry."""
        self._closing = True
        self.changes.close()
        self.now.leave()


def _from_ring(member: Member, message: object, header: bytes, payload: torch.Tensor | None) -> list[Tokens]:
    """Of the stage before, but for `End`: the tokens that came of it."""
    match message:
        case Microbatch() if payload is not None and member.part.first < member.part.end:
            return passes.compute(member, message, payload)
        case Chosen(lane, choice) if member.head is not None:
            return passes.land(member, lane, choice)
        case Room() if member.head is not None:
            room.hear(member, message)
            if member.exchange is not None:
                member.exchange.pump()
        case Shrink() if member.head is not None:
            pass  # it has been round: every stage has done it
        case Shrink():
            own_layers.give_up(member, message)
            member.forward(header)
        case _:
            member.forward(header, payload)  # not for a stage without layers, or for the head
    return []
