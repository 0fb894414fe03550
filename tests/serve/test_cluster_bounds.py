"""What a server takes from callers, beyond lengths of bodies and prompts: which requests, for how long, and what it quotes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("httpx", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

from cluster_folder import byte_tokenizer
from test_cluster_front import until
from test_cluster_server import JSON, SERVED, Scripted, ask_and_leave, client_of, deliveries, events

from remap.errors import InvalidArgument
from remap_serve.cluster import app
from remap_serve.cluster.app import Readers, make_app
from remap_serve.cluster.caller import Caller
from remap_serve.cluster.guard import hosts_of
from remap_serve.cluster.http_errors import MOST_TEXT
from remap_serve.cluster.ledger import Delivery
from remap_serve.cluster.limits import FrontLimits
from remap_serve.cluster.prompts import Catalog
from remap_serve.engine.request import Request

ANY = FrontLimits()


class Hanging(Scripted):
    """Behind what it was given nothing comes, until somebody ends the caller's wait."""

    hanging = False

    async def generate(self, id: str, request: Request, *, caller: Caller | None = None) -> AsyncIterator[Delivery]:
        async for each in super().generate(id, request):
            yield each
        assert caller is not None
        self.hanging = True
        async for each in caller:
            yield each


def asked(body: Any, *, limits: FrontLimits = ANY, front: Any = None, **more: Any) -> tuple[int, Any]:
    """The status of the answer to this completion, and its object, or its events."""

    async def run() -> tuple[int, Any]:
        made = front() if front is not None else Scripted(*deliveries("one", "length"))
        async with client_of(make_app(made, SERVED, limits, more.pop("hosts", None))) as client:
            answer = await client.post("/v1/completions", **({"json": body} if body is not None else {}), **more)
            stream = answer.headers["content-type"].startswith("text/event-stream")
            return answer.status_code, events(answer.text) if stream else answer.json()

    return asyncio.run(run())


def test_a_deadline_is_a_status_before_the_first_token_and_an_event_in_a_stream() -> None:
    limits = FrontLimits(deadline_s=0.05)
    for stream in (False, True):
        status, answer = asked({"prompt": "x", "stream": stream}, limits=limits, front=Hanging)
        assert (status, answer["error"]["code"]) == (504, "TooLate")
    status, (*chunks, last) = asked(
        {"prompt": "x", "stream": True},
        limits=FrontLimits(deadline_s=2.0),  # the tokens come first, however busy the machine is
        front=lambda: Hanging(*deliveries("one", None)),
    )
    assert (status, len(chunks), last["error"]["code"]) == (200, 3, "TooLate")
    assert "3 tokens" in last["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for_longer() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    for limits, expected in (
        (FrontLimits(deadline_s=0.05), (504, "TooLate")),
        (FrontLimits(body_s=0.05), (408, "SlowBody")),
    ):
        status, answer = asked(None, limits=limits, content=slow(), headers=JSON)
        assert (status, answer["error"]["code"]) == expected


