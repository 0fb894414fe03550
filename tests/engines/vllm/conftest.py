"""Engines run in processes of their own, each with a time limit; what they leave behind is killed with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """Nothing of the caller's settings of remap and vLLM; one thread; no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMAP_", "VLLM_"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **more,
    }


def run(arguments: list[str], *, cwd: Path, timeout_s: float, **more: str) -> str:
    """What the program said. Fails the test with that if it fails, or does not end in time."""
    log = cwd / "said.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *arguments],
            env=environment(**more),
            cwd=cwd,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    said = log.read_text(errors="replace")
    assert code == 0, f"exit code {code} (None: not within {timeout_s} s)\n{said[-8000:]}"
    return said


def end(process: subprocess.Popen[Any]) -> None:
    """The process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


@dataclass(frozen=True)
class Vllm:
    """vLLM, in a folder with the small models."""

    folder: Path

    def said(self) -> str:
        """What the last process printed."""
        return (self.folder / "said.log").read_text(errors="replace")

    def family(self, name: str, **more: str) -> str:
        """The folder of that family's small model (tests/families.py)."""
        if not (self.folder / name).exists():
            program = "import pathlib, sys, families; families.save(sys.argv[1], pathlib.Path(sys.argv[1]))"
            tests = os.pathsep.join([str(HERE.parents[1]), more.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))])
            run(["-c", program, name], cwd=self.folder, timeout_s=600, PYTHONPATH=tests)
        return name

    def smollm2(self) -> str:
        """The folder of SmolLM2-135M in bfloat16, made from its package if need be (see REMAP_CACHE)."""
        program = "from remap.cli import smollm2; print(smollm2.load('bfloat16')[2])"
        return run(["-c", program], cwd=self.folder, timeout_s=600).splitlines()[-1]

    def serve(
        self, runs: list[dict[str, Any]], *, timeout_s: float = 900, plain_linear: bool = False, **more: str
    ) -> Any:
        """The runs of one process (see serve.py), by name."""
        job, out = self.folder / "job.json", self.folder / "out.json"
        out.unlink(missing_ok=True)
        for each in runs:
            each["model"] = str(self.folder / each.get("model", "tiny"))
            for request in [one for requests in each.get("rounds", []) for one in requests if "lora" in one]:
                request["lora"] = str(self.folder / request["lora"])
        job.write_text(json.dumps({"runs": runs, "plain_linear": plain_linear}))
        run([str(HERE / "serve.py"), str(job), str(out)], cwd=self.folder, timeout_s=timeout_s, **more)
        return json.loads(out.read_text())


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    folder = tmp_path_factory.mktemp("vllm")
    run([str(HERE / "models.py"), str(folder)], cwd=folder, timeout_s=600)
    return Vllm(folder)
