"""Several models on one arena with memory for one or two: every answer is the one that transformers gives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("httpx", reason="needs the extras cluster, test-cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster, test-cluster and transformers")

import httpx
import torch
from cluster_folder import byte_tokenizer
from test_cluster_front import until
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import remap
from remap.errors import DriverError, InvalidArgument, InvalidState, OutOfBlocks
from remap_serve.cluster.app import make_endpoints
from remap_serve.cluster.many import HUNG_S, ManyModels
from remap_serve.cluster.many_models import make_many, plan_many
from remap_serve.cluster.many_serving import COLD_START, serving_of
from remap_serve.cluster.prompts import Catalog, Served
from remap_serve.engine.request import Request, SamplingParams

NAMES = ("a", "b", "c")
PAGE = 16384
PROMPT = [72, 101, 108, 108, 111]
TOKENS = 6
World = Callable[[httpx.AsyncClient, ManyModels, remap.Session], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three models that differ in size and weights."""
    found = {}
    for place, name in enumerate(NAMES):
        torch.manual_seed(place)
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=64,
            intermediate_size=128 + 32 * place,
            num_hidden_layers=3 + place,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=256,
        )
        folder = tmp_path_factory.mktemp("models") / name
        LlamaForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[int]]:
    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        found[name] = ids[0, len(PROMPT) :].tolist()
    return found


def least(folders: dict[str, str]) -> int:
    """The memory in which the largest of the models just fits."""
    with pytest.raises(InvalidArgument) as refused:
        plan_many(folders, PAGE, page_bytes=PAGE)
    minimum = refused.value.fields["minimum"]
    assert isinstance(minimum, int) and refused.value.fields["model"] == "c"
    return minimum


def serving(folders: dict[str, str], memory: int, world: World, config: remap.Config | None = None) -> None:
    async def run() -> None:
        plans, page = plan_many(folders, memory, page_bytes=PAGE)
        session = remap.Session(memory // page * page, page_bytes=page)
        shared = make_many(plans, session, config=config)
        front = ManyModels(shared)
        try:
            catalog = Catalog([Served(name, byte_tokenizer(), plan.positions) for name, plan in plans.items()])
            app = make_endpoints(serving_of(front, catalog, session))
            await front.start()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60.0) as client:
                await world(client, front, session)
        finally:
            await front.close()
            remap.advanced.check(session)
            session.close()

    asyncio.run(asyncio.wait_for(run(), 120.0))


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more


def test_every_model_answers_in_memory_for_one(folders: dict[str, str], expected: dict[str, list[int]]) -> None:
    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        assert len(session.snapshot().tenants["c"].cold) == 5
        for again in range(2):
            for name in NAMES:
                answer = await client.post("/v1/completions", json=body(name))
                assert answer.status_code == 200 and answer.json()["model"] == name
                assert answer.json()["choices"][0]["token_ids"] == expected[name]
                # The first one was attached while there was room.
                assert (float(answer.headers[COLD_START]) > 0) is (bool(again) or name != "a")
        warm = await client.post("/v1/completions", json=body("c"))
        assert float(warm.headers[COLD_START]) == 0.0
        # All at once, some as streams: turns go round.
        answers = await asyncio.gather(
            *(
                client.post("/v1/completions", json=body(name, stream=place % 2 == 1))
                for name in NAMES
                for place in range(4)
            )
        )
        for place, answer in enumerate(answers):
            name, tokens = NAMES[place // 4], list[int]()
            if place % 2:
                assert COLD_START in answer.headers
                events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
                for event in events:
                    tokens += json.loads(event)["choices"][0]["token_ids"]
            else:
                tokens = answer.json()["choices"][0]["token_ids"]
            assert tokens == expected[name]
        text = (await client.get("/metrics")).text
        assert 'remap_server_cold_start_seconds_count{model="a"}' in text
        assert 'remap_server_requests_total{model="c",outcome="length"} 7.0' in text
        assert "remap_tenant" in text and front.unfinished == 0

    serving(folders, least(folders), world)


def test_models_are_listed_and_found_by_name(folders: dict[str, str]) -> None:
    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == list(NAMES) and listed[0]["max_model_len"] == 256
        assert (await client.get("/v1/models/b")).json()["id"] == "b"
        for answer in (
            await client.get("/v1/models/d"),
            await client.post("/v1/completions", json=body("d")),
            await client.post("/v1/completions", json={"prompt": "x"}),
        ):
            assert answer.status_code == 404 and "a, b, c" in answer.json()["error"]["message"]
        asked = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=asked)).json()["model"] == "b"
        assert (await client.post("/tokenize", json={"model": "a", "prompt": "hi"})).json()["count"] == 2
        assert (await client.get("/health")).json() == {"status": "ok", "serving": 3}
        request = Request("last", tuple(PROMPT), SamplingParams(max_tokens=20, stop_token_ids=frozenset()))
        deliveries = front.generate("a", "last", request)
        await anext(deliveries)
        draining = asyncio.create_task(front.drain())
        await asyncio.sleep(0)
        assert not draining.done()  # although there were moments without a request before
        assert len([each async for each in deliveries]) == 19
        await draining
        assert (await client.get("/health")).status_code == 503

    serving(folders, 4 * least(folders), world)


