# SPDX-License-Identifier: Apache-2.0
"""KV that moves when groups change: which instance sends which layers of which request where, in chunks behind activations.

All instances of a change take part, joined by a mesh. KV that an instance had computed before lies in its old places
(`Departure`) until it is not needed any more; then the physical blocks go to whatever the instance is now. One request after
another:

    old head   Handover to all: its unfinished requests, with the old logical blocks of each, and who goes on with it
    new head   takes blocks of the new group for the request, and says Move; or Forget, if it is computed again: because that
               is cheaper (`policy.cluster.exchange.resumptions`), or because there is no room
    members    of the old group send each layer to the member that computes it in the new group, as Pieces, and copy KV that stays
    receivers  count the bytes that they have written; with all of it they say Done
    new head   lets the request run on when every stage with layers is done; when it waits for nothing more, it says Over

An instance is through when it has handed everything on and every new head said Over. No instances wait for each other in a
circle: pieces are sent from a copy by a thread of their own, and received in full before they are looked at.

The loop thread of the instance owns this object; `sent` is called by it too, when the sender thread says so. It calls the new
group's head (`RequestTaker`), and nothing above. Physical blocks that the old group does not need any more are fetched with
`take_freed`, and then `pump` may find room.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remap.errors import InvalidState
from remap_serve.cluster.slots import Departure, Places
from remap_serve.cluster.transport import bytes_of, tensor_of
from remap_serve.cluster.wire import Forget, Handed, Handover, KVComplete, Message, Move, Over, Piece
from remap_serve.policy.cluster.exchange import Running, resumptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from remap_serve.cluster.stage_kv import StageKV
    from remap_serve.policy.cluster.lookahead import ChunkCost
    from remap_serve.policy.cluster.pipeline import Network

__all__ = ["Exchange", "RequestTaker", "Run"]


class Run(NamedTuple):
    """The member with this rank in the mesh computes the layers first <= i < end."""

    rank: int
    first: int
    end: int


class RequestTaker(Protocol):
    """The calls that an exchange makes of a new head (`head.Head`) for the requests that it takes over."""

    @property
    def ready(self) -> bool:
        """Whether it knows how much room there is."""
        ...

    def room(self, blocks: int) -> list[int] | None:
        """`blocks` blocks of the new group; None if it has no room now."""
        ...

    def unused(self, blocks: list[int]) -> None:
        """Blocks of `room` that are not needed any more."""
        ...

    def adopt(self, handed: Handed, computed: int, blocks: list[int]) -> None:
        """The request runs on: these blocks hold the KV of `computed` of its tokens. Without any it is computed again."""
        ...


class _Send(NamedTuple):
    """One piece that has not been sent: of request `id`, blocks number `begin` to `stop` of what moves."""

    id: str
    owner: int
    to: Run
    begin: int
    stop: int
    last: bool


class Exchange:
    """One instance's part in one change.

    rank: its own; members: how many there are. old: where its old KV is, held: in which physical blocks. heads: ranks of the
    old heads; head: that of its own old group. runs: of each new head, which member computes what in its group. new, places:
    where KV goes here; None, None without layers. taker: if the instance is a new head. send(to, message, payload): enqueue;
    `sent` is called for each payload, in their order. chunk_bytes: of a piece at most, or a block of a layer run; while fewer are
    on their way from here, the next goes.
    """

    def __init__(
        self,
        rank: int,
        members: int,
        *,
        old: StageKV,
        departing: Callable[[dict[str, Sequence[int]]], Departure],
        heads: Iterable[int],
        head: int,
        before: dict[int, list[Run]],
        runs: dict[int, list[Run]],
        new: StageKV,
        places: Places,
        taker: RequestTaker | None,
        send: Callable[[int, Message, torch.Tensor | None], None],
        network: Network,
        cost: ChunkCost,
        chunk_bytes: int,
    ) -> None:
        self._rank = rank
        self._others = [other for other in range(members) if other != rank]
        self._old, self._new, self._places = old, new, places
        self._departing = departing
        self._departure: Departure | None = None
        self._heads, self._head = set(heads), head
        self._before, self._runs = before, runs
        self._taker = taker
        self._send = send
        self._network, self._cost = network, cost
        self.chunk_bytes = chunk_bytes
        self._early: list[tuple[int, Move | Forget]] = []  # that came before its own head's handover
        self._pieces: deque[_Send] = deque()
        self._moves: dict[str, list[int]] = {}  # of what leaves from here: the new blocks
        # Bytes of the pieces that were given to `send` and have not left; and of all.
        self._sending: deque[int] = deque()
        self._sending_bytes = 0
        self._written: dict[str, int] = {}
        # As a new head: not decided yet, with the head that it comes from.
        self._coming: dict[str, tuple[Handed, int]] = {}
        self._queue: deque[tuple[str, bool]] = deque()
        self._freed: list[int] = []  # physical blocks
        self._transit: dict[str, tuple[Handed, list[int], int]] = {}  # blocks, and how many stages are not done
        self._cancelled: set[str] = set()
        self._takers = set(runs)
        self._ordered = self._said_over = False

    # -- state -------------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Nothing is left to send or to wait for, here and at any new head."""
        gone = self._departure is not None and not self._departure.live and not self._freed
        return gone and not self._takers and not self._pieces and not self._sending and not self._heads

    @property
    def busy(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._pieces) and self._sending_bytes < self.chunk_bytes

    @property
    def stalled(self) -> list[Handed]:
        """As a new head: requests that do not run yet, the oldest first."""
        return [*(each for each, _, _ in self._transit.values()), *(each for each, _ in self._coming.values())]

    def attempt(self, id: str) -> int | None:
        """Of a stalled request; None for others."""
        stalled = self._transit.get(id) or self._coming.get(id)
        return None if stalled is None else stalled[0].attempt

    def cancel(self, id: str) -> Handed | None:
        """As a new head: take a stalled request out. None if it is not one of these."""
        if id in self._coming:
            handed, _ = self._coming.pop(id)
            self._tell(Forget(id))
            self.pump()
            return handed
        if id in self._transit:
            self._cancelled.add(id)  # its KV is on its way: it ends when that has come
            return self._transit[id][0]
        return None

    # -- messages ----------------------------------------------------------------------------------------------------------

    def on(self, source: int, message: Message, payload: torch.Tensor | None = None) -> None:
        """A message of the mesh, or one of its own."""
        match message:
            case Handover():
                self._handed(source, message)
            case Move() | Forget():
                if self._departure is None:
                    self._early.append((source, message))
                else:
                    self._leaves(source, message)
            case Piece() if payload is not None:
                self._write(message, tensor_of(payload, message.shape, message.dtype))
            case KVComplete(id):
                self._done(id)
            case Over():
                self._takers.discard(source)

    def hand_over(self, requests: list[Handed]) -> None:
        """As an old head: pass these on; nothing is in flight any more."""
        self._tell(Handover(requests))

    def sent(self) -> None:
        """The first payload of those that have not left has left."""
        self._sending_bytes -= self._sending.popleft()

    def take_freed(self) -> list[int]:
        """Physical blocks, since the last call, that the instance can use for something else."""
        freed, self._freed = self._freed, []
        return freed

    def step(self) -> int:
        """Send, or copy, one piece: its bytes; 0 if none can be sent now."""
        if not self.busy:
            return 0
        piece = self._pieces.popleft()
        assert self._departure is not None  # pieces are of what leaves
        old = self._departure.live[piece.id][piece.begin : piece.stop]
        firsts, first, end = self._departure.places.table(old), piece.to.first, piece.to.end
        data = self._old.read(firsts, first, end)
        blocks = self._moves[piece.id]
        payload, shape, dtype = bytes_of(data)
        part = blocks[piece.begin : piece.stop]
        message = Piece(piece.id, piece.owner, first, end, part, len(blocks), shape, dtype)
        if piece.last:
            # `data` is a copy: its source is not needed any more.
            del self._moves[piece.id]
            self._freed += self._departure.leave(piece.id)
        if piece.to.rank == self._rank:
            self._write(message, data)
        else:
            self._sending.append(payload.numel())
            self._sending_bytes += payload.numel()
            self._send(piece.to.rank, message, payload)
        return payload.numel()

    # -- as a member of an old group -----------------------------------------------------------------------------------------

    def _leaves(self, owner: int, message: Move | Forget) -> None:
        """Carry out the message for a request, if its KV is here."""
        departure = self._departure
        assert departure is not None
        if message.id not in departure.live:
            return
        if isinstance(message, Forget):
            self._freed += departure.leave(message.id)
            return
        self._moves[message.id] = message.blocks
        found = []
        for run in self._runs[owner]:
            first, end = max(run.first, self._old.first), min(run.end, self._old.end)
            if first >= end:
                continue
            stride = max(1, self.chunk_bytes // (self._old.slot_bytes * (end - first)))
            for begin in range(0, len(message.blocks), stride):
                stop = min(begin + stride, len(message.blocks))
                found.append(_Send(message.id, owner, Run(run.rank, first, end), begin, stop, False))
        # KV that stays comes last: until then its places are not free, and KV that goes has the network to wait for.
        found.sort(key=lambda piece: piece.to.rank == self._rank)
        if found:
            self._pieces += [*found[:-1], found[-1]._replace(last=True)]
        else:  # a stage without layers has nothing
            del self._moves[message.id]
            self._freed += departure.leave(message.id)

    # -- as a stage of a new group -------------------------------------------------------------------------------------------

    def _write(self, piece: Piece, data: torch.Tensor) -> None:
        self._new.write(self._places.table(piece.blocks), piece.first, piece.end, data)
        count = self._written.get(piece.id, 0) + len(piece.blocks) * (piece.end - piece.first)
        self._written[piece.id] = count
        if count < piece.total * (self._new.end - self._new.first):
            return
        del self._written[piece.id]
        if piece.owner == self._rank:
            self._done(piece.id)
        else:
            self._send(piece.owner, KVComplete(piece.id), None)

    # -- as a new head -------------------------------------------------------------------------------------------------------

    def _handed(self, source: int, message: Handover) -> None:
        self._heads.discard(source)
        if source == self._head:
            live = {each.id: each.blocks for each in message.requests if each.computed}
            self._departure = self._departing(dict(live))
            self._freed += self._departure.unused()
            early, self._early = self._early, []
            for owner, waited in early:
                self._leaves(owner, waited)
        for each in message.requests:
            if each.to == self._rank:
                if self.attempt(each.id) is not None:
                    raise InvalidState(
                        f"two heads hand request {each.id!r} over, attempts {self.attempt(each.id)} and {each.attempt}; recover",
                        request=each.id,
                    )
                self._coming[each.id] = each, source
        if self._taker is not None and not self._heads:
            self._order()
            self._ordered = True
            self.pump()

    def _order(self) -> None:
        """Those of whom little moves first, and those that are computed again last."""
        ids = list(self._coming)
        running = []
        for id in ids:
            handed, source = self._coming[id]
            blocks = len(handed.blocks)
            moved = sum(
                blocks * self._old.slot_bytes * max(0, min(run.end, its.end) - max(run.first, its.first))
                for its in self._before[source]
                for run in self._runs[self._rank]
                if its.rank != run.rank
            )
            running.append(Running(str(source), handed.computed, moved))
        for each in resumptions(running, self._network, self._cost):
            self._queue.append((ids[each.request], each.again))

    def pump(self, give_up: bool = False) -> None:
        """As a new head: decide about as many requests as there is room for. Call it when there may be more; and from time to
        time with `give_up`: where nothing moves that would make room, the last request gives its own up, which takes a while."""
        if self._taker is None or not self._ordered or not self._taker.ready:
            return
        self._decide(self._taker, give_up)
        if not self._queue and not self._transit and not self._said_over:
            self._said_over = True
            self._tell(Over())

    def _decide(self, taker: RequestTaker, give_up: bool) -> None:
        while self._queue:
            id, again = self._queue[0]
            if id not in self._coming:  # cancelled
                self._queue.popleft()
                continue
            handed, _ = self._coming[id]
            if again or not handed.computed:
                self._queue.popleft()
                self._anew(taker, id)
                continue
            blocks = taker.room(len(handed.blocks))
            if blocks is None:
                if not self._transit and give_up:
                    self._anew(taker, self._queue.pop()[0])
                return
            self._queue.popleft()
            del self._coming[id]
            stages = sum(run.first < run.end for run in self._runs[self._rank])
            self._transit[id] = handed, blocks, stages
            self._tell(Move(id, blocks))

    def _anew(self, taker: RequestTaker, id: str) -> None:
        """This request is computed again, if it was not cancelled."""
        if id not in self._coming:
            return
        handed, _ = self._coming.pop(id)
        if handed.computed:
            self._tell(Forget(id))
        taker.adopt(handed, 0, [])

    def _done(self, id: str) -> None:
        handed, blocks, left = self._transit[id]
        if left > 1:
            self._transit[id] = handed, blocks, left - 1
            return
        del self._transit[id]
        assert self._taker is not None  # it asked for the KV
        if id in self._cancelled:
            self._cancelled.discard(id)
            self._taker.unused(blocks)
        else:
            self._taker.adopt(handed, handed.computed, blocks)
        self.pump()

    def _tell(self, message: Message) -> None:
        """To all, itself included."""
        for other in self._others:
            self._send(other, message, None)
        self.on(self._rank, message)
