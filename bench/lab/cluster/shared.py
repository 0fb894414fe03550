"""Servers of one cluster in a Ray of their own, as processes, and clients with keys. For tests, and for kills of any of them:

python -m bench.lab.cluster.kills [KILLS] [RESULT] shared      200 kills of servers, keepers and instances, and a line of JSON

Rounds of streams, each with a key; in each round one process is killed. A client whose server went away comes back to another
server with its key. Its answer is to be the one that it would have been, from the token on that it has. A server that was killed
is replaced while other rounds go on; Ray replaces the others.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from socket import create_server
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from remap_serve.cli.machine import machine_now
from remap_serve.cli.shared_world import build
from remap_serve.engine.request import Request

from .cases import QUICK
from .instances import as_good, engine_answers

__all__ = [
    "COMMAND",
    "LIMIT_S",
    "Client",
    "SharedCluster",
    "all_begun",
    "below",
    "get",
    "ray_with",
    "run_shared",
    "runs",
    "until",
]

LOG = logging.getLogger(__name__)
LIMIT_S = 600.0
RAY = "from ray.scripts.scripts import main; main()"
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("remap", run_name="__main__", alter_sys=True)
"""
"""`remap`, which an interrupt ends also if what started it ignores interrupts."""
LINES = 40
SERVERS = 3
AT_ONCE = 16
KINDS = ("server", "instance", "keeper")
WITHIN_S = 0.5
"""A kill comes so long after the round's first token, at most."""
REPORTS_S = 0.6
"""Until the keeper has what instances count now."""
COUNTED = (
    "answered",
    "answered otherwise",
    "answered otherwise, as good",
    "other tokens than had",
    "lost",
    "came back",
    "computed again",
)


def until(holds: Callable[[], Any]) -> Any:
    """The first true value of this."""
    begin = time.monotonic()
    while not (found := holds()):
        assert time.monotonic() < begin + LIMIT_S
        time.sleep(0.05)
    return found


