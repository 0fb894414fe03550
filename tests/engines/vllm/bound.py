"""A plugin of pytest for vLLM's own tests: each scheduler that they make is remap's, bound to a tenant of a session. Nothing is
preempted, moved or grown, so that what these tests count stays what it is; what is shown is that nothing else changes.

In vLLM's unpacked source distribution (PyPI has one of each release), without tests/conftest.py, which wants more packages:

    PYTHONPATH=.:REMAP/tests/engines/vllm python -m pytest -p bound tests/v1/core/test_scheduler.py ...
"""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import remap
from remap.adapters.vllm.scheduler import Overlapping, Scheduler
from remap.ranks import Rank

PAGE, LAYERS = 4096, 4


class Worker:
    """What the link calls of a worker. All blocks are there from the start: the KV cache of these tests does not grow."""

    def __init__(self, blocks: int) -> None:
        layers = [bytes([layer + 1]) * (16 * PAGE) for layer in range(LAYERS)]
        self.session = remap.Session((blocks + LAYERS * 16 + 8) * PAGE, device="cpu", page_bytes=PAGE)
        kv = remap.KVSpec(
            layers=LAYERS,
            kv_heads=1,
            head_dim=PAGE // (2 * LAYERS),
            block_tokens=1,
            dtype="uint8",
            min_blocks=blocks,
            max_blocks=blocks,
        )
        self._rank = Rank(self.session, self.session.attach_bytes(layers, name="theirs", kv=kv), 0)
        self._blocks = blocks

    def remap_call(self, method: str, *args: Any) -> Any:
        return getattr(self._rank, method)(*args)

    def remap_may_move(self) -> bool:
        return False

    def remap_manifest(self) -> dict[str, Any]:
        return {"first_blocks": self._blocks, "arena": ""}


class Bound(Scheduler):
    """In place of vLLM's two classes. Which of the two a test asked for is an argument of its `create_scheduler`: the
    configuration does not say so, since vLLM turns overlapping off where it knows of no executor that overlaps."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        asked = bool(sys._getframe(1).f_locals.get("async_scheduling", False))
        kwargs["vllm_config"].scheduler_config.async_scheduling = asked
        return object.__new__(BoundOverlapping if asked else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        worker = Worker(self.kv_cache_config.num_blocks)
        weakref.finalize(self, worker.session.close)
        self.bind(
            SimpleNamespace(
                parallel_config=SimpleNamespace(world_size=1),
                driver_worker=SimpleNamespace(worker=worker),
                collective_rpc=lambda method, args=(): [getattr(worker, method)(*args)],
            )
        )


class BoundOverlapping(Bound, Overlapping):
    pass


def pytest_collection_finish() -> None:
    """The tests have imported vLLM's classes by now."""
    for module in [each for name, each in sys.modules.items() if name.startswith("tests.v1.core")]:
        for name in ("Scheduler", "AsyncScheduler"):
            if hasattr(module, name):
                setattr(module, name, Bound)
