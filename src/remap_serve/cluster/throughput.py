# SPDX-License-Identifier: Apache-2.0
"""The throughput of the network between instances, by the pieces that went over it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remap_serve.policy.cluster.pipeline import Network

__all__ = ["LEAST_BYTES", "Throughput"]

LEAST_BYTES = 1 << 20
"""Of a piece that shows it: smaller ones wait for processes more than for the network."""

KEPT = 0.9
"""Of the known figure, when a piece adds to it: about the last ten pieces count."""


class Throughput:
    """network: until pieces have shown more.

    Threads of links write, one link's at a time but for a moment when groups change; the loop reads. Each replaces one tuple, so
    nothing worse can happen than that a piece does not count.
    """

    def __init__(self, network: Network) -> None:
        self._assumed = network
        self._seen = 0.0, 0.0  # bytes and seconds of late

    def note(self, nbytes: int, seconds: float) -> None:
        """`nbytes` bytes took `seconds` to send."""
        if nbytes >= LEAST_BYTES and seconds > 0.0:
            before = self._seen
            self._seen = KEPT * before[0] + nbytes, KEPT * before[1] + seconds

    @property
    def bytes_per_s(self) -> float:
        """As measured; 0 if nothing was."""
        nbytes, seconds = self._seen
        return nbytes / seconds if seconds else 0.0

    @property
    def network(self) -> Network:
        """The network with the measured figures."""
        rate = self.bytes_per_s
        return replace(self._assumed, bytes_per_s=rate) if rate else self._assumed
