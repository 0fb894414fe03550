# SPDX-License-Identifier: Apache-2.0
"""The links of a group that is to be: how the instances of a change meet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from remap.errors import Error
from remap_serve.cluster.transport import GroupLink, PeerLost, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from remap_serve.cluster.messages import GroupPlan

__all__ = ["Ears", "PreparedGroup", "meet"]


class Ears(NamedTuple):
    """The listener to the links: ring and mesh are called with (epoch, source, header, payload), lost with
    (epoch, error)."""

    ring: Callable[[int, int, bytes, torch.Tensor | None], None]
    mesh: Callable[[int, int, bytes, torch.Tensor | None], None]
    lost: Callable[[int, PeerLost], None]


@dataclass(eq=False)
class PreparedGroup:
    """ring: of the stages, in their order; None for a group of one. mesh: of all instances of the change; None for one
    alone."""

    plan: GroupPlan
    ring: GroupLink | None
    mesh: GroupLink | None

    def open(self, ears: Ears) -> None:
        """Hear messages from now on: a peer may switch before this instance does."""
        epoch = self.plan.epoch
        lost = partial(ears.lost, epoch)
        if self.mesh is not None:
            others = [rank for rank in range(len(self.mesh.names)) if rank != self.mesh.rank]
            self.mesh.open(others, others, partial(ears.mesh, epoch), lost)
        if self.ring is not None:
            stages = len(self.ring.names)
            before, after = (self.ring.rank - 1) % stages, (self.ring.rank + 1) % stages
            self.ring.open([before], [after], partial(ears.ring, epoch), lost)

    def close(self) -> None:
        """Leave both."""
        for link in (self.ring, self.mesh):
            if link is not None:
                link.close()


def meet(plan: GroupPlan, name: str, host: str, timeout_s: float) -> PreparedGroup:
    """Connect to the other instances of the change, which reach this one under `host`; waits for them, for timeout_s at most for
    each link. Raises what `connect`
    raises; nothing is left open then."""
    members = [part.instance for group in plan.before for part in group]
    stages = [part.instance for part in plan.stages]
    made = PreparedGroup(plan, None, None)
    try:
        if len(members) > 1:
            made.mesh = connect(plan.rendezvous, f"{plan.epoch}/mesh", members, name, host, timeout_s)
        if len(stages) > 1:
            made.ring = connect(plan.rendezvous, f"{plan.epoch}/ring/{stages[0]}", stages, name, host, timeout_s)
    except Error:
        made.close()
        raise
    return made
