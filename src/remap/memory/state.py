# SPDX-License-Identifier: Apache-2.0
"""One tenant's state: its books (the decisions about it), its model, its KV cache, and the times learnt from passes.

Plain data. `attach.py` makes it, the functions of this package get it as an argument, and the public `Tenant` is a
handle over it. The thread of the tenant's engine writes the fields marked as the pass's, between a pass's begin and its
end. The change in progress, which has claimed the tenant (locking.py), writes all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from remap.config import Knobs
from remap.errors import InvalidState
from remap.kv.cache import TenantKV
from remap.kv.spec import BUFFERS
from remap.locking import Turn
from remap.memory.pages import Streaming, TenantPages, streaming_now
from remap.memory.streams import ComputeStream
from remap.memory.timing import PassTimes
from remap.model.protocols import Handle
from remap.model.source import LayerSource
from remap.policy import kv_stream, schedule
from remap.policy.controller import Controller
from remap.policy.cost import LayerTimes
from remap.policy.link import Neighbour, delayed
from remap.policy.selection import best_set
from remap.policy.views import Demand, LayerSeconds, Selection

if TYPE_CHECKING:
    from remap import _core
    from remap.memory.host_memory import HostMemory

__all__ = ["Books", "TenantState"]

Answer = TypeVar("Answer")


class Books(NamedTuple):
    """What is decided of one tenant, as one value: a change makes the next one, and swaps it whole (apply.py).

    draining_target: what streams after the change that waits for withdrawn slots. predicted_stall_s: the certificate of what
    streams. selection: how the streamed layers were chosen; by_hand: they were set by hand, and no certificate bounds them.
    kept: KV pages that it has for its min_blocks, besides those of `TenantState.reserved`: it got them with its layers (cold.py).
    """

    pages: TenantPages
    active: bool = True
    draining_target: Streaming | None = None
    predicted_stall_s: float = 0.0
    selection: str = ""
    by_hand: bool = False
    kept: frozenset[int] = frozenset()


class TenantLink(Protocol):
    """`shared_link.SharedLink`, which knows all tenants."""

    def times(self, tenant: TenantState) -> LayerTimes | None: ...
    def beside_switches(self, tenant: TenantState, times: LayerTimes) -> LayerTimes: ...
    def neighbours(self, tenant: TenantState) -> list[Neighbour] | None: ...


class Bounds(Protocol):
    """`bounds.StallBounds`, of one tenant."""

    def bound(self, times: LayerSeconds) -> tuple[int, int]: ...
    def kind(self, times: LayerSeconds | None, remapped: int, buffers: int) -> Selection: ...
    def plan_growth(self) -> None: ...


class Answers:
    """A tenant's last answer to each question that is asked again and again, with the key for which it holds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, object]] = {}

    def of(self, question: str, key: object, find: Callable[[], Answer]) -> Answer:
        """The answer: the last one, if that was for the same key."""
        known = self._known.get(question)
        if known is None or known[0] != key:
            return self.note(question, key, find())
        return known[1]  # type: ignore[return-value]  # `cast` is a call, in every step

    def note(self, question: str, key: object, answer: Answer) -> Answer:
        """This is the last answer."""
        self._known[question] = key, answer
        return answer

    def known(self, question: str, key: object) -> object:
        """The last answer, if it was for this key; else None."""
        known = self._known.get(question)
        return known[1] if known is not None and known[0] == key else None


