# SPDX-License-Identifier: Apache-2.0
"""The values that go between control and the instances of a cluster. Pure, and frozen; each can be pickled.

Epochs order everything. Control gives each change (a merger, a restoration, a recovery) a number that nothing had before. So
an instance can tell an old command from a new one, however they were delayed on their way:

    prepare   valid if its epoch is above the instance's own and above every epoch that was aborted; a newer one takes the
              place of an older one
    commit    valid for the epoch that is prepared
    abort     ends the preparations for this epoch and forbids it from now on; nothing else happens
    fetch     like prepare: the instance's own epoch stays
    recover   valid if its epoch is above the instance's own: it ends everything older

An invalid command is refused with StalePlan, and nothing changes. An instance tells its work in its reports, which state
how things are and not what happened. So a report that is lost costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from remap_serve.policy.cluster.placement import InstanceLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap.errors import Error
    from remap_serve.engine.request import TokenLogprobs
    from remap_serve.policy.cluster.placement import Offer, ServedLayers
    from remap_serve.policy.cluster.restore import Copy

__all__ = [
    "NOTHING",
    "Abort",
    "BringHome",
    "ChangeRefused",
    "Command",
    "Commit",
    "Death",
    "Decline",
    "Description",
    "Died",
    "Event",
    "Evict",
    "Fingerprint",
    "Finished",
    "GiveUp",
    "GroupPlan",
    "InstanceReport",
    "Joined",
    "Leaving",
    "News",
    "Part",
    "PlacementAsked",
    "Prepare",
    "Prepared",
    "Recover",
    "Reported",
    "Restart",
    "Route",
    "TakeAway",
    "Tick",
    "Tokens",
]

NOTHING = InstanceLoad()


@dataclass(frozen=True)
class Fingerprint:
    """The values that must be equal for instances to compute parts of one model. config: a digest of the model's configuration
    and of its weights' names and shapes; version: of this library; layers: transformer layers; weights: a digest of values that
    lie all over each tensor, "" where there are none (in simulations); block_tokens: of a KV block."""

    config: str
    dtype: str
    version: str
    layers: int
    weights: str = ""
    block_tokens: int = 16


@dataclass(frozen=True)
class Description:
    """An instance that is ready. model: its layers, with their bytes and measured seconds. memory_bytes: for layers and KV
    together. rendezvous: where those that merge with it find each other (`ServedStore.address`).
    host_bytes_per_s: at which layers come from the host's master copy, measured; 0: unknown. merges: whether it takes part in
    changes of groups (`contract.MergingInstance`). epoch: the highest that it was told: an earlier control may have had it.
    node: the machine that its process is on, and dies with; log: the file there that its errors go to; "" if not known."""

    name: str
    fingerprint: Fingerprint
    model: ServedLayers
    memory_bytes: int
    rendezvous: str = ""
    pid: int = 0
    host_bytes_per_s: float = 0.0
    merges: bool = True
    epoch: int = 0
    node: str = ""
    log: str = ""


@dataclass(frozen=True)
class Part:
    """The layers first <= i < end, which this instance computes."""

    instance: str
    first: int
    end: int


@dataclass(frozen=True)
class GroupPlan:
    """A group as it is to be from this epoch on. The first stage's instance is its head, where the scheduler is.

    before: the groups, as they are now, of all instances of the change; so each member knows who has which KV now. rendezvous:
    where all instances in `before` find each other, with the epoch as a prefix.
    """

    epoch: int
    stages: tuple[Part, ...]
    before: tuple[tuple[Part, ...], ...]
    fingerprint: Fingerprint
    rendezvous: str = ""

    @property
    def head(self) -> str:
        """The instance that schedules."""
        return self.stages[0].instance

    def part(self, instance: str) -> Part:
        """The layers that this member computes; KeyError if it is none."""
        for stage in self.stages:
            if stage.instance == instance:
                return stage
        raise KeyError(instance)


@dataclass(frozen=True)
class Tokens:
    """Tokens that a request got. attempt: the one that computed them; first: the place of the first of them among all tokens that
    the request generates. finish_reason: None unless the request has ended. noted: the tokens' logprobs, one for each, or none;
    prompt: those of the prompt's tokens but the first, with the first token; if they were asked for."""

    id: str
    attempt: int
    first: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    noted: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class InstanceReport:
    """How things are at an instance. epoch: of the group that it serves in; it rises when the instance switches.

    phase: "exchanging" from the switch until every old head of the change has handed its requests over, and all KV has moved
    that this instance needs or that others need from it.
    load, requests (id and attempt): what its scheduler has, running and waiting. Nothing unless it is the head, and never
    what it hands over. capacity: tokens of KV that the group has room for, by the head's count. arrived: layers that it holds
    and does not compute; from the host they may still be on their way, and the first pass that needs one waits. stuck: a request
    that has the group's KV to itself and still finds no room, and the tokens that it asks for. offers: of an instance alone,
    `Stage.offers`. bytes_per_s: of the network from here, as measured; 0: unknown. counts: `ClusterInstance.counts`. The report
    comes after all tokens that were made before it.
    """

    instance: str
    epoch: int
    phase: Literal["serving", "exchanging"] = "serving"
    load: InstanceLoad = NOTHING
    requests: tuple[tuple[str, int], ...] = ()
    capacity: int = 0
    arrived: frozenset[int] = frozenset()
    stuck: tuple[str, int] | None = None
    offers: tuple[Offer, ...] = ()
    bytes_per_s: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)


