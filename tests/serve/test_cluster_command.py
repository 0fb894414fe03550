"""`remap cluster serve` and `remap top`: what they refuse, and a cluster from its start to Ctrl-C."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("ray", reason="needs the extras cluster and transformers")
pytest.importorskip("msgspec", reason="needs the extras cluster and transformers")
pytest.importorskip("fastapi", reason="needs the extras cluster and transformers")
pytest.importorskip("uvicorn", reason="needs the extras cluster and transformers")
pytest.importorskip("prometheus_client", reason="needs the extras cluster and transformers")
pytest.importorskip("torch", reason="needs the extras cluster and transformers")
pytest.importorskip("transformers", reason="needs the extras cluster and transformers")

from bench.lab.cluster.shared import LIMIT_S, below, runs
from cluster_folder import save_model
from near_tokens import Near
from subprocesses import ROOT
from test_cli import run
from test_offline_process import COMMAND

from remap.cli import smollm2
from remap.errors import InvalidArgument
from remap_serve.cli import cluster
from remap_serve.engine import Request as Asked

JSON = {"Content-Type": "application/json"}
OF_RAY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
PAGE_OF_GROUPS = {
    "epoch": 5,
    "unfinished": 3,
    "restarts": 1,
    "rejected": {"i2": "another model"},
    "groups": [
        {
            "epoch": 4,
            "changing": 5,
            "phase": "fetching",
            "stages": [{"instance": "i0", "first": 0, "end": 3}, {"instance": "i1", "first": 3, "end": 4}],
            "running": 2,
            "waiting": 1,
            "kv_tokens": 30,
            "kv_capacity": 120,
        }
    ],
}


@pytest.fixture(autouse=True)
def own_ray() -> Iterator[None]:
    """A server sets these for its process."""
    before = {name: os.environ.get(name) for name in OF_RAY}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextmanager
def answering(text: bytes) -> Iterator[str]:
    """A server that answers everything with this: its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_top_shows_groups_with_their_layers_requests_and_kv() -> None:
    with answering(json.dumps(PAGE_OF_GROUPS).encode()) as url:
        found = run("top", "--once", "--url", url)
    said = " ".join(found.output.split())
    assert found.exit_code == 0, found.output
    for text in ("4 -> 5", "fetching", "i0: 0-2", "i1: 3-3", "120", "25%", "3 requests unfinished", "another model"):
        assert text in said, text


@pytest.mark.parametrize("text", [b"{}", b"[]", b"<html>", b"[" * 60_000, None])
def test_top_refuses_what_is_no_cluster(text: bytes | None) -> None:
    if text is None:
        found = run("top", "--once", "--url", "ftp://127.0.0.1")
    else:
        with answering(text) as url:
            found = run("top", "--once", "--url", url)
    assert found.exit_code == 2 and "shows no cluster" in " ".join(found.output.split())


