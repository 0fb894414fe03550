# SPDX-License-Identifier: Apache-2.0
"""Control of a cluster: which instances serve together, and how that changes. Pure: events in, commands out, no clock and no IO.

Every change, a merger or a dissolution, goes through the same steps and has an epoch of its own:

    fetching    dissolutions only: the missing layers come home while the group serves. It can be given up
    preparing   all instances of the change check the plan and make ready, and go on serving as before
    switching   all were ready, so the change is decided: each switches at its next pass boundary
    exchanging  each has switched: KV moves to where it is needed now, and new requests run

Until it is decided, a refusal, a death or a deadline aborts a change, and nothing has changed. Afterwards these are a fault:
the instance at fault is evicted, those that it shared the change or the group with recover (each serves alone, with layers
from its host's master copy), and their requests start again elsewhere. An instance that joins recovers in the same way, for it
has an epoch that control does not know. So each group holds a complete copy at every moment (`placement.check` sees each plan
before it is sent), and epochs only rise.

What instances have done is read from their reports, which come in order with the tokens that they made. Loads are judged at
ticks: `drop` says which merge, for as many tokens as the cluster lacks; when a group dissolves, by the policy:

    remap      exact plan; ski rental: a group dissolves when its requests' added waiting for their tokens reaches
               the cost of the copies, while each instance has room for its own demand and `MARGIN` more, beside all of its
               layers. A group without requests dissolves: there is none that the copies could delay
    kunserve   the paper's: greedy plan; dissolves when less than half of the KV is used that there is without a drop
    alone      never merges
    pipeline   groups of `stages` instances as soon as that many serve alone; never dissolves

A request that was with an instance when it died goes to other instances, of other nodes, where there are such with room for it.
One that fails again and again has none of the same twice, and a request that ends whoever has it is known by their number
(`service`).

An instance whose process is to be replaced (`Leaving`) keeps its requests, and gets no others while another group is there; its
group begins no change. When its process has ended, what it had starts again elsewhere.

An instance that takes part in no change (`Description.merges`) serves alone under each policy: requests are sent to it, and start
again elsewhere when it is lost.

A request that is too long for its group, alone in it, goes to a group with room for it, or waits for one (`drop.wider`), which
does not dissolve while it runs. Where all instances together have no room for it, or the policy makes no larger group, it ends.

Who runs where after a dissolution is the old head's decision, when it knows the requests. Here the load of a group counts
as if its instances had equal shares of it.

An instance that serves alone lets its own layers stream when its requests ask for more KV than it has, as far as its
certificate allows, and borrows pages of models that are idle in its session. Its reports say how much that is and its cost
(`Offer`): room like any other, to which requests are sent. Groups merge when they ask for more than that; or, where a drop
costs less (`drop.preferred`) and leaves no less room, for more than fits without it. Members of a group say nothing, and have
nothing of it: their layers have to come home, and the KV to fit beside them, before the group is dissolved.

Claim: while no instance dies and demand is constant, groups do not merge again after they were dissolved by "remap". It
dissolves while demand and the margin fit into each instance alone beside all of its layers. It merges when demand is above
capacity, which offers only add to, whether they count or not, and however what reports say of them changes. So demand must rise
by more than the margin between them (claim 3 of `policy.rental`, with the margin as its sigma). "kunserve" has the other half of
capacity between them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from remap.errors import Error, InvalidArgument, OutOfMemory
from remap_serve.policy.cluster import drop, restore
from remap_serve.policy.cluster.dispatch import Dispatcher, whole_lines
from remap_serve.policy.cluster.foresight import Foresight, Outlook
from remap_serve.policy.cluster.pipeline import Network, group_round_s
from remap_serve.policy.cluster.placement import (
    Group,
    Instance,
    Placement,
    PlannedStage,
    ServedLayers,
    check,
)
from remap_serve.policy.cluster.shortage import Shortage, shortage
from remap_serve.policy.cluster.stages import Splits

from .groups import GroupChange, GroupView, Phase, ServingGroup, bare, parts_of, spread, together
from .messages import (
    Abort,
    BringHome,
    ChangeRefused,
    Command,
    Commit,
    Death,
    Decline,
    Description,
    Died,
    Event,
    Evict,
    Fingerprint,
    Finished,
    GiveUp,
    GroupPlan,
    InstanceReport,
    Joined,
    Leaving,
    News,
    PlacementAsked,
    Prepare,
    Prepared,
    Recover,
    Reported,
    Restart,
    Route,
    TakeAway,
    Tick,
)

__all__ = ["MARGIN", "Control", "GroupPolicy", "NoCopy", "OtherModel", "PolicyName"]

MARGIN = 0.1
"""Share of an instance's KV, alone, that must stay free when a group dissolves under "remap"."""

