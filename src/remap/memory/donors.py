# SPDX-License-Identifier: Apache-2.0
"""The donors of pages for a tenant that needs blocks. Every kind answers the same question, and gives in the same way:

    quotes(giver, receiver, need, share)   increments, in blocks of the receiver, each on top of those before it; changes
                                           nothing. share: of an inactive giver's reload, what falls on each pass
    give(giver, receiver, take)            makes the taken increments free pages, for the receiver to take

    unused KV         blocks above min_blocks that no request uses (a giver that serves, or waits for its turn, keeps its demand,
                      headroom and hysteresis)
    inactive layers   a tenant's last layers, up to what its first prefill hides and its targets leave
    active layers     layers of a tenant that serves, or is about to, within its own slowdown; the receiver's own layers
                      compete with them (Controller.offers)
    paused KV         what a tenant that waits for its turn keeps of its unused KV, and its live blocks: the report wants these,
                      its engine copies them to host memory and frees them, and the next step finds them unused

`policy/donors/supply.py` chooses among the quotes, by what they cost; the executor never learns which donor it serves.
Sources: Oneiros section 5.1 (layers of inactive models and of active ones); KV and the exact cap are ours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container
from typing import Protocol, cast

from remap.memory.apply import Changes
from remap.memory.lend import Lending
from remap.memory.state import TenantState
from remap.memory.view import view_of
from remap.policy.donors.supply import Kind, Quote
from remap.policy.schedule import RELATIVE_EPSILON, one_shot_delay
from remap.policy.views import Take
from remap.sizes import MOST_BYTES

__all__ = ["ActiveLayers", "Donor", "InactiveLayers", "PausedKV", "Taker", "UnusedKV", "paused"]

# Asked in every step while demand is unmet, of times that change only when the giver runs.
_late = functools.lru_cache(maxsize=256)(one_shot_delay)


def paused(tenant: TenantState) -> bool:
    """Whether an inactive tenant has requests that have begun: it waits for its turn, and is not idle.

    By its turn, its lent pages would hold live blocks of tenants that wait for their own turns. They could not come
    home, and its layers would stream in every pass. So a paused tenant gives only as much as an active one, within
    `slowdown`, unless all tenants can copy their live blocks to host memory. The session cannot know which blocks of an engine
    with its own allocator are live: such a tenant counts as idle while it is inactive.
    """
    return not tenant.active and not tenant.kv.pool.external and tenant.kv.live_blocks > 0


class Taker(Protocol):
    """Who would get pages: a tenant, or the other processes (other_processes.py). index_of: the pages that have a place there."""

    @property
    def index_of(self) -> Container[int]: ...
    @property
    def blocks_per_page(self) -> float: ...


class Donor(Protocol):
    """One kind of donor (see above)."""

    kind: Kind

    def quotes(self, giver: TenantState, receiver: TenantState, need: int, share: float) -> list[Quote]: ...

    def give(self, giver: TenantState, receiver: TenantState, take: Take) -> int:
        """Returns how many pages have become free."""
        ...


class UnusedKV:
    """Pages of the giver's KV cache that no live block needs."""

    kind: Kind = "idle_kv"

    def __init__(self, changes: Changes, lending: Lending) -> None:
        self._changes = changes
        self._lending = lending

    def surplus(self, giver: TenantState) -> int:
        """Unused blocks that a tenant will not miss: above min_blocks, its last demand, headroom and hysteresis. A tenant that
        neither serves nor waits for its turn needs none of them."""
        free = self.unused(giver)
        if free > 0 and (giver.active or paused(giver)):
            wanted = giver.demand
            view = view_of(self._changes, giver, wanted)
            free = min(free, giver.controller.spare(view, wanted.blocks if wanted else 0))
        return max(0, free)

    @staticmethod
    def unused(giver: TenantState) -> int:
        """Unused blocks above min_blocks."""
        free = giver.kv.usable_blocks - giver.kv.spec.min_blocks
        if not giver.kv.pool.external:
            free = min(free, giver.kv.free_blocks)
        return max(0, free)

    def quotes(self, giver: TenantState, receiver: TenantState, need: int, share: float) -> list[Quote]:
        surplus = self.surplus(giver)
        if surplus <= 0:
            return []
        wanted = math.ceil(need / receiver.blocks_per_page) + 1
        pages = len(self._lending.idle_slots(giver, receiver, wanted, surplus))
        blocks = int(pages * receiver.blocks_per_page)
        return (
            [Quote(giver.name, self.kind, blocks, 0.0, 0.0, 0.0, Take(giver.name, self.kind, blocks))] if blocks else []
        )

    def give(self, giver: TenantState, receiver: TenantState, take: Take) -> int:
        return self._lending.give_idle(giver, take.blocks, receiver, self.surplus(giver))


