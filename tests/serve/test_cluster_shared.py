"""Two servers of one cluster, in a Ray that somebody started: processes that are killed among streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extras cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster and transformers")

from bench.lab.cluster.shared import COMMAND, LIMIT_S, Client, all_begun, get, ray_with, runs, until
from cluster_folder import save_model
from test_cluster_command import reference

pytestmark = pytest.mark.slow

SOON = """
from remap_serve.cluster import ray_cluster
ray_cluster.AWAY_S = 2.0
"""
LENGTH = 100
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}


def whole(client: Client) -> list[int]:
    client.join(LIMIT_S)
    assert not client.is_alive() and not client.broken
    return client.tokens


def test_of_two_servers_one_is_killed_among_streams_and_nothing_is_lost(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
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
        until(lambda: all_begun([*mine, plain]))
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
        until(lambda: all_begun(streams))
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