@pytest.mark.parametrize("call", ["activate", "expect"])
def test_a_load_that_fails_ends_that_models_requests_alone(
    folders: dict[str, str], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The model stays cold; the next request begins anew."""

    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        first = await client.post("/v1/completions", json=body("a"))
        assert first.status_code == 200
        method, failures = getattr(session, call), [0]

        def failing(name: str, **options: Any) -> Any:
            if name == "b" and failures[0] < 1:
                failures[0] += 1
                raise DriverError("no copy today")
            return method(name, **options)

        monkeypatch.setattr(session, call, failing)
        found = await asyncio.gather(*(client.post("/v1/completions", json=body(name)) for name in ("a", "b", "c")))
        assert [answer.status_code for answer in found] == [200, 500, 200] and failures == [1]
        assert "no copy today" in found[1].json()["error"]["message"]
        again = await client.post("/v1/completions", json=body("b"))
        assert again.json()["choices"][0]["token_ids"] == expected["b"]

    serving(folders, least(folders), world)


def test_a_request_without_room_ends_alone(folders: dict[str, str]) -> None:
    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        one = front.of("c")
        long = Request("long", tuple(PROMPT * 8), SamplingParams(max_tokens=200, stop_token_ids=frozenset()))

        async def ask(request: Request) -> list[int]:
            return [token async for found in one.generate(request.id, request) for token in found.tokens]

        with pytest.raises(OutOfBlocks):
            await ask(long)
        short = Request("short", tuple(PROMPT), SamplingParams(max_tokens=3))
        assert len(await ask(short)) == 3

    serving(folders, least(folders), world, remap.Config(max_layers=0))  # else layers would make room


def test_a_caller_that_leaves_cancels_its_request(folders: dict[str, str]) -> None:
    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        request = Request("r", tuple(PROMPT), SamplingParams(max_tokens=200, stop_token_ids=frozenset()))
        deliveries = front.generate("b", "r", request)
        await anext(deliveries)
        with pytest.raises(InvalidArgument, match="in use"):
            await anext(front.generate("b", "r", request))
        await deliveries.aclose()
        assert front.unfinished == 0
        answer = await client.post("/v1/completions", json=body("b"))  # behind which the engine has heard of it
        assert answer.status_code == 200 and not front._shared.unfinished

    serving(folders, 2 * least(folders), world)


def test_an_unforeseen_error_answers_everybody_and_ends_the_server(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def world(client: httpx.AsyncClient, front: ManyModels, session: remap.Session) -> None:
        def broken(self: Any) -> Any:
            raise RuntimeError("out of order")

        with monkeypatch.context() as patch:
            patch.setattr(type(front._shared), "step", broken)
            answer = await client.post("/v1/completions", json=body("a"))
        assert answer.status_code == 503 and front.over.is_set() and isinstance(front.failure, RuntimeError)
        assert (await client.get("/health")).json() == {"status": "failed", "serving": 0}
        with pytest.raises(InvalidState):
            await anext(front.generate("a", "x", Request("x", (1,))))

    serving(folders, 2 * least(folders), world)


def test_a_thread_that_hangs_is_seen_and_so_is_that_it_goes_on() -> None:
    """/health went on to say ok."""
    begun, go, now = threading.Event(), threading.Event(), [0.0]

    def step() -> dict[str, Any]:
        begun.set()
        assert go.wait(60.0)
        return {}

    async def run() -> None:
        shared: Any = SimpleNamespace(engines={}, unfinished=1, step=step, forget_samples=lambda: None)
        front = ManyModels(shared, lambda: now[0])
        serving = serving_of(front, Catalog([Served("a", None, 9)]), session)
        assert serving.health()["status"] == "ok"  # it has not begun
        await front.start()
        await asyncio.to_thread(begun.wait, 60.0)
        for now_s, found in ((HUNG_S, {"status": "ok", "serving": 1}), (HUNG_S + 1, {"status": "hangs", "serving": 0})):
            now[0] = now_s
            assert serving.health() == found
            # Of a session that hangs nothing is asked.
            text = await serving.figures()
            assert b"remap_server_unfinished" in text and (b"remap_session_epoch" in text) is bool(found["serving"])
        go.set()
        await until(lambda: serving.health()["status"] == "ok")
        await front.close()

    with remap.Session(8 * PAGE, page_bytes=PAGE) as session:
        asyncio.run(asyncio.wait_for(run(), 60.0))


def test_the_command_serves_and_ends(folders: dict[str, str], expected: dict[str, list[int]]) -> None:
    names = [f"{name}={folder}" for name, folder in folders.items()]
    options = (
        "--memory 3MiB --device cpu --ttft 10 --tbt 1 --quantum 0.5 --host 127.0.0.1 --port 0 --threads 1 --max-num-seqs 4 "
        "--max-batch-tokens 64 --max-body 1MiB --max-requests 8 --deadline 60 --grace 5 --allow-host box "
        "--access-log --log-level info"
    )
    command = [sys.executable, "-m", "remap", "serve-many", *names, *options.split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        lines = []
        try:
            for line in server.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
            assert lines and lines[-1].startswith("ready: "), "".join(lines)
            url = lines[-1].removeprefix("ready: ").strip()
            for name in (*NAMES, *NAMES):
                answer = httpx.post(f"{url}/completions", json=body(name), timeout=60.0)
                assert answer.json()["choices"][0]["token_ids"] == expected[name]
        finally:
            server.send_signal(signal.SIGINT)
            rest = server.stdout.read()
            assert server.wait(60) == 0 and "ended" in rest and "or in 5 s" in rest, "".join(lines) + rest


def test_two_servers_share_a_brokers_pages(
    folders: dict[str, str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Memory for the largest of three models, in two processes: each answers with the pages that the other one had."""
    pytest.importorskip("msgspec")
    from remap.broker.server import Broker

    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with Broker(tmp_path / "s", least(folders) + 8 * PAGE, PAGE) as broker, ExitStack() as stack:
        urls, servers = {}, []
        for number, names in enumerate((("a", "b"), ("c",))):
            command = [sys.executable, "-m", "remap", "serve-many", *(f"{name}={folders[name]}" for name in names)]
            options = f"--device unix:{broker.path} --port 0 --threads 1"
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            server = stack.enter_context(subprocess.Popen([*command, *options.split()], env=env, **pipes))
            servers.append(server)
            stack.callback(server.kill)
            assert server.stdout is not None
            lines = []
            for line in server.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
            assert lines[-1].startswith("ready: "), (number, "".join(lines))
            urls |= dict.fromkeys(names, lines[-1].removeprefix("ready: ").strip())
        for name in "abcacbcc":
            answer = httpx.post(f"{urls[name]}/completions", json=body(name), timeout=60.0)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected[name]
        with ThreadPoolExecutor(9) as pool:  # all at once: the answers of each server end its turn
            names = "abcabcabc"
            answers = pool.map(
                lambda name: httpx.post(f"{urls[name]}/completions", json=body(name), timeout=60.0), names
            )
            for name, answer in zip(names, answers, strict=True):
                assert answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == expected[name]
        for server in servers:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        assert broker.ledger.free == broker.ledger.pages


def test_the_memory_of_a_broker_is_its_own(folders: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "remap", "serve-many", f"a={folders['a']}", "--port", "0"]
    for options in (["--device", f"unix:{tmp_path / 's'}", "--memory", "1GiB"], ["--device", "cpu"]):
        found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert found.returncode == 2 and "nothing was started" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize("models", [["x=/none"], ["a={a}", "a={b}"], ["=x"], ["a={a}", "--quantum", "0"]])
def test_what_cannot_be_served_is_said_before_anything_is_loaded(folders: dict[str, str], models: list[str]) -> None:
    given = [each.format(**folders) for each in models]
    command = [sys.executable, "-m", "remap", "serve-many", *given, "--memory", "1GiB", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and "nothing was started" in found.stderr and "Traceback" not in found.stderr
