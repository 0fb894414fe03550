# SPDX-License-Identifier: Apache-2.0
"""Several engines on one arena: which one runs when, one `session.step` for all of them, and what it cost.

                who gets memory     who computes
    epochs      in turns            in rounds of one pass each: whose turn it is, and guests (guests.py)
    temporal    in turns            whose turn it is, alone: Oneiros, section 7.2
    spatial     all, in each step   in rounds of one pass each: Oneiros, section 7.3

In a turn the other tenants' layers may be KV of the one whose turn it is; what they had running keeps its KV and goes on later.
Of models that memory has no room for, the one whose tokens are due first is next, and turns pay for their switch (policy.turns).

On pages of a broker other processes may wait for what the active tenants have. Then the turn ends for these (process_turn.py): no
tenant is active, and no pass runs, until the pages are to be had again.

Without a session this is the recompute baseline: each tenant has the KV cache that it was attached with, turns and rounds are
the same, and nothing but requests moves.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from remap.errors import InvalidArgument, InvalidState, OutOfMemory
from remap.internals import internals
from remap.policy.turns import TURN_S, PresentTurn, Queue, Turns
from remap.process_turn import ProcessTurn
from remap.rate_limited import RateLimitedWarning
from remap_serve.engine.guests import Guests
from remap_serve.engine.reports import Reports
from remap_serve.engine.shared_metrics import Activation, SharedResult, SharedSample, TenantSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from remap_serve.engine.engine import Engine, StepOutput
    from remap_serve.engine.request import Output, Request

__all__ = ["SharedEngines", "latest_first"]

logger = logging.getLogger("remap.turns")

MODES = ("epochs", "temporal", "spatial")
PARTIAL = 0.25
"""By which share of their computation a turn's passes may wait for layers whose place live blocks of others have taken. Over a
slow link whole layers would cost many times a pass, in every turn, for as long as these blocks live."""
LONGEST_S, ROUNDS = 4.0, 20
"""For how long a request that has begun waits for a token, and for as long as how many rounds at least, before it goes in front
of its tenant's others when their turn begins: where a round takes seconds, so do the copies that this costs."""
AGAIN_S, LATER_S = 0.05, 0.5
"""After how long a tenant asks again for pages that other processes keep: while no tenant here runs, and while one does, which
has to stop for it. Within `process_turn.ASKS_S`."""


@dataclass
class _Begun:
    """An activation that has not led to a pass yet."""

    name: str
    begun_s: float
    seconds: float
    entry: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Return:
    """A tenant's layers that are coming home, since `begun_s`, to `pages` that it had lent."""

    name: str
    layers: tuple[int, ...]
    pages: int
    begun_s: float


