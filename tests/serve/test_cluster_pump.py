"""A new head takes over the requests of a change while it has room, and gives up no more of their KV than it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from remap.errors import InvalidState
from remap_serve.cluster.exchange import Exchange, Run
from remap_serve.cluster.slots import Departure, Whole
from remap_serve.cluster.wire import Forget, Handed, Handover, Message, Move, Over
from remap_serve.engine.request import SamplingParams
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.lookahead import ChunkCost
from remap_serve.policy.cluster.pipeline import Network

LAYERS = 4


class Head:
    """A taker with so many blocks. adopted: (id, blocks), in order."""

    def __init__(self, blocks: int) -> None:
        self.ready = True
        self.free = list(range(blocks))
        self.adopted: list[tuple[str, list[int]]] = []

    def room(self, blocks: int) -> list[int] | None:
        if len(self.free) < blocks:
            return None
        return [self.free.pop() for _ in range(blocks)]

    def unused(self, blocks: list[int]) -> None:
        self.free += blocks

    def adopt(self, handed: Handed, computed: int, blocks: list[int]) -> None:
        assert computed == (8 if blocks else 0)
        self.adopted.append((handed.id, blocks))


def handed(number: int, attempt: int = 1) -> Handed:
    """Of two blocks, to rank 0."""
    return Handed(f"r{number}", attempt, 0, [1] * 8, SamplingParams(9), [], 8, [2 * number, 2 * number + 1])


def exchange_of(
    head: Head, requests: int, bytes_per_s: float = 1e9, heads: tuple[int, ...] = (0, 1)
) -> tuple[Exchange, list[tuple[int, Message]]]:
    """Rank 0 of two, which is to head them both; its own old group has so many requests of two blocks each, the other none.
    bytes_per_s: of the network between them. heads: the old ones; of more than two the last has not handed over."""
    sent: list[tuple[int, Message]] = []
    kv: Any = SimpleNamespace(slot_bytes=8, first=0, end=LAYERS)
    whole = [Run(0, 0, LAYERS)]

    found = Exchange(
        0,
        2,
        old=kv,
        departing=lambda live: Departure(Whole(LAYERS), range(2 * requests), live),
        heads=heads,
        head=0,
        before={0: whole, 1: [Run(1, 0, LAYERS)]},
        runs={0: [Run(0, 0, 2), Run(1, 2, LAYERS)]},
        new=kv,
        places=Whole(LAYERS),
        taker=head,
        send=lambda to, message, payload: sent.append((to, message)),
        network=Network(Line(0.0, 0.0), bytes_per_s),
        cost=ChunkCost(0.0, 0.0, 1.0, 0.0, 1.0),
        chunk_bytes=1 << 20,
    )
    found.hand_over([handed(number) for number in range(requests)])
    found.on(1, Handover([]))
    return found, sent


def reuse(exchange: Exchange, head: Head) -> None:
    """What the instance does behind each round of messages."""
    while blocks := exchange.take_freed():
        head.free += blocks
        exchange.pump()


def test_without_room_nothing_is_given_up_before_it_is_time_and_then_one_request() -> None:
    head = Head(0)
    exchange, sent = exchange_of(head, 3)
    for _ in range(5):
        exchange.pump()
        reuse(exchange, head)
    assert not head.adopted and not any(isinstance(message, Forget) for _, message in sent)
    exchange.pump(give_up=True)
    reuse(exchange, head)
    # What it gave up is room for another here, but elsewhere that is not known yet: nobody else is given up for it.
    assert [id for id, _ in head.adopted] == ["r2"]
    assert [message for _, message in sent if isinstance(message, Forget)] == [Forget("r2")]
    assert [message.id for _, message in sent if isinstance(message, Move)] == ["r0"]
    assert not any(isinstance(message, Over) for _, message in sent)


@pytest.mark.parametrize("room", [0, 6])
def test_two_attempts_of_one_request_are_refused(room: int) -> None:
    """Whoever has them cannot tell whose KV is whose: the change ends as a fault, instead of in wrong tokens."""
    exchange, _ = exchange_of(Head(room), 3, heads=(0, 1, 2))
    with pytest.raises(InvalidState) as caught:
        exchange.on(2, Handover([handed(1, attempt=2)]))
    assert caught.value.fields["request"] == "r1"


def test_with_room_for_all_it_says_so_and_nothing_is_given_up() -> None:
    head = Head(6)
    exchange, sent = exchange_of(head, 3)
    assert {message.id for _, message in sent if isinstance(message, Move)} == {"r0", "r1", "r2"}
    exchange.pump(give_up=True)
    assert not head.adopted and not exchange.over


def test_any_number_of_requests_is_computed_again() -> None:
    """Each makes room; it is over when that was taken."""
    head = Head(0)
    exchange, sent = exchange_of(head, 2000, bytes_per_s=1e-3)
    assert [id for id, _ in head.adopted] == [f"r{n}" for n in range(2000)]
    assert isinstance(sent[-1][1], Over) and not exchange.over
    reuse(exchange, head)
    assert len(head.free) == 4000 and exchange.over
