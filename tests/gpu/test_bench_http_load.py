"""Whose turn it is in sleep mode, and a load over HTTP on servers that are doubles: what it counts, and what it does not hide."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu.context import Skip
from bench.gpu.http_load import HOST, Request, Turns, drive
from bench.gpu.measures.vllm_burst import Case
from bench.gpu.measures.vllm_sharing import SLEEP, STATIC, Sharing
from bench.gpu.models import LLAMA_3_8B
from bench.gpu.registry import Wrong, all_measures

CASE = Case(LLAMA_3_8B.scaled(0.375), "bfloat16", 768 << 20, requests=48, output=384)


def test_all_sides_have_the_same_memory_and_bursts_come_in_turn() -> None:
    fits, more = Sharing(CASE, 3), Sharing(CASE, 2)
    weights = fits.weights
    assert weights == 2 * CASE.shape.params()
    assert 3 * (weights + fits.kv_bytes(STATIC)) == weights + fits.kv_bytes(SLEEP) == fits.total
    assert weights + more.kv_bytes(SLEEP) == more.total == 2 * weights + 3 * CASE.kv_bytes
    with pytest.raises(Skip, match="do not hold"):
        more.kv_bytes(STATIC)
    load = fits.load()
    assert [(each.at_s, each.model) for each in load[::48]] == [(12.0 * n, n % 3) for n in range(6)]
    assert sorted({each.seed for each in load}) == list(
        range(96)
    )  # a round's prompts are its own, models' are the same
    assert [each.seed for each in load[:48]] == [each.seed for each in load[48:96]] == list(range(48))


def test_a_side_that_cannot_be_is_skipped_before_a_model_is_made() -> None:
    bodies = {each.name: each.body for each in all_measures() if each.call == "vllm"}
    room: Any = SimpleNamespace(free_bytes=1 << 37, host_budget=96 << 30)
    with pytest.raises(Skip, match="do not hold"):
        next(bodies["more vLLM servers than memory, static parts"](room))
    room.host_budget = 16 << 30
    with pytest.raises(Skip, match="of the host"):
        next(bodies["three vLLM servers, remap"](room))


def test_a_model_that_waits_wakes_when_the_awake_one_has_none_in_flight() -> None:
    turns = Turns(5.0)
    assert turns.next() is None
    turns.arrive(1, "a", 0.0)
    assert turns.due(0.0) == [] and turns.next() == 1
    turns.woke(1, 1.0)
    turns.arrive(2, "b", 1.5)
    turns.arrive(0, "c", 1.4)
    assert turns.due(2.0) == ["a"] and turns.next() is None  # sleep would drop its KV
    turns.finish(1)
    assert turns.due(2.5) == [] and turns.next() == 0  # within the turn; the other has waited for longest
    turns.woke(0, 3.0)
    assert turns.due(3.0) == ["c"]
    turns.finish(0)
    assert turns.next() == 2


def test_a_model_that_never_pauses_ends_its_turn_where_another_waits() -> None:
    turns = Turns(5.0)
    turns.woke(0, 0.0)
    turns.arrive(0, "a", 0.0)
    assert turns.due(0.0) == ["a"]
    turns.arrive(0, "b", 7.0)
    assert turns.due(7.0) == ["b"] and turns.next() is None  # nobody else waits: no turn is over
    turns.arrive(1, "c", 8.0)
    turns.arrive(0, "d", 8.0)
    turns.finish(0)
    assert turns.due(8.0) == [] and turns.next() is None  # what was sent finishes
    turns.finish(0)
    assert turns.next() == 1
    turns.woke(1, 8.5)
    turns.arrive(1, "e", 9.0)
    assert turns.due(9.0) == ["c", "e"]
    turns.finish(1)
    turns.finish(1)
    assert turns.due(9.5) == [] and turns.next() == 0
    turns.woke(0, 10.0)
    assert turns.due(10.0) == ["d"]


class Double:
    """A server: it answers as vLLM does, a token an event, or as `way` says. It refuses what it cannot do asleep."""

    def __init__(self, way: str, asleep: bool) -> None:
        self.way, self.asleep, self.flying, self.posts = way, asleep, 0, [""][:0]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = json.loads(await reader.readexactly(int(re.findall(r"Content-Length: (\d+)", head)[0])) or "{}")
        path = head.split()[1]
        if path == "/metrics":
            said = [b'vllm:num_preemptions_total{engine="0"} 2.0\n']
        elif path == "/v1/completions":
            said = self.events(body["max_tokens"])
        else:
            assert self.flying == 0 and self.asleep is (path == "/wake_up")
            self.asleep, said = not self.asleep, []
            self.posts.append(path)
        refused = (self.asleep and path == "/v1/completions") or self.way == "refuses"
        writer.write(b"HTTP/1.1 503 Busy\r\n\r\nno room" if refused else b"HTTP/1.1 200 OK\r\n\r\n")
        self.flying += path == "/v1/completions"
        for each in [] if refused else said:
            writer.write(b"%x\r\n%b\r\n" % (len(each), each))
            await asyncio.sleep(0.002)
        self.flying -= path == "/v1/completions"
        writer.close()

    def events(self, tokens: int) -> list[bytes]:
        made: list[dict[str, Any]] = [
            {"choices": [{"token_ids": [n]}]} for n in range(tokens - (self.way == "is short"))
        ]
        if self.way == "fails":
            made[-1] = {"error": {"message": "out of memory"}}
        lines = [f"data: {json.dumps(each)}\n\n".encode() for each in made]
        return lines if self.way == "is cut" else [*lines, b"data: [DONE]\n\n"]


async def served(load: list[Request], turns: Turns | None, *ways: str, limit_s: float = 60.0) -> Any:
    """What `drive` gives, and the doubles."""
    async with AsyncExitStack() as stack:
        doubles = [Double(way, asleep=turns is not None) for way in ways]
        servers = [await stack.enter_async_context(await asyncio.start_server(each, HOST, 0)) for each in doubles]
        ports = [each.sockets[0].getsockname()[1] for each in servers]
        return await drive(ports, load, 100, turns, limit_s), doubles


LOAD = [Request(0.02 * n, n % 2, 5, 4, n) for n in range(10)]


def test_every_request_is_answered_and_its_times_are_seen() -> None:
    (answers, switches, peaks), _ = asyncio.run(served(LOAD, None, "well", "well"))
    assert [each.request for each in answers] == LOAD and switches == []
    for each in answers:
        assert each.tokens == [0, 1, 2, 3] and each.times == sorted(each.times) and each.times[0] >= each.request.at_s
    assert peaks == [{"vllm:num_preemptions_total": 2.0}] * 2


def test_in_sleep_mode_one_model_is_awake_and_none_is_put_to_sleep_while_it_answers() -> None:
    (answers, switches, _), doubles = asyncio.run(served(LOAD, Turns(0.05), "well", "well"))
    assert len(answers) == len(LOAD)
    posts = [each.posts for each in doubles]
    assert sum(each.count("/wake_up") for each in posts) == len(switches) >= 2
    assert [each.asleep for each in doubles].count(False) == 1


@pytest.mark.parametrize(
    ("way", "says"),
    [("refuses", "503"), ("is short", "3 tokens"), ("fails", "out of memory"), ("is cut", "and not the end")],
)
def test_what_goes_wrong_is_said(way: str, says: str) -> None:
    with pytest.raises(Wrong, match=says):
        asyncio.run(served(LOAD, None, "well", way))


def test_a_load_that_takes_too_long_is_no_figure() -> None:
    with pytest.raises(Wrong, match="longer than 0 s"):
        asyncio.run(served(LOAD, None, "well", "well", limit_s=0.05))
