"""One instance of a cluster: a stage of a group, always, if only of a group of one.

One thread, the loop, owns everything that computes: the tenant's passes, the head, the places of KV, the exchange. Calls of
control and messages of peers come as entries of one queue, and each entry is carried out between two passes; so nothing here is
shared but the queue, and what `poll` takes, which has a lock. In each round the loop prefers what others wait for:

    1. commands, and messages of the ring (activations)      2. a microbatch to launch, if it is a head
    3. one message of the mesh (KV that comes)               4. one piece of KV to send, or to copy

`prepare` runs in its caller's thread, for it waits for others, and hands the loop two links that are ready. Peers may switch
sooner than this instance: what they send for an epoch that is still to come waits in `_early`.

What can go wrong: a peer that is gone leaves the instance as it is, waiting for `recover`. An error of its own (the model's, the
session's) is raised by `poll`, again and again, until `recover`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import torch

import remap
from remap.cluster.exchange import Exchange, Run
from remap.cluster.head import Head, Limits
from remap.cluster.messages import Description, Fingerprint, GroupPlan, Part, Report, Tokens
from remap.cluster.own_layers import end_streaming, hold, streamable
from remap.cluster.pool import GroupPool
from remap.cluster.slots import Departure, Places, Slots, Whole
from remap.cluster.stage import Row, Stage, row_of
from remap.cluster.stage_kv import StageKV
from remap.cluster.transport import Link, PeerLost, ServedStore, bytes_of, connect, tensor_of
from remap.cluster.wire import (
    Chosen,
    End,
    Handed,
    Message,
    Microbatch,
    Room,
    Shrink,
    decode,
    encode,
)
from remap.engine.attention import decode_first
from remap.engine.models import decoder_of
from remap.errors import Error, InvalidArgument, InvalidState, OutOfBlocks, StalePlan
from remap.policy.activations import Line
from remap.policy.cluster.exchange import chunk_bytes
from remap.policy.cluster.lookahead import ChunkCost
from remap.policy.cluster.placement import NO_LAYER, Group, Layer, Model, Placement, check
from remap.policy.cluster.placement import Instance as Placed
from remap.policy.cluster.placement import Stage as PlacedStage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import nn

    from remap.engine.request import Request
    from remap.policy.cluster.pipeline import Network
    from remap.policy.cluster.restore import Copy

__all__ = ["ClusterInstance", "fingerprint_of"]

STUCK_S = 0.02
"""Between two tries of a head whose requests find no blocks; `engine.STUCK_STEPS` of them end the first request."""

IDLE_S = 0.1
"""Between two looks of an idle instance at its session, which may want to give pages back."""

PROBE_TOKENS = 64
"""Tokens of the longer of two passes that a stage's seconds are measured with."""


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """What has to be equal for two instances to compute parts of one model (see `Fingerprint`). Weights are not read."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())  # type: ignore[union-attr, operator]
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Fingerprint(digest.hexdigest(), dtype, remap.__version__, len(decoder_of(model).layers))


@dataclass(eq=False)
class _Prepared:
    """Links of a group that is to be. ring: None for a group of one; mesh: of all instances of the change."""

    plan: GroupPlan
    ring: Link | None
    mesh: Link | None

    def close(self) -> None:
        for link in (self.ring, self.mesh):
            if link is not None:
                link.close()


@dataclass(eq=False)
class _Now:
    """What the instance is between two changes; the loop's alone.

    slots: of a stage of several, with layers; else None. home: whether all layers are here. rooms, leaving: as a head, by
    stage: logical blocks that each has places for, and will have when layers come home. launched: by lane, the chunks in flight.
    """

    epoch: int
    stages: tuple[Part, ...]
    place: int
    kv: StageKV
    places: Places
    slots: Slots | None
    stage: Stage
    head: Head | None
    ring: Link | None
    home: bool
    rooms: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    shrinking: bool = False
    launched: dict[int, list[Any]] = field(default_factory=dict)
    arrived: frozenset[int] = frozenset()  # or on their way from the host: a pass that needs one waits for it

    @property
    def part(self) -> Part:
        return self.stages[self.place]

    @property
    def alone(self) -> bool:
        return len(self.stages) == 1

    @property
    def working(self) -> list[int]:
        """The stages with layers, by their places."""
        return [place for place, part in enumerate(self.stages) if part.first < part.end]


class ClusterInstance:
    """See the module. model: a transformers causal LM whose layers the tenant owns, attached with hooks=False and KV in
    block_major layout. network: to other instances. host: under which others reach it. timeout_s: for others to come, and
    to take a message. The other arguments are the scheduler's.

    Measures two short passes. Raises InvalidArgument (field layout) for another layout, and (fields max_blocks, needed) if the KV
    region could not take the pages of all layers.
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
    ) -> None:
        self.name = name
        self._decoder = decoder_of(model)
        self._session, self._tenant = session, tenant
        # Blocks that are KV while every layer is here and none streams.
        self._own_blocks = frozenset(tenant.kv.pool.open_ids())
        self._network = network
        self._timeout_s = timeout_s
        self._count = len(self._decoder.layers)
        self._limits = Limits(
            self._decoder.vocabulary, self._decoder.max_tokens, max_num_seqs, max_batch_tokens, decode_cost
        )
        self._store = ServedStore(host)
        self._fingerprint = fingerprint_of(model)
        # Shared with callers' threads, under this lock: what has been asked for and not been done, and what `poll` takes.
        self._lock = threading.Condition()
        self._prepared: _Prepared | None = None
        self._committed = 0
        self._aborted = 0
        self._outputs: list[Tokens] = []
        self._report_taken = False
        self._failed: BaseException | None = None
        self._closing = False
        # The loop's.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._mesh_inbox: deque[Callable[[], None]] = deque()
        self._early: dict[int, list[Callable[[], None]]] = {}
        self._switching: _Prepared | None = None
        self._ended = 0
        self._fetching = 0
        self._lost: PeerLost | None = None
        self._exchange: Exchange | None = None
        self._mesh: Link | None = None
        # Written by the loop, number by number; others read them as they are.
        self._counts = dict.fromkeys(
            ("passes", "computing_s", "pipeline_computing_s", "pipeline_s", "activation_bytes", "kv_sent_bytes"), 0.0
        )
        self._pipeline_since: float | None = None
        self._cost = ChunkCost(0.0, 0.0, 1.0, 0.0, 0.0)
        self._now = self._alone(0)
        self._model = self._measured()
        self._report = Report(name, 0)
        self._update_report()
        self._thread = threading.Thread(target=self._loop, name=f"instance {name}", daemon=True)
        self._thread.start()

    # -- what control asks ---------------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Who this is, and what it can hold."""
        return Description(
            self.name,
            self._fingerprint,
            self._model,
            self._memory_bytes,
            self._tenant.kv.block_tokens,
            self._store.address,
            os.getpid(),
        )

    def prepare(self, plan: GroupPlan) -> None:
        """Check the plan and meet the other instances of the change; go on serving as before. Waits for them.

        Raises, with nothing changed: StalePlan (fields plan_epoch, epoch) for an epoch that is over or was aborted;
        InvalidArgument (field instance; or differs, expected, got) for a plan without this instance, of another model, or
        from groups other than the present ones; IncompleteCopy; InvalidState while KV still moves, or (field layers) if it
        does not hold what it is to compute; PeerLost if the others do not come.
        """
        with self._lock:
            self._require_newer(plan.epoch)
            self._check_plan(plan)
            older, self._prepared = self._prepared, None
        if older is not None:
            older.close()
        members = [part.instance for group in plan.before for part in group]
        stages = [part.instance for part in plan.stages]
        ring = mesh = None
        if len(members) > 1:
            mesh = connect(plan.rendezvous, f"{plan.epoch}/mesh", members, self.name, self._timeout_s)
        try:
            if len(stages) > 1:
                ring = connect(plan.rendezvous, f"{plan.epoch}/ring/{stages[0]}", stages, self.name, self._timeout_s)
        except Error:
            if mesh is not None:
                mesh.close()
            raise
        made = _Prepared(plan, ring, mesh)
        with self._lock:
            try:
                self._require_newer(plan.epoch)
            except StalePlan:
                made.close()
                raise
            self._prepared = made
            # Now: a peer may switch before this instance does.
            if mesh is not None:
                others = [rank for rank in range(len(members)) if rank != mesh.rank]
                lost = partial(self._peer_lost, plan.epoch)
                mesh.open(others, others, partial(self._from_mesh, plan.epoch), lost)
            if ring is not None:
                before, after = (ring.rank - 1) % len(stages), (ring.rank + 1) % len(stages)
                lost = partial(self._peer_lost, plan.epoch)
                ring.open([before], [after], partial(self._from_ring, plan.epoch), lost)

    def commit(self, epoch: int) -> None:
        """Switch to the prepared plan at the next pass boundary; the reports show when it has. A second call does nothing. Raises
        StalePlan (fields plan_epoch, epoch) if this epoch is not prepared; nothing changed then."""
        with self._lock:
            if epoch == self._committed:
                return
            if self._prepared is None or self._prepared.plan.epoch != epoch:
                raise self._stale(epoch)
            self._take_prepared()

    def abort(self, epoch: int) -> None:
        """Undo what was prepared or fetched for this epoch, and refuse it from now on. Nothing else happens; an epoch that was
        committed goes on."""
        with self._lock:
            if epoch <= self._committed:
                return
            self._aborted = max(self._aborted, epoch)
            prepared = self._prepared
            if prepared is not None and prepared.plan.epoch == epoch:
                self._prepared = None
                prepared.close()
        self._inbox.put(partial(self._unfetch, epoch))

    def fetch(self, epoch: int, copies: Iterable[Copy]) -> None:
        """Make room for the layers that `copies` names for this instance and bring them home, while it serves; the reports show
        when they are. Each comes from the host's master copy, whatever source is named: that is where the pages get theirs.

        Raises StalePlan as `prepare` does, and InvalidState while KV still moves.
        """
        with self._lock:
            self._require_newer(epoch)
        self._ask(partial(self._fetch, epoch))

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Forget every request and serve alone from this epoch on. Returns the ids of the requests that were here. Raises
        StalePlan (fields plan_epoch, epoch) unless it is above the instance's own; nothing changed then."""
        ids: tuple[str, ...] = self._ask(partial(self._recover, epoch))
        return ids

    def submit(self, request: Request, attempt: int, tokens: Sequence[int] = ()) -> None:
        """Queue a request behind the tokens that it has generated until now.

        Raises, with nothing queued: InvalidState (field instance) if this is no head, or is about to hand over; InvalidArgument
        for a request that the model cannot serve, or whose id is in use.
        """
        self._ask(partial(self._submit, request, attempt, tuple(tokens)))

    def cancel(self, id: str) -> None:
        """Take a request out; its end comes with the reason "abort". Unknown ids are ignored."""
        self._inbox.put(partial(self._cancel, id))

    def release(self, id: str) -> int | None:
        """Forget a request without an answer, if it is still stuck (`Report.stuck`): its attempt. None for others."""
        attempt: int | None = self._ask(partial(self._release, id))
        return attempt

    def give_up(self, id: str) -> None:
        """End a request with the reason "out_of_blocks", if it is still stuck (`Report.stuck`). Others are ignored."""
        self._inbox.put(partial(self._give_up_request, id))

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Tokens], Report]:
        """What has been computed since the last call, and how things are. Waits for so long for any tokens.

        Raises what ended the loop's work, after the tokens before it were taken: the instance has to `recover`, or go.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._outputs or self._failed is not None, timeout_s)
            outputs, self._outputs = self._outputs, []
            if self._failed is not None and not outputs:
                raise self._failed
            self._report_taken = True
            return outputs, self._report

    def counts(self) -> dict[str, float]:
        """Since this instance began: passes, computing_s (pipeline_computing_s of it as a stage of several), pipeline_s (for
        which it was one), activation_bytes and kv_sent_bytes (sent to others), layer_bytes (copied from the host's master
        copies). As of now, or of a moment ago."""
        found = dict(self._counts)
        if self._pipeline_since is not None:
            found["pipeline_s"] += time.perf_counter() - self._pipeline_since
        return found | {"layer_bytes": float(self._tenant.stats().copied_bytes)}

    def close(self) -> None:
        """End the loop and leave the group. The session and its tenant stay the caller's. A second call does nothing."""
        self._inbox.put(self._close)
        self._thread.join()

    # -- in callers' threads -------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Carry this out in the loop, between two passes: its result, or what it raises."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
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

    def _require_newer(self, epoch: int) -> None:
        if epoch <= max(self._committed, self._aborted):
            raise self._stale(epoch)

    def _stale(self, epoch: int) -> StalePlan:
        return StalePlan(
            f"instance {self.name!r} is at epoch {self._committed}, and what was aborted ends with {self._aborted}: epoch "
            f"{epoch} is over, or not prepared; nothing changed; plan anew",
            plan_epoch=epoch,
            epoch=self._committed,
            aborted=self._aborted,
        )

    def _check_plan(self, plan: GroupPlan) -> None:
        names = [part.instance for part in plan.stages]
        if self.name not in names:
            raise InvalidArgument(
                f"the plan for epoch {plan.epoch} must name {self.name!r}, and names {names}; nothing changed",
                instance=self.name,
            )
        if plan.fingerprint != self._fingerprint:
            mine, its = vars(self._fingerprint), vars(plan.fingerprint)
            differs = tuple(key for key in mine if mine[key] != its[key])
            raise InvalidArgument(
                f"the plan for epoch {plan.epoch} is for another model than {self.name!r} has: {', '.join(differs)} differ; "
                "nothing changed; start instances with the same files, dtype and version",
                differs=differs,
                expected=self._fingerprint,
                got=plan.fingerprint,
            )
        stages = tuple(
            PlacedStage(Placed(part.instance, self._memory_bytes), part.first, part.end) for part in plan.stages
        )
        check(Placement(self._model, (Group(stages),), plan.epoch))
        now = self._now  # the loop replaces it as a whole
        before = {part.instance for group in plan.before for part in group}
        mine_now = next((group for group in plan.before if any(part.instance == self.name for part in group)), ())
        merges = before == set(names)
        if mine_now != now.stages or len(before) == 1 or not (merges or (len(names) == 1 and len(plan.before) == 1)):
            raise InvalidArgument(
                f"the plan for epoch {plan.epoch} must begin with the group that {self.name!r} is in, {now.stages}, and merge "
                f"whole groups or leave an instance alone; it begins with {plan.before}; nothing changed; plan anew",
                expected=now.stages,
                got=plan.before,
            )
        if self._exchange is not None or self._switching is not None or self._committed != now.epoch:
            raise InvalidState(
                f"KV of the last change still moves at {self.name!r}; nothing changed; prepare when it serves",
                instance=self.name,
            )
        part = plan.part(self.name)
        missing = [] if now.home else sorted({*range(part.first, part.end)} - {*range(now.part.first, now.part.end)})
        if missing:
            raise InvalidState(
                f"{self.name!r} cannot compute the layers {missing}, which others have for it: it holds {now.part.first} to "
                f"before {now.part.end} of {self._count}; nothing changed; fetch first",
                instance=self.name,
                layers=tuple(missing),
            )

    def _take_prepared(self) -> None:
        """Under the lock: it is decided."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        self._committed = prepared.plan.epoch
        self._inbox.put(partial(self._begin_switch, prepared))

    # -- in threads of links -------------------------------------------------------------------------------------------------

    def _from_ring(self, epoch: int, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        self._inbox.put(partial(self._when, epoch, partial(self._on_ring, header, payload)))

    def _from_mesh(self, epoch: int, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        item = partial(self._when, epoch, partial(self._on_mesh, source, header, payload))
        self._inbox.put(partial(self._mesh_inbox.append, item))

    def _peer_lost(self, epoch: int, error: PeerLost) -> None:
        self._inbox.put(partial(self._when, epoch, partial(self._on_lost, error)))

    def _piece_sent(self, epoch: int) -> None:
        self._inbox.put(partial(self._when, epoch, self._on_sent))

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
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
                with self._lock:
                    self._failed = error
                    self._lock.notify_all()

    def _wait(self) -> None:
        """Until something comes; or for a short time, where time alone may change something."""
        head, exchange, timeout_s = self._now.head, self._exchange, None
        if self._halted:
            pass
        elif head is not None and not head.in_flight and (exchange is not None or not head.idle):
            timeout_s = STUCK_S
        elif self._now.alone and self._tenant.remapped:
            timeout_s = IDLE_S
        try:
            item = self._inbox.get(timeout=timeout_s)
        except Empty:
            if exchange is not None:
                exchange.pump()
            elif head is not None and head.idle and self._now.alone:
                head.rest()
        else:
            item()

    @property
    def _halted(self) -> bool:
        return self._lost is not None or self._failed is not None

    def _round(self) -> bool:
        """What the module says, once; whether there may be more to do at once."""
        did = False
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                break
            item()
            did = True
        if self._halted or self._closing:
            self._mesh_inbox.clear()
            return did
        self._boundary()
        if self._launch():
            return True
        if self._mesh_inbox:
            self._mesh_inbox.popleft()()
            return True
        if self._exchange is not None:
            if self._exchange.busy:
                self._exchange.step()
                return True
            if self._exchange.over:
                self._finish_exchange()
                return True
        return did

    def _boundary(self) -> None:
        """Carry out what waits for the end of all passes."""
        head = self._now.head
        if head is not None and head.draining and not head.in_flight:
            if self._now.shrinking:
                self._shrink()
            elif self._switching is not None:
                if self._now.ring is not None:
                    self._forward(encode(End(self._switching.plan.epoch)))
                self._switch(self._switching)
        elif head is None and self._switching is not None and self._ended == self._switching.plan.epoch:
            self._switch(self._switching)

    def _update_report(self, busy: bool = False) -> None:
        """Say how things are; while busy only if somebody took the last report, for that takes as long as there are requests."""
        if busy and not self._report_taken:
            return
        now, exchange = self._now, self._exchange
        phase: Literal["serving", "exchanging"] = "serving" if exchange is None else "exchanging"
        report = Report(self.name, now.epoch, phase, arrived=now.arrived)
        if now.head is not None:
            stalled = [] if exchange is None else exchange.stalled
            load = now.head.load(each.length for each in stalled)
            requests = now.head.requests + tuple((each.id, each.attempt) for each in stalled)
            capacity = now.head.kv.usable_blocks * self._tenant.kv.block_tokens
            gives = NO_LAYER
            if now.alone and not self._halted:
                gives = streamable(self._session, self.name, self._tenant.kv.spec.block_bytes)
            stuck = now.head.stuck
            report = Report(self.name, now.epoch, phase, load, requests, capacity, now.arrived, stuck, gives)
        with self._lock:
            self._report, self._report_taken = report, False

    def _emit(self, tokens: Iterable[Tokens]) -> None:
        found = list(tokens)
        if found:
            with self._lock:
                self._outputs += found
                self._lock.notify_all()

    def _when(self, epoch: int, item: Callable[[], None]) -> None:
        """Carry out what belongs to this epoch: now, when it has come, or never."""
        if epoch == self._now.epoch:
            if not self._halted:
                item()
        elif epoch > self._now.epoch:
            self._early.setdefault(epoch, []).append(item)

    def _on_lost(self, error: PeerLost) -> None:
        self._lost = self._lost or error

    def _on_sent(self) -> None:
        if self._exchange is not None:
            self._exchange.sent()

    def _close(self) -> None:
        self._closing = True
        self._leave_links()
        with self._lock:
            prepared, self._prepared = self._prepared, None
            self._aborted = max(self._aborted, 1 << 62)  # nothing is prepared any more
        if prepared is not None:
            prepared.close()

    # -- requests ------------------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, attempt: int, tokens: tuple[int, ...]) -> None:
        head = self._now.head
        if head is None or self._switching is not None or self._halted:
            raise InvalidState(
                f"instance {self.name!r} schedules nothing now: it is no head, or hands over; nothing was queued; submit "
                "to the head of its group",
                instance=self.name,
            )
        if self._exchange is not None and any(each.id == request.id for each in self._exchange.stalled):
            raise InvalidArgument(f"request id {request.id!r} is in use; nothing was queued", id=request.id)
        head.submit(request, attempt, tokens)

    def _cancel(self, id: str) -> None:
        if self._exchange is not None:
            handed = self._exchange.cancel(id)
            if handed is not None:
                self._emit([Tokens(id, handed.attempt, len(handed.tokens), (), "abort")])
                return
        if self._now.head is not None:
            self._emit(self._now.head.cancel(id))

    def _release(self, id: str) -> int | None:
        ends = [] if self._now.head is None else self._now.head.give_up(id)
        return ends[0].attempt if ends else None

    def _give_up_request(self, id: str) -> None:
        if self._now.head is not None:
            self._emit(self._now.head.give_up(id))

    # -- passes --------------------------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        head = self._now.head
        if head is None:
            return False
        launch = head.launch()
        if launch is None:
            return False
        now, lane = self._now, launch.lane
        ordered = decode_first(launch.schedule.chunks)
        now.launched[lane] = ordered
        rows = [row_of(chunk) for chunk in ordered]
        result = self._computed(rows, None, [chunk.sequence.tokens for chunk in ordered])
        self._pass_on(lane, rows, result)
        return True

    def _pass_on(self, lane: int, rows: list[Row], result: torch.Tensor | list[int]) -> None:
        """What this stage made of a microbatch goes to the next stage, or, where tokens were chosen, to the head."""
        if isinstance(result, torch.Tensor):
            payload, shape, dtype = bytes_of(result)
            self._forward(encode(Microbatch(lane, rows, shape, dtype)), payload)
        elif self._now.head is not None:
            self._land(lane, result)
        else:
            self._forward(encode(Chosen(lane, result)))

    def _land(self, lane: int, tokens: list[int]) -> None:
        head = self._now.head
        assert head is not None  # tokens come to heads only
        samplers = [chunk for chunk in self._now.launched.pop(lane) if chunk.samples]
        self._emit(head.land(lane, samplers, tokens))

    def _computed(
        self, rows: list[Row], hidden: torch.Tensor | None, tokens: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor | list[int]:
        """One microbatch through this stage."""
        begin = time.perf_counter()
        result = self._now.stage.compute(rows, hidden, tokens)
        counts, seconds = self._counts, time.perf_counter() - begin
        counts["passes"] += 1
        counts["computing_s"] += seconds
        if not self._now.alone:
            counts["pipeline_computing_s"] += seconds
        return result

    def _forward(self, header: bytes, payload: torch.Tensor | None = None) -> None:
        ring = self._now.ring
        assert ring is not None  # only a group of several has something to pass on
        if payload is not None:
            self._counts["activation_bytes"] += payload.numel()
        ring.post((ring.rank + 1) % len(ring.names), header, payload)

    def _on_ring(self, header: bytes, payload: torch.Tensor | None) -> None:
        now, message = self._now, decode(header)
        match message:
            case Microbatch(lane, rows) if payload is not None and now.part.first < now.part.end:
                hidden = tensor_of(payload, message.shape, message.dtype)
                self._pass_on(lane, rows, self._computed(rows, hidden))
            case Chosen(lane, tokens) if now.head is not None:
                self._land(lane, tokens)
            case Room() if now.head is not None:
                self._on_room(message)
            case Shrink() if now.head is not None:
                pass  # it has been round: every stage has done it
            case Shrink(limit, moves):
                self._give_up(limit, moves)
                self._forward(header)
            case End(epoch):
                if now.place + 1 < len(now.stages):
                    self._forward(header)
                self._ended = epoch
                with self._lock:
                    # It was decided, or the head would not have ended: whether or not the commit came here yet.
                    if self._prepared is not None and self._prepared.plan.epoch == epoch:
                        self._take_prepared()
            case _:
                self._forward(header, payload)  # not for a stage without layers, or for the head

    # -- room ----------------------------------------------------------------------------------------------------------------

    def _tell_room(self, blocks: int, leaving: bool = False) -> None:
        message = Room(self._now.place, blocks, leaving)
        if self._now.head is not None:
            self._on_room(message)
        else:
            self._forward(encode(message))

    def _on_room(self, message: Room) -> None:
        """As a head: the group has as many blocks as each stage with layers has places."""
        now = self._now
        assert now.head is not None
        rooms = now.leaving if message.leaving else now.rooms
        rooms[message.stage] = message.blocks
        if any(place not in rooms for place in now.working):
            return
        if message.leaving:
            now.shrinking = now.head.draining = True
            return
        now.head.kv.grow(min(rooms[place] for place in now.working))
        if self._exchange is not None:
            self._exchange.pump()

    def _grow(self, blocks: Iterable[int]) -> None:
        """These physical blocks are the stage's, or nobody's."""
        now = self._now
        if now.slots is None:
            self._tenant.kv.free(blocks)
            if self._exchange is not None:
                self._exchange.pump()
        else:
            self._tell_room(now.slots.grow(blocks))

    def _fetch(self, epoch: int) -> None:
        now = self._now
        if self._exchange is not None or self._switching is not None:
            raise InvalidState(
                f"KV of the last change still moves at {self.name!r}; nothing changed; fetch when it serves",
                instance=self.name,
            )
        self._fetching = epoch
        if now.home:
            return
        if now.slots is None:
            self._come_home()
        else:
            self._tell_room(now.slots.room_without(now.slots.held - self._own_blocks), leaving=True)

    def _shrink(self) -> None:
        """As a head: every stage has said how many blocks it will have. Nothing is in flight."""
        now = self._now
        assert now.head is not None
        limit = min(now.leaving[place] for place in now.working)
        moves = list(now.head.shrink(limit).items())
        now.rooms, now.leaving, now.shrinking = {}, {}, False
        now.head.draining = self._switching is not None
        if now.ring is not None:
            self._forward(encode(Shrink(limit, moves)))
        self._give_up(limit, moves)

    def _give_up(self, limit: int, moves: Sequence[tuple[int, int]]) -> None:
        """Logical blocks from `limit` on end; then the layers come home to the pages of those that others' layers had."""
        now = self._now
        if now.slots is None:
            return
        kv = now.kv
        if moves:
            sources, targets = zip(*moves)
            kv.write(now.slots.table(targets), kv.first, kv.end, kv.read(now.slots.table(sources), kv.first, kv.end))
        others = now.slots.held - self._own_blocks
        shifts = now.slots.shrink(limit, others)
        if shifts:
            kv.write([to for _, to in shifts], kv.first, kv.end, kv.read([at for at, _ in shifts], kv.first, kv.end))
        self._tenant.kv.free(sorted(others))
        self._come_home()

    def _come_home(self) -> None:
        """All layers, of which the stage goes on computing its own."""
        now = self._now
        self._hold(now.part.first, now.part.end, range(self._count))
        now.home = True
        now.arrived = frozenset(range(self._count)) - set(range(now.part.first, now.part.end))

    def _hold(self, first: int, end: int, besides: Collection[int] = ()) -> None:
        """See `own_layers.hold`. Live blocks of a head alone are followed to where they moved; where they have no room, its
        youngest requests lose theirs.

        Raises InvalidState (field moved) if blocks of a stage of several moved: its places straddle blocks, so its KV is torn.
        """
        self._follow(partial(hold, self._session, self.name, first, end, besides))

    def _follow(self, change: Callable[[], Mapping[int, int]]) -> None:
        """Carry out a change of the tenant's layers (see `_hold`)."""
        now, moved = self._now, None
        while moved is None:
            try:
                moved = change()
            except OutOfBlocks:
                # Live blocks lie in pages that layers need. Of a stage of several, nobody here knows whose they are.
                if not now.alone or now.head is None or not now.head.preempt():
                    raise
        if moved and (now.slots is not None or self._exchange is not None):
            raise InvalidState(
                f"{len(moved)} blocks moved at {self.name!r} while a stage had KV across them, which is torn now; recover",
                instance=self.name,
                moved=dict(moved),
            )
        if now.head is not None:
            now.head.follow(moved)

    def _unfetch(self, epoch: int) -> None:
        """The pages of what came home for this epoch become KV again."""
        now = self._now
        if self._fetching != epoch or now.alone:
            return
        self._fetching = 0
        if now.head is not None:
            now.leaving, now.shrinking = {}, False
            now.head.draining = self._switching is not None
        if now.home:
            self._drop_layers(now)
            now.arrived = frozenset()
            self._grow(self._tenant.kv.allocate(self._tenant.kv.free_blocks))

    def _drop_layers(self, now: _Now) -> None:
        self._hold(now.part.first, now.part.end)
        now.home = now.part.end - now.part.first == self._count

    # -- changes -------------------------------------------------------------------------------------------------------------

    def _begin_switch(self, prepared: _Prepared) -> None:
        if prepared.plan.epoch <= self._now.epoch:  # it has recovered since
            prepared.close()
            return
        self._switching = prepared
        if self._now.head is not None:
            self._now.head.draining = True

    def _alone(self, epoch: int) -> _Now:
        """A group of one, of all layers, with the tenant's own blocks."""
        kv, places = StageKV(self._tenant.kv, 0, self._count), Whole(self._count)
        stage = Stage(self._decoder, self._tenant, kv, places, samples=True)
        head = Head(self._tenant, self._session, 1, self._limits, self._cost)
        part = Part(self.name, 0, self._count)
        return _Now(epoch, (part,), 0, kv, places, None, stage, head, None, True)

    def _member(self, plan: GroupPlan, ring: Link) -> _Now:
        """A stage of a group of several; without blocks yet."""
        part = plan.part(self.name)
        place = plan.stages.index(part)
        kv = StageKV(self._tenant.kv, part.first, part.end)
        slots = Slots(self._count, part.end - part.first) if part.first < part.end else None
        places: Places = Whole(self._count) if slots is None else slots
        working = [number for number, each in enumerate(plan.stages) if each.first < each.end]
        stage = Stage(self._decoder, self._tenant, kv, places, samples=place == working[-1])
        head = None
        if place == 0:
            pool = GroupPool(self._tenant.kv.block_tokens)
            head = Head(self._tenant, self._session, len(working), self._limits, self._cost, kv=pool)
        return _Now(plan.epoch, plan.stages, place, kv, places, slots, stage, head, ring, True)

    def _switch(self, prepared: _Prepared) -> None:
        """Become what the plan says. Nothing of the old group is in flight here."""
        old, plan, kv = self._now, prepared.plan, self._tenant.kv
        now = self._member(plan, prepared.ring) if prepared.ring is not None else self._alone(plan.epoch)
        self._switching, self._fetching = None, 0
        if now.alone:
            self._hold(0, self._count)
        else:
            self._drop_layers(now)
            if old.alone:
                # Behind the drop, which makes room for blocks that move. From here on they must not: a stage's places straddle
                # them, so none of its layers may stream and come home later.
                self._follow(partial(end_streaming, self._session, self.name))
        leaving = old.head.leave() if old.head is not None else []
        held = set(kv.pool.live_ids())
        if old.ring is not None:
            old.ring.close()
        self._become(now)
        if prepared.mesh is not None:
            self._exchange, self._mesh = self._exchange_of(old, now, plan, prepared.mesh, held), prepared.mesh
            if now.head is not None:
                now.head.exchanging = True
        if now.slots is not None:
            self._grow(kv.allocate(kv.free_blocks))
        if old.head is not None and self._exchange is not None:
            # Requests come in at several heads; each is handed on by exactly one, with its blocks as they are now.
            targets = self._targets(old, plan, prepared.mesh)
            size = kv.block_tokens
            self._exchange.hand_over(
                [Handed.of(one, attempt, to, size) for (one, attempt), to in zip(leaving, targets(leaving))]
            )
        for item in self._early.pop(plan.epoch, ()):
            item()
        self._early = {epoch: items for epoch, items in self._early.items() if epoch > plan.epoch}

    def _become(self, now: _Now) -> None:
        self._now = now
        since, self._pipeline_since = self._pipeline_since, None if now.alone else time.perf_counter()
        if since is not None:
            self._counts["pipeline_s"] += time.perf_counter() - since

    def _targets(self, old: _Now, plan: GroupPlan, mesh: Link | None) -> Callable[[Sequence[Any]], list[int]]:
        """Who goes on with which request: the one new head; or, where a group is dissolved, whoever has the fewest tokens."""
        assert mesh is not None
        if len(plan.stages) > 1:
            rank = mesh.names.index(plan.head)
            return lambda leaving: [rank] * len(leaving)

        def spread(leaving: Sequence[Any]) -> list[int]:
            tokens = [0] * len(mesh.names)
            found = []
            for one, _ in leaving:
                rank = min(range(len(tokens)), key=tokens.__getitem__)
                tokens[rank] += one.length
                found.append(rank)
            return found

        return spread

    def _exchange_of(self, old: _Now, now: _Now, plan: GroupPlan, mesh: Link, held: set[int]) -> Exchange:
        ranks = {name: rank for rank, name in enumerate(mesh.names)}
        before = {
            ranks[group[0].instance]: [Run(ranks[part.instance], part.first, part.end) for part in group]
            for group in plan.before
        }
        if now.alone:
            runs = {rank: [Run(rank, 0, self._count)] for rank in range(len(mesh.names))}
        else:
            runs = {ranks[plan.head]: [Run(ranks[part.instance], part.first, part.end) for part in plan.stages]}

        def departing(live: dict[str, Sequence[int]]) -> Departure:
            return Departure(old.places, held, live if old.part.first < old.part.end else {})

        def send(to: int, message: Message, payload: torch.Tensor | None) -> None:
            # The next piece is made when this one has left: what is cheap to keep waiting is not in memory twice.
            then = None if payload is None else partial(self._piece_sent, plan.epoch)
            if payload is not None:
                self._counts["kv_sent_bytes"] += payload.numel()
            mesh.post(to, encode(message), payload, then)

        seconds = self._model.seconds(now.part.first, now.part.end, self._limits.max_batch_tokens)
        return Exchange(
            mesh.rank,
            len(mesh.names),
            old=old.kv,
            departing=departing,
            heads=before,
            head=ranks[old.stages[0].instance],
            before=before,
            runs=runs,
            new=now.kv,
            places=now.places,
            taker=self if now.head is not None else None,
            send=send,
            freed=self._grow,
            network=self._network,
            cost=self._cost,
            chunk_bytes=chunk_bytes(self._network, seconds),
        )

    def _on_mesh(self, source: int, header: bytes, payload: torch.Tensor | None) -> None:
        if self._exchange is not None:
            self._exchange.on(source, decode(header), payload)

    def _finish_exchange(self) -> None:
        self._exchange = None
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        if self._now.head is not None:
            self._now.head.exchanging = False

    # -- as `exchange.Taker` -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """`Taker.ready`; called in the loop."""
        now = self._now
        return (now.slots is None and now.alone) or all(place in now.rooms for place in now.working)

    def room(self, blocks: int) -> list[int] | None:
        """`Taker.room`; called in the loop."""
        head = self._now.head
        assert head is not None
        return head.room(blocks)

    def unused(self, blocks: list[int]) -> None:
        """`Taker.unused`; called in the loop."""
        head = self._now.head
        assert head is not None
        head.kv.free(blocks)

    def resume(self, handed: Handed, blocks: list[int]) -> None:
        """`Taker.resume`; called in the loop."""
        head = self._now.head
        assert head is not None
        head.adopt(handed.request, handed.attempt, handed.tokens, handed.computed if blocks else 0, blocks)

    # -- faults --------------------------------------------------------------------------------------------------------------

    def _leave_links(self) -> None:
        ring, mesh, self._mesh = self._now.ring, self._mesh, None
        if ring is not None:
            ring.close()
        if mesh is not None:
            mesh.close()

    def _recover(self, epoch: int) -> tuple[str, ...]:
        with self._lock:
            if epoch <= self._committed:
                raise self._stale(epoch)
            prepared, self._prepared = self._prepared, None
            self._committed = epoch
            self._failed = None
        if prepared is not None:
            prepared.close()
        if self._switching is not None:
            self._switching.close()
        head, exchange, kv = self._now.head, self._exchange, self._tenant.kv
        ids = [] if head is None else [id for id, _ in head.requests]
        ids += [] if exchange is None else [each.id for each in exchange.stalled]
        self._leave_links()
        self._exchange = self._switching = self._lost = None
        self._fetching = 0
        self._mesh_inbox.clear()
        self._early.clear()
        kv.free(kv.pool.live_ids())
        self._become(self._alone(epoch))
        self._hold(0, self._count)
        return tuple(ids)

    # -- measuring -----------------------------------------------------------------------------------------------------------

    def _measured(self) -> Model:
        """The layers' bytes and seconds; sets the memory, and the cost of a pass. Before the loop begins."""
        kv = self._tenant.kv
        sizes = [int(size) for size in self._tenant.layer_bytes[: self._count]]
        self._memory_bytes = sum(sizes) + kv.usable_blocks * kv.spec.block_bytes
        needed = -(-self._memory_bytes // kv.spec.block_bytes)
        if kv.max_blocks < needed:
            raise InvalidArgument(
                f"the KV region of {self.name!r} must have places for the pages of its layers as well: {needed} blocks, got "
                f"max_blocks={kv.max_blocks}; nothing was created; attach with a larger max_blocks (addresses, not memory)",
                max_blocks=kv.max_blocks,
                needed=needed,
            )
        tokens = min(PROBE_TOKENS, self._limits.positions, kv.free_blocks * kv.block_tokens)
        short, long = self._pass_s(1), self._pass_s(tokens)
        each_s = max(0.0, long - short) / max(1, tokens - 1)
        base_s = max(0.0, short - each_s)
        self._cost = ChunkCost(0.0, 0.0, each_s, 0.0, base_s)
        self._now = self._alone(0)
        line = Line(base_s / self._count, each_s / self._count)
        token_bytes = kv.spec.block_bytes // kv.spec.layers // kv.block_tokens
        return Model(tuple(Layer(size, token_bytes, line) for size in sizes))

    def _pass_s(self, tokens: int) -> float:
        """Seconds of a pass over a prompt of so many tokens: the least of three."""
        kv, least = self._tenant.kv, float("inf")
        blocks = kv.allocate(-(-tokens // kv.block_tokens))
        row = Row(0, tokens, tokens, tokens, blocks)
        try:
            for _ in range(3):
                begin = time.perf_counter()
                self._now.stage.compute([row], None, [[0] * tokens])
                least = min(least, time.perf_counter() - begin)
        finally:
            kv.free(blocks)
        return least
