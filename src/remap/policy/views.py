# SPDX-License-Identifier: Apache-2.0
"""The controller's input and output: frozen values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from remap.config import invalid, is_amount, is_count

if TYPE_CHECKING:
    from remap.policy.donors.supply import Kind
    from remap.policy.link import Neighbour

__all__ = ["NONE", "Decision", "Demand", "LayerSeconds", "NeedQuotes", "Selection", "Take", "TenantView"]

Selection = Literal["nested", "uniform", "best", "suffix", "onward", "inward", "slices"]
"""How the layers that stream are chosen: `remap.memory.state.TenantState.select`, and "slices", the last pages of each."""


class LayerSeconds(Protocol):
    """Seconds per layer: `remap.policy.cost.LayerTimes`, or anything hashable and immutable like it."""

    @property
    def compute_s(self) -> tuple[float, ...]: ...
    @property
    def transfer_s(self) -> tuple[float, ...]: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def alone(self) -> float: ...


@dataclass(frozen=True)
class Demand:
    """KV blocks that the engine wants to be able to allocate now, beyond those it holds. An int >= 0.

    free: how many blocks the engine's own allocator has free. An engine that has one (`kv.subscribe(...,
    external=True)`) must give it, since the pool sees all its blocks as held; others leave it out.

    waited_s: seconds that the first of the queue has waited for its first token; for `Config.ttft_s`.

    can_wait: whether requests run that need none of the blocks lacking. Before the first decode pass was timed no layer
    of the tenant's own streams for such a demand: a prefill hides more copies than the passes that follow it.
    """

    blocks: int
    free: int | None = None
    waited_s: float = 0.0
    can_wait: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.blocks):
            raise invalid("blocks", self.blocks, "an int of at least 0")
        if self.free is not None and not is_count(self.free):
            raise invalid("free", self.free, "an int of at least 0, or None")
        if not is_amount(self.waited_s):
            raise invalid("waited_s", self.waited_s, "a finite number of seconds of at least 0")
        if not isinstance(self.can_wait, bool):
            raise invalid("can_wait", self.can_wait, "True or False")


@dataclass(slots=True)
class TenantView:
    """The controller's view of a tenant. Counts of layers and of KV blocks; seconds in `times`. A value: no code changes
    it (it is not frozen because every step makes one, and setting the fields of a frozen class takes as long as all
    else that a step with nothing to do).

    For an engine with its own allocator, free_blocks and live_blocks are that allocator's, not the pool's (to the pool
    every block that the engine holds is live). blocks_per_layer is b1. shrink_blocks is the most blocks that the next
    shrink by one layer takes away, if it is known exactly (otherwise ceil(b1)).
    """

    layers: int
    remapped: int  # alpha
    buffers: int  # beta; meaningless while alpha is 0
    streamable: int  # layers that may be streamed: alpha + beta of them at most
    usable_blocks: int
    free_blocks: int
    live_blocks: int
    free_pool_blocks: int  # blocks obtainable from the arena's free pages, without remapping
    blocks_per_layer: float
    max_remapped: int  # the cap by structure, layers - buffers
    times: LayerSeconds | None  # None: not measured yet
    max_blocks: int | None = None  # size of the KV region; None: no limit
    shrink_blocks: int | None = None
    active: bool = True
    lends: bool = False  # other tenants have pages of its layers: they come home first, by `Controller.may_return`
    # Whether a whole pass has waited for every layer, and one of those decoded or demand cannot wait; else none may be streamed.
    seen: bool = True
    unit: str = "layers"  # the unit of alpha; for slices: tail pages of every layer
    order: tuple[int, ...] = ()  # streamable layers, in donation order: bounds and stalls depend on them
    shares: bool = False  # there are other tenants, and they are asked when free pages do not suffice
    # The other active tenants that stream, looked at only when the tenant copies more. None: no other tenant is active.
    neighbours: Sequence[Neighbour] | None = None


class Take(NamedTuple):
    """Pages of another tenant that the receiver gets, besides free ones.

    kind "idle_kv": from the donor's unused KV, for `blocks` blocks of the receiver. "paused_kv": from live KV that its
    engine copies to host memory first. "inactive", "active": the donor streams layers, chosen by `selection`, through
    `buffers` buffers, so that `remapped` layers' worth of its pages are no parameters.
    """

    donor: str
    kind: Kind
    blocks: int
    remapped: int = 0
    buffers: int = 0
    selection: Selection = "onward"
    predicted_stall_s: float = 0.0  # of the donor, per pass, at the target


class NeedQuotes(NamedTuple):
    """Free pages do not suffice: the caller is to ask what other tenants can give, for `blocks` blocks."""

    blocks: int


class Decision(NamedTuple):
    """The action to take now. `remapped` and `buffers` are the targets; `unmet_blocks` is the demand that stays unmet
    after it.

    action "grow" may leave `remapped` as it is, if free pages suffice. predicted_stall_s is per pass, at the target; 0
    while nothing has been measured.
    """

    action: Literal["none", "grow", "shrink"]
    free_pool_blocks_to_take: int
    remapped: int
    buffers: int
    reason: str
    predicted_stall_s: float
    unmet_blocks: int
    takes: tuple[Take, ...] = ()


NONE = Decision("none", 0, 0, 0, "demand is met and nothing is remapped", 0.0, 0)
"""The decision of almost every step: one shared object, so that a step with nothing to do allocates nothing."""
