# SPDX-License-Identifier: Apache-2.0
"""The decided state of one tenant, as one value: a change makes the next one before it begins, and swaps it whole (apply.py)."""

from __future__ import annotations

from dataclasses import dataclass

from remap.memory.pages import Streaming, TenantPages

__all__ = ["Books"]


@dataclass(frozen=True)
class Books:
    """Pages are page ids; slots are pages' places in the KV region; seconds are per pass.

    order: streamable layers, in the order in which the controller gives them away; the key of kept answers. draining: region
    slots withdrawn, waiting for an engine to empty them; draining_target: what streams after the change that waits for them.
    predicted_stall_s: the certificate of what streams. since: completed
    passes and their stall seconds at the last change. selection: how the streamed layers were chosen; by_hand: they were set
    by hand, and no certificate bounds them. kept: KV pages that it has for its min_blocks, besides those of
    `TenantState.reserved`: it got them with its layers (cold.py).
    """

    pages: TenantPages
    order: tuple[int, ...]
    active: bool = True
    draining: tuple[int, ...] = ()
    draining_target: Streaming | None = None
    predicted_stall_s: float = 0.0
    since: tuple[int, float] = (0, 0.0)
    selection: str = ""
    by_hand: bool = False
    kept: frozenset[int] = frozenset()