def below(parent: int, *pattern: str) -> list[int]:
    """Its children, of these names if any is given."""
    found = subprocess.run(["pgrep", "-P", str(parent), *pattern], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def runs(pid: int) -> bool:
    """Not if it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def get(url: str, path: str) -> dict[str, Any]:
    """What the server shows there."""
    with urlopen(f"{url}{path}", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


class SharedCluster:
    """A Ray, and what runs in it. Its processes are below `ray`."""

    def __init__(self, model: Path, address: str, ray: int, environment: dict[str, str], memory: str) -> None:
        self.model = model
        self.address = address
        self.ray = ray
        self.environment = environment
        self.memory = memory
        self.servers: list[subprocess.Popen[str]] = []
        self._folder = Path(environment["TMPDIR"]).parent

    def server(self, *options: str) -> tuple[subprocess.Popen[str], str]:
        """A process, and where it answers."""
        line = (
            f"cluster serve --model {self.model} --port 0 --memory {self.memory} --address {self.address} --shared tiny"
        )
        with NamedTemporaryFile(prefix="server-", suffix=".log", dir=self._folder, delete=False) as log:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *line.split(), *options],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.servers.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        return process, said.rpartition(" ")[2].strip() if "answer at" in said else said

    def said(self) -> str:
        """The last lines of what its servers and Ray's actors have written."""
        logs = [*self._folder.glob("server-*.log"), *self._folder.glob("session_latest/logs/worker-*.[eo]*")]
        return "\n".join(
            f"== {log.name}\n" + "".join(log.open(errors="replace").readlines()[-LINES:]) for log in sorted(logs)
        )

    def actors(self, name: str) -> list[int]:
        """Processes of Ray's actors of this class."""
        return [actor for child in below(self.ray) for actor in below(child, "-f", f"ray::{name}")]


@contextmanager
def ray_with(model: Path, memory: str = "3MiB") -> Iterator[SharedCluster]:
    """A Ray for servers of this model. Its end is theirs."""
    with create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with TemporaryDirectory(prefix="remap") as folder:  # Ray's sockets need a short path
        scratch = Path(folder) / "tmp"
        scratch.mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_worker_niceness": "0",  # by itself 15: where others compute, what is started again would wait for minutes
            "TMPDIR": str(scratch),
        }
        line = f"start --head --block --node-ip-address 127.0.0.1 --port {address.rpartition(':')[2]} --num-cpus 2"
        more = f"--include-dashboard false --object-store-memory 80000000 --temp-dir {folder} --disable-usage-stats"
        ray = subprocess.Popen(
            [sys.executable, "-c", RAY, *line.split(), *more.split()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cluster = SharedCluster(model, address, ray.pid, environment, memory)
        try:
            assert ray.stdout is not None
            for text in ray.stdout:
                if "--block" in text:
                    break
            threading.Thread(target=ray.stdout.read, daemon=True).start()
            yield cluster
        except BaseException:
            LOG.error("what the cluster's processes said:\n%s", cluster.said())
            raise
        finally:
            for process in cluster.servers:
                process.kill()
                process.wait()
            ray.terminate()
            ray.wait()


class Client(threading.Thread):
    """A stream. What it has is `tokens`; `broken` if the server went away, or said an error, before its end: `said`."""

    def __init__(self, url: str, body: dict[str, Any], key: str | None = None) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.key = url, body, key
        self.tokens: list[int] = []
        self.id = ""
        self.said = b""
        self.broken = False
        self.start()

    def run(self) -> None:
        """Ask, and take what comes."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=LIMIT_S)
        headers = {"Content-Type": "application/json"} | ({} if self.key is None else {"Idempotency-Key": self.key})
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body | {"stream": True}), headers)
            for line in connection.getresponse():
                if line.strip() == b"data: [DONE]":
                    return
                found = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if "choices" in found:
                    self.id = found["id"]
                    self.tokens += found["choices"][0]["token_ids"]
                elif line.strip():
                    self.said = line
        except (OSError, http.client.HTTPException) as error:
            self.said = repr(error).encode()
        self.broken = True


def all_begun(clients: Iterable[Client]) -> bool:
    """Whether each has a token. Raises AssertionError for one that has ended without."""
    for client in clients:
        assert client.tokens or not client.broken, client.said
    return all(client.tokens for client in clients)


def _save(folder: Path, model: Any) -> None:
    """The model, and a tokenizer that nobody asks."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = {str(token): token for token in range(model.config.vocab_size)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="0").save_pretrained(folder)


def _requests() -> list[Request]:
    """Of the quick case, every third drawn."""
    (case,) = QUICK.cases
    found = case.requests()
    return [
        replace(one, sampling=replace(one.sampling, temperature=1.0, seed=7)) if place % 3 == 0 else one
        for place, one in enumerate(found)
    ]


class _Kills:
    """Rounds. `servers` are there; one that was killed is being replaced by a thread."""

    def __init__(self, cluster: SharedCluster, model: Any, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.found, self.kills = Counter[str](), Counter[str]()
        self.killed: list[int] = []
        self.pool = _requests()
        self.model = model
        self.wanted = engine_answers(QUICK.cases[0], self.pool)
        self.servers: list[tuple[subprocess.Popen[str], str]] = []
        self._expected = 0
        for _ in range(SERVERS):
            self._start()
            until(lambda: len(self.servers) == self._expected)  # the first makes the cluster

    def _start(self) -> None:
        self._expected += 1
        threading.Thread(target=self._add, daemon=True).start()

    def _add(self) -> None:
        process, url = self.cluster.server()
        if url.startswith("http"):
            self.servers.append((process, url))
        else:
            self.found["servers that did not start"] += 1
            self._add()

    def round(self, number: int) -> None:
        """Ask, kill, and look what came of it."""
        until(lambda: len(self.servers) > 1)
        kind = min(KINDS, key=self.kills.__getitem__)
        before = self._started() if kind == "server" else None
        asked = [self.pool[(number * AT_ONCE + place) % len(self.pool)] for place in range(AT_ONCE)]
        clients = []
        for place, one in enumerate(asked):
            body = {
                "prompt": list(one.prompt),
                "max_tokens": one.sampling.max_tokens,
                "temperature": one.sampling.temperature,
                "seed": one.sampling.seed,
                "ignore_eos": True,
            }
            clients.append(Client(self.servers[place % len(self.servers)][1], body, f"{number}-{place}"))
        until(lambda: any(client.tokens for client in clients))
        time.sleep(self.rng.uniform(0.0, WITHIN_S))
        self._kill(kind)
        for one, client in zip(asked, clients):
            self._follow(one, client)
        if before is not None:
            # Each is begun once, by whichever instance; of instances that were there before and are there now.
            after = self._started() or before
            if after.keys() == before.keys() and all(after[name] >= before[name] for name in after):
                self.found["rounds in which what was computed is counted"] += 1
                self.found["computed again"] += int(sum(after.values()) - sum(before.values())) - len(asked)

    def _kill(self, kind: str) -> None:
        if kind == "server":
            pid = self.servers.pop(self.rng.randrange(len(self.servers)))[0].pid
            self._start()
        else:
            name = {"keeper": "_Kept", "instance": "_Actor"}[kind]
            pid = self.rng.choice(until(lambda: self.cluster.actors(name)))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed.append(pid)
        self.kills[kind] += 1
        sys.stderr.write(f"{dict(self.kills)} {dict(self.found)}\n")

    def _follow(self, one: Request, client: Client) -> None:
        had: list[int] = []
        for _ in range(20):
            client.join(LIMIT_S)
            self.found["other tokens than had"] += client.tokens[: len(had)] != had[: len(client.tokens)]
            if client.is_alive() or not client.broken:
                break
            had = max(had, client.tokens, key=len)
            self.found["came back"] += 1
            until(lambda: self.servers)
            client = Client(self.rng.choice(self.servers)[1], client.body, client.key)
        if client.is_alive() or client.broken:
            self.found["lost"] += 1
            return
        self.found["answered"] += 1
        wanted = self.wanted[one.id]
        if tuple(client.tokens) != wanted:
            greedy = not one.sampling.temperature
            as_right = greedy and as_good(self.model, one, wanted, client.tokens)
            self.found["answered otherwise, as good" if as_right else "answered otherwise"] += 1

    def _started(self) -> dict[str, float] | None:
        """Requests that each instance has begun, while both serve."""
        time.sleep(REPORTS_S)
        url = self.servers[0][1]
        try:
            if get(url, "/health")["status"] != "ok":
                return None
            with urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        name = "remap_cluster_instance_started_requests_total{"
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)} or None

    def end(self) -> dict[str, int]:
        """What is left when the last server has ended."""
        until(lambda: len(self.servers) == SERVERS)
        unfinished = until(lambda: get(self.servers[0][1], "/cluster"))["unfinished"]
        pids = [*self.killed, *self.cluster.actors("_Kept"), *self.cluster.actors("_Actor")]
        for process, _ in self.servers:
            process.send_signal(signal.SIGINT)
        codes = [process.wait(LIMIT_S) for process, _ in self.servers]
        end = time.monotonic() + 60.0
        while time.monotonic() < end and any(map(runs, pids)):
            time.sleep(0.1)
        left = [path for path in Path(self.cluster.environment["TMPDIR"]).rglob("*") if path.is_file()]
        return {
            "unfinished": unfinished,
            "servers that ended with an error": sum(code != 0 for code in codes),
            "processes left": sum(map(runs, pids)) + len(self.cluster.actors("_")),
            "files left": len(left),
        }


def run_shared(kills: int, seed: int = 0, within_s: float = float("inf")) -> dict[str, Any]:
    """Counts of one run of this many kills, or of those that come within that time."""
    (case,) = QUICK.cases
    machine = machine_now()
    with TemporaryDirectory(prefix="remap") as folder:
        model, _ = build(case.model, case.dtype, case.seed)
        _save(Path(folder), model)
        with ray_with(Path(folder), "2MiB") as cluster:
            made = _Kills(cluster, model, random.Random(f"shared kills {seed}"))
            begin = time.monotonic()
            number = 0
            while sum(made.kills.values()) < kills and time.monotonic() < begin + within_s:
                made.round(number)
                number += 1
            seconds = round(time.monotonic() - begin, 1)
            left = made.end()
    about = {"kills": sum(made.kills.values()), "of": dict(made.kills), "seconds": seconds, "seed": seed}
    return about | {key: made.found[key] for key in COUNTED} | dict(made.found) | left | {"machine": machine}
