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
from test_cluster_control import burst
from test_cluster_front import until
from test_cluster_server import SERVED, Listening, Scripted, client_of, deliveries, events, listening, serving

from remap.cluster import server
from remap.cluster.app import make_app
from remap.cluster.control import GroupPolicy
from remap.cluster.counts import Counts
from remap.cluster.front import Front
from remap.cluster.messages import InstanceReport, Part
from remap.cluster.metrics import ClusterMetrics
from remap.engine.request import Request
from remap.policy.cluster.shortage import Shortage

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
    caplog.set_level(logging.INFO, "remap.cluster")

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


@pytest.mark.parametrize("access_log", [False, True])
def test_an_access_log_is_a_line_for_each_request(caplog: pytest.LogCaptureFixture, access_log: bool) -> None:
    caplog.set_level(logging.INFO, "remap.cluster")

    async def run() -> None:
        app = make_app(Scripted(*deliveries("one", "length")), SERVED, access_log=access_log)  # type: ignore[arg-type]
        async with client_of(app) as client:
            await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            await client.get("/no\nsuch%0Aplace")

    with suppress(httpx.InvalidURL):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.name == "remap.cluster.access_log"]
    if not access_log:
        assert not lines
        return
    assert re.fullmatch(r"\S+ POST '/v1/completions' 200 \d+\.\d{3} s", lines[0]), lines
    assert all("\n" not in line for line in lines)


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
    from remap.cluster import ray_cluster

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
    from remap.cluster import ray_cluster, ray_keeper

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
