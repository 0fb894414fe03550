"""The ledger: whatever order tokens come in, and however often a request is started again, its caller gets each token once."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap_serve.cluster.ledger import Delivery, RequestLedger
from remap_serve.cluster.messages import Death, Tokens


def sent(ledger: RequestLedger[str], id: str = "r", instance: str = "a") -> None:
    ledger.add(id, "question")
    assert ledger.send(id, instance) is not None


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_each_token_is_delivered_once_and_in_order(data: st.DataObject) -> None:
    """Attempts that are cut off anywhere, whose pieces come in any order, twice, or too late."""
    ledger, given_, length = RequestLedger[str](), list[int](), data.draw(st.integers(1, 12))
    ledger.add("r", "question")
    late: list[Tokens] = []
    ended = 0
    for attempt in range(1, data.draw(st.integers(1, 4)) + 1):
        submission = ledger.send("r", f"i{attempt}")
        if submission is None:
            break
        assert (submission.attempt, submission.tokens) == (attempt, tuple(given_))
        cuts = sorted({len(given_), length, *data.draw(st.lists(st.integers(len(given_), length), max_size=4))})
        pieces = [
            Tokens("r", attempt, first, tuple(range(first, end)), "length" if end == length else None)
            for first, end in zip(cuts, cuts[1:])
        ]
        come = data.draw(st.lists(st.sampled_from([*pieces, *late]), max_size=8)) if pieces or late else []
        for tokens in come:
            delivery = ledger.take(tokens)
            if delivery is not None:
                assert delivery.first == len(given_)
                given_ += delivery.tokens
                ended += delivery.finish_reason is not None
        assert given_ == list(range(len(given_)))
        assert ended == (len(given_) == length)
        assert ("r" in ledger) == (not ended)
        late += pieces
    assert ended <= 1


def test_what_an_older_attempt_says_is_not_delivered() -> None:
    ledger = RequestLedger[str]()
    sent(ledger)
    assert ledger.take(Tokens("r", 1, 0, (5,))) == Delivery(0, (5,), None)
    assert ledger.restart({"a"}, Death("a")) == ["r"]
    again = ledger.send("r", "b")
    assert again is not None
    assert (again.attempt, again.tokens) == (2, (5,))
    assert ledger.take(Tokens("r", 1, 1, (6,), "stop")) is None
    assert ledger.take(Tokens("r", 2, 1, (6,), "stop")) == Delivery(1, (6,), "stop")
    assert ledger.take(Tokens("r", 2, 1, (6,), "stop")) is None
    assert len(ledger) == 0


def test_tokens_behind_a_gap_of_an_attempt_that_was_lost_are_forgotten() -> None:
    ledger = RequestLedger[str]()
    sent(ledger)
    assert ledger.take(Tokens("r", 1, 1, (6, 7), "stop")) is None
    ledger.restart({"a"}, Death("a"))
    ledger.send("r", "b")
    assert ledger.take(Tokens("r", 2, 0, (5,))) == Delivery(0, (5,), None)
    assert "r" in ledger


def test_a_request_without_a_token_can_end() -> None:
    ledger = RequestLedger[str]()
    sent(ledger)
    assert ledger.take(Tokens("r", 1, 0, (), "abort")) == Delivery(0, (), "abort")


def test_who_has_a_request_is_who_shows_its_last_attempt() -> None:
    ledger = RequestLedger[str]()
    sent(ledger)
    ledger.located("b", [("r", 1), ("unknown", 1)])
    assert ledger.where("r") == "b"
    assert ledger.restart({"a"}, Death("a")) == []
    assert ledger.restart({"b"}, Death("a")) == ["r"]
    ledger.located("b", [("r", 1)])  # it is nowhere now, whatever an old report shows
    assert ledger.where("r") is None
    ledger.send("r", "c")
    ledger.located("b", [("r", 1)])
    assert ledger.where("r") == "c"


def test_lost_requests_start_again_in_the_order_in_which_they_came() -> None:
    ledger = RequestLedger[str]()
    for number in range(5):
        sent(ledger, f"r{number}", "ab"[number % 2])
    ledger.add("new", "question")
    assert ledger.restart({"b", "a"}, Death("a")) == [f"r{number}" for number in range(5)]
    assert ledger.ids == [*(f"r{number}" for number in range(5)), "new"]


def test_ids_are_unique_among_unfinished_requests() -> None:
    ledger = RequestLedger[str]()
    sent(ledger)
    with pytest.raises(InvalidArgument) as caught:
        ledger.add("r", "another")
    assert caught.value.id == "r"
    assert ledger.request("r") == "question"
    assert ledger.forget("r") == "a"
    assert ledger.forget("r") is None
    assert ledger.send("r", "a") is None
    sent(ledger)
