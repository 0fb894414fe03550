# SPDX-License-Identifier: Apache-2.0
"""One instance of a cluster: a stage of a group, always, if only of a group of one. What control asks of it.

One thread, the loop (`instance_loop`), owns everything that computes. Calls of control come as entries of one queue, and each is
carried out between two passes; so nothing is shared but the queue, what control has decided (`change`), and what `poll` takes
(`outbox`).

Each entry goes one way, down: from here to `submissions` (requests that come and leave), `own_layers` (layers that leave and come
home), or the loop, which has `passes` (microbatches), `room`, `switch` (the next member) and the member's exchange; its result is
returned.

`prepare` runs in its caller's thread, for it waits for others, and hands the loop two links that are ready.
"""

from __future__ import annotations

import atexit
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidState
from remap_serve.cluster import beside, outbox, own_layers, submissions
from remap_serve.cluster.contract import require_not_recovered
from remap_serve.cluster.instance_loop import InstanceLoop
from remap_serve.cluster.messages import Description, GroupPlan, InstanceReport, Tokens
from remap_serve.cluster.resources import Resources
from remap_serve.cluster.transport import ServedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from remap_serve.cluster.own_layers import ReportT
    from remap_serve.cluster.resources import Others
    from remap_serve.engine.request import Request
    from remap_serve.policy.cluster.pipeline import Network
    from remap_serve.policy.cluster.restore import Copy