def test_bodies_that_do_not_come_shut_nobody_out() -> None:
    """512 callers that had sent a byte each had all the places for an hour."""

    async def run() -> None:
        made = make_app(Scripted(*deliveries("one", "length")), SERVED, FrontLimits(requests=2, body_bytes=100))  # type: ignore[arg-type]
        never, started = asyncio.Event(), 0

        async def slow() -> AsyncIterator[bytes]:
            nonlocal started
            yield b"{" * 60
            started += 1
            await never.wait()

        async with client_of(made) as client:

            async def ask(**body: Any) -> int:
                return (await client.post("/v1/completions", headers=JSON, **body)).status_code

            uploads = [asyncio.create_task(ask(content=slow())) for _ in range(3)]
            await until(lambda: started == 3)
            assert await ask(json={"prompt": "x"}) == 200
            # What comes of all of them together is bounded, too: two bodies as long as may be.
            assert await ask(content=b" " * 30) == 429
            for upload in uploads:
                upload.cancel()
            await asyncio.wait(uploads)
            assert await ask(content=b" " * 30) == 400

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_is_not_said_to_be_json_is_refused(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    status, answer = asked(None, content=b'{"prompt": "x"}', headers=headers)
    assert (status, answer["error"]["code"]) == (415, "NotJSON")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_is_taken_by_each_of_its_names(kind: str) -> None:
    assert asked(None, content=b'{"prompt": "x"}', headers={"content-type": kind})[0] == 200


def test_two_framings_of_one_body_are_refused() -> None:
    headers = JSON | {"content-length": "15", "transfer-encoding": "chunked"}
    assert asked(None, content=b'{"prompt": "x"}', headers=headers)[0] == 400


def test_a_server_at_a_loopback_address_answers_to_its_own_names() -> None:
    assert hosts_of("0.0.0.0") is None
    assert hosts_of("10.0.0.1", ["me"]) == {"10.0.0.1", "me"}
    hosts = hosts_of("127.0.0.1", ["box"])
    for host, status in (
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("box", 200),
        ("evil.example:8000", 400),
        ("localhost.evil.example", 400),
    ):
        assert asked({"prompt": "x"}, hosts=hosts, headers={"host": host})[0] == status, host


@pytest.mark.parametrize(
    "body", [{"model": "m" * 10**6}, {"n" * 10**6: 1}, {"stop": ["s" * 10**6] * 9}, {"logit_bias": {"1" * 10**6: 1.0}}]
)
def test_an_error_does_not_echo_a_body(body: dict[str, Any]) -> None:
    status, answer = asked({"prompt": "x"} | body)
    assert 400 <= status < 500 and len(answer["error"]["message"]) <= MOST_TEXT


def test_who_takes_nothing_of_a_stream_has_no_place_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the deadline, of an hour, it kept others out."""
    monkeypatch.setattr(app, "STALL_S", 0.05)

    async def run() -> None:
        front = Scripted(*deliveries("one", "length"))
        made, never = make_app(front, SERVED, FrontLimits(requests=1)), asyncio.Event()  # type: ignore[arg-type]

        async def full(message: Any) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        await ask_and_leave(made, {"prompt": "x", "stream": True}, never, full)
        assert front.closed
        async with client_of(made) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_choices_count_as_requests() -> None:
    status, answer = asked({"prompt": "x", "n": 3}, limits=FrontLimits(requests=2))
    assert (status, answer["error"]["code"]) == (429, "Busy")
    assert asked({"prompt": "x", "n": 3}, limits=FrontLimits(requests=3))[0] == 200


def test_limits_below_what_can_be_are_refused() -> None:
    for wrong in ({"body_bytes": 0}, {"requests": 0}, {"retry_after_s": 0}, {"deadline_s": 0.0}, {"body_s": 0.0}):
        with pytest.raises(InvalidArgument):
            FrontLimits(**wrong)  # type: ignore[arg-type]


def test_a_long_prompt_holds_up_no_other_and_there_is_one_tokenizer() -> None:
    """Each thread had its own, of a hundred megabytes. What a first call changes in it is changed before there are threads."""
    reading, go, used = threading.Event(), threading.Event(), []

    def read(number: int, served: Any, wanted: Any) -> None:
        used.append(served.tokenizer)
        if number == 0:
            reading.set()
            assert go.wait(60.0)

    async def run() -> None:
        readers = Readers(served, threads=2)
        assert tokenizer._tokenizer.truncation is None  # no thread has begun
        slow = asyncio.ensure_future(readers.run(read, 0))
        await asyncio.to_thread(reading.wait)
        await readers.run(read, 1)
        go.set()
        await slow

    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.enable_truncation(5)
    served = replace(SERVED, tokenizer=tokenizer)
    asyncio.run(run())
    assert all(each is tokenizer for each in used) and len(used) == 2


def test_a_tokenizer_that_need_not_bear_threads_has_one() -> None:
    class Python:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1]

        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

    async def run() -> None:
        readers = Readers(Catalog([SERVED, replace(SERVED, name="other", tokenizer=Python())]))
        threads = await asyncio.gather(*(readers.run(lambda *_: threading.get_ident()) for _ in range(20)))
        assert len(set(threads)) == 1

    asyncio.run(run())


def test_nobody_reads_on_for_a_caller_who_left() -> None:
    """Whom it reads for learns it at the next step; who waits for a thread is not begun."""
    reading, go, found = threading.Event(), threading.Event(), []

    def read(number: int, served: Any, wanted: Any) -> None:
        reading.set()
        assert go.wait(60.0)
        found.append((number, wanted()))

    async def run() -> None:
        readers = Readers(replace(SERVED, tokenizer=None), threads=1)
        tasks = [asyncio.ensure_future(readers.run(read, number)) for number in range(3)]
        await asyncio.to_thread(reading.wait)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        go.set()
        await tasks[2]

    asyncio.run(run())
    assert found == [(0, False), (2, True)]


def test_who_left_while_his_prompts_were_read_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        leave = asyncio.Event()
        leave.set()
        sent = await ask_and_leave(make_app(Hanging(), SERVED), {"prompt": "x"}, leave)  # type: ignore[arg-type]
        assert sent[0]["status"] == 499

    asyncio.run(run())
