"""The endpoints, over a front whose instances are doubles in threads of this process; no network but the loopback address."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("httpx", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

import httpx
from cluster_double import LocalConnection
from cluster_folder import byte_tokenizer
from control_worlds import MODEL, NETWORK, token
from test_cluster_front import until

from remap.errors import Error, InvalidState
from remap_serve.cli.serving import http_at
from remap_serve.cluster import openai, server
from remap_serve.cluster.answers import Deadline, pieces
from remap_serve.cluster.app import make_app, make_shared_app
from remap_serve.cluster.asked import AnswerAsked
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front
from remap_serve.cluster.http_errors import TooLate
from remap_serve.cluster.ledger import Delivery
from remap_serve.cluster.limits import FrontLimits
from remap_serve.cluster.metrics import RequestMetrics
from remap_serve.cluster.prompts import Served
from remap_serve.engine.request import Request, TokenLogprobs

SERVED = Served("tiny", byte_tokenizer(), 100)
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
Body = Callable[[httpx.AsyncClient, Front[Request], list[LocalConnection]], Coroutine[Any, Any, None]]


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def serving(folder: Path, body: Body, names: str = "a") -> None:
    """Run `body` beside a server with these instances."""

    async def run() -> None:
        connections = [LocalConnection(name, folder=str(folder)) for name in names]
        control = Control(MODEL, NETWORK, GroupPolicy("remap"), timeout_s=5.0)
        front = Front[Request](control, connections, lambda request: len(request.prompt))
        try:
            await front.start()
            async with client_of(make_app(front, SERVED)) as client:
                await body(client, front, connections)
            assert front.failure is None
        finally:
            await front.close()
            for connection in connections:
                connection.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def expected(id: str, length: int) -> list[int]:
    return [token(id, place) for place in range(length)]


def events(text: str) -> list[Any]:
    """What server-sent events carry; the last is the word DONE."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_completion_has_its_text_its_tokens_and_its_usage(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 7})
        found = answer.json()
        tokens = expected(found["id"], 7)
        assert answer.status_code == 200 and found["object"] == "text_completion" and found["model"] == "tiny"
        assert found["choices"] == [
            {
                "index": 0,
                "text": SERVED.tokenizer.decode(tokens),
                "finish_reason": "length",
                "logprobs": None,
                "token_ids": tokens,
            }
        ]
        assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}

    serving(tmp_path, body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_brings_the_same_in_chunks(tmp_path: Path, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": [1, 2, 3]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )

    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        more = {"max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post(path, json=asked | more)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(answer.text)
        assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [one for choice in choices for one in choice["token_ids"]] == expected(usage["id"], 20)
        parts = [one["text"] if "text" in one else one["delta"]["content"] for one in choices]
        assert "".join(parts) == SERVED.tokenizer.decode(expected(usage["id"], 20))
        assert [one["finish_reason"] for one in choices] == [*[None] * (len(choices) - 1), "length"]
        if "messages" in asked:
            assert choices[0]["delta"]["role"] == "assistant" and "role" not in choices[-1]["delta"]

    serving(tmp_path, body)


def test_a_chat_is_answered_by_an_assistant(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        found = (await client.post("/v1/chat/completions", json=asked)).json()
        text = SERVED.tokenizer.decode(expected(found["id"], 4))
        assert found["object"] == "chat.completion"
        assert found["choices"][0]["message"] == {"role": "assistant", "content": text}

    serving(tmp_path, body)


def test_what_is_wrong_gets_its_status_in_openais_form(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        for asked, status, code in (
            ({"prompt": "x", "suffix": "y"}, 400, "InvalidArgument"),
            ({"prompt": "x", "max_tokens": 1000}, 400, "InvalidArgument"),  # the instance refuses it
            ({"prompt": "x", "max_tokens": 1000, "stream": True}, 400, "InvalidArgument"),
            ({"prompt": "x", "model": "other"}, 404, "UnknownModel"),
        ):
            answer = await client.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    serving(tmp_path, body)


def test_models_health_and_the_cluster(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, front: Front[Request], connections: list[LocalConnection]) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 100)
        await until(lambda: all(view.phase == "serving" for view in front.groups))
        assert (await client.get("/health")).status_code == 200
        state = (await client.get("/cluster")).json()
        stages = [one["stages"] for one in state["groups"]]
        assert sorted(one["instance"] for (one,) in stages) == ["a", "b"]
        assert [(one["first"], one["end"]) for (one,) in stages] == [(0, 8), (0, 8)]
        assert state["groups"][0]["kv_capacity"] == 40 and state["groups"][0]["phase"] == "serving"
        for connection in connections:
            connection.returns = False
            connection.kill()
        await until(lambda: not front.groups)
        assert (await client.get("/health")).status_code == 503
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NoCopy")
        assert sorted((await client.get("/cluster")).json()["rejected"]) == ["a", "b"]

    serving(tmp_path, body, "ab")


def test_metrics_count_what_was_served(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 5})
        await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1000})
        lines = (await client.get("/metrics")).text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        for name, value in {
            'requests_total{outcome="length"}': 3,
            'requests_total{outcome="InvalidArgument"}': 1,
            'tokens_total{kind="prompt"}': 7,
            'tokens_total{kind="generated"}': 15,
            "ttft_seconds_count": 3,
            "tpot_seconds_count": 3,
            "restarts_total": 0,
            "groups": 1,
            "unfinished": 0,
            'group_stages{group="a"}': 1,
            'group_kv_capacity_tokens{group="a"}': 40,
            'changes_total{kind="merged"}': 0,
            'instance_passes_total{replica="a"}': 7,
            'instance_computing_seconds_total{replica="a"}': 0.5,
        }.items():
            assert float(found[f"remap_cluster_{name}"]) == value, name

    serving(tmp_path, body)


async def ask_and_leave(
    app: Any, asked: dict[str, Any], leave: asyncio.Event, take: Callable[[Any], Awaitable[None]] | None = None
) -> list[dict[str, Any]]:
    """A caller who goes away at `leave`, which httpx cannot: what the app sent. take: awaited with each part."""
    body, sent = json.dumps(asked).encode(), list[dict[str, Any]]()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if take is not None:
            await take(message)

    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": "/v1/completions", "raw_path": b"", "query_string": b"", "root_path": "", "scheme": "http"}
    await app(
        scope | {"headers": [(b"content-type", b"application/json")], "client": None, "server": None}, receive, send
    )
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_goes_away_cancels(tmp_path: Path, stream: bool) -> None:
    async def body(client: httpx.AsyncClient, front: Front[Request], connections: list[LocalConnection]) -> None:
        app, leave = client._transport.app, asyncio.Event()  # type: ignore[attr-defined]
        asked = {"prompt": [1, 2], "max_tokens": 90, "stream": stream}
        caller = asyncio.create_task(ask_and_leave(app, asked, leave))
        await until(lambda: any(front.service.ledger.tokens(id) for id in front.service.ledger.ids))
        leave.set()
        sent = await caller
        assert front.unfinished == 0
        await until(lambda: "cancel" in connections[0].calls)
        await until(lambda: not front.reports["a"].requests)
        assert sent[0].get("status") == (200 if stream else 499)
        assert 'outcome="cancelled"} 1.0' in (await client.get("/metrics")).text

    serving(tmp_path, body)


class Scripted:
    """A front that answers with what it was given; it notes whether the caller let go of the answer."""

    failure = None
    groups: tuple[Any, ...] = ()
    up: ClassVar[dict[str, bool]] = {}
    draining = False
    restarts = unfinished = 0
    service = SimpleNamespace(control=SimpleNamespace(epoch=0))

    def __init__(self, *script: Delivery | Error) -> None:
        self._script = script
        self.closed = False

    async def generate(self, id: str, request: Request, **_: Any) -> AsyncIterator[Delivery]:
        try:
            for each in self._script:
                if isinstance(each, Error):
                    raise each
                yield each
        finally:
            self.closed = True


def scripted(front: Scripted, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(make_app(front, SERVED)) as client:  # type: ignore[arg-type]
            await body(client)

    asyncio.run(run())


def deliveries(text: str, reason: str | None) -> list[Delivery]:
    """A byte each."""
    tokens = SERVED.tokenizer.encode(text)
    return [Delivery(place, (one,), reason if place == len(tokens) - 1 else None) for place, one in enumerate(tokens)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_answer_before_it_and_cancels_the_rest(stream: bool) -> None:
    front = Scripted(*deliveries("one END two", "length"))

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stop": [" END"], "stream": stream})
        objects = events(answer.text)[:-1] if stream else [answer.json()]
        choices = [each["choices"][0] for each in objects]
        assert "".join(each["text"] for each in choices) == "one"
        assert choices[-1]["finish_reason"] == "stop" and front.closed

    scripted(front, body)


def noted(text: str) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -1.0, ()) for token in SERVED.tokenizer.encode(text))


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_together_with_a_stop_is_no_part_of_the_answer(stream: bool) -> None:
    text = "one END two"
    front = Scripted(Delivery(0, tuple(SERVED.tokenizer.encode(text)), "length", noted(text)))

    async def body(client: httpx.AsyncClient) -> None:
        asked = {"prompt": "x", "stop": " END", "logprobs": 0, "stream": stream}
        answer = await client.post("/v1/completions", json=asked)
        (choice,) = (events(answer.text)[0] if stream else answer.json())["choices"]
        assert choice["text"] == "one" and choice["token_ids"] == SERVED.tokenizer.encode("one END")
        assert choice["logprobs"]["tokens"] == list("one END") and choice["finish_reason"] == "stop"

    scripted(front, body)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_has_the_prompts_logprobs_and_no_token(stream: bool) -> None:
    front = Scripted(Delivery(0, (64,), "length", noted("a"), noted("bc")))

    async def body(client: httpx.AsyncClient) -> None:
        asked = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
        answer = await client.post("/v1/completions", json=asked)
        found = events(answer.text)[0] if stream else answer.json()
        (choice,) = found["choices"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("abc", [], "length")
        assert choice["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [None, -1.0, -1.0],
            "top_logprobs": [None, {"b": -1.0}, {"c": -1.0}],
            "text_offset": [0, 1, 2],
        }
        assert stream or found["usage"]["completion_tokens"] == 0

    scripted(front, body)


def test_a_long_prompt_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is, others get their tokens."""
    reading, other_done = threading.Event(), threading.Event()
    plain = openai.parse

    def parse(body: bytes, *args: Any, **named: Any) -> Any:
        if b"long" in body:
            reading.set()
            assert other_done.wait(60.0)
        return plain(body, *args, **named)

    monkeypatch.setattr(openai, "parse", parse)

    async def body(client: httpx.AsyncClient) -> None:
        slow = asyncio.create_task(client.post("/v1/completions", json={"prompt": "long"}))
        while not reading.is_set():
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 503  # of no group
        other_done.set()
        assert (await slow).json()["choices"][0]["text"] == "one"

    scripted(Scripted(*deliveries("one", "length")), body)


def test_a_request_for_which_there_is_no_room_is_an_error() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "abc"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "OutOfBlocks")

    scripted(Scripted(Delivery(0, (), "out_of_blocks")), body)


def test_an_error_in_the_middle_of_a_stream_ends_it_with_the_error() -> None:
    front = Scripted(*deliveries("on", None), InvalidState("the server is closing"))

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "abc", "stream": True})
        *chunks, last = events(answer.text)
        assert answer.status_code == 200 and len(chunks) == 2 and front.closed
        assert last["error"]["code"] == "InvalidState"

    scripted(front, body)


class Listening:
    """A server that listens at the loopback address, and what callers of it got."""

    def __init__(self, front: Front[Request], connections: list[LocalConnection], address: tuple[str, int]) -> None:
        self.front, self.connections, self.address = front, connections, address

    def ask(self, length: int, stream: bool = True) -> asyncio.Task[httpx.Response]:
        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(
                base_url=f"http://{self.address[0]}:{self.address[1]}", timeout=60.0
            ) as client:
                body = {"prompt": [1, 2], "max_tokens": length, "stream": stream}
                return await client.post("/v1/completions", json=body)

        return asyncio.create_task(asked())

    async def begun(self, count: int) -> None:
        """So many requests have got tokens."""
        ledger = self.front.service.ledger
        await until(lambda: sum(bool(ledger.tokens(id)) for id in ledger.ids) == count)


def listening(
    folder: Path,
    body: Callable[[Listening], Coroutine[Any, Any, None]],
    names: str = "a",
    grace_s: float = 3600.0,
    **options: Any,
) -> None:
    """Run `body` beside a server that `serve` runs, with these options, until it is to end. What `serve` raises is raised."""

    async def run() -> None:
        connections = [LocalConnection(name, folder=str(folder)) for name in names]
        front = Front[Request](Control(MODEL, NETWORK, timeout_s=5.0), connections, lambda request: len(request.prompt))
        taken = socket.create_server(("127.0.0.1", 0))
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least: what a caller does not read stays here
        try:
            await front.start()
            beside = list[asyncio.Task[None]]()
            made = Listening(front, connections, taken.getsockname())
            broken = options.pop("broken", None)
            app = make_app(front, SERVED, **options)
            try:
                begun = lambda: beside.append(asyncio.create_task(body(made)))  # noqa: E731
                await server.serve(front, app, taken, begun, grace_s, broken)
            finally:
                if beside:
                    await beside[0]  # its failure comes first
        finally:
            await front.close()
            for connection in connections:
                connection.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for who takes no error."""
    monkeypatch.setattr(server, "LEAVE_S", 0.0)


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupt_ends_streams_with_an_error_event_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, signals: int
) -> None:
    """When their time is over, or at a second interrupt, however much of that time is left."""

    async def body(there: Listening) -> None:
        streams, whole = [there.ask(90) for _ in range(3)], there.ask(90, stream=False)
        await there.begun(4)
        for _ in range(signals):
            interrupt()
        for stream in streams:
            *chunks, last = events((await stream).text)
            assert last["error"]["code"] == "InvalidState" and chunks[0]["choices"][0]["token_ids"]
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "InvalidState")

    listening(tmp_path, body, grace_s=0.0 if signals == 1 else 3600.0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_server_that_is_to_end_says_so_and_answers_what_it_has(tmp_path: Path) -> None:
    """Its port closed at once, and a balancer learnt of its end by a connection that was refused."""

    async def body(there: Listening) -> None:
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*there.address), timeout=60.0) as client:
            with there.connections[0].instance._news:  # so no token comes
                stream = there.ask(30)
                await until(lambda: there.front.unfinished == 1)
                await check(client, there.front)
                assert not stream.done()
        *_, done = events((await stream).text)
        assert done == "[DONE]"

    async def check(client: httpx.AsyncClient, front: Front[Request]) -> None:
        interrupt()
        await until(lambda: front.draining)
        await asyncio.sleep(0.3)  # it would close by now: ten times a second it looks whether it is to
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    listening(tmp_path, body)


