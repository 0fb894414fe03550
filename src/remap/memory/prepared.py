# SPDX-License-Identifier: Apache-2.0
"""Everything that applying and settling a plan derives from it: made ahead for growth, and otherwise just before.

Growth is on the engine's critical path, and the end of a pass is not (restream.py, `prepare_growth`). So what a plan
needs is here, and not in apply.py: the core's own plan, the slots of the pool, the tenant's pages after the plan, and
the prefetcher's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remap import _core
from remap.kv.pages import SlotRuns
from remap.memory.pages import TenantPages
from remap.memory.plan import Copies, Plan, Point, SetOwner, copies_of

__all__ = ["PreparedPlan", "prepare"]

_OWNERS = {name: getattr(_core.Owner, name) for name in ("free", "params", "kv", "ring")}


@dataclass(eq=False, slots=True)
class PreparedPlan:
    """A plan for one tenant, and what follows from it. Valid while the tenant's pages are `before`."""

    plan: Plan
    before: TenantPages
    core: _core.Plan  # its epoch is set when it is applied
    gained: SlotRuns  # slots of the KV region
    copies: Copies
    ring_changes: bool
    frees: bool  # whether pages become free
    layer_bytes: Sequence[int]
    page_bytes: int

    def followed_by(self, later: PreparedPlan) -> PreparedPlan:
        """The consequences of both, one after the other, as of one plan: what is loaded, re-pointed and streamed after it.
        Its steps are the later one's: the core has those of both."""
        after = later.plan.there
        home: dict[int, tuple[int, int]] = {}  # layer -> pages from, and to before
        for layer, first, pages in (*self.plan.home, *later.plan.home):
            begin, end = home.get(layer, (first, first))
            home[layer] = min(begin, first), max(end, first + pages)
        found = []
        for layer, (begin, end) in sorted(home.items()):
            end = min(end, after.sizes[layer] - after.tails[layer])  # the rest streams again
            if begin < end and layer not in after.gone:
                found.append((layer, begin, end - begin))
        held = tuple(sorted({*self.plan.held, *later.plan.held} - after.gone))
        plan = replace(later.plan, home=tuple(found), held=held)
        copies = copies_of(plan, self.layer_bytes, self.page_bytes)
        ring_changes = self.ring_changes or later.ring_changes
        return PreparedPlan(
            plan,
            self.before,
            later.core,
            later.gained,
            copies,
            ring_changes,
            later.frees,
            self.layer_bytes,
            self.page_bytes,
        )


def prepare(
    before: TenantPages, plan: Plan, gained: SlotRuns, layer_bytes: Sequence[int], page_bytes: int
) -> PreparedPlan:
    """The plan's consequences for a tenant with these pages. Changes nothing. gained: slots of the plan's gained
    pages."""
    core = _core.Plan(0)
    frees = False
    for step in plan.steps:
        if isinstance(step, SetOwner):
            frees = frees or step.to_owner == "free"
            core.set_owner(step.pages, _OWNERS[step.from_owner], _OWNERS[step.to_owner], step.tenant)
        elif isinstance(step, Point):
            core.point(step.region, step.first_slot, step.pages, step.deferred, step.layer or 0)
        else:
            core.set_home(step.region, step.pages)
    copies = copies_of(plan, layer_bytes, page_bytes)
    ring_changes = plan.there.ring != before.ring
    return PreparedPlan(plan, before, core, gained, copies, ring_changes, frees, layer_bytes, page_bytes)
