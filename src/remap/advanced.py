# SPDX-License-Identifier: Apache-2.0
"""For tests, ablations and several instances together (`remap_serve.cluster`): the controller's verbs by hand, layers that other
instances compute, and a look inside a session. An engine needs none of it.

    from remap import advanced
    advanced.remap(session, "llama", layers=4, buffers=2)
    advanced.settle(session)
    advanced.check(session)

Each is one call of the session (see `Session` for threads and interrupts): it happens whole or not at all, even if an
exception ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

from remap.arguments import require, require_bytes, require_call, require_layer, require_layers, require_range
from remap.config import Knobs
from remap.errors import InvalidArgument
from remap.internals import internals as internals_of
from remap.memory.by_hand import check_by_hand, give_back_by_hand, lend_by_hand, remap_by_hand
from remap.memory.core import Core
from remap.memory.device import Platform
from remap.memory.entries import Entries
from remap.memory.observe import check_books
from remap.memory.place import check_place
from remap.memory.place import fill_layer as fill_bytes
from remap.memory.place import filled as note_filled
from remap.memory.place import place as place_layers
from remap.memory.place import read_layer as read_bytes
from remap.memory.rewrite import differing as find_differing
from remap.memory.rewrite import rewrite as rewrite_layers
from remap.policy.donors.supply import Quote
from remap.report import StepReport
from remap.session import Session
from remap.shown import show as show_at
from remap.tenant import Internals, Tenant

__all__ = [
    "Internals",
    "Knobs",
    "Platform",
    "check",
    "declare_registered",
    "differing",
    "fill_layer",
    "filled",
    "give_back",
    "internals",
    "layer_address",
    "lend",
    "offers",
    "place",
    "read_layer",
    "remap",
    "rewrite",
    "settle",
    "show",
    "unsettled",
    "withdraw_registered",
]

Answer = TypeVar("Answer")


def _known(session: Session) -> Session:
    """Raises InvalidArgument (fields field, value) for what is no session, nor the double of one."""
    if not hasattr(session, "exclusively"):
        require("session", session, Session, "a remap.Session")
    return session


def internals(tenant: Tenant) -> Internals:
    """The tenant as this library itself sees it. Raises InvalidArgument (fields field, value) for what is none."""
    found = internals_of(tenant)
    require("tenant", found, Internals, "a tenant: what `Session.attach` returned, or `Session.tenants` has")
    return found


def remap(
    session: Session,
    name: str,
    layers: float,
    buffers: int = 1,
    selection: Literal["uniform", "nested", "slices"] = "uniform",
    *,
    drain: bool = False,
) -> StepReport:
    """Make `layers` layers' worth of the tenant's pages KV; layers + buffers layers then stream.

    layers: 0 gives all pages back; a fraction is allowed in "slices".
    selection: "uniform" (evenly spaced), "nested" (growing reloads nothing) or "slices": every layer streams the same
    number of its last pages, the fewest that free `layers` layers' worth (from all resident, or from other slices
    only).
    drain: if an engine with its own allocator holds live blocks in pages that go back, drain those blocks; later
    steps finish the change when the engine has returned them. All other live blocks there are moved; the report says
    where (`moved`).

    Raises InvalidArgument (fields: layers, buffers, maximum) if layers + buffers exceeds the streamable layers, or
    their pages are too few for the ring (needed_pages, available_pages) or have no place in the KV region (pages,
    max_blocks); OutOfBlocks if the live blocks do not fit into the remaining pages; InvalidState inside a pass, or
    (fields tenant, layers) if more layers are to stream than now and no pass has waited for every layer yet. Nothing
    changes then.
    """

    def verb(core: Core) -> Entries:
        tenant = core.tenant(name)
        tenant.require_idle()
        check_by_hand(tenant, layers, buffers, selection)
        require("drain", drain, bool, "True or False")
        return remap_by_hand(core.changes, core.lending, tenant, layers, buffers, selection, drain)

    return _known(session).change(verb)


def lend(session: Session, name: str, layers: int, buffers: int = 1, *, to: str | None = None) -> StepReport:
    """Make `layers` layers' worth of the tenant's pages free; if that is fewer than now, the others come home.

    to: the tenant whose KV the pages become at once. An inactive tenant streams its last layers; an active one adds to
    those that it streams. An inactive tenant may lend before its first pass, since activating brings its layers home.
    Errors as for `remap`; OutOfBlocks (field preempt) if live blocks lie in pages that are to come home.
    """

    def verb(core: Core) -> Entries:
        tenant, receiver = core.tenant(name), None if to is None else core.tenant(to)
        for each in (tenant, receiver):
            if each is not None:
                each.require_idle()
        check_by_hand(tenant, layers, buffers, "nested")
        if receiver is tenant:
            raise InvalidArgument(f"{name!r} cannot lend to itself; nothing changed; use remap", tenant=name)
        return lend_by_hand(core.changes, core.lending, tenant, layers, buffers, receiver)

    return _known(session).change(verb)


def give_back(session: Session, name: str) -> StepReport:
    """Make the pages free that other tenants' layers lent to this tenant's KV. They stay lent until their owners bring them home.
    Live blocks there move; the report says where (`moved`).

    Raises InvalidArgument for an unknown tenant, OutOfBlocks (field preempt) if live blocks have no room elsewhere, and
    InvalidState inside a pass. Nothing changes then.
    """

    def verb(core: Core) -> Entries:
        tenant = core.tenant(name)
        tenant.require_idle()
        return give_back_by_hand(core.changes, core.lending, tenant)

    return _known(session).change(verb)


def offers(session: Session, name: str) -> list[Quote]:
    """The memory that the tenant's KV has now, or may have, beside the pages that it was attached with (see `Quote`): one
    increment from nothing for each donor and kind. blocks: of its own, at least 1. Changes nothing.

    Its own layers (donor: its name): as far as its certificate allows; each pass then waits for stall_s, and copies for reload_s,
    of which `share` is lost to the computation. By the times measured until now; before the first pass, one layer.
    Other tenants: while they are inactive, the memory that they lent and still would. Of active ones only what they lent:
    the rest comes and goes with their passes. Free pages, and those that no donor asks back (donor: ""), cost nothing.

    Raises InvalidArgument for an unknown tenant, and InvalidState inside a pass.
    """

    def call(core: Core) -> list[Quote]:
        tenant = core.tenant(name)
        tenant.require_idle()
        return core.offers.whole(tenant)

    found: list[Quote] = _known(session).exclusively(call)
    return found


def place(
    session: Session,
    name: str,
    first: int,
    end: int,
    *,
    hold: Collection[int] = (),
    fill: Collection[int] = (),
) -> StepReport:
    """Make the tenant's passes compute the layers first <= i < end alone, and hold those of `hold` besides: other instances
    compute the others. Their pages become the tenant's KV, and nothing of them is copied. Layers that come back are loaded
    from their master copies; those of `hold` may load while passes compute others. fill: layers of `hold` that come back and are
    not loaded: the caller has their bytes from another instance (`fill_layer`, then `filled`). Until then they are elsewhere; a
    call that does not name them in `fill` loads those that it holds.

    In passes `wait` refuses layers that are computed elsewhere. The engine computes a part of the model itself: with
    attach(hooks=False). place(session, name, 0, layers) brings everything home.

    Raises InvalidArgument (fields first, end, hold, layers) for layers that are none, (pages, max_blocks) if pages have no place
    in the KV region, and (fill, layers) for layers to fill that are computed, or not elsewhere, or not held; OutOfBlocks (field
    preempt) if live blocks in the pages of layers that come back do not fit into the others; InvalidState inside a pass, where
    layers stream for good (attach(resident_layers=)), or (layers, written) for layers that must stay, as something wrote into
    them or registered their memory. Nothing changes then. After an error of the driver all is as before, but layers that waited
    for bytes and are not in `fill` need all of theirs again; `filled` refuses them until then.
    """

    def verb(core: Core) -> Entries:
        tenant = core.tenant(name)
        tenant.require_idle()
        require_bytes(first=first, end=end)
        held, filling = (require_layers(name, each, tenant.layers) for name, each in (("hold", hold), ("fill", fill)))
        check_place(tenant, first, end, held, filling)
        return place_layers(core.changes, core.lending, tenant, first, end, held, filling)

    return _known(session).change(verb)


def read_layer(session: Session, name: str, layer: int, offset: int, address: int, nbytes: int) -> None:
    """Copy bytes of a layer to host memory at `address`, behind all work on the layer; another instance has them at the same
    offset. Waits for the copy.

    Raises InvalidArgument (fields layer, offset, nbytes) for bytes that are none, and InvalidState (field layer) while the layer
    streams, loads or is elsewhere. Nothing is copied then.
    """

    def call(core: Core) -> None:
        tenant = core.tenant(name)
        require_layer(layer, tenant.layers)
        require_bytes(offset=offset, address=address, nbytes=nbytes)
        read_bytes(core.changes, tenant, layer, offset, address, nbytes)

    _known(session).exclusively(call)


def fill_layer(session: Session, name: str, layer: int, offset: int, address: int, nbytes: int) -> bool:
    """Copy bytes from host memory at `address` into a layer that waits for them (`place(fill=)`). Waits for the copy. False, with
    nothing copied, while the layer's addresses do not show its pages yet: call it again.

    Raises InvalidArgument (fields layer, offset, nbytes) for bytes that are none, and InvalidState (field layer) for a layer that
    does not wait. Nothing is copied then.
    """

    def call(core: Core) -> bool:
        tenant = core.tenant(name)
        require_layer(layer, tenant.layers)
        require_bytes(offset=offset, address=address, nbytes=nbytes)
        return fill_bytes(core.changes, tenant, layer, offset, address, nbytes)

    return bool(_known(session).exclusively(call))


def filled(session: Session, name: str, layer: int) -> None:
    """This layer has all of its bytes. From now on it is as if it had been loaded from its master copy.

    Raises InvalidState (field layer) for a layer that does not wait for bytes, or (fields come, nbytes) of which not all have
    come (a `place` that failed may have overwritten what had), and inside a pass; nothing changes then.
    """

    def call(core: Core) -> None:
        tenant = core.tenant(name)
        tenant.require_idle()
        require_layer(layer, tenant.layers)
        note_filled(core.changes, tenant, layer)

    _known(session).exclusively(call)


def rewrite(session: Session, name: str, write: Callable[[], Answer]) -> Answer:
    """Call write(), which writes the model's weights (a trainer's new ones), wherever its layers are. Layers and master copies
    have the same bytes then, also those of half a write, if write() raises. Returns its answer.

    In write() the tensors of layers that are away show their master copies, on the CPU also where the model is on another device;
    keep no view of them. Layers at home are written where they lie, and their copies are made anew, which takes the time to copy
    them. A tensor that gets other memory (`tensor.data = other`) is put back with its bytes.

    Writes outside of this call reach the layers and not the copies: the session sees those that torch counts, and pins
    their layers, but none through `tensor.data`. Waits for layers that are coming home. It is one call of the session:
    other calls, and all passes, wait for it, and write() must not call the session.

    Raises InvalidState inside a pass, (field tenant) for a tenant of bytes or with weights=, and (fields tenant, layers) for
    layers that another instance computes; nothing is written then. Behind the write it raises it (tenant, tensors) for those of
    another shape or dtype now, which are as they were; (tenant, written) if the model has others for those of layers away
    (`assign=True`): detach it; or an error of the device: what is left is done before the next pass or change, which may fail.
    """

    def call(core: Core) -> Answer:
        tenant = core.tenant(name)
        tenant.require_idle()
        require_call("write", write)
        answer: Answer = rewrite_layers(core, tenant, write)
        return answer

    found: Answer = _known(session).exclusively(call)
    return found


def differing(session: Session, name: str) -> dict[int, list[str]]:
    """layer -> its tensors whose bytes are not those of its master copy, for the layers that are home: something wrote into
    them. Reads all their bytes; {} for a tenant of bytes. Waits for layers that are coming home. Changes nothing.

    Raises InvalidState inside a pass.
    """

    def call(core: Core) -> dict[int, list[str]]:
        tenant = core.tenant(name)
        tenant.require_idle()
        return find_differing(core, tenant)

    found: dict[int, list[str]] = _known(session).exclusively(call)
    return found


def settle(session: Session, name: str | None = None) -> None:
    """Finish now what the last change deferred, and wait for it; with a name, for that tenant only and without waiting.
    Raises the backend's error if that fails again."""

    def call(core: Core) -> None:
        for each in list(core.tenants.values()) if name is None else [core.tenant(name)]:
            core.changes.settle(each)
            core.changes.retry_failed(each)
        if name is None:
            core.changes.await_worker()

    _known(session).exclusively(call, always=True)


