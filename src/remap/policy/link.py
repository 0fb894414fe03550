# SPDX-License-Identifier: Apache-2.0
"""The host link that active tenants share: how long copies wait for other tenants' copies, and who may begin to copy. Pure.

Each tenant copies on one stream, in order: when it asks the link for a piece (a whole layer's streamed part, or a chunk
of one), every other tenant has at most one piece there. The link serves pieces in the order of asking and is never idle
while one waits. So a piece waits for at most the longest piece of each other tenant:

    D_k <= max(D_{k-1}, C_{prev(k)}) + tau_k + pieces_k * (sum over the others of their longest piece)

These are the equations of `schedule` with longer copies. (max, +) is monotone, so their stall bounds the real one, however
the tenants' passes lie to each other and however long each takes. With one tenant the sum is 0 and the bound exact.
tests/reference/link_des.py simulates such a link. Source: derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remap.policy import kv_stream, schedule

__all__ = ["Neighbour", "delayed", "spared"]


class Neighbour(NamedTuple):
    """An active tenant that streams layers or KV blocks, as another one sees it.

    compute_s, copy_s, pieces: per layer; copy_s without any waiting. others_s: the longest pieces of all tenants other
    than these two, in all. allowed_s: the stall per pass that its settings allow. part_s: of each of the two copies of a
    layer's streamed KV blocks, for its first `kv_layers` layers through `kv_buffers` buffers; 0: none stream.
    """

    name: str
    compute_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    pieces: tuple[int, ...]
    streamed: tuple[int, ...]
    buffers: int
    others_s: float
    allowed_s: float
    part_s: float = 0.0
    kv_layers: int = 0
    kv_buffers: int = 0

    def stall(self, longest_s: float) -> float:
        """Seconds per pass that it waits at most, beside a tenant whose longest piece takes `longest_s`."""
        wait_s = self.others_s + longest_s
        copies = delayed(self.copy_s, self.pieces, wait_s)
        if not self.part_s:
            return schedule.stall(self.compute_s, copies, self.streamed, self.buffers)
        block_s, buffers = 2 * (self.part_s + wait_s), max(1, self.buffers)
        seconds = kv_stream.pass_seconds(
            self.compute_s, copies, self.streamed, buffers, block_s, self.kv_layers, self.kv_buffers
        )
        return max(0.0, seconds - math.fsum(self.compute_s))


def delayed(copy_s: Sequence[float], pieces: Sequence[int], wait_s: float) -> tuple[float, ...]:
    """Seconds to copy in each layer if each of its pieces waits `wait_s` for the link."""
    return tuple(copy + count * wait_s for copy, count in zip(copy_s, pieces, strict=True))


def spared(neighbours: Iterable[Neighbour], present_s: float, longest_s: float) -> bool:
    """Whether a tenant may copy pieces of `longest_s`, instead of the `present_s` of now: no neighbour's certificate
    rises above the allowed, or further above it."""
    return all(each.stall(longest_s) <= max(each.allowed_s, each.stall(present_s)) for each in neighbours)