def test_a_port_answers_that_its_server_starts_and_then_what_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes of a server that was loading got no answer, and were logged as 200 when it had loaded."""
    caplog.set_level(logging.INFO, "remap_serve.cluster.access_log")

    async def run() -> None:
        ends = {"over": asyncio.Event(), "failure": None, "rejected": {}, "unfinished": 0, "stop": lambda: None}
        front: Any = SimpleNamespace(**ends, drain=asyncio.Event().wait)
        app = make_app(Scripted(), SERVED)  # type: ignore[arg-type]
        with http_at("127.0.0.1", 0, FrontLimits(), None, True, 0.0) as http:
            async with httpx.AsyncClient(base_url=http.url, timeout=60.0) as client:
                health, asked = await client.get("/health"), await client.post("/v1/completions", json={})
                assert (health.status_code, health.json()["status"]) == (503, "starting")
                assert (asked.status_code, asked.json()["error"]["code"]) == (503, "InvalidState")
                assert health.headers["retry-after"] == asked.headers["retry-after"] == "1"
                assert (await client.get("/health", headers={"host": "evil.example"})).status_code == 400
                await asyncio.to_thread(http.started)
                early = asyncio.create_task(client.get("/version"))
                serving = asyncio.create_task(http.serve(front, app, lambda: None))
                assert (await early).status_code == 200  # it was not cut off
                interrupt()
                await serving

    asyncio.run(asyncio.wait_for(run(), 60.0))
    statuses = [record.getMessage().split(" ")[3] for record in caplog.records]
    assert statuses == ["503", "503", "400"]


@pytest.mark.parametrize("sent", [b"", b"GET /version HTT", HEAD % 1000 + b"{}"])
def test_a_connection_that_asks_for_nothing_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Of the third the body is refused. uvicorn keeps them as long as a byte comes now and then, and each is a descriptor."""
    monkeypatch.setattr(server, "QUIET_S", 0)

    async def body(there: Listening) -> None:
        assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1  # as many descriptors as it may have
        reader, writer = await asyncio.open_connection(*there.address)
        writer.write(sent)
        with suppress(ConnectionError):
            while not reader.at_eof():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(1000), 0.1)
                writer.write(sent and b"x")
                await writer.drain()
        writer.close()
        interrupt()

    listening(tmp_path, body, limits=FrontLimits(body_bytes=100))


