"""A slow, obvious simulation of several tenants that stream over one link, to test `remap.policy.link` against.

Each tenant is a `schedule_des.Machine`, but for its copy engine: there is one for all. A tenant asks for one piece at a
time; pieces are served in the order of asking. Times are integers.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from reference.schedule_des import Copy, Machine


@dataclass
class Tenant(Machine):
    """chunk: the longest piece; 0: a copy is one piece. begins: when its first pass begins."""

    chunk: int = 0
    begins: int = 0
    waiting: Copy | None = None  # asked for, or being copied
    left: int = 0  # of it, not asked for yet
    passes_end: list[int] = field(default_factory=list)

    def ask(self) -> int:
        """The next piece's duration, or -1 if there is nothing to ask for."""
        if self.waiting is None and self.queue:
            previous = self.waits_for[self.queue[0].use]
            if previous is None or previous in self.finished:
                self.waiting = self.queue.popleft()
                self.left = self.transfer[self.waiting.layer]
        if self.waiting is None:
            return -1
        piece = min(self.left, self.chunk) if self.chunk else self.left
        self.left -= piece
        return piece

    def try_compute(self) -> bool:
        use = self.current_use()
        if self.computing or not (use == -1 or use in self.arrived):
            return False
        self.computing = True
        return True


def pass_ends(tenants: list[Tenant], passes: int, most_events: int = 1_000_000) -> list[list[int]]:
    """When each tenant's passes end, until each has ended `passes`. Others go on meanwhile, if they copy anything: one whose
    layers all have a buffer would only make events."""
    link: deque[tuple[int, int]] = deque()  # (tenant, duration), in the order of asking
    asked = [False] * len(tenants)
    serving: int | None = None
    events: list[tuple[int, int, str, int]] = []
    serial = 0

    def after(now: int, seconds: int, kind: str, who: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (now + seconds, serial, kind, who))

    for who, tenant in enumerate(tenants):
        tenant.pass_starts.append(tenant.begins)
        tenant.enqueue_until(2 * tenant.buffers + 2 * len(tenant.streamed) + 2)
        after(0, tenant.begins, "begin", who)
    for _ in range(most_events):
        if all(len(tenant.passes_end) >= passes for tenant in tenants):
            return [tenant.passes_end for tenant in tenants]
        now, _, kind, who = heapq.heappop(events)
        tenant = tenants[who]
        tenant.now = now
        if kind == "copied":
            serving = None
            asked[who] = False
            if tenant.left == 0 and tenant.waiting is not None:
                tenant.arrived.add(tenant.waiting.use)
                tenant.waiting = None
        elif kind == "computed" and tenant.handle("computed", tenant.current_use()):
            tenant.passes_end.append(now)
            ahead = 2 * tenant.buffers + 2 * len(tenant.streamed) + 2
            tenant.enqueue_until((len(tenant.pass_starts) - 1) * len(tenant.streamed) + ahead)
        if not asked[who] and (piece := tenant.ask()) >= 0:
            asked[who] = True
            link.append((who, piece))
        if serving is None and link:
            serving, piece = link.popleft()
            after(now, piece, "copied", serving)
        done = len(tenant.passes_end) >= passes and len(tenant.streamed) <= tenant.buffers
        if not done and tenant.try_compute():
            after(now, tenant.compute[tenant.layer], "computed", who)
    raise AssertionError(f"not done after {most_events} events")