# -- Commands: what control asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare:
    """Check the plan and make ready; go on serving as before. Answered by Prepared or Refused."""

    instance: str
    plan: GroupPlan


@dataclass(frozen=True)
class Commit:
    """Switch to the prepared plan at the next pass boundary."""

    instance: str
    epoch: int


@dataclass(frozen=True)
class Abort:
    """Undo the preparations and fetches for this epoch."""

    instance: str
    epoch: int


@dataclass(frozen=True)
class BringHome:
    """Bring these layers home, behind all else, when there is room; the instance named as their source is asked for them."""

    instance: str
    epoch: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Recover:
    """Forget every request and serve alone from this epoch on, with layers from the host's master copy."""

    instance: str
    epoch: int


@dataclass(frozen=True)
class Evict:
    """Kill this instance: it did not answer, or could not carry out the decision. Answered by Joined, when it is back, or by
    Died, if it does not come back."""

    instance: str
    reason: str


@dataclass(frozen=True)
class Route:
    """Submit this request to this instance."""

    id: str
    instance: str


@dataclass(frozen=True)
class TakeAway:
    """Take this request away from this instance, if it is still stuck there: another has room. Answered by its attempt, which is
    then asked for again (`Service.bounced`)."""

    instance: str
    id: str


@dataclass(frozen=True)
class GiveUp:
    """End this request, with the reason "out_of_blocks": no group can have room for it."""

    instance: str
    id: str


@dataclass(frozen=True)
class Death:
    """The end of an instance's process. node: as of `Description`. why: as far as it is known. outside: no request can be why,
    such as when it was replaced."""

    instance: str
    node: str = ""
    why: str = ""
    outside: bool = False

    def __str__(self) -> str:
        return f"{self.instance} ({self.why or 'it is not known why'})"


@dataclass(frozen=True)
class Restart:
    """The KV of these instances was lost by this death: ask for their requests again (`RequestLedger.restart`, then
    PlacementAsked)."""

    instances: tuple[str, ...]
    death: Death


@dataclass(frozen=True)
class Decline:
    """Answer this request with the error: no instance can serve it, now or later."""

    id: str
    error: Error


Command = Prepare | Commit | Abort | BringHome | Recover | Evict | Route | Restart | TakeAway | GiveUp | Decline


@dataclass(frozen=True)
class News:
    """A change of groups, for the log. step: begun, decided, or aborted. groups: of instances, that merge or dissolve
    into the members of each. why: of its begin, or of its abort."""

    epoch: int
    step: Literal["begun", "decided", "aborted"]
    kind: Literal["merge", "dissolve"]
    groups: tuple[tuple[str, ...], ...]
    why: str

    def __str__(self) -> str:
        named = " | ".join(", ".join(names) for names in self.groups)
        return f"epoch {self.epoch}: {self.kind} of {named} is {self.step}: {self.why}"


# -- Events: what control is told ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """An instance is ready, for the first time or again. It serves nothing yet."""

    description: Description


@dataclass(frozen=True)
class Died:
    """An instance's process ended. returns: it is being started again. why, outside: as of `Death`."""

    instance: str
    returns: bool = True
    why: str = ""
    outside: bool = False


@dataclass(frozen=True)
class Leaving:
    """The instance's process is to be replaced: it gets no new requests if others serve, and begins no change, until it joins
    again. leaves: False if it stays after all."""

    instance: str
    leaves: bool = True


@dataclass(frozen=True)
class Reported:
    """A report came."""

    report: InstanceReport


@dataclass(frozen=True)
class Prepared:
    """The instance is ready to commit this epoch."""

    instance: str
    epoch: int


@dataclass(frozen=True)
class ChangeRefused:
    """The instance refused, or failed in, a command of this epoch. error: the name of the error's class."""

    instance: str
    epoch: int
    error: str
    reason: str


@dataclass(frozen=True)
class PlacementAsked:
    """A request has to be placed: a new one, one that is started again, or one whose instance was not a head any more.
    tokens: of KV that it asks for now. deaths: of instances that had it."""

    id: str
    tokens: int
    deaths: tuple[Death, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A request was answered or cancelled."""

    id: str


@dataclass(frozen=True)
class Tick:
    """Time passed: look at deadlines and loads. Control acts on loads at ticks only."""


Event = Joined | Died | Leaving | Reported | Prepared | ChangeRefused | PlacementAsked | Finished | Tick