@pytest.mark.parametrize("half", [False, True])
def test_who_takes_no_answer_or_sends_no_request_holds_up_no_end_and_is_not_complained_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: None, half: bool
) -> None:
    """A caller who does not read, and one whose body never comes whole."""

    async def body(there: Listening) -> None:
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        await asyncio.to_thread(other.connect, there.address)
        asked = json.dumps({"prompt": [1], "max_tokens": 120, "stream": True}).encode()
        other.sendall(HEAD % (len(asked) + half) + asked)
        if half:
            await asyncio.sleep(0.1)
        else:
            await there.begun(1)
        interrupt()
        beside.append(other)  # it stays open

    beside: list[socket.socket] = []
    listening(tmp_path, body, grace_s=0.0)
    for each in beside:
        each.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_caller_who_leaves_amid_his_body_is_not_complained_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: None
) -> None:
    async def body(there: Listening) -> None:
        with await asyncio.to_thread(socket.create_connection, there.address, 60.0) as other:
            other.sendall(HEAD % 1000 + b"{")
            await asyncio.sleep(0.1)
        assert (await there.ask(5)).status_code == 200
        interrupt()

    listening(tmp_path, body, grace_s=0.0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_server_ends_when_every_instance_is_gone_for_good(tmp_path: Path) -> None:
    async def body(there: Listening) -> None:
        stream = there.ask(90)
        await there.begun(1)
        for connection in there.connections:
            connection.returns = False
            connection.kill()
        *_, last = events((await stream).text)
        assert last["error"]["code"] in ("NoCopy", "InvalidState")

    with pytest.raises(server.NobodyLeft) as caught:
        listening(tmp_path, body, names="ab")
    assert caught.value.instances == 2


def test_the_server_ends_when_its_front_fails(tmp_path: Path) -> None:
    async def body(there: Listening) -> None:
        stream = there.ask(90)
        await there.begun(1)
        there.front.service.control.on = None  # type: ignore[method-assign,assignment]
        *_, last = events((await stream).text)
        assert last["error"]["code"] == "InvalidState"

    with pytest.raises(InvalidState) as caught:
        listening(tmp_path, body)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    parsed, sent = [], []
    monkeypatch.setattr(openai, "parse", lambda *args, **named: parsed.append(args))

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 100

    async def run() -> None:
        app = make_app(Scripted(), SERVED, FrontLimits(body_bytes=1000))  # type: ignore[arg-type]
        async with client_of(app) as client:
            answer = await client.post("/v1/completions", content=parts() if chunked else b"x" * 1001, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TooLarge")

    asyncio.run(run())
    assert not parsed and len(sent) <= 11  # the rest is not asked for


@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_than_the_limit_are_told_to_come_again(tmp_path: Path, stream: bool) -> None:
    read = []

    async def parts() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"{}"

    async def body(_: httpx.AsyncClient, front: Front[Request], __: list[LocalConnection]) -> None:
        app, leave = make_app(front, SERVED, FrontLimits(requests=2, retry_after_s=3)), asyncio.Event()
        asked = {"prompt": [1, 2], "max_tokens": 90, "stream": stream}
        callers = [asyncio.create_task(ask_and_leave(app, asked, leave)) for _ in range(2)]
        await until(lambda: front.unfinished == 2)
        async with client_of(app) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "Busy")
            assert answer.headers["retry-after"] == "3" and front.unfinished == 2
            assert (await client.post("/v1/completions", content=parts(), headers=JSON)).status_code == 429 and not read
            leave.set()
            await asyncio.gather(*callers)
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    serving(tmp_path, body)


def test_several_choices_are_told_apart_in_an_answer_and_in_a_stream(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        asked = {"prompt": ["a", [1, 2]], "n": 2, "max_tokens": 5, "echo": True}
        found = (await client.post("/v1/completions", json=asked)).json()
        assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
        for number, one in enumerate(found["choices"]):
            assert one["token_ids"] == expected(f"{found['id']}-{number}", 5)
            prompt = SERVED.tokenizer.decode([64] if number < 2 else [1, 2])
            assert one["text"] == prompt + SERVED.tokenizer.decode(one["token_ids"])
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}

        more = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 5, "stream": True}
        *chunks, done = events((await client.post("/v1/chat/completions", json=more)).text)
        assert done == "[DONE]"
        for number in range(3):
            own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == number]
            ids = [token for one in own for token in one["token_ids"]]
            assert ids == expected(f"{chunks[0]['id']}-{number}", 5)
            assert ["role" in one["delta"] for one in own] == [True, *[False] * (len(own) - 1)]
            assert [one["finish_reason"] for one in own] == [*[None] * (len(own) - 1), "length"]

    serving(tmp_path, body)