class SharedEngines:
    """Steps several engines: memory in turns and passes in rounds (`mode` "epochs"), both in turns ("temporal"), or both in
    rounds ("spatial").

    session: None, or the one that all engines were made with (`LLMEngine(..., session=session)`): its `step` is called once
    a step for all of them, and the engines' own `step` must not be. engines: by tenant name, at least one. quantum_s: a turn ends
    when its tenant has nothing to do or gets nothing done, or when it has lasted that long; only if another tenant needs one.
    math.inf: turns drain, and a tenant that is never out of work keeps the memory. Turns go round in the
    order of `engines`, if turns is None and no tenant was without pages when this was made. clock: the engines' own.

    Engines that swap: a request that has begun and waits for a token for `LONGEST_S`, or for `ROUNDS` rounds if longer, goes
    before its tenant's others when their turn begins.

    turns: the rule for temporal turns (`remap.policy.turns.Turns`), by the targets that tenants were attached with
    (`Config.ttft_s`, `tbt_s`). None: where some tenant has no pages, `Turns(quantum_s)`. A tenant that begins to wait has its
    first layers loaded ahead of its turn (`session.expect`).

    partial: a turn begins at once, and layers whose place live blocks of others have taken are streamed (a number: while passes
    then wait for at most this share of their computation); otherwise the requests that hold these blocks are preempted
    first, and the layers come home. None: `PARTIAL`, unless all engines swap: then to preempt costs a copy, nothing is
    recomputed, and all come home.

    turn_s: with a broker's pages, how long the engines serve, at least, while another process waits for these pages.

    Raises InvalidArgument for an unknown mode, no engines, a name that is not its tenant's, or an engine of another session.
    """

    def __init__(
        self,
        session: Any,
        engines: Mapping[str, Engine],
        mode: str = "epochs",
        *,
        quantum_s: float = 1.0,
        partial: bool | float | None = None,
        turns: Turns | None = None,
        turn_s: float = TURN_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if mode not in MODES or not engines or not quantum_s >= 0:
            raise InvalidArgument(
                f"expected a mode of {', '.join(MODES)}, at least one engine and quantum_s >= 0, got {mode!r}, "
                f"{len(engines)} engines and {quantum_s!r}; nothing was made",
                mode=mode,
                engines=len(engines),
                quantum_s=quantum_s,
            )
        for name, engine in engines.items():
            if engine.tenant.name != name or engine.session is not session:
                raise InvalidArgument(
                    f"engine {name!r} must be of the tenant of this name and of the shared session, it is of "
                    f"{engine.tenant.name!r}; nothing was made; make it with LLMEngine(..., session=session)",
                    engine=name,
                    tenant=engine.tenant.name,
                )
        self.session = session
        self.engines = dict(engines)
        self._reports = Reports(self.engines)
        for engine in engines.values():
            engine.reports, engine.scheduler.closed = self._reports, False  # whatever ended a run before this one
        self.mode = mode
        self.quantum_s = quantum_s
        # Only an engine that can give its blocks up for a copy does so before its turn is over.
        self._prepares = session is not None and all(engine.scheduler.swap for engine in engines.values())
        default = False if self._prepares else PARTIAL
        self.partial: bool | float = default if partial is None else partial
        self._clock = clock
        self._sleep = sleep
        if turns is None and session is not None and any(internals(each.tenant).cold for each in engines.values()):
            turns = Turns(quantum_s)
        self._turns = turns if mode != "spatial" else None
        # Of a session that lets one model be awake at a time, as sleep modes do, nobody is another's guest.
        rounds = mode == "epochs" and not getattr(session, "one_at_a_time", False)
        self._guests = Guests(session, self.engines, self._reports) if rounds else None
        joined = session is not None and session.broker
        self._process = ProcessTurn(session, tuple(engines), turn_s) if joined else None
        self._resting = False  # spatial only: other processes have the pages, or may have them
        self._lacking: dict[str, float] = {}  # tenants whose layers' pages other processes keep -> when these ask again
        self._waits_said = RateLimitedWarning(logger)
        self._waits: dict[str, float] = {}  # with `turns`: the tenants that have work and not the turn, since when
        self._pass_s: dict[str, float] = {}  # with `turns`: what each one's last pass took
        self._turn_cost_s = 0.0  # of the present turn's beginning
        self._active: str | None = None  # whose turn it is; None before the first, and in rounds
        self._turn_began = 0.0
        self._idle_step = False  # the last step got nothing done
        self._round_s = 0.0  # what the last round took that computed
        self._idle_turn = False  # or nothing for the tenant whose turn it is
        self._prepared: str | None = None  # in turns: whose turn is next, if its layers are coming home already
        self._returning: _Return | None = None  # in turns: not all of them were seen at home
        # In turns: seconds in which a page comes home, at the quickest that was seen: a look comes late, never early.
        # Of all tenants, since the link and the driver are the same. Mapping pages may take longer than copying them.
        self._page_s = math.inf
        self._all_active = False  # spatial only: every tenant has been activated
        self._pending_turn: _Begun | None = None
        self.beginning: str | None = None
        """The tenant whose layers are being brought, or which raised what the last step raised when they were."""
        self._begin_measuring()

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[str, ...]:
        """The tenants that run in the present turn: its own, then guests, or all; none before the first, and while other
        processes have theirs."""
        if self.mode == "spatial":
            return () if self._resting else tuple(self.engines)
        guests = self._guests.names if self._guests is not None else ()
        return () if self._active is None else (self._active, *guests)

    @property
    def unfinished(self) -> int:
        """Requests of all tenants that have not finished."""
        return sum(engine.unfinished for engine in self.engines.values())

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._clock() - self._started_s

    @property
    def last_sample(self) -> SharedSample:
        """All tenants after the last step of the run."""
        return self._timeline[-1]

    # -- running ---------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, StepOutput]:
        """One round: the tenants whose turn it is ask the session, in one call, and run at most one pass each.

        Returns what each of them did; empty if no engine has work, or other processes have the pages: then only the session
        acted. Exceptions of the model or the session pass through, and `step` may be called again.
        """
        self.beginning = None
        others_turn = self._process is not None and not self._may_run(self._process)
        if not others_turn:
            if self.mode == "spatial":
                self._activate_all()
            else:
                self._take_turns()
        if not self.active and (others_turn or self._lacking):
            self._wait()
        if self._guests is not None and self._active is not None:
            self._guests.look(self._active, self._prepared, None if self._returning is None else self._returning.name)
        guests = self.active
        report = self._rebalance()
        done: dict[str, StepOutput] = {}
        begun = self._clock()
        for name in self.active:
            if self.engines[name].unfinished:
                done[name] = self.engines[name].advance()
        self._idle_step = bool(done) and not any(step.computed for step in done.values())
        # Who has just got blocks, or is given some, computes in the next round.
        gets = guests != self.active or bool(report is not None and report.changed)
        self._idle_turn = not gets and self._active in done and not done[self._active].computed
        if self._guests is not None and not self.unfinished:
            self._guests.begin(self._active)  # who steps the engines next finds them open
        now = self._clock()
        if done and not self._idle_step:
            self._round_s = now - begun
        turn = self._pending_turn
        if turn is not None and turn.name in done and done[turn.name].computed:
            self._end_pending(now - turn.begun_s)
        elif self._turns is not None:
            self._pass_s.update(dict.fromkeys(done, now - begun))  # of a round: so long each waits for its next one
        self._watch_return()
        self._record(now, tuple(done))
        return done

    def run(
        self,
        requests: Mapping[str, Iterable[Request]],
        on_step: Callable[[SharedEngines, Mapping[str, StepOutput]], None] | None = None,
    ) -> SharedResult:
        """Serve every tenant's requests, each from its `arrival_s` on, until all are finished. Metrics start anew.

        Raises InvalidArgument for an unknown tenant before anything runs, and what `LLMEngine.add_request` raises.
        """
        unknown = sorted(set(requests) - set(self.engines))
        if unknown:
            raise InvalidArgument(
                f"no engine {unknown[0]!r}, there are {sorted(self.engines)}; nothing was run", tenant=unknown[0]
            )
        self._begin_measuring()
        outputs: dict[str, dict[str, Output]] = {name: {} for name in self.engines}
        stalled = self._stalls()
        for done in self._serve([(one.arrival_s, name, one) for name, mine in requests.items() for one in mine]):
            for name, step in done.items():
                outputs[name].update((output.id, output) for output in step.finished)
            if on_step is not None:
                on_step(self, done)
        self._end_pending(None)
        return SharedResult(
            outputs=outputs,
            metrics={name: engine.metrics for name, engine in self.engines.items()},
            timeline=tuple(self._timeline),
            activations=tuple(self._activations),
            stall_s={name: value - stalled.get(name, 0.0) for name, value in self._stalls().items()},
        )

    def forget_samples(self) -> None:
        """Forget what was measured, but for the last step: for a server, which has no end. Between two steps."""
        del self._timeline[:-1]
        self._activations.clear()
        for engine in self.engines.values():
            engine.reset_metrics()

    def _serve(self, requests: Iterable[tuple[float, str, Any]]) -> Iterator[dict[str, StepOutput]]:
        """Step until all have finished; yields what each step did. requests: (arrival, tenant, request), of equal times the
        first given first."""
        pending = latest_first(requests)
        while pending or self.unfinished:
            self._let_in(pending)
            done = self.step()
            yield done
            if not done and pending:
                self._nap(self._started_s + pending[-1][0])

    def _let_in(self, pending: list[tuple[float, str, Any]]) -> list[str]:
        """Queue what has arrived by now, from the end of `pending`. The names of the tenants that it is for."""
        names = []
        while pending and self._started_s + pending[-1][0] <= self._clock():
            arrival, name, request = pending.pop()
            self.engines[name].add_request(request, arrived_s=self._started_s + arrival)
            names.append(name)
        return names

    def _nap(self, until_s: float) -> None:
        """No engine has work before `until_s`, on the clock. Short naps: idle engines still let the session give pages back."""
        self._sleep(min(0.01, max(0.0, until_s - self._clock())))

    # -- turns -----------------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """End the turn if it is over and another tenant waits; begin the next one."""
        if self._turns is not None:
            self._take_due_turns(self._turns)
            return
        names = list(self.engines)
        if self._active is None:
            busy = [name for name in names if self._has_work(name)]
            if busy:
                self._switch(busy[0])
            return
        over = not self.engines[self._active].unfinished or self._idle_turn
        left = self.quantum_s - (self._clock() - self._turn_began)
        if not over and left > 0 and (self._prepared is not None or not self._prepares):
            return
        place = names.index(self._active)
        others = (name for name in (*names[place + 1 :], *names[:place]) if self._has_work(name) and self._needs(name))
        follower = next(others, None)
        if not over and left > 0:
            if follower is not None:
                self._look_ahead(follower, left)
        elif follower is not None:
            self._switch(follower)
        elif not over:
            self._begin_again(self._active)

    def _rotate(self, name: str) -> None:
        self.engines[name].rotate(max(LONGEST_S, ROUNDS * self._round_s))

    def _begin_again(self, name: str) -> None:
        """Nobody else needs a turn: a new one of its own, without a switch."""
        self._turn_began = self._clock()
        self._rotate(name)
        if self._guests is not None:
            self._guests.begin(name)
        if self._prepared is not None:  # has nothing to do any more, or is a guest and lacks nothing
            if self._prepared not in self.active:
                self.session.deactivate(self._prepared)
            self._prepared = None

    def _take_due_turns(self, rule: Turns) -> None:
        """As `_take_turns`, by the rule."""
        now, queues = self._clock(), {}
        for name, engine in self.engines.items():
            if not engine.unfinished:
                self._waits.pop(name, None)
                self._lacking.pop(name, None)
            elif name != self._active:
                if not self._needs(name):
                    self._waits.pop(name, None)
                    continue
                if name not in self._waits:
                    self._waits[name] = now
                    self._expect(name)
                if not self._has_work(name):
                    continue
                queues[name] = self._queue(name, self._waits[name], self._reload_s(name))
            elif not self._idle_turn:  # else it gets nothing done: others may
                queues[name] = self._queue(name, now, 0.0)
        turn = None if self._active is None else PresentTurn(self._active, self._turn_began, self._turn_cost_s)
        found = rule.decide(now, turn, queues)
        if found.name not in (None, self._active):
            self._switch(found.name)
        elif found.follower is not None:
            if self._prepares and self._prepared is None:
                self._look_ahead(found.follower, found.at_s - now)
        elif self._active is not None and now - self._turn_began >= self.quantum_s:
            self._begin_again(self._active)
            self._turn_cost_s = 0.0

    def _queue(self, name: str, since_s: float, switch_s: float) -> Queue:
        engine = self.engines[name]
        due_s = engine.due_s(*internals(engine.tenant).targets)
        longest = max(self._pass_s.values(), default=0.0)  # one that has not run yet may take as long as any
        return Queue(since_s, due_s, switch_s, self._pass_s.get(name, longest))

    def _expect(self, name: str) -> None:
        if self.session is not None and internals(self.engines[name].tenant).cold:
            self.beginning = name
            self.session.expect(name)
            self.beginning = None

    def _look_ahead(self, name: str, left_s: float) -> None:
        """As long before a turn of `name` as its layers need, they come home; and as long again before that, the new part of the
        present turn's KV goes to host memory: it need not wait for that when it has to give pages up."""
        reload_s = self._reload_s(name)
        if left_s > 2 * reload_s:
            return
        for active in self.active:
            self.engines[active].pause(soon=True)
        if left_s <= reload_s:
            self._prepare(name)

    def _reload_s(self, name: str) -> float:
        """Seconds in which what the tenant has lent comes home: at the rate that was seen; before that, as the link loads it."""
        within = internals(self.engines[name].tenant)
        return within.reload_s if self._page_s == math.inf else within.away_pages * self._page_s

    def _watch_return(self) -> None:
        """Learn how long it took, once all are at home."""
        known = self._returning
        if known is None:
            return
        tenant = self.engines[known.name].tenant
        if not set(known.layers).isdisjoint(tenant.streamed):  # away again, before it was seen
            self._returning = None
        elif all(map(internals(tenant).ready, known.layers)):
            self._page_s = min(self._page_s, (self._clock() - known.begun_s) / known.pages)
            self._returning = None

    def _prepare(self, name: str) -> None:
        """Let the layers of the next tenant come home while the present turn still computes: from now until its end it keeps what
        it has left. Not possible now: its turn begins with that."""
        self._prepared = name
        try:
            self._activate(name, alone=False)
        except (InvalidState, OutOfMemory):  # a cold model may need the pages of the tenant that has its turn now
            self.beginning = None
            return
        self.engines[name].bring_back()

    def _switch(self, name: str) -> None:
        """Make `name` the active tenant. If that fails, the turn is the former one's again, or no tenant's if that fails too."""
        begun, reload_s = self._clock(), 0.0
        entry: dict[str, Any] = {}
        if self.session is not None:
            reload_s = self._reload_s(name) if self._turns is not None else 0.0
            # An activation alone makes the others inactive first. Written down before, so that an interrupt in between
            # leaves the turn with no tenant: the next step begins a new one.
            former, self._active, self._prepared = self._active, None, None
            alone = self._end_turn(former, name)
            process, asked_s = self._process, time.monotonic()
            load_s = 0.0 if process is None else self._reload_s(name)
            try:
                entry = self._activate(name, alone=alone)
            except Exception as error:
                if former is not None:
                    self._go_on(former)
                if self._asks_later(name, error):
                    return
                self.beginning = name
                raise
            if process is not None and former is None:
                process.begun(asked_s, load_s)
            self._lacking.pop(name, None)
        self._end_pending(None)
        if self._guests is not None:
            self._guests.begin(name)
        self._rotate(name)
        self._active, self._turn_began, self._idle_step, self._idle_turn = name, self._clock(), False, False
        self._turn_cost_s = self._turn_began - begun + reload_s
        self._waits.pop(name, None)
        self._pending_turn = _Begun(name, begun, self._turn_began - begun, entry)

    def _end_turn(self, former: str | None, name: str) -> bool:
        """The turn of `former` is over, and that of `name` begins. Returns whether that computes alone at first: what it lacks
        others have, whoever computes."""
        guests = self._guests
        alone = guests is None or bool(internals(self.engines[name].tenant).cold)
        if former is not None and (guests is None or alone or not guests.may_stay(former)):
            self.engines[former].pause()
            if not alone:
                self.session.deactivate(former)
            former = None
        if guests is not None:
            if alone:
                guests.dismiss()
            guests.begin(name, former)
        return alone

    def _needs(self, name: str) -> bool:
        return self._guests is None or self._guests.needs(name)

    def _go_on(self, name: str) -> None:
        """The turn of `name` could not end."""
        if self._guests is not None:
            self._guests.dismiss()
        try:
            self._activate(name, alone=True)
        except OutOfMemory as error:
            if not self._asks_later(name, error):
                raise
        else:
            self._active = name

    def _activate_all(self) -> None:
        if self.session is None or self._all_active:
            return
        if self._process is not None and not self.unfinished:
            self._resting = True  # until there is a request
            return
        process, asked_s = self._process, time.monotonic()
        load_s = 0.0 if process is None else sum(map(self._reload_s, self.engines))
        tenants = self.session.snapshot().tenants
        for name in self.engines:
            if tenants[name].active:
                continue
            try:
                self._activate(name, alone=False)
            except OutOfMemory as error:
                if not self._asks_later(name, error):
                    raise
                self._rest()  # who waits keeps nothing from others
                return
        self._all_active, self._resting = True, False
        self._lacking.clear()
        if process is not None:
            process.begun(asked_s, load_s)

    def _activate(self, name: str, alone: bool) -> dict[str, Any]:
        """`session.activate`, and what it asks for: that number of others' blocks is freed first, of their youngest requests.
        Which blocks these are is all one: those that stay move."""
        preempted = 0
        self.beginning = name
        within, begun = internals(self.engines[name].tenant), self._clock()
        away = within.away_pages
        for _ in range(len(self.engines) + 1):
            report = self._reports.ask(lambda: self.session.activate(name, alone=alone, partial=self.partial))
            if report.activated:
                self.beginning = None
                if away > within.away_pages:
                    self._returning = _Return(name, report.restored, away - within.away_pages, begun)
                return {
                    "preempted_requests": preempted,
                    "restored_layers": len(report.restored),
                    "predicted_stall_s": report.predicted_stall_s,
                }
            victims = 0
            for holder, blocks in report.preempt.items():
                if holder in self.engines:
                    victims += len(self.engines[holder].preempt(len(blocks)))
            preempted += victims
            if not victims and not report.moved:
                break
        raise InvalidState(
            f"tenant {name!r} could not be activated: {report.reason}; {preempted} requests were preempted and will be "
            "recomputed; free memory of the others and try again",
            tenant=name,
            preempted=preempted,
        )

    # -- other processes -------------------------------------------------------------------------------------------

    def _has_work(self, name: str) -> bool:
        """And may ask for its pages now."""
        again_s = self._lacking.get(name)
        return self.engines[name].unfinished > 0 and (again_s is None or self._clock() >= again_s)

    def _may_run(self, process: ProcessTurn) -> bool:
        """Whether passes may run, or begin: the turn of this process, if it has one, ends here where others have waited for long
        enough, or wait and no request is here."""
        if self.active and (process.over() if self.unfinished else process.others_wait()):
            self._rest()
            process.give()
        return bool(self.active) or process.may_begin()

    def _rest(self) -> None:
        """No tenant is active any more."""
        # Written down before: behind an interrupt in between the next step begins a turn.
        active, self._active, self._prepared = self.active, None, None
        if self._guests is not None:
            self._guests.names = ()
        self._all_active, self._resting = False, True
        for name in active:
            self.engines[name].pause()
        self._end_pending(None)
        for name, engine in self.engines.items():
            # KV for which host memory has no room is computed again: no process keeps some while it waits for others' pages.
            engine.preempt(engine.tenant.kv.live_blocks - engine.releasable())
            if engine.tenant.active:
                self.session.deactivate(name)

    def _asks_later(self, name: str, error: Exception) -> bool:
        """Whether the activation that has failed lacks no more pages than other processes have: it is made again then."""
        fields = error.fields if isinstance(error, OutOfMemory) else {}
        kept_elsewhere = "outside" in fields and cast("int", fields["short"]) <= cast("int", fields["outside"])
        if self._process is None or not kept_elsewhere:
            return False
        self.beginning = None
        self._process.refused()
        self._lacking[name] = self._clock() + (LATER_S if self.active else AGAIN_S)
        self._waits_said.warn("requests for %s wait for its layers: %s", name, error)
        return True

    def _wait(self) -> None:
        """Other processes have the pages. They get what engines free for them meanwhile."""
        self._reports.ask(lambda: self.session.step())
        self._sleep(AGAIN_S)

    def _end_pending(self, first_pass_s: float | None) -> None:
        turn, self._pending_turn = self._pending_turn, None
        if turn is None:
            return
        entry = {
            "preempted_requests": 0,
            "restored_layers": 0,
            "predicted_stall_s": 0.0,
            **turn.entry,
        }
        began = turn.begun_s - self._started_s
        self._activations.append(Activation(began, turn.name, turn.seconds, first_pass_s, **entry))

    # -- the session -----------------------------------------------------------------------------------------------

    def _rebalance(self) -> Any:
        """One call for all active tenants; moves may concern any tenant. The session's report, None without one."""
        if self.session is None or not self.active or self._prepared is not None:
            return None
        asking = [self.engines[name] for name in self.active if not self.engines[name].scheduler.closed]
        report = self._reports.ask(lambda: self.session.step({one.tenant.name: one.demand() for one in asking}))
        if self._guests is not None and self._active is not None:
            self._guests.give(self._active, report.unmet_blocks.get(self._active, 0))
        return report

    def _stalls(self) -> dict[str, float]:
        if self.session is None:
            return dict.fromkeys(self.engines, 0.0)
        tenants = self.session.snapshot().tenants
        return {name: tenants[name].stall_s for name in self.engines}

    # -- measuring -------------------------------------------------------------------------------------------------

    def _begin_measuring(self) -> None:
        self._started_s = self._clock()
        for engine in self.engines.values():
            engine.reset_metrics(self._started_s)
        self._timeline: list[SharedSample] = []
        self._activations: list[Activation] = []
        self._turn_began = self._started_s
        self._waits = {}
        self._pending_turn = None

    def _record(self, now: float, ran: Sequence[str]) -> None:
        tenants = {}
        for name, engine in self.engines.items():
            scheduler = engine.scheduler
            tenants[name] = TenantSample(
                kv_used_blocks=scheduler.used_blocks,
                kv_usable_blocks=engine.tenant.kv.usable_blocks,
                layers_remapped=engine.tenant.remapped,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                preemptions=engine.metrics.preemptions,
                lent_pages=getattr(internals(engine.tenant), "lent_pages", 0),
            )
        self._timeline.append(SharedSample(now - self._started_s, tuple(ran), tenants))


def latest_first(requests: Iterable[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    """(arrival, tenant, request), to be taken from the end: by arrival, and of those that arrive together the first given."""
    return sorted(requests, key=lambda one: one[0])[::-1]
