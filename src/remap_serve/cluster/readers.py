# SPDX-License-Identifier: Apache-2.0
"""Bodies become requests beside the event loop: a long prompt holds up neither tokens nor another prompt.

A few threads, with one tokenizer for all of them and the event loop: the usual kind, in Rust, encodes and decodes in several
threads at once, and lets others run meanwhile. What its first call sets is set before there are threads (`Served.settle`). The
other kind, in Python, need not bear that: with it one body is read at a time. A body that no caller waits for is not begun; one
that has been begun ends at its next step (parsed, template, one prompt of several), and a step is bounded, since a body and a
prompt are (`limits`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .prompts import Catalog, Served

__all__ = ["Readers"]

THREADS = 4

ValueT = TypeVar("ValueT")


class Readers:
    """The function that they run is called with its arguments, `served`, and wanted(): whether a caller waits."""

    def __init__(self, served: Served | Catalog, threads: int = THREADS) -> None:
        self._served = served
        settled = [each.settle() for each in served.models]
        self._pool = ThreadPoolExecutor(threads if all(settled) else 1, "bodies")

    async def run(self, function: Callable[..., ValueT], *arguments: object) -> ValueT:
        """The function's result or exception. When this is cancelled it is not begun, or wanted() is False from now on."""
        wanted = threading.Event()
        wanted.set()

        def work() -> ValueT:
            return function(*arguments, self._served, wanted.is_set)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            wanted.clear()
