# SPDX-License-Identifier: Apache-2.0
"""The results of `remap_serve.sim.planning`, as plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from remap.policy.hardware import Machine, Model
from remap.policy.hidden import Selection

__all__ = ["KINDS", "Balance", "IdleDonor", "Limit", "Numbers", "Reload", "Selection", "WhatIf"]

KINDS: tuple[Selection, ...] = ("uniform", "nested")


@dataclass(frozen=True)
class Limit:
    """The layers that a decode pass of `rows` requests with `context` tokens each hides. Exact, fixed slots, no stall at all.

    layer_s: computing one layer; copy_s: copying one in. remapped: whole layers, by `selection` through `buffers` ring
    buffers. slices: layers' worth, when every layer streams its last pages. paper: what Eq. 5 of Oneiros allows, which
    assumes rotating slots. fits: whether the KV cache, with the remapped layers, holds that many tokens.
    """

    rows: int
    context: int
    layer_s: float
    copy_s: float
    remapped: int
    buffers: int
    selection: Selection
    slices: float
    paper: int
    fits: bool


@dataclass(frozen=True)
class Balance:
    """The most whole layers that the batch which they make possible still hides, with the KV cache full.

    kv_tokens, rows: with them; kv_tokens_before, rows_before: without. rows are at most `Numbers.max_requests`. speedup:
    tokens/s with them over those without, queueing left out; infinite if not one request had room. slices, slices_rows,
    slices_speedup: the same in slices, in layers' worth.
    """

    remapped: int
    buffers: int
    selection: Selection
    kv_tokens_before: int
    rows_before: int
    kv_tokens: int
    rows: int
    speedup: float
    slices: float
    slices_rows: int
    slices_speedup: float


@dataclass(frozen=True)
class WhatIf:
    """A pass with `remapped` layers remapped, KV full. iteration_s: computing, waiting, both ends, and the gap."""

    remapped: int
    rows: int
    iteration_s: float
    stall_s: float
    speedup: float


@dataclass(frozen=True)
class Reload:
    """The cost of loading a model back when it wakes. layer_s: copying one layer, all_s: all of them. hidden: (prefill
    tokens, most layers that may be away without the first prefill being late); late_s: (prefill tokens, by how much it is late
    if half of the layers are). The last layers are away, and the one whose memory is the ring is loaded with them: the rule by
    which the controller lends."""

    model: str
    layers: int
    layer_s: float
    all_s: float
    hidden: tuple[tuple[int, int], ...]
    late_s: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class IdleDonor:
    """The memory that an idle model on the same machine can give.

    weight_bytes: of one device. tokens_free: KV tokens of the layers that its 512-token prefill hides the reload of;
    tokens_half: of half of its layers.
    """

    model: str
    weight_bytes: int
    reload: Reload
    layers_free: int
    tokens_free: int
    layers_half: int
    tokens_half: int


@dataclass(frozen=True)
class Numbers:
    """The results of a plan. kv_tokens: without remapping; tokens_per_layer: of one remapped layer. limits: by context,
    then rows. activation_bytes: as assumed. max_requests: that run at once, at most. tp: devices that share each layer;
    model, memory_bytes and all that follows are of one of them."""

    machine: Machine
    model: Model
    memory_bytes: int
    context: int
    batch: int | None
    activation_bytes: int
    max_requests: int
    tp: int
    kv_tokens: int
    tokens_per_layer: float
    limits: tuple[Limit, ...]
    balance: Balance
    what_if: tuple[WhatIf, ...]
    reload: Reload
    donors: tuple[IdleDonor, ...]