def test_the_model_its_version_and_tokens(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, *_: Any) -> None:
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        answer = await client.get("/v1/models/other/one")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "UnknownModel")
        assert (await client.get("/version")).json()["version"]
        assert (await client.post("/tokenize", json={"prompt": "a"})).json()["tokens"] == [64]

    serving(tmp_path, body)


def test_an_error_of_one_choice_ends_all(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, front: Front[Request], connections: list[LocalConnection]) -> None:
        stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1], "n": 3, "max_tokens": 90}))
        await until(lambda: front.unfinished == 3)
        front.end(front.service.ledger.ids[1], InvalidState("it is over"))
        assert (await stream).status_code == 503
        assert front.unfinished == 0

    serving(tmp_path, body)


def test_a_deadline_of_one_caller_ends_no_other_of_its_key(tmp_path: Path) -> None:
    from test_cluster_keeper import request, shared

    asked = AnswerAsked("same", (request("same", 60),), 1, 1, ("",), (), False, False, False, "tiny", 0)

    async def body(world: Any) -> None:
        one = await world.server()

        async def answer(deadline_s: float) -> list[int]:
            found = pieces(one.keyed, SERVED, RequestMetrics("tiny"), asked, Deadline(deadline_s))
            return [token async for piece in found for token in piece.tokens]

        stays = asyncio.create_task(answer(600.0))
        await until(lambda: one.unfinished == 1)
        with pytest.raises(TooLate):
            await answer(0.0)
        assert await stays == expected("same", 60)
        await one.close()

    shared(tmp_path, body)


