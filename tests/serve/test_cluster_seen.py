"""What whoever runs a cluster sees of it: lines, metrics, its health, and why it ends."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("httpx", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

import httpx
from cluster_double import LocalConnection
from control_worlds import Chaos, World
from prometheus_client.parser import text_string_to_metric_families
from test_cluster_bounds import Hanging
from test_cluster_control import burst
from test_cluster_front import until
from test_cluster_server import (
    SERVED,
    Listening,
    Scripted,
    ask_and_leave,
    client_of,
    deliveries,
    events,
    listening,
    serving,
)

from remap.errors import InvalidState
from remap_serve.cluster import server
from remap_serve.cluster.app import ServedModels, make_app, make_endpoints
from remap_serve.cluster.control import GroupPolicy
from remap_serve.cluster.counts import Counts
from remap_serve.cluster.front import Front
from remap_serve.cluster.limits import FrontLimits
from remap_serve.cluster.messages import InstanceReport, Part
from remap_serve.cluster.metrics import ClusterMetrics, RequestMetrics
from remap_serve.engine.request import Request
from remap_serve.policy.cluster.shortage import Shortage

PAGE = Path(__file__).parents[2] / "docs" / "cluster-metrics.md"


def test_the_page_says_what_metrics_gives() -> None:
    """Names, types and labels of all of it."""
    stage = Part("a", 0, 8)
    view = SimpleNamespace(stages=(stage,), load=SimpleNamespace(running=1, waiting=(), tokens=16), capacity=40)
    control = SimpleNamespace(epoch=1, changes={"merged": 0, "dissolved": 0, "aborted": 0}, lacking=Shortage(9, 1))
    front: Any = SimpleNamespace(
        service=SimpleNamespace(control=control),
        groups=[view],
        reports={"a": InstanceReport("a", 1, counts=Counts().as_dict())},
        restarts=0,
        unfinished=0,
        up={"a": True},
    )
    metrics = ClusterMetrics(front)
    metrics.ended("tiny", "stop", 1, 2, 0.1, 0.2)
    metrics.refused(429, "Busy")
    found = {
        family.name: (family.type, {label for one in family.samples for label in one.labels} - {"le"})
        for family in text_string_to_metric_families(metrics.text().decode())
        if not family.name.endswith("_created")
    }
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]*\| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    assert found == {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_fewer_instances_than_there_should_be_are_degraded_and_series_of_the_dead_end(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, front: Front[Request], connections: list[LocalConnection]) -> None:
        async def health() -> tuple[int, Any]:
            answer = await client.get("/health")
            return answer.status_code, answer.json()

        async def lines() -> set[str]:
            text = (await client.get("/metrics")).text
            return {line.split(" ")[0] for line in text.splitlines() if "replica=" in line}

        await until(lambda: set(front.reports) == set("abcd") and all(front.up.values()))
        assert await health() == (200, {"status": "ok", "serving": 4, "instances_expected": 4})
        assert 'remap_cluster_instance_passes_total{replica="b"}' in await lines()
        connections[1].returns = False
        connections[1].kill()
        await until(lambda: "b" in front.rejected and sum(front.up.values()) == 3)
        assert await health() == (200, {"status": "degraded", "serving": 3, "instances_expected": 4})
        assert {line for line in await lines() if 'replica="b"' in line} == {'remap_cluster_up{replica="b"}'}
        assert 'remap_cluster_up{replica="b"} 0.0' in (await client.get("/metrics")).text

    serving(tmp_path, body, "abcd")


def test_a_death_and_what_starts_again_are_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "remap_serve.cluster")

    async def body(client: httpx.AsyncClient, front: Front[Request], connections: list[LocalConnection]) -> None:
        ledger = front.service.ledger
        asked = {"prompt": [1], "max_tokens": 60}
        answer = asyncio.create_task(client.post("/v1/completions", json=asked))
        await until(lambda: any(ledger.tokens(id) for id in ledger.ids))
        where = ledger.where(ledger.ids[0])
        next(each for each in connections if each.name == where).kill()
        assert (await answer).status_code == 200
        said = [record.getMessage() for record in caplog.records]
        assert "the instance is gone" in said
        assert any(re.fullmatch(r"1 requests start again, behind \d+ tokens that they have", line) for line in said), (
            said
        )

    serving(tmp_path, body, "ab")


def test_a_change_says_why_it_begins_and_why_it_is_aborted() -> None:
    world = World(4, GroupPolicy("remap"), 1)
    burst(world, 100, 4.0)
    world.run(40.0)
    news = list(world.control.news)
    assert {(each.step, each.kind) for each in news} >= {
        ("begun", "merge"),
        ("decided", "merge"),
        ("begun", "dissolve"),
        ("decided", "dissolve"),
    }
    assert all(re.search(r"\d+ tokens of KV", each.why) for each in news if each.step != "aborted")
    first = next(each for each in news if each.kind == "merge")
    assert re.match(r"epoch \d+: merge of i\d( \| i\d)+ is begun: \d+ requests ask for", str(first)), first
    world = World(4, GroupPolicy("remap"), 1, Chaos(refuse=0.5, until_s=15.0))
    burst(world, 100, 4.0)
    world.run(40.0)
    aborted = [each.why for each in world.control.news if each.step == "aborted"]
    assert aborted and all(re.match(r"i\d refused: \w+: |requests ask for more KV", why) for why in aborted), aborted


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def logged(caplog: pytest.LogCaptureFixture, front: Any, asked: Any, access_log: bool = True) -> list[str]:
    """The lines of what `asked` does with a client, without the caller and the seconds."""
    caplog.set_level(logging.INFO, "remap_serve.cluster.access_log")

    async def run() -> None:
        async with client_of(make_app(front, SERVED, access_log=access_log)) as client:
            await asked(client)

    asyncio.run(asyncio.wait_for(run(), 60.0))
    lines = [record.getMessage() for record in caplog.records if record.name == "remap_serve.cluster.access_log"]
    found = [re.fullmatch(r"\S+ (.*) \d+\.\d{3} s (.*)", line) for line in lines]
    return [f"{one[1]} {one[2]}" for one in found if one is not None or pytest.fail(str(lines))]


@pytest.mark.parametrize("access_log", [False, True])
def test_an_access_log_is_a_line_for_each_request_with_its_ids_and_tokens(
    caplog: pytest.LogCaptureFixture, access_log: bool
) -> None:
    async def asked(client: httpx.AsyncClient) -> None:
        ids = {"X-Request-Id": "mine", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=ids)
        assert answer.headers["x-request-id"] == "mine"
        answers.append(answer.json()["id"])
        stream = await client.post("/v1/completions", json={"prompt": "xy", "stream": True})
        answers.append(events(stream.text)[0]["id"])
        answers.append(stream.headers["x-request-id"])
        with suppress(httpx.InvalidURL):
            await client.get("/no%0Asuch")
        # What would be more than one line, or one word of it, is not taken.
        odd = [await client.get("/version", headers={"x-request-id": each}) for each in ("a b", "x" * 129, "")]
        assert all(re.fullmatch("[0-9a-f]{32}", each.headers["x-request-id"]) for each in odd)

    answers: list[str] = []
    lines = logged(caplog, Scripted(*deliveries("one", "length")), asked, access_log)
    if not access_log:
        assert not lines
        return
    assert lines[:2] == [
        f"POST '/v1/completions' 200 request=mine model=tiny answer={answers[0]} tokens=1+3 trace={TRACE}",
        f"POST '/v1/completions' 200 request={answers[2]} model=tiny answer={answers[1]} tokens=2+3",
    ]
    assert lines[2].startswith("GET '/no\\nsuch' 404 ") and lines[2].endswith(" error=NoPath"), lines


def test_a_stream_that_ended_with_an_error_is_logged_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its status was 200, which was sent before."""

    async def asked(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "x", "n": 600})).status_code == 400

    lines = logged(caplog, Scripted(*deliveries("on", None), InvalidState("it ends")), asked)
    assert re.fullmatch(r".* 503 request=\S+ model=tiny answer=\S+ tokens=1\+2 error=InvalidState", lines[0]), lines
    assert re.fullmatch(r".* 400 request=\S+ error=InvalidArgument", lines[1]), lines


