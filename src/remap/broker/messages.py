# SPDX-License-Identifier: Apache-2.0
"""The messages on the socket: one a packet (SOCK_SEQPACKET keeps their borders and their order), msgpack by msgspec.

    to the broker    Join, Fetch, Want, Give, Done; of the pages of a member's own layers: Home, Disown; of how it is: Report;
                     of a member that was another broker's: Claim, and Pages that it has
    to a member      Welcome (with the pages' file), Pages (with descriptors of some), Grant, Recall, Tell, Refused; of those
                     pages: Returned; of a broker that has none: Bring
    of an observer   Look, which State answers, and a Shown a member behind it

Page numbers go as runs, (first, how many): pages that are granted together usually stand together.

A page is *lent* while it is of a layer of a member that has given it and may ask for it by its number: its lender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

from remap.errors import InvalidState
from remap.extras import install

try:
    import msgspec
except ImportError as error:
    raise ImportError(f"processes share pages by messages of msgspec; {install('broker')}") from error

__all__ = [
    "MOST_BYTES",
    "MOST_DECISIONS",
    "MOST_EVENTS",
    "MOST_NAME",
    "MOST_PARTS",
    "MOST_REASON",
    "MOST_RUNS",
    "MOST_TENANTS",
    "MOST_TEXT",
    "VERSION",
    "Bring",
    "Claim",
    "DecisionReport",
    "Disown",
    "Done",
    "Events",
    "Fetch",
    "Give",
    "Grant",
    "Home",
    "Join",
    "Look",
    "OwnedPages",
    "Pages",
    "Recall",
    "Refused",
    "Report",
    "Returned",
    "Shown",
    "ShownEvent",
    "State",
    "Tell",
    "TenantReport",
    "ToBroker",
    "ToMember",
    "Want",
    "Welcome",
    "decode_to_broker",
    "decode_to_member",
    "encode",
    "named_pages",
    "pages_of",
    "runs_of",
]

VERSION = 8
MOST_BYTES = 1 << 16
"""Of a message."""
MOST_RUNS = 4096
"""In a message: a sender that has more sends another one."""
MOST_NAME = 64
"""Characters of a name."""
MOST_REASON = 300
"""Characters of a reason."""
MOST_TEXT = 120
"""Characters of an event's text."""
MOST_EVENTS, MOST_PARTS = 40, 6
"""In a message, which is never too large then; and messages of a member."""
MOST_TENANTS, MOST_DECISIONS = 32, 8
"""In a report: the largest has little more than half of `MOST_BYTES`."""

