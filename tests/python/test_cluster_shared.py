"""Two servers of one cluster, in a Ray that somebody started: processes that are killed among streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("ray", reason="needs the extras cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster and transformers")

from cluster_folder import save_model
from test_cluster_command import LIMIT_S, below, reference, runs
from test_offline_process import COMMAND

pytestmark = pytest.mark.slow

SOON = """
from remap.cluster import ray_cluster
ray_cluster.AWAY_S = 2.0
"""
RAY = "from ray.scripts.scripts import main; main()"
LENGTH = 100
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}


def until(holds: Callable[[], Any]) -> Any:
    """The first true value of this."""
    begin = time.monotonic()
    while not (found := holds()):
        assert time.monotonic() < begin + LIMIT_S
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Cluster:
    """A Ray, and what runs in it. Its processes are below `ray`."""

    def __init__(self, model: Path, address: str, ray: int, environment: dict[str, str]) -> None:
        self.model = model
        self.address = address
        self.ray = ray
        self.environment = environment
        self.servers: list[subprocess.Popen[str]] = []

    def server(self, *options: str) -> tuple[subprocess.Popen[str], str]:
        """A process, and where it answers."""
        line = f"cluster serve --model {self.model} --port 0 --memory 3MiB --address {self.address} --shared tiny"
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *line.split(), *options],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.servers.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        return process, said.rpartition(" ")[2].strip() if "answer at" in said else said

    def actors(self, name: str) -> list[int]:
        return [actor for child in below(self.ray) for actor in below(child, "-f", f"ray::{name}")]


@contextmanager
def ray_with(model: Path) -> Iterator[Cluster]:
    save_model(model)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    address = f"127.0.0.1:{free_port()}"
    with TemporaryDirectory(prefix="remap") as folder:  # Ray's sockets need a short path
        line = f"start --head --block --node-ip-address 127.0.0.1 --port {address.rpartition(':')[2]} --num-cpus 2"
        more = f"--include-dashboard false --object-store-memory 80000000 --temp-dir {folder} --disable-usage-stats"
        ray = subprocess.Popen(
            [sys.executable, "-c", RAY, *line.split(), *more.split()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cluster = Cluster(model, address, ray.pid, environment)
        try:
            assert ray.stdout is not None
            for text in ray.stdout:
                if "--block" in text:
                    break
            threading.Thread(target=ray.stdout.read, daemon=True).start()
            yield cluster
        finally:
            for process in cluster.servers:
                process.kill()
                process.wait()
            ray.terminate()
            ray.wait()


class Client(threading.Thread):
    """A stream. What it has is `tokens`; `broken` if the server went away before its end."""

    def __init__(self, url: str, body: dict[str, Any], key: str | None = None) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.key = url, body, key
        self.tokens: list[int] = []
        self.id = ""
        self.broken = False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=LIMIT_S)
        headers = {"Content-Type": "application/json"} | ({} if self.key is None else {"Idempotency-Key": self.key})
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body | {"stream": True}), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    found = json.loads(line[6:])
                    self.id = found["id"]
                    self.tokens += found["choices"][0]["token_ids"]
        except (OSError, http.client.HTTPException):
            pass
        self.broken = True


def whole(client: Client) -> list[int]:
    client.join(LIMIT_S)
    assert not client.is_alive() and not client.broken
    return client.tokens


def get(url: str, path: str) -> dict[str, Any]:
    with urlopen(f"{url}{path}", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_of_two_servers_one_is_killed_among_streams_and_nothing_is_lost(tmp_path: Path) -> None:
    with ray_with(tmp_path / "model") as cluster:
        (first, one), (second, other) = cluster.server(), cluster.server()
        (keeper,), instances = until(lambda: cluster.actors("_Kept")), cluster.actors("_Actor")
        assert len(instances) == 2 and get(other, "/cluster")["servers"] == 2
        _, refused = cluster.server("--threads", "2")
        assert refused == ""  # it has ended, for it would make another cluster

        greedy = [{"prompt": [number, 8, 9]} | GREEDY for number in range(6)]
        drawn = [
            {"prompt": [number, 7], "max_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True} for number in range(3)
        ]
        known = [reference(cluster.model, body["prompt"], LENGTH, endless=True) for body in greedy]
        mine = [Client(one, body, f"key{number}") for number, body in enumerate(greedy + drawn)]
        plain = Client(one, greedy[0])
        theirs = [Client(other, body) for body in greedy[:3]]
        until(lambda: all(each.tokens for each in [*mine, plain]))
        first.send_signal(signal.SIGKILL)
        for each in [*mine, plain]:
            each.join(LIMIT_S)
        # What was on its way breaks off. Clients with a key come back to the other server, and have the same from the first
        # token.
        assert any(each.broken for each in mine)
        again = [Client(other, each.body, each.key) for each in mine]
        for before, after in zip(mine, again):
            assert whole(after)[: len(before.tokens)] == before.tokens and len(after.tokens) == LENGTH
            assert after.id == before.id
        for number, after in enumerate(again[: len(greedy)]):
            assert after.tokens == known[number]
        for number, each in enumerate(theirs):
            assert whole(each) == known[number]
        # None was computed twice, for none was submitted twice; what had no key ends when the dead server is missed.
        until(lambda: (seen := get(other, "/cluster"))["unfinished"] == 0 and seen["servers"] == 1)
        assert get(other, "/cluster")["restarts"] == 0
        assert cluster.actors("_Kept") == [keeper] and sorted(cluster.actors("_Actor")) == sorted(instances)

        # Another server takes the place of the dead one. Then the keeper's process is killed: streams of both go on.
        first, one = cluster.server()
        streams = [Client((one, other)[number % 2], body) for number, body in enumerate(greedy)]
        until(lambda: all(each.tokens for each in streams))
        os.kill(keeper, signal.SIGKILL)
        for number, each in enumerate(streams):
            assert whole(each) == known[number]
        assert cluster.actors("_Kept") not in ([], [keeper]) and sorted(cluster.actors("_Actor")) == sorted(instances)

        # The cluster is there until its last server ends.
        for process in (first, second):
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
            assert process.returncode == 0
        until(lambda: not cluster.actors("_Kept") and not cluster.actors("_Actor"))
        assert not any(map(runs, instances))


@pytest.mark.parametrize("shared", [(), ("--shared", "tiny")])
def test_a_server_does_not_wait_for_ever_for_a_ray_that_says_nothing(tmp_path: Path, shared: tuple[str, ...]) -> None:
    save_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = f"cluster serve --model {tmp_path} --port 0 --memory 3MiB --address {address}"
        found = subprocess.run(
            [sys.executable, "-c", SOON + COMMAND, *line.split(), *shared],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    assert f"RayAway: Ray at {address} has not answered for 2 s" in found.stderr