def test_a_stream_whose_caller_left_is_logged_so(caplog: pytest.LogCaptureFixture) -> None:
    async def asked(client: httpx.AsyncClient) -> None:
        leave, app = asyncio.Event(), client._transport.app  # type: ignore[attr-defined]
        caller = asyncio.create_task(ask_and_leave(app, {"prompt": "x", "stream": True}, leave))
        await until(lambda: front.hanging)
        leave.set()
        await caller

    front = Hanging(*deliveries("on", None))
    assert re.fullmatch(r".* 499 request=\S+ model=tiny answer=\S+ tokens=1\+2", logged(caplog, front, asked)[0])


def test_what_is_refused_is_counted_and_what_is_not_there_says_so_as_openai_does() -> None:
    class Broken(Scripted):
        def generate(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("a defect")

    metrics, broken = RequestMetrics("remap_cluster"), Broken()

    async def figures() -> bytes:
        return metrics.text()

    async def run() -> None:
        served: Any = ServedModels(SERVED, lambda _: broken, metrics, lambda: {"serving": 1}, figures)  # type: ignore[arg-type, return-value]
        app = make_endpoints(served, FrontLimits(requests=2, body_bytes=100))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, asked, status, code in (
                ("/v1/completions", {"json": {"prompt": "x", "n": 3}}, 429, "Busy"),
                ("/v1/completions", {"json": {"prompt": "x", "n": 0}}, 400, "InvalidArgument"),
                ("/v1/completions", {"json": {"prompt": "x" * 200}}, 413, "TooLarge"),
                ("/v1/completions", {"content": b"{}"}, 415, "NotJSON"),
                ("/v1/completions", {"json": {"prompt": "x"}}, 500, "Defect"),
                ("/v1/responses", {"json": {}}, 404, "NoPath"),
                ("/v1/models", {"json": {}}, 405, "NoMethod"),
            ):
                answer = await client.post(path, **asked)  # type: ignore[arg-type]
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert answer.headers["x-request-id"]
                line = f'remap_cluster_refused_total{{reason="{code}",status="{status}"}} 1.0'
                assert line in (await client.get("/metrics")).text, line
            assert "GET" in answer.headers["allow"]
            for path in ("/health", "/v1/models", "/metrics", "/version"):
                assert (await client.head(path)).status_code == (await client.get(path)).status_code != 405

    asyncio.run(run())


def test_without_what_restarts_instances_the_server_ends_after_what_is_in_flight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = asyncio.Event()

    async def broken() -> str:
        await gone.wait()
        return "Ray's head is gone"

    async def body(there: Listening) -> None:
        stream = there.ask(30)
        await there.begun(1)
        gone.set()
        await until(lambda: there.front.draining)
        answer = await there.ask(5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "InvalidState")
        *chunks, done = events((await stream).text)
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"

    with pytest.raises(server.NoRestarts) as caught:
        listening(tmp_path, body, broken=broken)
    assert caught.value.reason == "Ray's head is gone"
    assert any("the server ends when the 1 that it has" in record.getMessage() for record in caplog.records)


def test_rays_head_is_lost_when_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra cluster")
    from remap_serve.cluster import ray_cluster

    listened = socket.create_server(("127.0.0.1", 0))
    context = SimpleNamespace(gcs_address=f"127.0.0.1:{listened.getsockname()[1]}")
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.02)
    instances = object.__new__(ray_cluster.RayInstances)
    instances._patience_s = 0.2

    async def run() -> None:
        lost = asyncio.ensure_future(instances.head_lost())
        await asyncio.to_thread(listened.accept)
        await asyncio.to_thread(listened.accept)  # it looks again
        assert not lost.done()
        listened.close()
        assert context.gcs_address in await lost

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_head_of_ray_that_accepts_and_says_nothing_is_lost_and_so_is_a_silent_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is stopped: the kernel accepts for it. What waits for it ends."""
    pytest.importorskip("ray", reason="needs the extra cluster")
    from remap_serve.cluster import ray_cluster, ray_keeper

    class Silent:
        async def call(self, method: str, *_: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.02)
    monkeypatch.setattr(ray_keeper, "SILENT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listened:
        address = f"127.0.0.1:{listened.getsockname()[1]}"
        monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))

        async def run() -> None:
            keeper: Any = Silent()
            for lost, who in ((ray_cluster.head_lost(0.1), address), (ray_keeper._silent("tiny", keeper), "'tiny'")):
                with pytest.raises(ray_cluster.RayAway, match=f"{who}.* has not answered for 0 s") as caught:
                    await ray_cluster.unless_lost(keeper.call("figures"), lost, 0.1)
                assert (caught.value.address, caught.value.waited_s) == (address, 0.1)

        asyncio.run(asyncio.wait_for(run(), 60.0))