Run = tuple[int, int]
Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
Reason = Annotated[str, msgspec.Meta(max_length=MOST_REASON)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first message of a member. name: for people. number: the one that it has locked (`remap.broker.locks`). The rest is of
    one that joins again: the arena that its pages are of, with what `Welcome` said of it; claims: how many `Claim` follow."""

    version: int
    name: str = ""
    number: Count = 0
    arena: Name = ""
    page_bytes: Count = 0
    pages: Count = 0
    uuid: Name = ""
    claims: Count = 0


class Claim(msgspec.Struct, tag=True, frozen=True):
    """These pages are the member's that joins again. borrowed: another member has lent them, and may call them. lent: it has not
    got these; it has lent them itself."""

    runs: tuple[Run, ...]
    lent: bool = False
    borrowed: bool = False


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Of pages of a device: the member asks for descriptors, from this page on."""

    first: Count


class Want(msgspec.Struct, tag=True, frozen=True):
    """The member can use `pages` pages more. It replaces what it wanted before. serial: larger than that of each earlier one.
    keeps: for good, so none that is lent; with 0 pages, what it lacked of these it has found itself. ahead: it has no use for
    them yet, so nobody gives what it needs itself."""

    serial: int
    pages: int
    keeps: bool = False
    ahead: bool = False


class Give(msgspec.Struct, tag=True, frozen=True):
    """The member has let go of these pages: it does not touch them any more, and nothing on its device does. lent: they are
    of its own layers, and it may ask for them by their numbers."""

    runs: tuple[Run, ...]
    lent: bool = False


class Home(msgspec.Struct, tag=True, frozen=True):
    """The member's layers that it has lent are to come home. serial: larger than that of each earlier one. gently: only what is
    free, or not in use by the member that has it; else also what a member can make free by moving blocks, now or later."""

    serial: int
    runs: tuple[Run, ...]
    gently: bool = False


class Disown(msgspec.Struct, tag=True, frozen=True):
    """The member has lent these, and will not ask for them: their layers have gone."""

    runs: tuple[Run, ...]


class Done(msgspec.Struct, tag=True, frozen=True):
    """The member has given what it can spare, for this recall."""

    recall: int


class OwnedPages(msgspec.Struct, frozen=True):
    """Pages by owner, of `remap.PageTotals`."""

    params: Count
    kv: Count
    ring: Count


class TenantReport(msgspec.Struct, frozen=True):
    """Of `remap.TenantSnapshot`, what numbers say. streamed, cold: how many layers."""

    name: Name
    active: bool
    layers: Count
    remapped: Amount
    streamed: Count
    cold: Count
    pages: OwnedPages
    lent_pages: Count
    borrowed_pages: Count
    usable_blocks: Count
    free_blocks: Count
    live_blocks: Count
    withdrawn_blocks: Count
    reserve_blocks: Count
    host_blocks: Count
    streamed_blocks: Count
    shortages_met: Count
    shortages_unmet: Count
    passes: Count
    copies: Count
    copied_bytes: Count
    copy_s: Amount
    kv_out_bytes: Count
    kv_in_bytes: Count
    kv_streamed_bytes: Count
    misses: Count
    stall_s: Amount
    predicted_stall_s: Amount
    seen_stall_s: Amount


class DecisionReport(msgspec.Struct, frozen=True):
    """Of `remap.report.DecisionRecord`."""

    epoch: Count
    tenant: Name
    reason: Reason
    unmet_blocks: Count


class ShownEvent(msgspec.Struct, array_like=True, frozen=True):
    """Of `remap.memory.trace.Event`."""

    number: Count
    kind: Name
    tenant: Name
    begin_s: Amount
    seconds: Amount
    text: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
    values: Annotated[dict[Name, float], msgspec.Meta(max_length=16)]


class Events(msgspec.Struct, tag=True, frozen=True):
    """Of a member that was told to send some, in front of its Report; and to an observer, behind a Shown. Oldest first."""

    events: Annotated[tuple[ShownEvent, ...], msgspec.Meta(max_length=MOST_EVENTS)]


class Report(msgspec.Struct, tag=True, frozen=True):
    """How a member is, which was told to say so. free, params, kv, ring, quarantine: of its pages. waited, predicted,
    allowed: shares, of `remap.report.StallShare`. attached: tenants, of which the first are listed. decisions: the last ones,
    oldest first."""

    epoch: Count
    free: Count
    params: Count
    kv: Count
    ring: Count
    quarantine: Count
    waited: Amount
    predicted: Amount
    allowed: Amount
    attached: Count
    tenants: Annotated[tuple[TenantReport, ...], msgspec.Meta(max_length=MOST_TENANTS)]
    decisions: Annotated[tuple[DecisionReport, ...], msgspec.Meta(max_length=MOST_DECISIONS)]


class Look(msgspec.Struct, tag=True, frozen=True):
    """The sender is no member. It is told how all are, each time. events: and what they have done lately."""

    version: int
    events: bool = False


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """No page is the member's, but those that it has claimed. uuid: of the device that they are of, and the member fetches them
    (`Fetch`); "" of the host, and their file goes with this. arena: a name that no other arena has."""

    page_bytes: int
    pages: int
    uuid: str = ""
    arena: str = ""


class Bring(msgspec.Struct, tag=True, frozen=True):
    """The broker has no pages, and the member that joins again has them: the broker asks for descriptors, from this page on."""

    first: int


class Pages(msgspec.Struct, tag=True, frozen=True):
    """Descriptors go with it, one a page, of `count` pages from `first` on; of the host one, of all. To a member: they are its to
    map, none is its own."""

    first: int
    count: int


class Grant(msgspec.Struct, tag=True, frozen=True):
    """These pages are the member's, of unknown bytes. serial: the want that they are for. more: others may follow. lent: another
    member has lent them."""

    serial: int
    runs: tuple[Run, ...]
    more: bool = False
    lent: bool = False


class Recall(msgspec.Struct, tag=True, frozen=True):
    """Others want `pages` pages: give what can be spared, then say `Done`. layers: of tenants that serve no pass, too, and KV of
    paused ones; keeps: for good, so these have no pages then. runs: they want these, and no others, since they are pages of their
    layers; gently: see `Home`. ahead: see `Want`."""

    recall: int
    pages: int
    layers: bool = False
    runs: tuple[Run, ...] = ()
    gently: bool = False
    keeps: bool = False
    ahead: bool = False


class Returned(msgspec.Struct, tag=True, frozen=True):
    """These pages that the member has lent are its own again, of unknown bytes. serial: of its last `Home`. more: the
    member that has the others has not answered yet."""

    serial: int
    runs: tuple[Run, ...]
    more: bool = False


class Tell(msgspec.Struct, tag=True, frozen=True):
    """A user looks: send a `Report`, one. events: and before that, `Events`, at most `MOST_PARTS`."""

    events: bool = False


class State(msgspec.Struct, tag=True, frozen=True):
    """Of the broker, to an observer. lent: pages of layers that their lenders may call. waiting: wants that are not met.
    members: how many `Shown` follow. unknown: pages that a member of the broker before this one may have."""

    page_bytes: int
    pages: int
    free: int
    lent: int
    waiting: int
    members: int
    unknown: int = 0


class Shown(msgspec.Struct, tag=True, frozen=True):
    """A member, to an observer. held: pages that are its own. lent: of its layers, and not its own now. connected: False for one
    whose pages are waited for. report: its last one, `age_s` old; None before it has sent any. events: how many `Events`
    follow."""

    member: int
    name: str
    pid: int
    held: int
    lent: int
    connected: bool
    age_s: float = 0.0
    report: Report | None = None
    events: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The broker closes the connection, and why."""

    why: str


ToBroker = Join | Claim | Pages | Fetch | Want | Give | Home | Disown | Done | Report | Events | Look
ToMember = Welcome | Bring | Pages | Grant | Returned | Recall | Tell | State | Shown | Events | Refused
Message = TypeVar("Message", ToBroker, ToMember)

_ENCODER = msgspec.msgpack.Encoder()
_TO_BROKER = msgspec.msgpack.Decoder(ToBroker)
_TO_MEMBER = msgspec.msgpack.Decoder(ToMember)


def encode(message: ToBroker | ToMember) -> bytes:
    """A packet."""
    return _ENCODER.encode(message)


def decode_to_broker(packet: bytes) -> ToBroker:
    """Raises InvalidState (field why) for what is no such message."""
    return _decode(_TO_BROKER, packet)


def decode_to_member(packet: bytes) -> ToMember:
    """Raises InvalidState (field why) for what is no such message."""
    return _decode(_TO_MEMBER, packet)


def _decode(decoder: msgspec.msgpack.Decoder[Message], packet: bytes) -> Message:
    try:
        message = decoder.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidState(
            f"a packet of {len(packet)} bytes is no message: {error}; nothing changed", why=str(error)
        ) from error
    runs: tuple[Run, ...] = getattr(message, "runs", ())
    if len(runs) > MOST_RUNS or any(first < 0 or count < 1 for first, count in runs):
        raise InvalidState(
            f"{len(runs)} runs of pages, expected at most {MOST_RUNS} with a first page of 0 or more and a page at least; "
            "nothing changed",
            why="runs",
        )
    return message


def runs_of(pages: Iterable[int]) -> list[tuple[Run, ...]]:
    """Runs of these pages, ascending, in as many messages' worth as they take."""
    runs: list[Run] = []
    for page in sorted(pages):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return [tuple(runs[at : at + MOST_RUNS]) for at in range(0, len(runs), MOST_RUNS)]


def pages_of(runs: Sequence[Run]) -> list[int]:
    """The reverse."""
    return [page for first, count in runs for page in range(first, first + count)]


def named_pages(runs: Sequence[Run], pages: int, who: str) -> list[int]:
    """`pages_of`, of what `who` has sent, in an arena of `pages` pages. Raises InvalidState (field why) for a page that is not
    there, or is named twice."""
    if any(first + count > pages for first, count in runs) or sum(count for _, count in runs) > pages:
        why = f"names pages beyond the last, {pages - 1}, or more than there are"
    elif len(set(named := pages_of(runs))) == len(named):
        return named
    else:
        why = "names a page twice"
    raise InvalidState(f"{who} {why}; nothing changed", why=why)
