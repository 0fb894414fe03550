# SPDX-License-Identifier: Apache-2.0
"""Record a piece of a pass once, run it again and again: CUDA graphs, and a stand-in that runs the piece itself.

A piece is a function without arguments or result that works on fixed tensors. Its work must depend on them alone, for
the recording holds addresses and launches, no Python. It contains no copy of a layer and no `wait` or `done`: those stay
between pieces, on the stream, so that a graph knows nothing of streaming and no change of the remapping makes a
recording stale (regions keep their addresses).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EagerGraphs", "Graphs", "TorchCudaGraphs"]


class Graphs(Protocol):
    """`capture(piece)` runs the piece at least once (warm-up) and returns what runs it again."""

    def capture(self, piece: Callable[[], None]) -> Callable[[], None]: ...


class EagerGraphs:
    """No graphs: the piece is called again. For CPU tensors, and to tell a fault of a graph from a fault of the pass."""

    def capture(self, piece: Callable[[], None]) -> Callable[[], None]:
        piece()
        return piece


class TorchCudaGraphs:
    """CUDA graphs on one stream, all in one memory pool.

    The pool may be shared because no two graphs run at once (one stream) and nothing that a piece leaves for the next one
    lies in it: pieces hand over through tensors allocated outside of any capture.

    Captures are thread-local: the copy threads and the re-pointing worker of a session may go on calling the driver.
    Before a capture the piece runs once as it is and the stream is waited for: kernels are compiled and workspaces made
    then, which no capture may do.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, piece: Callable[[], None]) -> Callable[[], None]:
        """Raises what the piece raises, or torch's error if it did what no capture may; nothing is kept then."""
        with torch.cuda.stream(self.stream):
            piece()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                piece()
            finally:
                graph.capture_end()
        return graph.replay
