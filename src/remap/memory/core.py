# SPDX-License-Identifier: Apache-2.0
"""A session's parts in one place, for `Session` and `remap.advanced`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remap.errors import InvalidArgument
from remap.memory.apply import Changes
from remap.memory.cold import Cold
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.other_processes import OtherProcesses
from remap.memory.registered import Registered
from remap.memory.state import TenantState
from remap.memory.trace import Event, Trace
from remap.sizes import shown

if TYPE_CHECKING:
    from remap import _core

__all__ = ["Core", "events_of"]


@dataclass(frozen=True)
class Core:
    """Only the call that has the session may touch this (`Session.change`, `Session.exclusively`)."""

    arena: _core.Arena
    tenants: dict[str, TenantState]
    changes: Changes
    lending: Lending
    offers: Offers
    registered: Registered
    cold: Cold
    other_processes: OtherProcesses | None = None  # other processes, where the arena is shared with some
    trace: Trace = field(default_factory=Trace)

    def tenant(self, name: str) -> TenantState:
        """The tenant of this name. Raises InvalidArgument (field tenant) if there is none."""
        if not isinstance(name, str):
            raise InvalidArgument(
                f"name must be a tenant's name, a str, got {shown(name)}; nothing changed", field="name", value=name
            )
        tenant = self.tenants.get(name)
        if tenant is None:
            raise InvalidArgument(
                f"no tenant {shown(name)} is attached, only {sorted(self.tenants)}; nothing changed", tenant=name
            )
        return tenant


def events_of(core: Core) -> tuple[Event, ...]:
    """The events of late; from now on they are kept for a while (`remap trace`)."""
    return core.trace.ask()