PolicyName = Literal["remap", "kunserve", "alone", "pipeline"]


class OtherModel(Error):
    """An instance that serves another model, or another version of it, wants to join. Nothing changed.

    Fields: instance, expected and got (fingerprints, or layers with their bytes), differs (the names of what differs).
    """


class NoCopy(Error):
    """No instance is left, and none comes back: there is no complete copy of the model. The request is answered with this.

    Fields: request (its id), instances (how many are left, 0), death (of the last, a `Death`; None if there was none).
    """


@dataclass(frozen=True)
class GroupPolicy:
    """When groups change (see the module). stages: instances of a group of "pipeline"; the others ignore it. restores: whether
    groups dissolve at all, which ablations turn off. outlook: "remap" and "kunserve" merge by a forecast of the demand, if
    there is one (`policy.cluster.foresight`).

    Raises InvalidArgument for another name, or stages below 1.
    """

    name: PolicyName = "remap"
    stages: int = 1
    restores: bool = True
    outlook: Outlook | None = None

    def __post_init__(self) -> None:
        if self.name not in ("remap", "kunserve", "alone", "pipeline") or self.stages < 1:
            raise InvalidArgument(
                f"the policy must be remap, kunserve, alone or pipeline, with at least one stage, got {self.name!r} with "
                f"{self.stages}; nothing was created",
                name=self.name,
                stages=self.stages,
            )


REMAP = GroupPolicy()


