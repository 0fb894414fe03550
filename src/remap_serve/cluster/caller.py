# SPDX-License-Identifier: Apache-2.0
"""What comes for one caller, on its way from whoever has it to who waits for it. All in one event loop."""

from __future__ import annotations

import asyncio

from remap.errors import Error

from .ledger import Delivery

__all__ = ["Caller"]


class Caller:
    """Iterated by one task: deliveries as they come, to the last one of the answer. An error is raised, and ends this caller's
    wait alone."""

    def __init__(self) -> None:
        self._came = asyncio.Queue[Delivery | Error]()
        self._whole = False

    def put(self, found: Delivery | Error) -> None:
        """This comes next."""
        self._came.put_nowait(found)

    def __aiter__(self) -> Caller:
        return self

    async def __anext__(self) -> Delivery:
        if self._whole:
            raise StopAsyncIteration
        found = await self._came.get()
        if isinstance(found, Error):
            raise found
        self._whole = found.finish_reason is not None
        return found
