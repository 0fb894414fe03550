# SPDX-License-Identifier: Apache-2.0
"""Stall and capacity bounds for the layers that a tenant would stream: the controller's two questions to
`remap.schedule`.

    bound   how much can be remapped within the slowdown, and through how many buffers
    stall   for how long a pass would wait: the certificate of every plan

Whole layers count in layers, slices in tail pages of every layer (view.py). The answers are exact. With many layers and
times near the limit they take up to milliseconds, and growth must not wait for that. So `prepare` computes the answers
that growth will need at the end of a pass, when new times arrive.
"""

from __future__ import annotations

import math

from remap.memory.pages import MAX_BUFFERS, Streaming, TenantPages, streaming_now
from remap.memory.restream import next_growth
from remap.memory.state import TenantState
from remap.policy import kv_stream, schedule
from remap.policy.link import Neighbour, delayed, spared
from remap.policy.maxplus import copied_uses
from remap.policy.views import LayerSeconds, Selection

__all__ = ["StallBounds"]

_AHEAD = 4  # growth usually takes no more layers, or pages a layer, at once


class StallBounds:
    """One tenant's answers, kept while its times and its streamable layers stay the same."""

    def __init__(self, tenant: TenantState) -> None:
        self._tenant, config = tenant, tenant.config
        self._slowdown = config.slowdown
        self._kinds: tuple[Selection, ...] = ("nested", "uniform") if config.selection == "auto" else ("nested",)
        if config.selection == "uniform":
            self._kinds = ("uniform",)
        sizes = tenant.layer_bytes
        if config.selection == "auto" and max(sizes) > 1.05 * min(sizes):
            self._kinds = ("nested", "uniform", "best")  # the search pays for unequal layers only
        self._buffers = range(1, MAX_BUFFERS + 1) if config.buffers == "auto" else (config.buffers,)
        self._asked: tuple[LayerSeconds, tuple[int, ...], bool] | None = None  # the answers' key
        self._bound: tuple[int, int] | None = None
        self._stalls: dict[tuple[int, int], tuple[float, Selection]] = {}
        self._beside: dict[tuple[int, int, int], float] = {}
        # The answer of `streamable_blocks`, with its key.
        self._blocks: tuple[LayerSeconds, Streaming, list[Neighbour], int] | None = None
        self._looked_at: tuple[TenantPages, tuple[int, ...]] | None = None  # the key of `_possible`
        self._possible: dict[tuple[int, int], bool] = {}

    def bound(self, times: LayerSeconds) -> tuple[int, int]:
        """(most layers, or tail pages, that can be remapped within the slowdown, buffers)."""
        self._renew(times)
        if self._bound is None:
            self._bound = self._most_pages(times) if self._tenant.slicing else self._most_layers(times)
        return self._bound

    def stall(self, times: LayerSeconds, remapped: int, buffers: int) -> float:
        """Seconds per pass that the computation would wait, beside the KV blocks that stream now."""
        stall, kind = self._answer(times, remapped, buffers)
        blocks = self._tenant.kv.streamed.stop
        if not blocks:
            return stall
        known = self._beside.get((remapped, buffers, blocks))
        if known is None:
            target = self._tenant.streaming_at(remapped, buffers, kind)
            known = self._beside[remapped, buffers, blocks] = self._tenant.stall(times, target, blocks)
        return known

    def kind(self, times: LayerSeconds | None, remapped: int, buffers: int) -> Selection:
        """The selection to use: the first allowed one with a stall within the slowdown, else the one of least stall."""
        if times is None:
            return self._kinds_for(remapped, buffers)[0]
        return self._answer(times, remapped, buffers)[1]

    def possible(self, remapped: int, buffers: int) -> bool:
        """Whether a plan can get there from the layers that stream now: by bringing some home, or by a selection for
        growing."""
        tenant = self._tenant
        if remapped == 0:
            return True
        state = (tenant.pages, tenant.order)  # both are replaced, never changed
        if self._looked_at is None or self._looked_at[0] is not state[0] or self._looked_at[1] is not state[1]:
            self._looked_at = state
            self._possible.clear()
        known = self._possible.get((remapped, buffers))
        if known is None:
            kinds: tuple[Selection, ...] = ("inward",) if remapped < tenant.remapped else ("onward", *self._kinds)
            if tenant.slicing:
                kinds = ("slices",)
            known = self._possible[remapped, buffers] = any(
                tenant.possible(tenant.streaming_at(remapped, buffers, kind)) for kind in kinds
            )
        return known

    def streamable_blocks(self) -> int:
        """Host blocks that a decode pass may stream, from the first on, beside the weights that stream now, so that it waits
        no longer than `slowdown` and `tbt_s` allow, and other active tenants that stream no longer than they may. 0 before
        the first decode pass."""
        tenant, most = self._tenant, self._tenant.kv.spec.streamed_blocks
        times = tenant.link.times(tenant) if most else None
        if times is None:
            return 0
        neighbours, present = tenant.link.neighbours(tenant) or [], streaming_now(tenant.pages)
        known = self._blocks
        if known is None or known[0] is not times or known[1] != present or known[2] != neighbours:
            compute_s, piece_s = math.fsum(times.compute_s), tenant.present_piece()

            def seconds(blocks: int) -> float:
                longest_s = max(tenant.longest_piece(present), tenant.blocks_piece(blocks))
                spares = longest_s <= piece_s or spared(neighbours, piece_s, longest_s)
                return tenant.period(times, present, blocks) if spares else math.inf

            limit, target = (1.0 + self._slowdown) * compute_s, tenant.config.tbt_s
            limit = limit if target is None else min(limit, max(compute_s, target))
            known = self._blocks = (times, present, neighbours, kv_stream.most_blocks(seconds, limit, most))
        return known[3]

    def plan_growth(self) -> None:
        """Plan the next growth, if the bound allows one that adds to what streams, and it is not planned yet. Called at
        the end of every pass."""
        tenant, (most, best) = self._tenant, self._bound or (math.inf, 0)
        buffers = tenant.buffers or best
        if buffers and self._kinds[0] == "nested" and tenant.remapped < most:
            next_growth(tenant, buffers)

    def longest_piece(self, remapped: int, buffers: int) -> float:
        """Seconds of the longest piece that it would copy: by so much each piece of another tenant waits."""
        tenant = self._tenant
        kinds: tuple[Selection, ...] = ("onward", *self._kinds) if not tenant.slicing else ("slices",)
        return max(tenant.longest_piece(tenant.streaming_at(remapped, buffers, kind)) for kind in kinds)

    def prepare(self) -> None:
        """Answer ahead: the bound, and the stall now and with a little more."""
        times = self._tenant.decode_times()
        if times is None:
            return
        most, buffers = self.bound(times)
        present = self._tenant.amount
        if present:
            buffers = self._tenant.buffers
        if not self._tenant.slicing:
            most = min(most, len(self._tenant.order) - buffers)
        for more in range(max(1, present), min(present + _AHEAD, most) + 1):
            self._answer(times, more, buffers)

    def _answer(self, times: LayerSeconds, remapped: int, buffers: int) -> tuple[float, Selection]:
        self._renew(times)
        known = self._stalls.get((remapped, buffers))
        if known is None:
            known = self._stalls[remapped, buffers] = self._compute(times, remapped, buffers)
        return known

    def _compute(self, times: LayerSeconds, remapped: int, buffers: int) -> tuple[float, Selection]:
        total = math.fsum(times.compute_s)
        kinds = self._kinds_for(remapped, buffers)
        best = (math.inf, kinds[0])
        for kind in kinds:
            stall = self._tenant.stall(times, self._tenant.streaming_at(remapped, buffers, kind))
            if stall < best[0]:
                best = (stall, kind)
            if stall <= self._slowdown * total:
                break
        return best

    def _kinds_for(self, remapped: int, buffers: int) -> tuple[Selection, ...]:
        """The allowed selections that a plan can stream; if there are none "nested", which adds to what streams."""
        tenant = self._tenant
        if tenant.slicing:
            return ("slices",)
        if tenant.plain:
            return self._kinds
        kinds = [k for k in self._kinds if tenant.possible(tenant.streaming_at(remapped, buffers, k))]
        return tuple(kinds) or ("nested",)

    def _renew(self, times: LayerSeconds) -> None:
        order, slicing = self._tenant.order, self._tenant.slicing
        asked = self._asked
        if asked is None or asked[0] is not times or asked[1] is not order or asked[2] != slicing:
            self._asked = (times, order, slicing)
            self._bound = None
            self._stalls.clear()
            self._beside.clear()

    def _most_layers(self, times: LayerSeconds) -> tuple[int, int]:
        transfer = times.transfer_s
        if (
            times.wait_s or times.alone < 1.0
        ):  # of the two kinds of pass (TenantState.period), the one that copies longer
            pieces = self._tenant.pieces(self._tenant.whole(range(self._tenant.layers), 1))
            beside, alone = delayed(transfer, pieces, times.wait_s), tuple(each / times.alone for each in transfer)
            transfer = max(beside, alone, key=math.fsum)
        limit = (1.0 + self._slowdown) * math.fsum(times.compute_s) * (1.0 + schedule.RELATIVE_EPSILON)
        streamable = len(self._tenant.order)
        # Of any alpha + beta streamed layers at least alpha + 1 are copied in every pass.
        least = min(transfer)
        most = streamable if least * streamable <= limit else int(limit / least) - 1
        best = (0, self._buffers[0])
        for buffers in self._buffers:
            # The stall is not monotone in alpha (see schedule.max_remapped), so try from the largest down. Most alphas
            # fail without computing the exact period: the copy engine alone would be busy for longer than the pass may
            # last.
            for alpha in range(min(most, streamable - buffers), best[0], -1):
                for kind in self._kinds:
                    if kind == "best" and min(transfer) * (alpha + buffers) > limit:
                        continue
                    streamed = self._tenant.select(alpha, buffers, kind)
                    copied = copied_uses(len(streamed), buffers, "fixed")
                    if math.fsum(transfer[streamed[use]] for use in copied) > limit:
                        continue
                    if self._tenant.period(times, self._tenant.whole(streamed, buffers)) <= limit:
                        best = (alpha, buffers)
                        break
                if best[0] == alpha:
                    break
        return best

    def _most_pages(self, times: LayerSeconds) -> tuple[int, int]:
        limit = (1.0 + self._slowdown) * math.fsum(times.compute_s) * (1.0 + schedule.RELATIVE_EPSILON)
        buffers = max(self._buffers)  # one slot overlaps nothing: no computation lies between two slices
        tenant = self._tenant
        low, high = 0, tenant.pages.buffer_pages
        while low < high:  # the period grows with the tail
            middle = (low + high + 1) // 2
            if tenant.period(times, tenant.streaming_at(middle, buffers, "slices")) <= limit:
                low = middle
            else:
                high = middle - 1
        return low, buffers