@dataclass(eq=False)
class TenantState:
    """See the module. Pages are page ids; slots are pages' places in the KV region; units are seconds and bytes."""

    # -- who it is
    number: int  # never used twice, so that no tenant gets another's bytes by mistake
    name: str
    priority: int
    config: Knobs

    # -- what attach made of the model
    source: LayerSource
    # Swapped whole, with the session's lock held: of two writers one's fields would be lost. Read by the properties below.
    books: Books
    donation_order: tuple[int, ...]  # page ids: place i of the KV region holds donation_order[i]
    donation_lookup: _core.PageOrder  # the same, for the arena
    index_of: dict[int, int]  # its inverse
    layer_bytes: tuple[int, ...]
    addresses: tuple[int, ...]  # of the layers' regions
    regions: tuple[tuple[int, int], ...]  # address and bytes of every region: the layers' first
    rest_address: int
    ring_address: int
    reserved: int  # the first places of the donation order, for min_blocks: their pages never leave
    placed: frozenset[
        int
    ]  # pages that may be homes of its layers: they have a place in the KV region, where they are zeroed
    max_remappable: int  # the most layers that can be given: all their home pages have a place in the KV region
    pinned: frozenset[int]  # layers that may not be streamed
    host: HostMemory  # page-locked: master copies, where the device needs them so, and KV blocks copied out

    # -- what it computes with
    kv: TenantKV
    live_prefetcher: _core.Prefetcher | None  # None once the tenant has gone
    compute: ComputeStream
    turn: Turn
    timing: PassTimes  # the pass's
    link: TenantLink  # the session's
    copy_setup_s: float = field(default=0.0, init=False)  # of any copy, at least; measured if KV blocks stream
    chunk_bytes: int  # layers are copied in chunks of this many bytes; 0: each as a whole

    # -- what the controller has decided
    controller: Controller = field(init=False)
    bounds: Bounds = field(init=False)  # what answers the controller's questions
    demand: Demand | None = None  # of the last step; of a paused tenant: of the last one of its turn
    certified_wait_s: float = 0.0  # what each copied piece waited for other tenants' when it was certified last
    told_alpha: float = 0.0  # alpha in the last report
    logged_alpha: float = 0.0  # alpha in the last line of log (observe.py)
    logged_short_s: float = -math.inf  # when the log said last that demand was not met
    shortages_met: int = 0  # decisions that met a demand beyond the free blocks (observe.py)
    shortages_unmet: int = 0  # and that did not
    last_use: int = 0  # the session's count of activations at the last one
    last_pass_s: float = 0.0  # when the last pass ended; the pass's
    expected: bool = False  # first layers came ahead of its activation, which has not been since

    # -- changes that are not finished
    rest: _core.Rest | None = None  # of a change that is made and not settled
    owed: Callable[[], None] | None = None  # what a rewrite leaves to be done, as rest
    since: tuple[int, float] = (0, 0.0)  # completed passes and their stall seconds at the last change
    leaving: bool = False  # detaching it has failed: only another try is allowed
    detached: bool = False

    # -- layers whose pages other processes have (other_processes.py)
    gone: frozenset[int] = frozenset()  # pages.lent that others have
    at_others: bool = False  # some were gone, and are not home yet
    arrived: bool = False  # some have come back while a pass was open
    tried_home: object = None  # the `Changes.key` for which no more of them could come home
    called_s: float = 0.0  # until then they need not be called again
    began_s: float = 0.0  # when the pass in progress began, if somebody traces; the pass's
    traced: tuple[int, int, float] = (0, 0, 0.0)  # copies, bytes and seconds of them that are in a trace; the pass's

    # -- bytes that are not where they should be
    # Of layers in pages.unfilled, which bytes have come: (offset, end), ascending, with gaps between.
    come: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    written: dict[int, list[str]] = field(default_factory=dict)  # layer -> tensors written after attach
    absent: set[int] = field(default_factory=set)  # noted when the tenant leaves: layers not all at their addresses
    asleep: bool = (
        False  # regions of layers that left while it was inactive may still be to be re-pointed: `Changes.wake`
    )
    all_ready: bool = False  # every layer was seen ready since the last change
    from_masters: set[int] = field(
        default_factory=set
    )  # layers of the open pass, or the last one, that came from weights files; the pass's
    changed_file: InvalidState | None = None  # a weights file changed while layers came from it: no more passes
    # While hooks are new: layers that no whole pass has waited for yet. None: a pass has, or the engine calls wait
    # itself.
    unseen: set[int] | None = None
    handle: Handle | None = None  # `Internals`, with the public tenant, over it

    answers: Answers = field(default_factory=lambda: Answers())
    known_order: tuple[object, object, object, tuple[int, ...]] = (
        None,
        None,
        (),
        (),
    )  # (pages, pinned layers, those and what is away, order)

    def __post_init__(self) -> None:
        # Parts with pages: the layers, and behind them what stands before the first and behind the last, if it may go as well.
        self.parts = len(self.layer_bytes)
        self.layers = self.parts if self.source.embedding_part is None else self.source.embedding_part
        self.in_order = (
            tuple(range(self.parts)) if self.source.embedding_part is None else (self.layers, *range(self.layers))
        )
        self.nested = schedule.nested(self.layers, max(range(self.layers), key=self.pages_of))  # as `Attaching` has it
        order = self.donation_order
        # Of each place, how many pages from there on are consecutive.
        self.runs = [1] * len(order)
        for place in range(len(order) - 2, -1, -1):
            if order[place + 1] == order[place] + 1:
                self.runs[place] = self.runs[place + 1] + 1
        self.blocks_per_page: float = self.kv.geometry.page_bytes / self.kv.spec.block_bytes
        self.blocks_per_layer: float = self.pages.buffer_pages * self.blocks_per_page
        self.shrink_blocks = math.ceil(self.blocks_per_layer) + 1  # blocks that straddle both ends

    def __repr__(self) -> str:
        return f"<state of tenant {self.name!r}: {len(self.streamed)} of {self.layers} layers streamed>"

    @property
    def prefetcher(self) -> _core.Prefetcher:
        """Raises InvalidState (field tenant) once the tenant has gone."""
        found = self.live_prefetcher
        if found is None:
            raise InvalidState(f"tenant {self.name!r} has gone; nothing was copied; attach it again", tenant=self.name)
        return found

    # -- what is decided --------------------------------------------------------------------------------------------

    @property
    def pages(self) -> TenantPages:
        return self.books.pages

    @property
    def order(self) -> tuple[int, ...]:
        """Streamable layers, in the order in which the controller gives them away: the same object, the key of kept answers,
        while they are the same."""
        pages, known = self.books.pages, self.known_order
        if known[0] is not pages or known[1] is not self.pinned:
            away, order = None if pages.for_good else self.pinned | pages.gone, known[3]
            if away != known[2]:
                found = () if away is None else tuple(layer for layer in self.nested if layer not in away)
                order = order if order == found else found
            known = self.known_order = (pages, self.pinned, away, order)
        return known[3]

    @property
    def active(self) -> bool:
        return self.books.active

    @property
    def draining(self) -> bool:
        """Whether slots are withdrawn, and wait for an engine to empty them."""
        return self.kv.pool.withdrawn

    @property
    def draining_target(self) -> Streaming | None:
        return self.books.draining_target

    @property
    def predicted_stall_s(self) -> float:
        return self.books.predicted_stall_s

    @property
    def selection(self) -> str:
        return self.books.selection

    @property
    def by_hand(self) -> bool:
        return self.books.by_hand

    # -- what streams ----------------------------------------------------------------------------------------------

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that are loaded on each pass, ascending."""
        return self.pages.streamed

    @property
    def cold_layers(self) -> tuple[int, ...]:
        """The layers without pages, ascending."""
        return tuple(sorted(self.pages.cold.intersection(range(self.layers))))

    def late_s(self, times: LayerTimes, parts: Collection[int]) -> float:
        """Seconds by which a pass that takes `times` ends later while these parts load in the order of use: `in_order`."""
        layers = [part for part in parts if part < self.layers]
        if len(layers) == len(parts):
            return schedule.one_shot_delay(times.compute_s, times.transfer_s, layers)
        compute_s, transfer_s = self.in_use(times)
        return schedule.one_shot_delay(compute_s, transfer_s, [0, *(layer + 1 for layer in sorted(layers))])

    def in_use(self, times: LayerTimes) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of computation and of copies of each part, in the order of use: what stands before the first layer computes
        in no time, since its computation is counted with the layers'."""
        if self.parts == self.layers:
            return times.compute_s, times.transfer_s
        seconds = self.layer_bytes[-1] * self.timing.seconds_per_byte()
        return (0.0, *times.compute_s), (seconds, *times.transfer_s)

    @property
    def buffers(self) -> int:
        """Ring buffers in use (beta); 0 while nothing is streamed."""
        return len(self.pages.ring)

    @property
    def alpha(self) -> float:
        """Layers' worth of pages that are KV now, or lent: a whole number, or a fraction if slices stream."""
        if not self.slicing:
            return self.remapped
        pages = self.pages
        return (sum(pages.tails) - len(pages.ring) * pages.depth) / pages.buffer_pages

    @property
    def remapped(self) -> int:
        """`alpha`, rounded down."""
        pages = self.pages  # asked for many times in each step
        if pages.for_good:
            return 0  # none of their pages could be anything else
        return int(self.alpha) if self.slicing else max(0, len(pages.streamed) - len(pages.ring))

    @property
    def reported(self) -> float:
        """`alpha` as reports show it: an int unless slices stream."""
        return self.alpha if self.pages.streamed else 0

    @property
    def slicing(self) -> bool:
        """Whether slices stream now, or will if nothing streams. Amounts are then tail pages of each layer."""
        return (self.selection if self.pages.streamed else self.config.selection) == "slices"

    @property
    def amount(self) -> int:
        """How much streams now: layers' worth, or in slices tail pages of every layer."""
        return self.pages.depth if self.slicing else self.remapped

    @property
    def growing_by(self) -> Selection:
        """The selection of the next layers to go: an inactive tenant's last ones, unless others stream already."""
        return "suffix" if not self.active and self.streams_suffix else "onward"

    # -- where bytes are -------------------------------------------------------------------------------------------

    @property
    def streaming(self) -> bool:
        """Whether wait() has something to do in the next pass: some layer is streamed, loading, or being re-pointed, or KV
        blocks are."""
        if self.kv.streamed.used and not self.detached:
            return True
        if self.all_ready or self.detached:
            return False
        if self.streamed or self.rest is not None:
            return True
        self.all_ready = all(map(self.prefetcher.ready, range(self.parts)))
        return not self.all_ready

    def away(self) -> set[int]:
        """The layers of which some bytes are not at their addresses now: streamed, loading, or to be re-pointed."""
        found = self.absent | self.pages.gone
        if self.streaming:
            found.update(self.streamed)
            found.update(part for part in range(self.parts) if not self.prefetcher.ready(part))
            if self.rest is not None:
                found.update(self.rest.reload, self.rest.held)
        return found

    def lost_writes(self, *, replaced: bool = False) -> dict[int, list[str]]:
        """layer -> its tensors that something wrote into while the layer was away; or replaced, if that counts."""
        return self.source.writes((*self.streamed, *self.pages.gone), replaced)

    def refuse_lost_writes(self, *, replaced: bool = True) -> None:
        """Raises InvalidState (fields tenant, written) for writes into layers that were away, by then: into the ring, or into
        memory that another layer, or another tenant, has. Layers that something wrote into before are pinned."""
        written = self.lost_writes(replaced=replaced)
        if written:
            raise InvalidState(
                f"tenant {self.name!r}: something wrote into layers while they were away (streamed, lent or without pages), or "
                f"replaced their tensors, and that is lost: {written}; detach the tenant; write while it is active and these "
                "layers are resident, name the tensors in attach(mutable=), or run a pass before remapping so that remap finds "
                "them",
                tenant=self.name,
                written=written,
            )

    # -- what is allowed now ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the change in progress must leave it alone: it was inside a pass when the change began, or is being
        detached."""
        return self.leaving or not self.turn.claimed

    def require_seen(self) -> None:
        """Raises InvalidState (fields tenant, layers) while no pass has waited for every layer. An inactive tenant is
        allowed: its lent layers come home before its next pass, or that pass checks for them as for all streamed
        layers."""
        if self.unseen is not None and self.active:
            raise InvalidState(
                f"tenant {self.name!r}: no pass has waited for every layer yet, so nothing may be streamed; nothing "
                f"changed; run one whole pass first (layers {sorted(self.unseen)} were not waited for in the last "
                "one), or attach with hooks=False if the engine calls wait and done itself",
                tenant=self.name,
                layers=tuple(sorted(self.unseen)),
            )

    def require_idle(self, leaving: bool = False, asleep: bool = False) -> None:
        """Raises InvalidState (field tenant) if a pass is open, or detaching has failed (unless `leaving`), or, with
        `asleep`, if the tenant is inactive."""
        if self.leaving and not leaving:
            raise InvalidState(
                f"detaching tenant {self.name!r} has failed before; nothing changed; detach it again, or close the "
                "session",
                tenant=self.name,
            )
        if not self.turn.claimed:
            raise InvalidState(
                f"tenant {self.name!r} is inside a pass; nothing changed; call this between passes",
                tenant=self.name,
            )
        if asleep and not self.active:
            raise InvalidState(
                f"tenant {self.name!r} is inactive and can have no demand; nothing changed; call session.activate() first",
                tenant=self.name,
            )

    def pin(self, written: Mapping[int, list[str]]) -> None:
        """Something wrote into these tensors of layers, which may not stream any more."""
        self.written.update(written)
        self.pinned |= written.keys()

    def retire(self) -> None:
        """The memory goes away. From now on wait and done raise instead of touching it, and no hook calls them."""
        if self.handle is not None:
            self.handle.retire()
        self.detached = True
        self.turn.retire(self.name)
        self.kv.retire()

    # -- which layers ----------------------------------------------------------------------------------------------

    def select(self, remapped: int, buffers: int, selection: Selection) -> tuple[int, ...]:
        """The layers to stream for `remapped` layers' worth, ascending; () for 0.

        "nested": a prefix of the nested order, which grows without reloading. "uniform": evenly spaced. "suffix": the
        last ones. "onward": all layers that stream now, and more of the nested order. "inward": fewer of the layers
        that stream now: those lent to other tenants come home first, those of the ring last, and behind these what other
        processes have. "best": by search.
        """
        if remapped == 0:
            return ()
        order, present = self.order, self.pages.streamed
        if selection == "best":
            times = self.timing.known
            if times is not None:
                return best_set(order, remapped, buffers, times, present)
        if selection == "suffix":
            return tuple(sorted(order)[-(remapped + buffers) :])
        if selection == "inward":
            ring = self.pages.ring_layers
            rank = {layer: index for index, layer in enumerate(order)}
            # A suffix comes back from its front, so that it stays a suffix; any other set in the nested order
            # backwards.
            suffix = self.streams_suffix
            lent = {layer for layer in present if self.lends(layer)}
            gone = self.gone
            stuck = {layer for layer in lent if not gone.isdisjoint(self.pages.homes[layer])} if gone else ()
            keep = sorted(
                present,
                key=lambda layer: (
                    layer not in ring,
                    layer in lent,
                    layer not in stuck,
                    -layer if suffix else rank.get(layer, len(rank)),
                ),
            )
            return tuple(sorted(keep[: remapped + buffers]))
        if selection == "onward":
            more = [layer for layer in order if layer not in present][: max(0, remapped + buffers - len(present))]
            return tuple(sorted((*present, *more)))
        if selection == "nested":
            return tuple(sorted(order[: remapped + buffers]))
        ascending = sorted(order)
        return tuple(ascending[index] for index in schedule.uniform(len(ascending), remapped, buffers))

    def streaming_at(self, amount: int, buffers: int, selection: Selection) -> Streaming:
        """The streaming for this amount: whole layers by `select`, or for "slices" the last `amount` pages of every
        streamable layer."""
        sizes = self.pages.sizes
        if selection == "slices":
            return Streaming.of(sizes, self.order if amount else (), buffers, amount, selection=selection)
        # Fewer of what streams were chosen as before, and more as in the nested order.
        recorded = "" if selection == "inward" else "nested" if selection == "onward" else selection
        return self.whole(self.select(amount, buffers, selection), buffers, recorded)

    def whole(self, layers: Iterable[int], buffers: int, selection: str = "") -> Streaming:
        """The streaming of these whole layers."""
        return Streaming.of(self.pages.sizes, layers, buffers, largest=self.pages.buffer_pages, selection=selection)

    def possible(self, target: Streaming) -> bool:
        """Whether a plan can go from the present streaming to `target`: the tails are large enough for the ring, and
        every page that would become KV has a place in the KV region."""
        layers, pages = target.layers, self.pages
        if self.plain or not layers:
            return not layers or len(layers) > target.buffers
        if len(layers) <= target.buffers or sum(target.tails) < target.buffers * target.depth:
            return False
        if self.unplaced.isdisjoint(layers):
            return True
        unmoved = pages.kv_from_homes.union(pages.lent, *(pages.ring_of(target) or ()))
        tails = (pages.homes[n][pages.sizes[n] - target.tails[n] :] for n in self.unplaced.intersection(layers))
        return all(page in self.index_of or page in unmoved for page in chain.from_iterable(tails))

    def copy_seconds(self, times: LayerSeconds, target: Streaming) -> Sequence[float]:
        """Seconds for which the link is busy with each layer's streamed part."""
        sizes, seconds = self.pages.sizes, times.transfer_s
        if all(target.tails[layer] == sizes[layer] for layer in target.layers):
            return seconds
        # A layer that is elsewhere has no pages, and nothing of it is copied.
        return [each * (tail / size) if tail else 0.0 for each, tail, size in zip(seconds, target.tails, sizes)]

    def pieces(self, target: Streaming) -> tuple[int, ...]:
        """In how many pieces each layer's streamed part is copied."""
        return tuple(-(-nbytes // self.chunk_bytes) if self.chunk_bytes else 1 for nbytes in self._copied(target))

    def longest_piece(self, target: Streaming) -> float:
        """Seconds of the longest copy during which no other tenant's copies run."""
        rate = self.timing.seconds_per_byte()

        def find() -> float:
            copied = self._copied(target)
            nbytes = max((copied[layer] for layer in target.layers), default=0)
            return rate * min(nbytes, self.chunk_bytes or nbytes)

        return self.answers.of("piece", (target.tails, rate), find)

    def _copied(self, target: Streaming) -> list[int]:
        """Bytes of each layer that a pass copies, if it streams."""
        page_bytes, sizes = self.kv.geometry.page_bytes, self.pages.sizes
        return [
            max(0, n - (size - tail) * page_bytes) if tail else 0
            for n, size, tail in zip(self.layer_bytes[: self.layers], sizes, target.tails)
        ]

    def decode_times(self) -> LayerTimes | None:
        """Seconds per layer of a decode pass, beside the passes and copies of the other active tenants now
        (`SharedLink.times`)."""
        return self.link.times(self)

    def part_seconds(self, blocks: int) -> float:
        """Seconds to copy a layer's keys, or its values, of the first `blocks` host blocks in."""
        return (
            self.copy_setup_s + blocks * self.kv.geometry.unit_bytes * self.timing.seconds_per_byte() if blocks else 0.0
        )

    def present_piece(self) -> float:
        """`longest_piece` of what its passes copy now, streamed blocks included."""
        weights = self.longest_piece(streaming_now(self.pages)) if self.pages.ring else 0.0
        return max(weights, self.blocks_piece(self.kv.streamed.stop))

    def blocks_piece(self, blocks: int) -> float:
        """`longest_piece` of `blocks` streamed blocks: a layer's keys and values are handed to the link together."""
        return 2 * self.part_seconds(blocks)

    def period(self, times: LayerSeconds, target: Streaming, blocks: int = 0) -> float:
        """Seconds per pass at most: in passes beside other tenants' passes and copies or, if these are stretched by
        more, in the quicker ones beside none (and so without any wait for the link), at the same scale. blocks: how many
        host blocks, from the first on, stream too."""
        copies, part_s = self.copy_seconds(times, target), self.part_seconds(blocks)
        if times.wait_s:
            beside = delayed(copies, self.pieces(target), times.wait_s)
            seconds = self._pass_seconds(times.compute_s, beside, target, part_s + times.wait_s if blocks else 0.0)
        else:
            seconds = self._pass_seconds(times.compute_s, copies, target, part_s)
        if times.alone < 1.0:
            quick = [each * times.alone for each in times.compute_s]
            seconds = max(seconds, self._pass_seconds(quick, copies, target, part_s) / times.alone)
        return seconds

    def _pass_seconds(
        self, compute_s: Sequence[float], copies: Sequence[float], target: Streaming, part_s: float
    ) -> float:
        if not part_s:
            return schedule.period(compute_s, copies, target.layers, target.buffers)
        buffers = max(1, target.buffers)
        return kv_stream.pass_seconds(
            compute_s, copies, target.layers, buffers, 2 * part_s, self.kv.spec.layers, BUFFERS
        )

    def stall(self, times: LayerSeconds, target: Streaming, blocks: int = 0) -> float:
        """Seconds per pass for which the computation would wait at most (`period`)."""
        return max(0.0, self.period(times, target, blocks) - math.fsum(times.compute_s))

    @property
    def unplaced(self) -> frozenset[int]:
        """Layers with a page that has no place in the KV region: such a page can only be ring, or lent."""
        return self._of_homes()[0]

    @property
    def plain(self) -> bool:
        """Whether any choice of streamable layers can stream: all have equal sizes and a place in the KV region."""
        return self._of_homes()[1]

    def _of_homes(self) -> tuple[frozenset[int], bool]:
        """(`unplaced`, `plain`), kept while the homes stay the same."""
        homes, order = self.pages.homes, self.order

        def find() -> tuple[frozenset[int], bool]:
            places = self.index_of.keys()
            unplaced = frozenset(layer for layer, home in enumerate(homes) if not places >= set(home))
            sizes = {len(homes[layer]) for layer in order}
            return unplaced, sizes <= {self.pages.buffer_pages} and unplaced.isdisjoint(order)

        return self.answers.of("homes", (homes, order), find)

    @property
    def streams_suffix(self) -> bool:
        """Whether nothing streams, or exactly the last streamable layers do."""
        present = self.pages.streamed
        return not present or present == tuple(sorted(self.order)[-len(present) :])

    def pages_of(self, layer: int) -> int:
        """How many pages the layer takes at home."""
        return self.regions[layer][1] // self.kv.geometry.page_bytes

    def lends(self, layer: int) -> bool:
        """Whether other tenants have pages of this layer, or may take some."""
        return layer in self.pages.lending

    # -- pages of the KV region ------------------------------------------------------------------------------------

    def stand_together(self, pages: Sequence[int]) -> bool:
        """Whether these pages stand in the KV region one after another, as they usually do: pages given together do."""
        first = self.index_of.get(pages[0]) if pages else None
        if first is None or not isinstance(pages, range):
            return first is not None and self.donation_order[first : first + len(pages)] == tuple(pages)
        return self.runs[first] >= len(pages)

    def slots_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Slots of the KV region at which these pages stand: a range if they are consecutive, the fast case."""
        geometry = self.kv.geometry
        if self.stand_together(pages):
            return geometry.donation_slots(self.index_of[pages[0]], len(pages))
        places = [self.index_of[page] for page in pages if page in self.index_of]
        if not places:
            return ()
        if places == list(range(places[0], places[0] + len(places))):
            return geometry.donation_slots(places[0], len(places))
        if geometry.ranges == 1:  # a page stands where it was given
            return places
        return [geometry.donation_slot(place) for place in places]
