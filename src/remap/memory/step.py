"""One step of a session: every tenant's demand, in order of priority, then what may come home.

demand -> view -> Controller.decide -> carry_out (decisions.py)            for each tenant that has one
lender -> Controller.may_return -> Lending.restream                        for each tenant whose layers others have
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remap.errors import ArenaBroken, Error
from remap.memory.decisions import Entries, carry_out, consider_return, ended_early, moved_entry
from remap.memory.view import view_of
from remap.policy.views import Demand

if TYPE_CHECKING:
    from remap.session import Session

__all__ = ["step"]


def step(session: Session, demand: Mapping[str, Demand]) -> Entries:
    """The entries of the step's report; {} if nothing was decided. Known tenants, active and outside of passes.

    Tenants of higher priority are served first, equal ones in the order of attaching. An error ends the step: it is raised if
    nothing has changed by then, and is in the report otherwise. If the step raises, what had moved by then is in the next report
    (`Changes.moved`): the engines have to hear of it.
    """
    session._demands = dict(demand)  # the caller may use its own again
    entries: Entries = {}
    applied = session._changes.applied
    try:
        for name in demand if len(demand) < 2 else sorted(demand, key=lambda name: _precedence(session, name)):
            tenant, wanted = session._tenants[name], demand[name]
            decision = session._controllers[name].decide(view_of(session, tenant, wanted), wanted)
            if decision.action == "none" and not decision.unmet_blocks and not tenant._attachment.draining:
                continue
            carry_out(session, tenant, wanted, decision, entries)
        for tenant in session._tenants.values():
            if tenant._attachment.pages.lent:
                consider_return(session, tenant, entries)
    except ArenaBroken:
        raise
    except Error as error:
        if session._changes.applied == applied:
            raise
        # Not as if nothing had changed: the report says what was done, and the next step tries the rest again.
        entry = entries.setdefault(tenant.name, moved_entry({}, tenant.name))  # whose turn it was
        entry["reason"] = ended_early(entry["reason"], str(error))
        for name, wanted in demand.items():
            pool = session._tenants[name].kv.pool
            short = wanted.blocks - ((wanted.free or 0) if pool.external else pool.free_blocks)
            if name not in entries and short > 0:
                reason = f"the step ended before its turn: {error}"
                entries[name] = moved_entry({}, name) | {"unmet": short, "reason": reason}
    return entries


def _precedence(session: Session, name: str) -> tuple[int, int]:
    tenant = session._tenants[name]
    return (-tenant.priority, tenant.number)
