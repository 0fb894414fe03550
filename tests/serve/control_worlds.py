"""A cluster in virtual time: instances that are test doubles, and a network that delays and reorders, refuses and kills.

A double keeps the contract of `remap_serve.cluster.messages`: epochs, two phases, hand-over of requests, reports. Its model is a
function of request and place, so every token that a caller gets can be checked. What random worlds assert after every event is in
`World.check`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from remap.errors import Error
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.messages import (
    Abort,
    BringHome,
    ChangeRefused,
    Commit,
    Decline,
    Description,
    Died,
    Evict,
    Fingerprint,
    GiveUp,
    GroupPlan,
    InstanceReport,
    Joined,
    Part,
    Prepare,
    Prepared,
    Recover,
    Reported,
    TakeAway,
    Tick,
    Tokens,
)
from remap_serve.cluster.service import Cancel, Service, Submit
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network
from remap_serve.policy.cluster.placement import (
    Group,
    Instance,
    InstanceLoad,
    Layer,
    Offer,
    Placement,
    PlannedStage,
    ServedLayers,
    check,
)
from remap_serve.policy.cluster.stages import Splits

LAYERS = 8
MODEL = ServedLayers((Layer(10, 1, Line(0.002, 0.0005)),) * LAYERS)
MEMORY = 80 + 8 * 40
"""Alone an instance has room for 40 tokens; two together for 45 + 40 each, and so on."""
NETWORK = Network(Line(0.001, 0.0), 200.0, 50.0)
TIMEOUT_S = 3.0
FINGERPRINT = Fingerprint("tiny", "float32", "1", LAYERS)


def description(name: str, memory: int = MEMORY, fingerprint: Fingerprint = FINGERPRINT) -> Description:
    return Description(name, fingerprint, MODEL, memory)


def joined(control: Control, *names: str, now_s: float = 0.0, merges: bool = True) -> None:
    """These instances serve, each alone."""
    for name in names:
        (recover,) = control.on(Joined(replace(description(name), merges=merges)), now_s)
        assert isinstance(recover, Recover)
        control.on(Reported(InstanceReport(name, recover.epoch)), now_s)


def token(id: str, place: int) -> int:
    """What the model answers. A server may know the request by its id and more, behind a `~`."""
    return (sum(map(ord, id.partition("~")[0])) * 31 + place * 7) % 101


@dataclass(frozen=True)
class Ask:
    id: str
    prompt: int
    length: int


@dataclass
class Held:
    """A request at a head. ready_s: when its KV has moved."""

    ask: Ask
    attempt: int
    made: int
    ready_s: float = 0.0


@dataclass
class Chaos:
    """Shares of commands that are refused, and rates per second of a death or a hang of an instance, until `until_s`."""

    refuse: float = 0.0
    die: float = 0.0
    hang: float = 0.0
    delay_s: float = 0.05
    until_s: float = 0.0
    gone: float = 0.0
    """Share of deaths after which the instance does not come back."""


@dataclass(eq=False)
class Double:
    """One incarnation of an instance."""

    name: str
    world: World
    epoch: int = 0
    since: int = 0
    ended: int = 0
    alive: bool = True
    returns: bool = True
    hangs_until_s: float = 0.0
    parts: tuple[Part, ...] = ()
    phase: str = "recovering"
    prepared: GroupPlan | None = None
    committed: GroupPlan | None = None
    fetched: int = 0
    arrived: set[int] = field(default_factory=set)
    requests: dict[str, Held] = field(default_factory=dict)
    out: list[Tokens] = field(default_factory=list)
    expects: set[tuple[Part, ...]] = field(default_factory=set)
    early: dict[int, list[tuple[tuple[Part, ...], list[Held]]]] = field(default_factory=dict)
    moved_s: float = 0.0

    @property
    def head(self) -> bool:
        return bool(self.parts) and self.parts[0].instance == self.name

    @property
    def holds(self) -> set[int]:
        mine = next((range(part.first, part.end) for part in self.parts if part.instance == self.name), range(LAYERS))
        return {*mine, *self.arrived}

    def command(self, command: object) -> None:
        """Carry out, or refuse."""
        match command:
            case Prepare(_, plan):
                mine = plan.part(self.name)
                if plan.epoch <= max(self.epoch, self.ended):
                    return self.refuse(plan.epoch, "StalePlan")
                if self.parts not in plan.before or not {*range(mine.first, mine.end)} <= self.holds:
                    return self.refuse(plan.epoch, "IncompleteCopy")
                if self.world.chance(self.world.chaos.refuse):
                    return self.refuse(plan.epoch, "OutOfBlocks")
                if self.prepared is None or plan.epoch > self.prepared.epoch:
                    self.prepared = plan
                self.world.tell(Prepared(self.name, plan.epoch))
            case Commit(_, epoch):
                if self.prepared is None or self.prepared.epoch != epoch:
                    return self.refuse(epoch, "StalePlan")
                if self.world.chance(self.world.chaos.refuse):
                    return self.refuse(epoch, "DriverError")
                self.committed, self.prepared = self.prepared, None
            case Abort(_, epoch):
                self.ended = max(self.ended, epoch)
                if self.prepared is not None and self.prepared.epoch <= epoch:
                    self.prepared = None
                if 0 < self.fetched <= epoch:
                    self.fetched = 0
                    self.arrived.clear()
            case BringHome(_, epoch, copies):
                if epoch <= max(self.epoch, self.ended):
                    return self.refuse(epoch, "StalePlan")
                if self.world.chance(self.world.chaos.refuse):
                    return self.refuse(epoch, "OutOfBlocks")
                self.fetched = epoch
                for copy in copies:
                    if copy.instance == self.name:
                        self.world.later(copy.end_s, lambda layer=copy.layer: self.come(epoch, layer))
            case Recover(_, epoch):
                if epoch > self.epoch:
                    self.epoch, self.since, self.phase = epoch, epoch, "recovering"
                    self.parts = (Part(self.name, 0, LAYERS),)
                    self.prepared = self.committed = None
                    self.fetched = 0
                    self.arrived.clear()
                    self.requests.clear()
                    self.expects.clear()
                    self.world.later(self.world.delay() * 5, lambda: self.recovered(epoch))
            case Submit(_, submission, epoch):
                if not self.head or self.phase == "recovering" or epoch < self.since:
                    self.world.bounce(submission.request.id, submission.attempt)
                else:
                    held = Held(submission.request, submission.attempt, len(submission.tokens))
                    assert submission.tokens == tuple(token(held.ask.id, place) for place in range(held.made))
                    self.requests[held.ask.id] = held
            case Cancel(_, id, attempt):
                if id in self.requests and self.requests[id].attempt <= attempt:
                    del self.requests[id]
            case TakeAway(_, id):
                if self.stuck is not None and self.stuck[0] == id:
                    self.world.bounce(id, self.requests.pop(id).attempt)
            case GiveUp(_, id):
                if self.stuck is not None and self.stuck[0] == id:
                    held = self.requests.pop(id)
                    self.out.append(Tokens(id, held.attempt, held.made, (), "out_of_blocks"))
        return None

    def refuse(self, epoch: int, error: str) -> None:
        self.world.tell(ChangeRefused(self.name, epoch, error, "drawn at random"))

    def come(self, epoch: int, layer: int) -> None:
        if self.fetched == epoch:
            self.arrived.add(layer)

    def recovered(self, epoch: int) -> None:
        if self.epoch == epoch and self.phase == "recovering":
            self.phase = "serving"

    def switch(self, plan: GroupPlan) -> None:
        """At a pass boundary: hand over what it has, and be a stage of the new group."""
        assert {*range(plan.part(self.name).first, plan.part(self.name).end)} <= self.holds
        members = [part.instance for parts in plan.before for part in parts]
        alone = len(plan.stages) == 1
        targets = members if alone else [plan.head]
        leaving, old, was_head = list(self.requests.values()), self.parts, self.head
        self.epoch, self.parts, self.phase, self.committed = plan.epoch, plan.stages, "exchanging", None
        self.arrived.clear()
        self.fetched = 0
        self.requests = {}
        self.expects = set(plan.before) if self.head else set()
        self.moved_s = self.world.now + self.world.delay() * 5
        if was_head:
            for number, target in enumerate(targets):
                self.world.hand_over(target, plan.epoch, old, leaving[number :: len(targets)])
        for parts, held in self.early.pop(plan.epoch, []):
            self.take_over(plan.epoch, parts, held)

    def take_over(self, epoch: int, parts: tuple[Part, ...], held: list[Held]) -> None:
        if epoch > self.epoch:
            self.early.setdefault(epoch, []).append((parts, held))
        elif epoch == self.epoch and parts in self.expects:
            self.expects.discard(parts)
            for each in held:
                # One that was submitted again meanwhile is newer.
                if each.ask.id not in self.requests or self.requests[each.ask.id].attempt < each.attempt:
                    self.requests[each.ask.id] = replace(each, ready_s=self.moved_s)

    def step(self) -> None:
        """One pass, if it is the head: a token for everybody who runs."""
        if self.committed is not None:
            self.switch(self.committed)
        if self.phase == "exchanging" and not self.expects and self.world.now >= self.moved_s:
            self.phase = "serving"
        if not self.head or self.phase == "recovering":
            return None
        mates = [self.world.doubles.get(part.instance) for part in self.parts]
        if any(mate is None or not mate.alive or mate.epoch != self.epoch for mate in mates):
            return None
        for held in self.running:
            if held.ready_s > self.world.now:
                continue
            if self.world.poisons.get(held.ask.id, -1) == held.made:
                self.world.ends[held.ask.id] += 1
                return self.world.kill(self.world.random.choice(self.parts).instance)
            place, last = held.made, held.made + 1 == held.ask.length
            held.made += 1
            self.out.append(
                Tokens(held.ask.id, held.attempt, place, (token(held.ask.id, place),), "length" if last else None)
            )
            if last:
                del self.requests[held.ask.id]
        return None

    @property
    def offers(self) -> tuple[Offer, ...]:
        return self.world.offers if len(self.parts) == 1 else ()

    @property
    def capacity(self) -> int:
        """Of its group; alone in it, with what is offered."""
        stages = [
            PlannedStage(Instance(part.instance, MEMORY), part.first, part.end, offers=self.offers)
            for part in self.parts
        ]
        return Group(tuple(stages)).capacity(MODEL) if stages else 0

    @property
    def running(self) -> list[Held]:
        room, found = self.capacity, []
        for held in self.requests.values():
            room -= held.ask.prompt + held.made + 1
            if room < 0:
                break
            found.append(held)
        return found

    @property
    def stuck(self) -> tuple[str, int] | None:
        """The first request, if it is too long for the whole group."""
        if not self.head or self.running or not self.requests:
            return None
        held = next(iter(self.requests.values()))
        return held.ask.id, held.ask.prompt + held.made + 1

    def report(self) -> InstanceReport:
        running = self.running if self.head else []
        waiting = list(self.requests.values())[len(running) :] if self.head else []
        load = InstanceLoad(
            len(running),
            sum(held.ask.prompt + held.made for held in running),
            tuple(held.ask.prompt + held.made + 1 for held in waiting),
            max((held.ask.prompt + held.made + 1 for held in (*running, *waiting)), default=0),
        )
        requests = tuple((held.ask.id, held.attempt) for held in self.requests.values()) if self.head else ()
        arrived = frozenset(self.arrived)
        stuck, counts = self.stuck, {"passes": 7.0, "computing_s": 0.5}
        return InstanceReport(
            self.name, self.epoch, self.phase, load, requests, self.capacity, arrived, stuck, self.offers, counts=counts
        )


class World:
    """Instances, callers and what lies between them, in virtual time; equal seeds give equal worlds. offers: of each instance
    alone. poisons: requests that end who is to compute the token at this place of theirs; ends: how often they did."""

    def __init__(
        self,
        instances: int,
        policy: GroupPolicy,
        seed: int = 0,
        chaos: Chaos | None = None,
        offers: tuple[Offer, ...] = (),
        poisons: Mapping[str, int] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.offers = offers
        self.poisons = poisons or {}
        self.ends = Counter[str]()
        self.chaos = chaos if chaos is not None else Chaos()
        self.control = Control(MODEL, NETWORK, policy, TIMEOUT_S)
        self.service = Service[Ask](self.control, lambda ask: ask.prompt)
        self.now = 0.0
        self.doubles: dict[str, Double] = {}
        self.given: dict[str, list[int]] = {}
        self.asks: dict[str, Ask] = {}
        self.ended = Counter[str]()
        self.declined: dict[str, Error] = {}
        self.cancelled: set[str] = set()
        self.exhausted: set[str] = set()
        self.phases = Counter[str]()
        self.epochs: dict[str, int] = {}
        self.largest = 1
        self._checked: list[object] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for number in range(instances):
            self.start(f"i{number}")
        self.every(0.1, lambda: self.event(Tick()))

    # -- Time -----------------------------------------------------------------------------------------------------------------

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + after_s, self._number, call))

    def every(self, period_s: float, call: Callable[[], None], double: Double | None = None) -> None:
        def again() -> None:
            if double is not None and not double.alive:
                return
            if double is None or self.now >= double.hangs_until_s:
                call()
            self.later(period_s, again)

        self.later(self.random.random() * period_s, again)

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until_s

    def delay(self) -> float:
        return self.random.random() * self.chaos.delay_s

    def chance(self, share: float) -> bool:
        return self.now < self.chaos.until_s and self.random.random() < share

    # -- Between control and instances --------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        double = Double(name, self)
        self.doubles[name] = double
        self.every(0.05, double.step, double)
        self.every(0.08, lambda: self.poll(double), double)
        if self.chaos.die or self.chaos.hang:
            self.every(1.0, lambda: self.trouble(double), double)
        self.later(self.delay(), lambda: self.event(Joined(description(name))))

    def poll(self, double: Double) -> None:
        """Tokens and the report come together, and in order: so both are delivered at once."""
        out, double.out = double.out, []
        for tokens in out:
            delivery = self.service.take(tokens, self.now)
            if delivery is not None:
                given = self.given[tokens.id]
                assert delivery.first == len(given)
                given += delivery.tokens
                if delivery.finish_reason is not None:
                    self.ended[tokens.id] += 1
                if delivery.finish_reason == "out_of_blocks":
                    self.exhausted.add(tokens.id)
        self.event(Reported(double.report()))

    def trouble(self, double: Double) -> None:
        if self.chance(self.chaos.die):
            self.kill(double.name)
        elif self.chance(self.chaos.hang):
            double.hangs_until_s = self.now + self.random.random() * 3 * TIMEOUT_S

    def kill(self, name: str) -> None:
        double = self.doubles[name]
        if not double.alive:
            # Control heard of its death before it heard that it had joined.
            self.later(
                self.delay(), lambda: self.event(Died(name, double.returns)) if self.doubles[name] is double else None
            )
            return
        double.alive = False
        double.returns = returns = not self.chance(self.chaos.gone)
        # Noticed before or after the next incarnation joins.
        self.later(self.delay(), lambda: self.event(Died(name, returns)) if self.doubles[name] is double else None)
        if returns:
            self.later(self.delay() * 2 + 0.2, lambda: self.start(name))

    def tell(self, event: object) -> None:
        self.later(self.delay(), lambda: self.event(event))

    def event(self, event: object) -> None:
        self.carry_out(self.service.on(event, self.now))
        self.check()

    def bounce(self, id: str, attempt: int) -> None:
        self.later(self.delay(), lambda: self.carry_out(self.service.bounced(id, attempt, self.now)))

    def hand_over(self, name: str, epoch: int, parts: tuple[Part, ...], held: list[Held]) -> None:
        target = self.doubles[name]
        self.later(self.delay(), lambda: target.take_over(epoch, parts, held) if target.alive else None)

    def carry_out(self, actions: list[object]) -> None:
        for action in actions:
            match action:
                case Evict(name, _):
                    self.kill(name)
                case Decline(id, error):
                    self.declined[id] = error
                case _:
                    self.send(action)

    def send(self, action: object) -> None:
        double = self.doubles[action.instance]

        def arrive() -> None:
            if not double.alive:
                return  # its death will be told
            if self.now < double.hangs_until_s:
                self.later(double.hangs_until_s - self.now + 0.001, arrive)
            else:
                double.command(action)

        self.later(self.delay(), arrive)

    # -- Callers ----------------------------------------------------------------------------------------------------------------

    def ask(self, id: str, prompt: int, length: int) -> None:
        self.asks[id] = Ask(id, prompt, length)
        self.given[id] = []
        self.carry_out(self.service.ask(id, self.asks[id], self.now))
        self.check()

    def cancel(self, id: str) -> None:
        if not self.ended[id] and id not in self.declined:
            self.cancelled.add(id)
            self.carry_out(self.service.cancel(id, self.now))

    # -- What holds -------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every event: a complete copy in every group, every instance in one of them, and epochs that only rise."""
        for view in self.control.groups:
            self.phases[view.phase] += 1
            self.largest = max(self.largest, len(view.stages))
            assert view.epoch <= self.control.epoch
            for part in view.stages:
                assert view.epoch >= self.epochs.get(part.instance, 0)
                self.epochs[part.instance] = view.epoch
        shape = [(view.epoch, view.stages) for view in self.control.groups]
        if shape != self._checked:
            self._checked = shape
            stages = [[PlannedStage(Instance(p.instance, MEMORY), p.first, p.end) for p in parts] for _, parts in shape]
            check(Placement(MODEL, tuple(Group(tuple(group)) for group in stages), self.control.epoch))

    def all_answered(self) -> None:
        """Every request has had each of its tokens, once and in order, and one end, unless it was declined."""
        assert len(self.service.ledger) == 0
        assert len(self.control._held) == 0
        for id, ask in self.asks.items():
            if id in self.cancelled or id in self.declined:
                assert self.ended[id] == 0
                continue
            made = len(self.given[id])
            assert self.given[id] == [token(id, place) for place in range(made)], id
            assert self.ended[id] == 1
            if id in self.exhausted:
                assert ask.prompt + made + 1 > self.most
            else:
                assert made == ask.length

    @property
    def most(self) -> int:
        """Tokens that the largest group has room for which the policy makes of the instances that are left."""
        instances = [
            PlannedStage(Instance(name, MEMORY), 0, LAYERS) for name, double in self.doubles.items() if double.alive
        ]
        sizes = {"alone": 1, "pipeline": self.control.policy.stages}
        size = sizes.get(self.control.policy.name, len(instances))
        return Splits(MODEL).tokens(instances[: size if len(instances) >= size else 1])

    @property
    def alone(self) -> bool:
        return all(len(view.stages) == 1 and view.phase == "serving" for view in self.control.groups)