__all__ = ["ClusterInstance"]


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
        self._loop = InstanceLoop(self._has, host, timeout_s)
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
            epoch=self._loop.changes.newest,
        )

    def prepare(self, plan: GroupPlan) -> None:
        """Check the plan and meet the other instances of the change; go on serving as before. Waits for them.

        Raises, with nothing changed: StalePlan (fields plan_epoch, epoch) for an epoch that is over or was aborted;
        InvalidArgument (field instance; or differs, expected, got) for a plan without this instance, of another model, or
        from groups other than the present ones; IncompleteCopy; InvalidState while KV still moves, (field layers) if it
        does not hold the layers that it is to compute, or (field neighbours) if another model's KV lies in its layers' pages;
        PeerLost if the others do not come.
        """
        self._loop.changes.prepare(plan, self._loop.now, lambda: self._loop.ask(lambda: beside.check(self._loop.now)))

    def commit(self, epoch: int) -> None:
        """Switch to the prepared plan at the next pass boundary; the reports show when it has. A second call does nothing. Raises
        StalePlan (fields plan_epoch, epoch) if this epoch is not prepared; nothing changed then."""
        prepared = self._loop.changes.commit(epoch)
        if prepared is not None:
            self._loop.inbox.put(partial(self._loop.begin_switch, prepared))
            self._store.forget(epoch)

    def abort(self, epoch: int) -> None:
        """Undo the preparations for this epoch, and refuse it from now on. Nothing else happens; an epoch that was
        committed goes on."""
        if self._loop.changes.abort(epoch):
            self._store.forget(epoch)
            self._loop.inbox.put(lambda: own_layers.unfetch(self._loop.now, epoch))

    def fetch(self, epoch: int, copies: Iterable[Copy]) -> None:
        """Make room for the layers that `copies` names for this instance and bring them home, while it serves; the reports show
        when they are. Each comes from the source that is named, if that is in its group; else from the host's master copy.

        Raises StalePlan as `prepare` does, and InvalidState while KV still moves.
        """
        self._loop.changes.require_newer(epoch)
        named = {each.layer: each.source for each in copies if each.instance == self.name and each.source is not None}
        self._loop.ask(partial(self._fetch, epoch, named))

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Forget every request and serve alone from this epoch on. Returns the ids of the requests that were here. Raises
        StalePlan (fields plan_epoch, epoch) unless it is above the instance's own; nothing changed then."""
        ids: tuple[str, ...] = self._loop.ask(partial(self._recover, epoch))
        return ids

    def submit(self, request: Request, attempt: int, tokens: Sequence[int] = (), epoch: int | None = None) -> None:
        """Queue a request behind the tokens that it has generated until now. epoch: of this instance, when the request was sent
        to it; None: now.

        Raises, with nothing queued: InvalidState (field instance) if this is no head, is about to hand over, has recovered since
        that epoch (fields epoch, recovered), or still has an older attempt; InvalidArgument for a request that the model cannot
        serve, or whose id is in use.
        """
        self._loop.ask(partial(self._submit, request, attempt, tuple(tokens), epoch))

    def cancel(self, id: str, attempt: int | None = None) -> None:
        """Take a request out; its end comes with the reason "abort". attempt: not if a later one is here. Unknown ids are
        ignored."""
        self._loop.inbox.put(partial(self._cancel, id, attempt))

    def release(self, id: str) -> int | None:
        """Forget a request without an answer, if it is still stuck (`InstanceReport.stuck`): its attempt. None for others."""
        attempt: int | None = self._loop.ask(partial(self._release, id))
        return attempt

    def give_up(self, id: str) -> None:
        """End a request with the reason "out_of_blocks", if it is still stuck (`InstanceReport.stuck`). Others are ignored."""
        self._loop.inbox.put(partial(self._give_up, id))

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Tokens], InstanceReport]:
        """The tokens computed since the last call, and a report. Waits for `timeout_s` for any tokens.

        Raises what ended the loop's work, after the tokens before it were taken: the instance has to `recover`, or go. And
        InvalidState (fields instance, busy_s) if the loop hangs: it has to go.
        """
        return self._loop.outbox.take(timeout_s, self._timeout_s)

    def counts(self) -> dict[str, float]:
        """Since this instance began: passes, computing_s (pipeline_computing_s of it as a stage of several), pipeline_s (for
        which it was one), activation_bytes, kv_sent_bytes and layers_sent_bytes (sent to others), layer_bytes (copied from the
        host's master copies), swapped_bytes (KV to host memory and back); started_requests, queue_s, preemptions and pauses
        (`Counts`). As of now, or of a moment ago."""
        return self._loop.counts()

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
            if self._loop.changes.pending(self._loop.now.epoch):
                raise InvalidState(
                    f"{self.name!r} is about to change its group; nothing changed; call again when it serves",
                    instance=self.name,
                )
            return own_layers.following(self._loop.now, call)

        report: ReportT = self._loop.ask(between)
        return report

    def close(self) -> None:
        """End the loop and leave the group. The session and its tenant stay the caller's. A second call does nothing; at the
        interpreter's end it is called, if it was not before. Raises InvalidState (field instance) if the loop hangs (see
        `poll`)."""
        self._loop.inbox.put(self._loop.close)
        patience_s = outbox.HUNG * self._timeout_s
        if not self._loop.join(patience_s):
            raise InvalidState(
                f"instance {self.name!r} did not end its loop within {patience_s:g} s: it hangs; end its process",
                instance=self.name,
            )
        atexit.unregister(self.close)

    # -- in the loop ----------------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, attempt: int, tokens: tuple[int, ...], epoch: int | None) -> None:
        if self._loop.halted:
            raise InvalidState(
                f"instance {self.name!r} has lost a peer, or failed; nothing was queued; submit elsewhere",
                instance=self.name,
            )
        require_not_recovered(self.name, request.id, epoch, self._loop.recovered)
        submissions.submit(self._loop.now, request, attempt, tokens, self._loop.outbox.put)

    def _cancel(self, id: str, attempt: int | None) -> None:
        if not self._loop.halted:
            self._loop.outbox.put(submissions.cancel(self._loop.now, id, attempt))

    def _release(self, id: str) -> int | None:
        ends = [] if self._loop.halted else submissions.give_up(self._loop.now, id)
        return ends[0].attempt if ends else None

    def _give_up(self, id: str) -> None:
        if not self._loop.halted:
            self._loop.outbox.put(submissions.give_up(self._loop.now, id))

    def _fetch(self, epoch: int, named: dict[int, str]) -> None:
        now = self._loop.now
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

    def _recover(self, epoch: int) -> tuple[str, ...]:
        found = self._loop.recover(epoch)
        self._store.forget(epoch)
        return found
