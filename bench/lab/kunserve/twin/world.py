"""A cluster in virtual time: the production control and dispatcher, and instances that take the time that computing, copies
and messages would. Pure.

Events go into `remap_serve.cluster.control.Control` and its commands come out, as in production. What is simplified: nobody dies;
all instances of a change switch together, when the last of them is at its pass boundary; KV that moves counts where it goes,
so what both ends hold for a moment is not counted twice; a message takes MESSAGE_S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from remap_serve.cluster.control import Control
from remap_serve.cluster.messages import (
    Abort,
    BringHome,
    Commit,
    Description,
    Event,
    Fingerprint,
    Finished,
    GroupPlan,
    InstanceReport,
    Joined,
    Part,
    PlacementAsked,
    Prepare,
    Prepared,
    Recover,
    Reported,
    Route,
    Tick,
)
from remap_serve.policy.cluster.exchange import Priority, Running, chunk_bytes, moves, resumptions, takers
from remap_serve.policy.cluster.placement import Group, Instance, InstanceLoad, PlannedStage
from remap_serve.policy.cluster.restore import Copy
from remap_serve.sim.pools import CountedPool
from remap_serve.sim.workload import Item

from .dispatchers import DISPATCHERS, DispatcherName
from .events import Events
from .host import HostPool
from .migration import Migration
from .network import HOST, Links, Sent, Transfer
from .pipeline import Pipeline, Request
from .results import Answer, Result, Sample
from .setup import Hardware
from .systems import System

__all__ = ["BLOCK_TOKENS", "World"]

BLOCK_TOKENS = 64  # KunServe, section 5.1
MESSAGE_S = 0.001
PERIOD_S = 0.2
"""Between two reports of an instance, and two ticks of control."""
SAMPLE_S = 1.0
MORE = 4
"""Instances that an autoscaler may start."""
PREPARE_S = 0.02
"""Until an instance has made process groups and buffers; it serves meanwhile."""


class World:
    """One run of a system over requests, which are in order of time. dispatcher: of all of them. cold_s: an autoscaler starts as
    many instances as `Control.lacking` says, MORE at most, and each joins after so many seconds; None: there is none. log: takes
    the pieces that the network sends. watch: called after each event, for tests."""

    def __init__(
        self,
        hardware: Hardware,
        system: System,
        items: Sequence[Item],
        *,
        dispatcher: DispatcherName = "lines",
        cold_s: float | None = None,
        log: list[Sent] | None = None,
        watch: Callable[[World], None] | None = None,
    ) -> None:
        self.hardware, self.system, self.items = hardware, system, items
        self.events = Events()
        self.links = Links(
            self.events,
            hardware.network_bytes_per_s,
            hardware.host_bytes_per_s,
            hardware.setup_s,
            coordinated=system.coordinated,
            log=log,
        )
        self.control = Control(
            hardware.model, hardware.network, system.policy, timeout_s=60.0, dispatcher=DISPATCHERS[dispatcher]()
        )
        self.messages: Counter[str] = Counter()
        self.pipelines: dict[str, Pipeline] = {}
        """Of each instance that serves."""
        self.answers: dict[int, Answer] = {}
        self._watch, self._cold_s = watch, cold_s
        self._more = self._coming = 0  # instances that were started, and those of them that have not joined
        self._requests: dict[str, Request] = {}  # unfinished
        self._epochs: dict[str, int] = {}
        self._plans: dict[int, dict[str, GroupPlan]] = {}
        self._committed: Counter[int] = Counter()
        self._switching: set[str] = set()
        self._moving: Counter[int] = Counter()  # epoch -> requests whose KV is on its way
        self._copies: dict[int, list[Transfer]] = {}
        self._lacking: dict[str, set[int]] = {}  # layers that are to come
        self._arrived: dict[str, frozenset[int]] = {}
        self._samples: list[Sample] = []
        self._everybody: list[Pipeline] = []  # that there has been
        self._generated = self._prompts = 0
        self._migration = Migration(self.links, hardware) if system.migrates else None
        # About what a stage takes: one of a group of four, for a few hundred tokens.
        cost = hardware.chunk_cost
        self._chunk = chunk_bytes(hardware.network, (cost.batch_s + cost.chunk(0, 256)) / 4)

    def run(self, most_s: float = 1e5) -> Result:
        """Until every request is answered, or so much virtual time is over."""
        hardware = self.hardware
        fingerprint = Fingerprint(hardware.model_name, "bfloat16", "", len(hardware.model.layers), "", BLOCK_TOKENS)
        self._description = partial(
            Description, fingerprint=fingerprint, model=hardware.model, memory_bytes=hardware.memory_bytes
        )
        for name in hardware.names:
            self._tell(Joined(self._description(name)))
        for number, item in enumerate(self.items):
            self.events.at(item.time_s, lambda number=number, item=item: self._come(number, item))  # type: ignore[misc]
        self._tick()
        self._sample()
        while len(self.answers) < len(self.items) and self.events.now < most_s and self.events.step():
            if self._watch is not None:
                self._watch(self)
        return self._result()

    # -- Requests ------------------------------------------------------------------------------------------------------

    def _come(self, number: int, item: Item) -> None:
        request = Request(number, item.prompt_tokens, item.output_tokens, self.events.now)
        if -(-request.end // BLOCK_TOKENS) > self.hardware.capacity // BLOCK_TOKENS:  # no instance alone can answer it
            self.answers[number] = Answer(item, None, None, 0)
            return
        self._requests[request.id] = request
        self._tell(PlacementAsked(request.id, request.length))

    def _submit(self, id: str, instance: str) -> None:
        pipeline = self.pipelines[instance]
        if pipeline.names[0] == instance:
            pipeline.add(self._requests[id])
        else:  # it is no head any more
            self._tell(PlacementAsked(id, self._requests[id].length))

    def _token(self, request: Request, ended: bool) -> None:
        self._generated += 1
        if request.length == request.prompt_tokens + 1:
            self._prompts += request.prompt_tokens
        if ended:
            item = self.items[request.order]
            self.answers[request.order] = Answer(item, request.first_s, request.last_s, request.preemptions)
            del self._requests[request.id]
            self._tell(Finished(request.id))

    # -- Messages ------------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """An event to control; its commands go to the instances."""
        self.messages[type(event).__name__] += 1
        for command in self.control.on(event, self.events.now):
            self.messages[type(command).__name__] += 1
            self.events.after(MESSAGE_S, lambda command=command: self._obey(command))  # type: ignore[misc]

    def _obey(self, command: object) -> None:
        match command:
            case Route(id, instance):
                self._submit(id, instance)
            case Prepare(instance, plan):
                self._plans.setdefault(plan.epoch, {})[instance] = plan
                self.events.after(PREPARE_S, lambda: self._tell(Prepared(instance, plan.epoch)))
            case Commit(_, epoch):
                self._commit(epoch)
            case BringHome(instance, epoch, copies):
                self._fetch(instance, epoch, [copy for copy in copies if copy.instance == instance])
            case Abort(instance, epoch):
                self._abort(instance, epoch)
            case Recover(instance, epoch):  # it has just joined
                self._pipeline([Part(instance, 0, len(self.hardware.model.layers))], epoch)
                self._report(instance)
            case _:
                raise NotImplementedError(f"nobody dies here, so control does not ask for {command}")

    def _tick(self) -> None:
        for name in self.pipelines:
            self._report(name)
        self._tell(Tick())
        if self._cold_s is not None:
            self._scale(self._cold_s)
        if self._migration is not None:
            self._migration.look(list(self.pipelines.values()))
        self.events.after(PERIOD_S, self._tick)

    def _scale(self, cold_s: float) -> None:
        """Start what is lacking beside what was started already. Nothing ends before the run does."""

        def join(name: str) -> None:
            self._coming -= 1
            self._tell(Joined(self._description(name)))

        for _ in range(min(MORE - self._more, self.control.lacking.instances - self._coming)):
            name = f"more{self._more}"
            self._more, self._coming = self._more + 1, self._coming + 1
            self.events.after(cold_s, lambda name=name: join(name))  # type: ignore[misc]

    def _report(self, name: str) -> None:
        """How things are at this instance."""
        if name in self._switching:
            return
        pipeline, epoch = self.pipelines[name], self._epochs[name]
        head = pipeline.names[0] == name
        self._tell(
            Reported(
                InstanceReport(
                    name,
                    epoch,
                    "exchanging" if self._moving[epoch] else "serving",
                    pipeline.load if head else InstanceLoad(),
                    tuple((one.id, 1) for one in pipeline.requests) if head else (),
                    pipeline.pool.usable_blocks * BLOCK_TOKENS,
                    self._arrived.get(name, frozenset()),
                )
            )
        )

    # -- Groups --------------------------------------------------------------------------------------------------------

    def _pipeline(self, stages: Sequence[Part], epoch: int) -> Pipeline:
        """A group begins; its instances belong to no other from now on."""
        hardware, system = self.hardware, self.system
        parts = [stage for stage in stages if stage.first < stage.end]
        blocks = system.memory * self._capacity(parts) // BLOCK_TOKENS
        pool = CountedPool(blocks, BLOCK_TOKENS)
        if system.swap:
            size = BLOCK_TOKENS * hardware.whole.kv_bytes_per_token
            out_bytes_per_s = hardware.machine.d2h_bytes_per_s * hardware.tp
            pool = HostPool(self.events, blocks, BLOCK_TOKENS, size, out_bytes_per_s, hardware.host_bytes_per_s)
        pipeline = Pipeline(
            self.events,
            self.links,
            hardware,
            parts,
            pool,
            cut=system.cut,
            swap=system.swap,
            shares=system.shares,
            on_token=self._token,
        )
        self._everybody.append(pipeline)
        for stage in stages:
            self.pipelines[stage.instance] = pipeline
            self._epochs[stage.instance] = epoch
        return pipeline

    def _capacity(self, parts: Iterable[Part], arrived: frozenset[int] = frozenset()) -> int:
        """Tokens of KV of a group, if its instances hold these layers besides."""
        memory = self.hardware.memory_bytes
        stages = (PlannedStage(Instance(part.instance, memory), part.first, part.end, arrived) for part in parts)
        return Group(tuple(stages)).capacity(self.hardware.model)

    def _commit(self, epoch: int) -> None:
        """All of a change are told at once; the last one starts it."""
        plans = self._plans[epoch]
        self._committed[epoch] += 1
        if self._committed[epoch] < len(plans):
            return
        old = list(dict.fromkeys(self.pipelines[name] for name in plans))
        self.messages["merges" if len(old) > 1 else "dissolutions"] += 1
        self._switching.update(plans)
        open_ = set(old)

        def closed(pipeline: Pipeline) -> None:
            open_.discard(pipeline)
            if not open_:
                self.events.after(self.hardware.drop_s, lambda: self._switch(epoch, plans, old))

        for pipeline in old:
            pipeline.close(closed)

    def _switch(self, epoch: int, plans: dict[str, GroupPlan], old: Sequence[Pipeline]) -> None:
        """The new groups begin, and take over requests and KV: each request goes to the one with the most room."""
        after = list(dict.fromkeys(plans.values()))
        new = [self._pipeline(plan.stages, epoch) for plan in after]
        self._switching.difference_update(plans)
        for name in plans:
            self._arrived.pop(name, None)
        before = {part.instance: _group(parts) for parts in after[0].before for part in parts}
        groups = [_group(plan.stages) for plan in after]
        running: list[tuple[Request, int, Pipeline, dict[tuple[str, str], int]]] = []
        asked: list[Running] = []
        room = [pipeline.pool.usable_blocks for pipeline in new]
        handed = [
            (request, pipeline.take(request), pipeline.names[0]) for pipeline in old for request in pipeline.requests
        ]
        wanted = [max(blocks, -(-request.length // BLOCK_TOKENS)) for request, blocks, _ in handed]
        for (request, blocks, head), size, place in zip(handed, wanted, takers(wanted, room)):
            kept = 0 < blocks <= room[place]
            room[place] -= size
            if kept:
                moved = moves(self.hardware.model, before[head], groups[place], request.computed)
                running.append((request, blocks, new[place], moved))
                asked.append(Running(head, request.computed, sum(moved.values())))
            else:
                request.computed = 0
                new[place].add(request)
        for one in resumptions(asked, self.hardware.network, self.hardware.chunk_cost):
            request, blocks, target, moved = running[one.request]
            if one.again and moved:
                request.computed = 0
                target.add(request)
            else:
                request.blocks = target.pool.allocate(blocks)
                self._move(epoch, request, target, moved)
        for pipeline in new:
            pipeline.pump()
        for name in plans:
            self._report(name)

    def _move(self, epoch: int, request: Request, pipeline: Pipeline, moved: dict[tuple[str, str], int]) -> None:
        """Send its KV; it goes on when all of that has come."""
        pipeline.hold(request)
        if not moved:
            pipeline.resume(request)
            return
        left = Counter(moved)
        self._moving[epoch] += 1

        def came(pair: tuple[str, str]) -> None:
            del left[pair]
            if left:
                return
            pipeline.resume(request)
            self._moving[epoch] -= 1
            if not self._moving[epoch]:
                for name in [name for name, at in self._epochs.items() if at == epoch]:
                    self._report(name)

        for pair, size in moved.items():
            self.links.send(*pair, size, Priority.EXCHANGE, lambda pair=pair: came(pair), self._chunk)  # type: ignore[misc]

    # -- Layers that come home -----------------------------------------------------------------------------------------

    def _fetch(self, instance: str, epoch: int, copies: Sequence[Copy]) -> None:
        """Free the room, then bring this instance's layers home, behind all else."""
        pipeline = self.pipelines[instance]
        layers = frozenset(copy.layer for copy in copies)
        own = [stage for stage in pipeline.stages if stage.instance == instance]
        if own:
            pipeline.pool.usable_blocks = min(pipeline.pool.usable_blocks, self._capacity(own, layers) // BLOCK_TOKENS)
        self._lacking[instance] = set(layers)
        sent = self._copies.setdefault(epoch, [])

        def came(layer: int) -> None:
            self._lacking[instance].discard(layer)
            if not self._lacking[instance]:
                self._arrived[instance] = layers
                self._report(instance)

        for copy in copies:
            size = self.hardware.model.layers[copy.layer].weight_bytes
            source = HOST if copy.source is None else copy.source
            call: Callable[[], None] = lambda layer=copy.layer: came(layer)  # type: ignore[misc]  # noqa: E731
            sent.append(self.links.send(source, instance, size, Priority.RESTORE, call, self._chunk))

    def _abort(self, instance: str, epoch: int) -> None:
        """What was prepared or fetched is undone: the room is KV's again."""
        self._plans.pop(epoch, None)
        self.links.cancel(self._copies.pop(epoch, ()))
        self._arrived.pop(instance, None)
        pipeline = self.pipelines[instance]
        pipeline.pool.usable_blocks = self._capacity(pipeline.stages) // BLOCK_TOKENS
        pipeline.pump()

    # -- Results -------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        groups = list(dict.fromkeys(self.pipelines.values()))
        loads = [group.load for group in groups]
        self._samples.append(
            Sample(
                self.events.now,
                sum(group.pool.usable_blocks for group in groups) * BLOCK_TOKENS,
                sum(load.demand for load in loads),
                sum(group.pool.live_blocks for group in groups) * BLOCK_TOKENS,
                sum(load.running for load in loads),
                sum(len(load.waiting) for load in loads),
                self._generated,
                self._prompts,
                len(groups),
                max((len(group.stages) for group in groups), default=0),
            )
        )
        self.events.after(SAMPLE_S, self._sample)

    def _result(self) -> Result:
        many = [one for one in self._everybody if len(one.stages) > 1]
        there_s = sum(one.active_s * len(one.stages) for one in many)
        pools = [one.pool for one in self._everybody]
        return Result(
            answers=tuple(self.answers[number] for number in sorted(self.answers)),
            samples=tuple(one for one in self._samples if one.capacity),
            end_s=max((one.last_s or 0.0 for one in self.answers.values()), default=0.0),
            messages=dict(self.messages),
            sent_bytes={priority.name: size for priority, size in self.links.sent.items()},
            bubble_share=1.0 - sum(one.stage_s for one in many) / there_s if there_s else float("nan"),
            preemptions=sum(one.preemptions for one in self._everybody),
            recomputed_tokens=sum(one.recomputed_tokens for one in self._everybody),
            swapped_blocks=sum(pool.copied_blocks for pool in pools if isinstance(pool, HostPool)),
            migrations=self._migration.moved if self._migration is not None else 0,
        )


def _group(parts: Iterable[Part]) -> Group:
    return Group(tuple(PlannedStage(Instance(part.instance, 0), part.first, part.end) for part in parts))
