"""vLLM on remap: its weights live in an arena, and its KV cache grows out of them instead of preempting.

    REMAP_ENABLE=1 vllm serve MODEL                                    through the entry point `vllm.general_plugins`
    vllm serve MODEL --worker-cls remap.adapters.vllm.Worker --scheduler-cls remap.adapters.vllm.Scheduler

    scheduler   what the engine needs -> link -> `session.step` on rank 0, the same change on the others -> blocks open or leave
    worker      weights and KV cache in one session; brackets each pass, whose layers wait through vLLM's own offloader interface
    internals   everything that depends on vLLM's version

Settings: the environment variables of `remap.adapters.settings`, or the same names in lower case and without the prefix
under `--additional-config '{"remap": {"slowdown": 0.05}}'`. Without REMAP_CAPACITY the capacity is what vLLM itself
would use: its weights and the KV cache that it would have allocated.

Importing this module imports no vLLM: it is loaded in every process of every vLLM that is installed beside it.
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
    """The entry point of `vllm.general_plugins`: called in each of vLLM's processes, more than once. Does nothing
    unless REMAP_ENABLE is set; then every engine that is configured from here on uses our worker and our scheduler.

    Raises InvalidState for a version of vLLM that this was not written for.
    """
    if enabled(os.environ):
        from .internals import check_version, enter_without_flags
        from .metrics import collect_everywhere, file

        check_version()
        collect_everywhere()
        file()  # named before the engine's process starts, which writes it
        enter_without_flags(WORKER, SCHEDULER)


def __getattr__(name: str) -> Any:
    if name == "Worker":
        from .worker import worker_class

        return worker_class()
    if name == "Scheduler":
        from .scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