class Control:
    """The state machine (see the module). Not thread-safe: one thread calls `on`.

    model: of the instances that may join. network: between them, until they have measured it (the median of their rates); the
    rate from their hosts is the least that they measured, once they have joined. timeout_s: without a report for so long, or
    without an answer to a command, an instance counts as dead, and a change that was not decided is aborted. dispatcher: says
    where requests go.

    Raises InvalidArgument (fields timeout_s) unless the timeout is above 0.
    """

    def __init__(
        self,
        model: ServedLayers,
        network: Network,
        policy: GroupPolicy = REMAP,
        timeout_s: float = 10.0,
        *,
        dispatcher: Dispatcher = whole_lines,
    ) -> None:
        if not timeout_s > 0:
            raise InvalidArgument(
                f"the timeout must be above 0 s, got {timeout_s!r}; nothing was created", timeout_s=timeout_s
            )
        self.model = model
        self.network = network
        self.policy = policy
        self.timeout_s = timeout_s
        self.epoch = 0
        """The highest epoch that was given out."""
        self.dispatcher = dispatcher
        self.changes = Counter[str]()
        """Changes of groups: "merged", "dissolved", "aborted"."""
        self.news = deque[News](maxlen=256)
        """The results of changes, the oldest first; the reader takes away what it has read."""
        self._fingerprint: Fingerprint | None = None  # of the first that joined: requests may be half answered by it
        self._known: dict[str, Description] = {}
        self._groups: list[ServingGroup] = []
        self._of: dict[str, ServingGroup] = {}
        self._heard_s: dict[str, float] = {}
        self._rates: dict[str, float] = {}  # of the network, as instances measured it
        self._returning: set[str] = set()
        self._leaving: set[str] = set()
        self._held: dict[str, int] = {}
        self._deaths: dict[str, tuple[Death, ...]] = {}  # of held requests that were lost
        self._last: Death | None = None
        # Requests that were stuck and moved, and the tokens that they asked for: more than the caller that asks again may know.
        self._moved: dict[str, int] = {}
        self._foresight = None if policy.outlook is None else Foresight(policy.outlook)
        self._splits = Splits(model)
        self._commands: list[Command] = []

    # -- What there is --------------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Who computes which layers, with the loads as they were last reported and sent; a new value each time."""
        return self._placement(self._groups)

    @property
    def groups(self) -> list[GroupView]:
        """The state, for display."""
        return [
            GroupView(
                each.epoch,
                None if each.change is None else each.change.epoch,
                each.phase,
                each.parts,
                each.load,
                each.capacity(self.model),
            )
            for each in self._groups
        ]

    @property
    def lacking(self) -> Shortage:
        """What an autoscaler is for: KV that requests ask for, or will by the forecast, and that this policy cannot free."""
        later = 0 if self._foresight is None else self._foresight.ahead()[1]
        return shortage(self.placement, later, self.policy.name in ("remap", "kunserve"))

    @property
    def descriptions(self) -> dict[str, Description]:
        """Of the instances in the cluster, as they joined."""
        return dict(self._known)

    def epoch_of(self, instance: str) -> int | None:
        """Of the group that this instance is in, by the last decision; None if it is in none."""
        return self._of[instance].epoch if instance in self._of else None

    @property
    def leaving(self) -> frozenset[str]:
        """Instances that are to be replaced (`Leaving`), until they join again."""
        return frozenset(self._leaving)

    def members(self, instance: str) -> tuple[str, ...]:
        """The instances of this one's group, its head first; none if it is not in the cluster."""
        return tuple(self._of[instance].names) if instance in self._of else ()

    # -- Events ---------------------------------------------------------------------------------------------------------------

    def on(self, event: Event, now_s: float) -> list[Command]:
        """The commands that follow from this event, in this order. now_s: seconds on the caller's clock; it never goes back.

        Raises, with nothing changed: OtherModel and OutOfMemory, for an instance that cannot serve this model.
        """
        self._commands = []
        match event:
            case Joined(description):
                self._join(description, now_s)
            case Died():
                self._die(event, now_s)
            case Leaving(instance, leaves):
                if instance in self._of:
                    (self._leaving.add if leaves else self._leaving.discard)(instance)
            case Reported(report):
                self._report(report, now_s)
            case Prepared(instance, epoch):
                self._prepared(instance, epoch, now_s)
            case ChangeRefused(instance, epoch, error, reason):
                self._refused(instance, epoch, f"{error}: {reason}", now_s)
            case PlacementAsked(id, tokens, deaths):
                for each in self._groups:
                    each.sent.pop(id, None)  # it was sent there, and came back
                self._held[id] = max(tokens, self._moved.get(id, 0))
                if deaths:
                    self._deaths[id] = deaths
            case Finished(id):
                self._held.pop(id, None)
                self._deaths.pop(id, None)
                self._moved.pop(id, None)
                for each in self._groups:
                    each.sent.pop(id, None)
                    if each.stuck is not None and each.stuck[0] == id:
                        each.stuck = None
                return []  # `Service.take` promises that: a held request waits for a group to open, not for the end of a request
            case Tick():
                self._tick(now_s)
        self._route()
        return self._commands

    def _join(self, description: Description, now_s: float) -> None:
        name = description.name
        self._require_same(description)
        instance = Instance(name, description.memory_bytes)
        whole = Group((PlannedStage(instance, 0, len(self.model.layers)),))
        check(Placement(self.model, (whole,), self.epoch))  # it has room for the model
        if name in self._of:
            self._lose(name, now_s, "it was started again before its end was noticed")
        self._returning.discard(name)
        self._leaving.discard(name)
        self._known[name] = description
        self.epoch = max(self.epoch, description.epoch)
        self._fingerprint = description.fingerprint
        rates = [each.host_bytes_per_s for each in self._known.values() if each.host_bytes_per_s]
        if rates:
            self.network = replace(self.network, host_bytes_per_s=min(rates))
        self._heard_s[name] = now_s
        self._recover([whole.stages[0]], now_s)

    def _require_same(self, description: Description) -> None:
        """Raises OtherModel unless it serves the first one's model, even if all others are gone."""
        sizes = [
            [(layer.weight_bytes, layer.kv_bytes) for layer in model.layers]
            for model in (self.model, description.model)
        ]
        expected, got = self._fingerprint or description.fingerprint, description.fingerprint
        differs = tuple(key for key in vars(expected) if getattr(expected, key) != getattr(got, key))
        if sizes[0] != sizes[1]:
            differs = (*differs, "layers' bytes")
        if differs:
            raise OtherModel(
                f"instance {description.name!r} must serve the cluster's model, and differs in {', '.join(differs)}: "
                f"expected {expected} of {len(sizes[0])} layers, got {got} of {len(sizes[1])}; nothing changed; start it "
                "with the same files, dtype and version",
                instance=description.name,
                expected=expected,
                got=got,
                differs=differs,
            )

    def _die(self, died: Died, now_s: float) -> None:
        (self._returning.add if died.returns else self._returning.discard)(died.instance)
        if not died.returns:
            self._leaving.discard(died.instance)
        if died.instance in self._of:
            self._lose(died.instance, now_s, died.why, died.outside)

    def _report(self, report: InstanceReport, now_s: float) -> None:
        group = self._of.get(report.instance)
        if group is None:
            return  # evicted, or not joined yet
        self._heard_s[report.instance] = now_s
        if report.bytes_per_s:
            self._rates[report.instance] = report.bytes_per_s
        change = group.change
        if change is not None and change.phase in ("switching", "exchanging"):
            done = report.phase == "serving" or (change.phase == "switching" and report.phase == "exchanging")
            if report.epoch == change.epoch and done:
                self._answered(change, report.instance, now_s)
        if report.epoch != group.epoch:
            return
        if group.recovering:
            if report.phase == "serving":
                group.recovering = False
            return
        if group.phase == "fetching":
            self._arrived(group, report, now_s)
        # Until all have switched, a new head does not have the requests of the others: the sum of their reports is
        # nearer to the truth.
        if group.phase != "switching" and report.instance == group.names[0]:
            group.reported, group.stuck, group.offers = report.load, report.stuck, report.offers
            for id, _ in report.requests:
                group.sent.pop(id, None)

    def _prepared(self, instance: str, epoch: int, now_s: float) -> None:
        group = self._of.get(instance)
        if group is not None:
            self._heard_s[instance] = now_s
            change = group.change
            if change is not None and change.epoch == epoch and change.phase == "preparing":
                self._answered(change, instance, now_s)

    def _refused(self, instance: str, epoch: int, reason: str, now_s: float) -> None:
        group = self._of.get(instance)
        if group is None:
            return
        self._heard_s[instance] = now_s
        change = group.change
        if change is not None and change.epoch == epoch and change.phase in ("fetching", "preparing"):
            self._abort(change, now_s, f"{instance} refused: {reason}")
        elif group.epoch == epoch and group.phase in ("switching", "exchanging", "recovering"):
            self._evict(instance, reason, now_s)

    def _route(self) -> None:
        """Send requests that are held, if any group serves; decline them if none ever will. One whose group is not open yet waits
        for it: the first that opens is not to have all of them."""
        if not self._held:
            return
        if not self._of and not self._returning:
            self._commands += [Decline(id, _no_copy(id, self._last)) for id in self._held]
            self._held.clear()
            self._deaths.clear()
        groups = self._staying or self._groups
        if not any(each.routable for each in groups):
            return
        sizes = [each.capacity(self.model) for each in groups]
        alike: dict[tuple[int, ...], list[str]] = {}  # by the groups that they may go to
        for id, tokens in self._held.items():
            alike.setdefault(self._apart(groups, sizes, tokens, self._deaths.get(id, ())), []).append(id)
        for numbers, ids in alike.items():
            loads, capacities = [groups[each].load for each in numbers], [sizes[each] for each in numbers]
            for id, place in zip(ids, self.dispatcher(loads, capacities, [self._held[id] for id in ids])):
                chosen = groups[numbers[place]]
                if chosen.routable:
                    chosen.sent[id] = self._held.pop(id)
                    self._deaths.pop(id, None)
                    self._commands.append(Route(id, chosen.names[0]))

    def _apart(
        self, groups: Sequence[ServingGroup], sizes: Sequence[int], tokens: int, deaths: Sequence[Death]
    ) -> tuple[int, ...]:
        """The numbers of those groups that have nothing to do with these deaths: without their nodes, or else without their
        instances. All, where none of these has as much room as the request finds anywhere."""
        numbers = tuple(range(len(groups)))
        if not deaths:
            return numbers
        room = min(tokens, max(sizes))
        instances, nodes = {death.instance for death in deaths}, {death.node for death in deaths if death.node}
        others = [each for each in numbers if instances.isdisjoint(groups[each].names) and sizes[each] >= room]
        known = self._known
        far = [each for each in others if nodes.isdisjoint(known[name].node for name in groups[each].names)]
        return tuple(far or others) or numbers

    # -- Changes --------------------------------------------------------------------------------------------------------------

    def _begin(
        self, before: list[ServingGroup], after: list[Group], phase: Phase, now_s: float, why: str
    ) -> GroupChange | None:
        """Start a change of these groups; None if there is no room for what runs. Raises IncompleteCopy, with nothing changed,
        for a plan that has no complete copy."""
        try:
            check(Placement(self.model, tuple(after), self.epoch + 1))
        except OutOfMemory:
            for each in before:
                each.quiet_s = now_s + self.timeout_s
            return None
        self.epoch += 1
        change = GroupChange(self.epoch, before, after, phase, why=why)
        self._tell(change, "begun", why)
        for each in before:
            each.change = change
        old = tuple(each.parts for each in before)
        known = self._known[after[0].stages[0].instance.name]
        change.plans = [
            GroupPlan(change.epoch, parts_of(group), old, known.fingerprint, known.rendezvous) for group in after
        ]
        return change

    def _tell(self, change: GroupChange, step: Literal["begun", "decided", "aborted"], why: str) -> None:
        kind: Literal["merge", "dissolve"] = "merge" if len(change.after) < len(change.before) else "dissolve"
        self.news.append(News(change.epoch, step, kind, tuple(tuple(each.names) for each in change.before), why))

    def _prepare(self, change: GroupChange, now_s: float) -> None:
        self._enter(change, "preparing", now_s)
        self._commands += [Prepare(part.instance, plan) for plan in change.plans for part in plan.stages]

    def _enter(self, change: GroupChange, phase: Phase, now_s: float) -> None:
        change.phase = phase
        change.waiting_for = set(change.members)
        self._extend(change, now_s)

    def _extend(self, change: GroupChange, now_s: float) -> None:
        """Behind activations a copy takes longer than planned; twice as long is enough."""
        copying_s = 2 * change.slowest_s if change.phase == "fetching" else 0.0
        change.deadline_s = now_s + self.timeout_s + copying_s

    def _answered(self, change: GroupChange, instance: str, now_s: float) -> None:
        """This instance is ready with the present phase; the last one ends it."""
        change.waiting_for.discard(instance)
        if change.waiting_for:
            return
        if change.phase == "preparing":
            self._decide(change, now_s)
        elif change.phase == "switching":
            self._enter(change, "exchanging", now_s)
        else:
            for each in self._groups:
                if each.change is change:
                    each.change = None

    def _decide(self, change: GroupChange, now_s: float) -> None:
        """All are ready: from here on the new groups are the placement, and there is no way back but a fault."""
        names, sent = change.members, dict[str, int]()
        for each in change.before:
            sent |= each.sent
        loads = spread(together([each.reported for each in change.before]), len(change.after))
        made = [
            ServingGroup(Group(tuple(map(bare, group.stages))), change.epoch, load, change=change)
            for group, load in zip(change.after, loads)
        ]
        self._tell(change, "decided", change.why)
        self.changes["merged" if len(made) < len(change.before) else "dissolved"] += 1
        made[0].sent = sent  # the old head, or the one that took its place, has them until a report shows them
        place = min(self._groups.index(each) for each in change.before)
        kept = [each for each in self._groups if each not in change.before]
        self._groups = [*kept[:place], *made, *kept[place:]]
        self._of |= {name: each for each in made for name in each.names}
        self._enter(change, "switching", now_s)
        self._commands += [Commit(name, change.epoch) for name in names]

    def _abort(self, change: GroupChange, now_s: float, why: str, quiet: bool = True, lost: str | None = None) -> None:
        """Nothing has changed: tell all of it but the one that died."""
        self._tell(change, "aborted", why)
        self.changes["aborted"] += 1
        for each in change.before:
            each.change = None
            each.group = Group(tuple(replace(stage, arrived=frozenset()) for stage in each.group.stages))
            each.rental.forfeit()
            each.rent_s = None
            each.quiet_s = now_s + self.timeout_s if quiet else each.quiet_s
        self._commands += [Abort(name, change.epoch) for name in change.members if name != lost]

    def _arrived(self, group: ServingGroup, report: InstanceReport, now_s: float) -> None:
        """Layers have come home to this instance; the last of them lets the group dissolve."""
        change = group.change
        assert change is not None  # its phase is "fetching"
        stages = [
            replace(stage, arrived=report.arrived) if stage.instance.name == report.instance else stage
            for stage in group.group.stages
        ]
        if tuple(stages) != group.group.stages:
            self._extend(change, now_s)  # it goes on
        group.group = Group(tuple(stages))
        if all(stage.holds(layer) for stage in stages for layer in range(len(self.model.layers))):
            self._prepare(change, now_s)

    # -- Faults ---------------------------------------------------------------------------------------------------------------

    def _evict(self, instance: str, reason: str, now_s: float) -> None:
        self._commands.append(Evict(instance, reason))
        self._returning.add(instance)
        self._lose(instance, now_s, reason)

    def _lose(self, instance: str, now_s: float, why: str, outside: bool = False) -> None:
        """This instance is gone: its group's survivors, and those of a change that was decided, serve alone again."""
        group = self._of[instance]
        change = group.change
        hit = [group]
        if change is not None and change.phase in ("fetching", "preparing"):
            self._abort(change, now_s, f"{instance} is gone", quiet=False, lost=instance)
        elif change is not None:
            hit = [each for each in self._groups if each.change is change]
        count = len(self.model.layers)
        names = [name for each in hit for name in each.names]
        stages = [replace(stage, first=0, end=count) for each in hit for stage in each.group.stages]
        self._groups = [each for each in self._groups if each not in hit]
        for name in names:
            del self._of[name]
        self._last = death = Death(instance, self._known.pop(instance).node, why, outside)
        del self._heard_s[instance]
        self._rates.pop(instance, None)
        self._recover([bare(stage) for stage in stages if stage.instance.name != instance], now_s)
        # Last: when these requests are asked for again, no instance may still count as able to serve them that is not.
        self._commands.append(Restart(tuple(names), death))

    def _recover(self, stages: Sequence[PlannedStage], now_s: float) -> None:
        """These instances serve alone from a new epoch on, once they report so."""
        if not stages:
            return
        self.epoch += 1
        for stage in stages:
            name = stage.instance.name
            alone = ServingGroup(Group((stage,)), self.epoch, recovering=True, deadline_s=now_s + self.timeout_s)
            self._groups.append(alone)
            self._of[name] = alone
            self._commands.append(Recover(name, self.epoch))

    # -- Ticks ----------------------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        if self._rates:
            self.network = replace(self.network, bytes_per_s=median(self._rates.values()))
        self._deadlines(now_s)
        for each in list(self._groups):
            if each.phase == "fetching" and not self._fits(each):
                assert each.change is not None  # its phase is "fetching"
                self._abort(each.change, now_s, "requests ask for more KV than fits beside all layers", quiet=False)
        self._widen(now_s)
        if self.policy.name == "alone":
            return
        if self.policy.name == "pipeline":
            self._line_up(now_s)
            return
        ahead = self._look(now_s)
        self._drop(now_s, ahead)
        if self.policy.restores:
            self._restore(now_s)

    def _deadlines(self, now_s: float) -> None:
        """Evict instances that are silent or late. A change that is not decided is aborted instead: nothing was asked of them
        that they had to do. An exchange has no deadline: it waits for room that requests free, and a connection that breaks is
        told by `poll`."""
        for name in [name for name, heard_s in self._heard_s.items() if now_s - heard_s > self.timeout_s]:
            if name in self._of:
                self._evict(name, f"no report for {self.timeout_s} s", now_s)
        for group in list(self._groups):
            if group not in self._groups:
                continue  # it was hit by the fault of another
            if group.recovering and now_s > group.deadline_s:
                self._evict(group.names[0], f"not recovered within {self.timeout_s} s", now_s)
            change = group.change
            if change is None or now_s <= change.deadline_s:
                continue
            if change.phase in ("fetching", "preparing"):
                late = ", ".join(sorted(change.waiting_for))
                self._abort(change, now_s, f"{late} not done with {change.phase} in time")
            elif change.phase == "switching":
                first = next(name for name in change.members if name in change.waiting_for)
                self._evict(first, f"not switched to epoch {change.epoch} within {self.timeout_s} s", now_s)

    def _ready(self, now_s: float) -> list[ServingGroup]:
        """Groups that may change now."""
        return [each for each in self._merging if each.phase == "serving" and now_s >= each.quiet_s]

    @property
    def _merging(self) -> list[ServingGroup]:
        """Groups of instances that take part in changes."""
        return [each for each in self._staying if all(self._known[name].merges for name in each.names)]

    @property
    def _staying(self) -> list[ServingGroup]:
        """Groups without an instance that is to be replaced."""
        return [each for each in self._groups if self._leaving.isdisjoint(each.names)]

    def _widen(self, now_s: float) -> None:
        """Find room for requests that have none in their group: in another, or in a larger one. End those that nothing helps."""
        for each in self._groups:
            if each.stuck is None or each.phase != "serving":
                continue
            id, tokens = each.stuck
            # More than it had room for wherever it was stuck, so that it goes nowhere twice.
            least = max(tokens, each.capacity(self.model) + 1, self._moved.get(id, 0) + 1)
            ready, group = self._ready(now_s), None
            if any(other.routable and other.capacity(self.model) >= least for other in self._staying):
                self._moved[id] = least
                self._unstick(each, TakeAway(each.names[0], id))
                continue
            if self.policy.name in ("remap", "kunserve") and each in ready:
                group = drop.wider(self._placement(ready), ready.index(each), tokens)
            if group is not None:
                self._merge(ready, [group], now_s, f"request {id} asks for {tokens} tokens of KV, alone")
            elif not self._may_widen(each, len(ready)) and not self._divide_anew(ready, tokens, now_s):
                self._unstick(each, GiveUp(each.names[0], id))

    def _divide_anew(self, ready: list[ServingGroup], tokens: int, now_s: float) -> bool:
        """Whether instances that all serve alone could make a group with room for `tokens` tokens, though the present groups
        cannot, who have given up layers of each other's. Then one of these begins to dissolve, if what else it has fits."""
        if self.policy.name not in ("remap", "kunserve"):
            return False
        count = len(self.model.layers)
        several = [each for each in ready if len(each.names) > 1]
        whole = [PlannedStage(stage.instance, 0, count) for each in self._merging for stage in each.group.stages]
        if not several or self._splits.tokens(whole) < tokens:
            return False
        for each in sorted(several, key=lambda one: one.stuck is None):
            if self._fits(each):
                self._dissolve(each, now_s, f"a larger group is wanted, of {tokens} tokens of KV")
                break
        return True

    def _fits(self, each: ServingGroup) -> bool:
        """Whether the group may dissolve. Where a request is stuck none runs, and none behind it will before it can."""
        return each.stuck is not None or restore.fits(self._placement([each]), 0, 0)

    def _unstick(self, each: ServingGroup, command: TakeAway | GiveUp) -> None:
        """The head of this group's line goes: no group is to make room for it until a report shows it again."""
        self._commands.append(command)
        each.stuck, each.reported = None, replace(each.reported, waiting=each.reported.waiting[1:])

    def _may_widen(self, each: ServingGroup, ready: int) -> bool:
        """Whether there may be a larger group later, this one or another. ready: groups that may change now."""
        if self._returning or self._leaving or any(other.phase != "serving" for other in self._groups):
            return True
        merging = self._merging
        if each not in merging:
            return False
        if self.policy.name == "pipeline":
            return len(each.names) < self.policy.stages <= sum(len(other.names) == 1 for other in merging)
        return self.policy.name != "alone" and ready < len(merging)

    def _look(self, now_s: float) -> tuple[int, int]:
        """`Foresight.ahead`; nothing without a forecast."""
        if self._foresight is None or not self._groups:
            return 0, 0
        alone = sum(self._alone(stage.instance) for each in self._groups for stage in each.group.stages)
        self._foresight.see(now_s, sum(each.load.demand for each in self._groups), alone)
        return self._foresight.ahead()

    def _alone(self, instance: Instance) -> int:
        """Tokens of KV that it has when it serves alone, without offers."""
        return max(0, PlannedStage(instance, 0, len(self.model.layers)).capacity(self.model))

    def _drop(self, now_s: float, ahead: tuple[int, int]) -> None:
        """Merge groups if one asks for more KV than it has, and all of them together do, too; or will, by the forecast."""
        ready = self._ready(now_s)
        if len(ready) < 2:
            return
        here = self._placement(ready)
        if any(ahead):  # of these groups, by what there is
            room = sum(each.capacity(self.model) for each in self._groups)
            share = sum(each.capacity(self.model) for each in ready) / max(1, room)
            ahead = round(share * ahead[0]), round(share * ahead[1])
        find = drop.greedy if self.policy.name == "kunserve" else drop.plan
        plan = drop.decided(here, self.network, find, ahead)
        if plan is not None:
            self._merge(ready, plan.placement.groups, now_s, _lack(here, plan))

    def _line_up(self, now_s: float) -> None:
        """Groups of `policy.stages` instances, of those that serve alone."""
        size = self.policy.stages
        single = sorted((each for each in self._ready(now_s) if len(each.names) == 1), key=lambda each: each.names)
        if size < 2:
            return
        for first in range(0, len(single) - size + 1, size):
            stages = [stage for each in single[first : first + size] for stage in each.seen().stages]
            self._merge(single, [Group(self._splits.split(stages, 1.0))], now_s, "the policy is pipeline")

    def _merge(self, ready: Iterable[ServingGroup], after: Iterable[Group], now_s: float, why: str) -> None:
        """Begin a change for each group of `after` that several groups become."""
        of = {name: each for each in ready for name in each.names}
        for group in after:
            before = list(dict.fromkeys(of[s.instance.name] for s in group.stages if s.instance.name in of))
            if len(before) > 1:
                change = self._begin(before, [group], "preparing", now_s, why)
                if change is not None:
                    self._prepare(change, now_s)

    def _restore(self, now_s: float) -> None:
        """Begin to dissolve the groups for which that pays."""
        for each in self._ready(now_s):
            if len(each.names) > 1 and self._pays(each, now_s):
                load = each.load
                why = f"{load.requests} requests ask for {load.wanted} tokens of KV, which fits beside all layers"
                self._dissolve(each, now_s, why)

    def _dissolve(self, each: ServingGroup, now_s: float, why: str) -> None:
        """Begin to bring all layers home to this group's instances."""
        here = self._placement([each])
        after = restore.dissolved(here, 0)
        change = self._begin([each], list(after.groups), "fetching", now_s, why)
        if change is not None:
            if self._foresight is not None:
                self._foresight.dissolved()
            copies = restore.copies(here, after, self.network)
            change.slowest_s = max((copy.end_s - copy.begin_s for copy in copies), default=0.0)
            self._enter(change, "fetching", now_s)
            self._commands += [
                BringHome(name, change.epoch, tuple(copy for copy in copies if copy.instance == name))
                for name in each.names
            ]

    def _pays(self, each: ServingGroup, now_s: float) -> bool:
        """Whether this group should dissolve now."""
        here, before_s, each.rent_s = self._placement([each]), each.rent_s, now_s
        if self.policy.name == "kunserve":
            return restore.half_used(here, 0) and restore.fits(here, 0, 0)
        group = here.groups[0]
        alone = min(self._alone(stage.instance) for stage in group.stages)
        fits = restore.fits(here, 0, round(MARGIN * alone))
        requests = group.load.requests
        if not requests or before_s is None:
            return each.rental.accrue(0.0 if requests else 1.0, fits)
        rounds = (now_s - before_s) / max(1e-9, group_round_s(self.model, group.stages, requests, self.network))
        return each.rental.accrue(rounds * restore.income_of(here, 0, self.network), fits)

    def _placement(self, groups: Iterable[ServingGroup]) -> Placement:
        return Placement(self.model, tuple(each.seen() for each in groups), self.epoch)


def _lack(placement: Placement, plan: drop.DropPlan) -> str:
    loads = [group.load for group in placement.groups]
    room = sum(group.capacity(placement.model) for group in placement.groups)
    wanted, count = sum(load.wanted for load in loads), sum(load.requests for load in loads)
    return f"{count} requests ask for {wanted} tokens of KV, there is room for {room}, and the plan frees {plan.freed}"


def _no_copy(id: str, last: Death | None) -> NoCopy:
    return NoCopy(
        f"request {id!r} needs a complete copy of the model, and no instance is left or comes back; nothing changed; start "
        f"instances{'' if last is None else f'; the last one was {last}'}",
        request=id,
        instances=0,
        death=last,
    )