def test_a_server_of_several_answers_by_the_key_and_shows_the_whole_cluster(tmp_path: Path) -> None:
    from test_cluster_keeper import World

    async def run() -> None:
        world = World(tmp_path)
        await world.begin()
        servers = [await world.server() for _ in "ab"]
        clients = [client_of(make_shared_app(each, SERVED)) for each in servers]
        body = {"prompt": [1, 2, 3], "max_tokens": 9, "temperature": 1, "n": 2}
        answers = [
            await each.post("/v1/completions", json=body, headers={"Idempotency-Key": key})
            for each, key in ((clients[0], "k"), (clients[1], "k"), (clients[1], "l"))
        ]
        found = [(each.json()["id"], each.json()["choices"]) for each in answers]
        assert found[0] == found[1] and found[1][0] != found[2][0] and world.submitted() == 4
        refused = await clients[1].post(
            "/v1/completions", json=body | {"max_tokens": 8}, headers={"Idempotency-Key": "k"}
        )
        assert refused.status_code == 400 and "another request's" in refused.json()["error"]["message"]
        plain = [(await clients[0].post("/v1/completions", json=body)).json()["id"] for _ in "ab"]
        assert len(set(plain)) == 2

        assert (await clients[0].get("/health")).json()["status"] == "ok"
        assert (await clients[0].get("/cluster")).json()["servers"] == 2
        text = (await clients[1].get("/metrics")).text
        assert 'remap_cluster_requests_total{outcome="length"} 4.0' in text and "remap_cluster_up" in text
        await world.end()
        assert (await clients[0].get("/cluster")).status_code == 503
        assert "remap_cluster_up" not in (await clients[0].get("/metrics")).text
        servers[0]._heard_s -= 11.0
        assert (await clients[0].get("/health")).status_code == 503
        await world.begin()
        assert (await clients[0].post("/v1/completions", json=body)).status_code == 200
        servers[0].failure = InvalidState("it has ended")
        assert (await clients[0].get("/health")).status_code == 503
        for each in servers:
            await each.close()
        assert world.keeper is not None
        await world.keeper.close()
        for each in world.instances:
            each.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))