def test_what_cannot_be_served_is_refused_with_2_before_instances_start(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    model = str(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, text in (
            (("--model", str(tmp_path / "nowhere")), "cannot be loaded"),
            (("--model", model, "--memory", "12 apples"), "memory must be"),
            (("--model", model, "--memory", "64KiB"), "memory: an instance needs"),
            (("--model", model, "--host-kv", "12 apples"), "host_kv must be"),
            (("--model", model, "--host-kv", "12B"), "host_kv: host memory must have room"),
            (("--model", model, "--policy", "best"), "the policy must be"),
            (("--model", model, "--engine", "sglang"), "engine: must be remap or vllm"),
            (("--model", model, "--engine-args", "{}"), "engine-args: are vLLM's"),
            (("--model", model, "--bandwidth", "fast"), "bandwidth must be"),
            (("--model", model, "--bandwidth", "0"), "bandwidth must be"),
            (("--model", model, "--port", str(taken.getsockname()[1])), "cannot be listened at"),
        ):
            found = run("cluster", "serve", *arguments)
            said = " ".join(found.output.split())
            assert found.exit_code == 2 and text in said and "Traceback" not in said, found.output


@pytest.mark.parametrize("option", [("--policy", "kunserve"), ("--ahead",), ("--host-kv", "1GiB")])
def test_what_vllm_engines_do_not_have_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    save_model(tmp_path)
    monkeypatch.setattr("remap_serve.cli.cluster.needed", lambda *names: None)  # here is no vLLM
    found = run("cluster", "serve", "--model", str(tmp_path), "--engine", "vllm", *option)
    said = " ".join(found.output.split())
    assert found.exit_code == 2 and "nothing was started" in said and "Traceback" not in said, found.output
    assert option[0].strip("-").replace("-", "_") + ":" in said


def test_weights_that_are_cut_off_are_refused_in_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = run("cluster", "serve", "--model", str(tmp_path), "--bandwidth", "1GB", "--latency-ms", "1")
    assert found.exit_code == 2 and "Traceback" not in found.output, found.output
    assert [line.partition(":")[0] for line in found.output.splitlines()] == ["InvalidArgument"]


def test_the_demos_model_names_the_package_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an install of the extras cluster and transformers, which have no reader of GGUF."""
    try:
        smollm2.find_gguf()
    except InvalidArgument as error:
        pytest.skip(f"needs the demo's model: {error}")
    monkeypatch.setenv("REMAP_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    found = run("cluster", "serve", "--model", "SmolLM2")
    said = " ".join(found.output.split())
    assert found.exit_code == 2 and "needs gguf, of the extra `demo`" in said and "Traceback" not in said, found.output
    assert not list(tmp_path.iterdir())


def test_what_the_operator_says_of_ray_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)  # `own_ray` brings it back
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    cluster._keep_ray_to_itself()
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("disabled", "1")
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def ask(url: str, body: dict[str, Any]) -> bytes:
    with urlopen(Request(url, json.dumps(body).encode(), JSON), timeout=LIMIT_S) as answer:
        return bytes(answer.read())


def reference(folder: Path, prompt: list[int], count: int, endless: bool = False) -> Near:
    """Greedy tokens of the model alone. endless: no token ends them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None if endless else model.generation_config.eos_token_id
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
    return Near(model, Asked("reference", tuple(prompt)), found)


def actors_of(pid: int) -> list[int]:
    """The processes of the instances: grandchildren, below Ray's own."""
    return [actor for child in below(pid) for actor in below(child, "-f", "ray::_Actor")]


def listened_at(pid: int) -> set[str]:
    """The addresses at which this process and all below it listen, as /proc writes them: hexadecimal."""
    pids, sockets = [pid], set[str]()
    for each in pids:
        pids += below(each)
        sockets |= {os.readlink(link) for link in Path(f"/proc/{each}/fd").iterdir() if link.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, of IPv4 and mapped into IPv6."""


SMALL = "--model MODEL --port 0 --memory 3MiB"


@contextmanager
def served(folder: Path, line: str = SMALL) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with two instances of a tiny model in `folder`, which is MODEL in the line, and where it answers."""
    save_model(folder)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "cluster", "serve", *line.replace("MODEL", str(folder)).split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("2 instances of model answer at"), (line, process.poll())
        yield process, line.rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.wait()


def until_merged(url: str) -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + LIMIT_S:
        with urlopen(f"{url}/cluster", timeout=LIMIT_S) as answer:
            groups = json.loads(answer.read())["groups"]
        if [(len(group["stages"]), group["phase"]) for group in groups] == [(2, "serving")]:
            return
        time.sleep(0.05)
    raise AssertionError(f"no group of two instances after {LIMIT_S} s: {groups}")


@pytest.mark.slow
def test_a_cluster_answers_as_the_model_alone_would_and_ends_at_an_interrupt(tmp_path: Path) -> None:
    """With every option that there is."""
    from test_documented_commands import TRIED

    with served(tmp_path / "model", TRIED["remap cluster serve"].runs[0]) as (process, url):
        # What Ray starts for this is nobody else's.
        assert listened_at(process.pid) == LOOPBACK and not (tmp_path / ".ray").exists()
        # The two of them are to be one pipeline before anything is asked.
        until_merged(url)
        greedy = {"max_tokens": 12, "temperature": 0}
        *events, done = ask(f"{url}/v1/completions", {"prompt": [7, 8, 9], "stream": True} | greedy).split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        tokens = [one for each in events for one in json.loads(each[6:])["choices"][0]["token_ids"]]
        assert tokens == reference(tmp_path / "model", [7, 8, 9], 12)
        chat = json.loads(ask(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | greedy))
        assert chat["choices"][0]["message"]["role"] == "assistant"
        assert run("top", "--once", "--url", url).exit_code == 0
        burst = runpy.run_path(str(ROOT / "examples/05_cluster/burst.py"))["main"]
        assert burst(url, 4, 8) == ["i0+i1"]

        bodies = [{"prompt": [number] * 60} | greedy for number in range(6)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [json.loads(each) for each in pool.map(partial(ask, f"{url}/v1/completions"), bodies)]
        for number, answer in enumerate(answers):
            assert answer["choices"][0]["token_ids"] == reference(tmp_path / "model", [number] * 60, 12)

        # One of the two is killed in the middle of an answer, which goes on with the tokens that it would have had.
        asked = {"prompt": [5, 6], "stream": True, "max_tokens": 190, "temperature": 0, "ignore_eos": True}
        with urlopen(Request(f"{url}/v1/completions", json.dumps(asked).encode(), JSON), timeout=LIMIT_S) as answer:
            begin = answer.readline() + answer.readline()
            os.kill(actors_of(process.pid)[-1], signal.SIGKILL)
            *events, done = (begin + answer.read()).split(b"\n\n")[:-1]
        assert done == b"data: [DONE]"
        tokens = [one for each in events for one in json.loads(each[6:])["choices"][0]["token_ids"]]
        assert tokens == reference(tmp_path / "model", [5, 6], 190, endless=True)
        until_merged(url)  # it came back

        # Ctrl-C, and again: streams end with an error event.
        with urlopen(Request(f"{url}/v1/completions", json.dumps(asked).encode(), JSON), timeout=LIMIT_S) as answer:
            answer.readline()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            *_, last, end = answer.read().split(b"\n\n")
        assert end == b"" and (last == b"data: [DONE]" or json.loads(last[6:])["error"]["code"] == "InvalidState")
        said, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0 and "ended" in said and "Traceback" not in errors, errors
        assert "or in 5 s" in errors  # --grace
        lines = [line.split(" ", 2)[2] for line in errors.splitlines() if line[:2] == "20"]
        found = [line for line in lines if "joined" in line or not line.startswith("INFO")]
        assert [line.split(" ")[0] for line in found] == ["INFO", "INFO", "WARNING", "INFO"], errors
        assert "is gone, and is being started again" in found[2] and "joined" in found[3]
        assert any("merge of i0 | i1 is begun" in line for line in lines), errors
        assert any("1 requests start again" in line for line in lines), errors


@pytest.mark.slow
def test_without_its_raylet_the_server_ends_and_leaves_no_process(tmp_path: Path) -> None:
    with served(tmp_path / "model") as (process, _url):
        actors = actors_of(process.pid)
        assert len(actors) == 2
        (raylet,) = below(process.pid, "raylet")
        os.kill(raylet, signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1 and "Traceback" not in errors, errors
        assert errors.splitlines()[-1].startswith("NobodyLeft: all 2 instances are gone for good"), errors
        assert not any(map(runs, actors))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_rays_head_the_server_ends_and_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    with served(tmp_path / "model") as (process, _url):
        actors = actors_of(process.pid)
        (head,) = below(process.pid, "gcs_server")
        os.kill(head, how)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1 and "Traceback" not in errors, errors
        assert errors.splitlines()[-1].startswith("NoRestarts: Ray's head process"), errors
        assert not any(map(runs, [head, *actors]))