class PausedKV:
    """Blocks that an inactive tenant will miss in its next turn: unused blocks that it needed in its last one, and live blocks,
    whose KV its engine copies to host memory, as far as it is new, before it frees them.

    Neither costs anything until then, and both cost the same then: a block's KV is copied in again, the giver's own or that of
    the tenant that has its place by then. stuck: whether live blocks stay where they are, whichever tenant needs their pages.
    """

    kind: Kind = "paused_kv"

    def __init__(self, unused: UnusedKV, lending: Lending, immovable: Callable[[], bool]) -> None:
        self._unused = unused
        self._lending = lending
        self._immovable = immovable

    def quotes(self, giver: TenantState, receiver: TenantState, need: int, share: float) -> list[Quote]:
        missed = self._kept(giver) + self.movable(giver)
        blocks = int(missed * giver.kv.spec.block_bytes / receiver.kv.spec.block_bytes)
        if blocks <= 0:
            return []
        # At the link's rate, as layers are copied. New blocks went out when its turn ended.
        nbytes = max(giver.layer_bytes)
        reload = missed * giver.kv.spec.block_bytes * giver.timing.copy_seconds() / nbytes if nbytes else 0.0
        return [Quote(giver.name, self.kind, blocks, 0.0, reload, share, Take(giver.name, self.kind, blocks))]

    def give(self, giver: TenantState, receiver: TenantState, take: Take) -> int:
        return self._lending.give_idle(giver, take.blocks, receiver, self._unused.unused(giver))

    def want(self, giver: TenantState, nbytes: int) -> int:
        """How many live blocks the giver's engine is to free, before its pages can give that much. Uses its offer up."""
        # One block more: pages at both ends may hold a part of a block that stays. At least one: what is unused is in no whole
        # pages yet, and would be in none in the next step.
        lacking = -(-nbytes // giver.kv.spec.block_bytes) + 1 - self._unused.unused(giver)
        wanted = min(max(1, lacking), self.movable(giver))
        if wanted:
            giver.kv.use_offer()
        return wanted

    def _kept(self, giver: TenantState) -> int:
        """Unused blocks that it keeps for its next turn."""
        return self._unused.unused(giver) - self._unused.surplus(giver) if paused(giver) else 0

    def movable(self, giver: TenantState) -> int:
        """Live blocks that its engine can copy to host memory, by its own word."""
        return 0 if giver.active or self._immovable() else giver.kv.reclaimable_blocks


class _Layers:
    """Layers of the giver that stream from then on; the pages that this frees are lent."""

    def __init__(self, changes: Changes, lending: Lending) -> None:
        self._changes = changes
        self._lending = lending

    def give(self, giver: TenantState, receiver: Taker, take: Take) -> int:
        return self._lending.lend(
            giver,
            take.remapped,
            take.buffers,
            take.selection,
            predicted_stall_s=take.predicted_stall_s,
        )


class InactiveLayers(_Layers):
    """Layers of a tenant that serves no pass, one by one, until they cover the need or reach the tenant's cap. ahead: the
    seconds in which layers can come home before their tenant's next pass."""

    kind: Kind = "inactive"

    def __init__(self, changes: Changes, lending: Lending, ahead: Callable[[], float]) -> None:
        super().__init__(changes, lending)
        self._ahead = ahead

    def away_cap(self, giver: TenantState) -> int:
        """The most layers that may be away: loading all streamed layers, the ring's included, may delay a short prefill
        of the giver by at most `Knobs.late_s`, beyond the part that can be loaded ahead of it.

        While none of its passes was measured: one layer, and those that this pays for. Never all: the ring's layers
        stay, and one more.
        """
        config = giver.config
        buffers = max(1, giver.buffers)
        most = min(len(giver.order), giver.layers - 1) - buffers
        if config.max_layers is not None:
            most = min(most, config.max_layers)
        times = giver.timing.prefill()
        if times is None:
            copy = giver.timing.copy_seconds()
            # As many as that pays for, in this order: the quotient may be larger than any int that a float becomes.
            return max(0, min(most, 1 + int(min(config.late_s(0.0) / copy, most)) if copy > 0 else 1))
        prefill_s = math.fsum(times.compute_s)
        bound = config.late_s(prefill_s) + self._ahead() + RELATIVE_EPSILON * prefill_s
        kind = giver.growing_by
        cap = giver.remapped  # more is away only together with what is away now
        while cap < most and _late(times.compute_s, times.transfer_s, giver.select(cap + 1, buffers, kind)) <= bound:
            cap += 1
        return max(0, min(cap, most))

    def quotes(self, giver: TenantState, receiver: Taker, need: int, share: float) -> list[Quote]:
        if giver.slicing and giver.pages.streamed:
            return []  # slices of all layers stream: no layer can go whole
        known = None if share else giver.answers.known("quotes", self._key(giver, receiver))
        if known is not None:
            known = cast("list[Quote]", known)
            covered = itertools.accumulate((quote.blocks for quote in known), initial=0)
            return known[: sum(blocks < need for blocks in covered)]
        buffers = max(1, giver.buffers)
        kind = giver.growing_by
        last = sorted(giver.order, reverse=True)[:buffers]
        places = receiver.index_of
        quotes: list[Quote] = []
        copy = giver.timing.copy_seconds()
        before = giver.select(giver.remapped, buffers, kind) or tuple(last)
        for alpha in range(giver.remapped + 1, self.away_cap(giver) + 1):
            if need <= 0:
                break
            chosen = giver.select(alpha, buffers, kind)
            if not giver.possible(giver.streaming_at(alpha, buffers, kind)):
                continue
            layers, before = set(chosen).difference(before), chosen
            pages = sum(page in places for layer in layers for page in giver.pages.homes[layer])
            blocks = int(pages * receiver.blocks_per_page)
            take = Take(giver.name, self.kind, blocks, alpha, buffers, kind)
            quotes.append(Quote(giver.name, self.kind, blocks, 0.0, copy, share, take))
            need -= blocks
        return quotes

    def prepare(self, giver: TenantState, receiver: Taker) -> bool:
        """Keep all quotes for this receiver, ahead of its question: they hold while the giver makes no pass and gives nothing.
        Returns whether it had none."""
        key = self._key(giver, receiver)
        if giver.answers.known("quotes", key) is not None:
            return False
        giver.answers.of("quotes", key, lambda: self.quotes(giver, receiver, MOST_BYTES, 0.0))
        return True

    def _key(self, giver: TenantState, receiver: Taker) -> tuple[object, ...]:
        seconds = giver.timing.copy_seconds()
        return receiver, giver.pages, giver.order, giver.active, giver.last_pass_s, seconds, self._ahead()


class ActiveLayers(_Layers):
    """Layers of a tenant that serves: as many as its own controller lets stream."""

    kind: Kind = "active"

    def quotes(self, giver: TenantState, receiver: TenantState, need: int, share: float) -> list[Quote]:
        if giver.slicing:
            return []  # it counts in pages of every layer, which no other tenant can use
        view = view_of(self._changes, giver, giver.demand, beside=True)
        scale = giver.pages.buffer_pages * receiver.blocks_per_page / view.blocks_per_layer
        quotes = []
        total = 0.0
        for quote in giver.controller.offers(view, giver.name):
            alpha, buffers = cast("tuple[int, int]", quote.step)
            blocks = int(quote.blocks * scale)
            total += quote.stall_s
            take = Take(giver.name, self.kind, blocks, alpha, buffers, "onward", total)
            quotes.append(Quote(giver.name, self.kind, blocks, quote.stall_s, quote.reload_s, quote.share, take))
        return quotes
