# SPDX-License-Identifier: Apache-2.0
"""vLLM on remap: its weights live in an arena, and its KV cache grows into their pages instead of preempting requests.

    REMAP_ENABLE=1 vllm serve MODEL                                    through the entry point `vllm.general_plugins`
    vllm serve MODEL --worker-cls remap.adapters.vllm.Worker --scheduler-cls remap.adapters.vllm.Scheduler

    scheduler   reports the demand to `link`: `session.step` on rank 0, the same change on all ranks, blocks come and go
    worker      has weights and KV cache in one session, brackets each pass; layers wait by vLLM's offloader interface
    host_kv     KV in host memory on a CPU, for vLLM's own OffloadingConnector; also without remap
    engine_internals   has everything that depends on vLLM's version

Settings: the environment variables of `remap.adapters.settings`, or the same names in lower case and without the prefix
under `--additional-config '{"remap": {"slowdown": 0.05}}'`. Without REMAP_CAPACITY the capacity is the memory that vLLM
itself would use: its weights and the KV cache that it would have allocated.

This module does not import vLLM, because every process of every installed vLLM loads it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from remap.adapters.settings import enabled

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .worker import RemapWorker as Worker

__all__ = ["SCHEDULER", "WORKER", "Scheduler", "Worker", "register"]

WORKER, SCHEDULER = "remap.adapters.vllm.Worker", "remap.adapters.vllm.Scheduler"


def register() -> None:
    """The entry point of `vllm.general_plugins`, which vLLM calls in each of its processes, more than once.

    Does nothing unless REMAP_ENABLE is set; then every engine that is configured later uses our worker and our
    scheduler. Raises InvalidState for a version of vLLM that the adapter cannot work with.
    """
    if enabled(os.environ):
        from .engine_internals import check_version, enter_without_flags
        from .metrics import collect_everywhere, file

        check_version()
        collect_everywhere()
        file()  # sets the name before the engine's process starts, which writes the file
        enter_without_flags(WORKER, SCHEDULER)


def __getattr__(name: str) -> Any:
    if name == "Worker":
        from .worker import worker_class

        return worker_class()
    if name == "Scheduler":
        from .scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
