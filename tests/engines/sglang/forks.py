"""Engines that start in a second or two, since their imports have been made before: python forks.py

Each line of standard input is a job, {"arguments": a script and its own, "environment": more of it, "log": a file}. It runs in a
fork, as do the engine's processes. A line with its exit status comes back.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any

SECONDS = 900


def run(job: dict[str, Any]) -> None:
    os.setsid()
    signal.alarm(SECONDS)
    log = os.open(job["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    sys.argv = job["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def unpinned(make: Any, *arguments: Any, pin_memory: bool = False, **more: Any) -> Any:
    return make(*arguments, **more)


def main() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *arguments, **more: None  # SGLang's is "spawn"
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    import torch
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent

    # Torch pins memory where there is a GPU; SGLang's LoRA asks for it anywhere.
    torch.Tensor.pin_memory = lambda tensor: tensor
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, partial(unpinned, getattr(torch, name)))
    # For prompts SGLang expands latents, which its attention for CPUs cannot; as for other tokens it does not expand them here.
    latent.AttentionBackendRegistry.register("torch_native", latent._dispatch_mla_subtype)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(json.loads(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)


if __name__ == "__main__":
    main()