def unsettled(session: Session) -> bool:
    """Whether a deferred re-pointing has failed and waits for another try."""
    return bool(_known(session).exclusively(lambda core: core.changes.failed_points(), always=True, claims=False))


def check(session: Session) -> None:
    """Verify all invariants of the arena and of every block pool. Raises AssertionError on a violation."""
    _known(session).exclusively(lambda core: check_books(core.arena, core.tenants), always=True, claims=False)


def layer_address(session: Session, name: str, layer: int) -> int:
    """The address of a layer, which never changes. Raises InvalidArgument for an unknown tenant or layer."""

    def call(core: Core) -> int:
        addresses = core.tenant(name).addresses
        require_layer(layer, len(addresses))
        return addresses[layer]

    return int(_known(session).exclusively(call, always=True, claims=False))


def show(session: Session, path: str) -> AbstractContextManager[object]:
    """Show the session at a Unix-domain socket, to `remap top --socket PATH` of the same user, until the context ends or the
    session is gone. Needs the extra `broker`.

    A look makes one `snapshot()`, in a thread of its own; nothing happens without one. The environment variable REMAP_TOP does
    the same for every session of a process, `{pid}` in its path being the process. Raises InvalidArgument (field path) if
    nothing can listen there, InvalidState if another listener is there or the session is closed.
    """
    require("path", path, str, "the path of a socket")
    _known(session).exclusively(lambda core: None, claims=False)  # it is open, and this process's
    return show_at(session, path)


# -- ranges that others have registered ---------------------------------------------------------------------------------


def declare_registered(session: Session, address: int, nbytes: int) -> None:
    """Declare that NCCL, a network card or the like has registered [address, address + nbytes), and keeps the pages
    that it found there. From now on the regions there always show the same pages: layers that intersect the range are
    pinned.

    Raises InvalidState (fields tenant, layer) if such a layer is streamed now, or is still to be re-pointed (`settle`,
    then register, then declare); InvalidArgument if no region lies there. Nothing changes then.
    """
    require_range(address, nbytes)
    _known(session).exclusively(lambda core: core.registered.declare(address, nbytes))


def withdraw_registered(session: Session, address: int, nbytes: int) -> None:
    """Take back one declaration: the range was deregistered, so its layers may stream again.

    Raises InvalidArgument if exactly this range was not declared; nothing changes then.
    """
    require_range(address, nbytes)
    _known(session).exclusively(lambda core: core.registered.withdraw(address, nbytes))
