# SPDX-License-Identifier: Apache-2.0
"""How long a pass waits if KV blocks stream beside weights, and how many may. Pure.

The prefetcher copies on one stream, first come, first served. A layer's weights go into the ring as soon as the layer
that used the same buffer before is done, ahead of the pass if need be. A layer's part of the streamed blocks goes into
buffer `layer mod buffers` when layer - buffers is done, and not before its pass begins, which names the blocks:

    C_i = max(C_{i-1}, D_i, B_i) + c_i          D_i, B_i: when its weights and its blocks have come
    each copy begins when the link has made all copies that were issued before it

At one moment the copy of the earlier layer is issued first, and of one layer the weights. Both kinds of copies take a
link in which each may keep the other waiting, so the pass is stepped through, copy by copy, until it has become steady.
Source: derived from the equations of `remap.policy.schedule`, which this gives exactly where no block streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["most_blocks", "pass_seconds"]

_PASSES = 6
"""Passes that are stepped through. Weights that are copied ahead of a pass delay the next one's; the longest of the later
passes counts, so that what alternates between passes is seen."""


def pass_seconds(
    compute_s: Sequence[float],
    copy_s: Sequence[float],
    streamed: Sequence[int],
    ring: int,
    block_s: float,
    kv_layers: int,
    buffers: int,
) -> float:
    """Seconds of a pass of len(compute_s) layers, if nothing is between passes.

    copy_s: seconds to copy each layer's streamed part; streamed: the layers that have one, ascending, through `ring`
    buffers. block_s: seconds to copy one layer's part of all streamed blocks (0: none stream), for each of the first
    `kv_layers` layers, through `buffers` buffers.
    """
    layers, m = len(compute_s), len(streamed)
    at = {layer: j for j, layer in enumerate(streamed)}
    uses = [j for j in range(m) if j >= ring or j + ring < m]  # a buffer with one layer keeps its bytes
    last = {j: max(range(j % ring, m, ring)) for j in uses}
    order = [(turn, j) for turn in range(_PASSES + 1) for j in uses]
    done: dict[tuple[int, int], float] = {}  # (pass, layer) -> when it was done
    weights: dict[tuple[int, int], float] = {}  # (pass, position) -> when its copy ends
    link, now, issued, longest = 0.0, 0.0, 0, 0.0

    def free(turn: int, j: int) -> bool:
        """Whether the buffer of this use is free: the use before it is done."""
        if j >= ring:
            return (turn, streamed[j - ring]) in done
        return turn == 0 or (turn - 1, streamed[last[j]]) in done

    for turn in range(_PASSES):
        begun, parts, blocks = now, 0, list[float]()
        for layer in range(-1, layers):
            if layer >= 0:
                start = max(now, weights.get((turn, at.get(layer, -1)), now))
                if block_s and layer < kv_layers:
                    start = max(start, blocks[layer])
                now = start + compute_s[layer]
                done[turn, layer] = now
            while True:
                part = parts if block_s and parts < kv_layers and parts - buffers <= layer else None
                use = order[issued] if issued < len(order) and free(*order[issued]) else None
                if use is not None and (part is None or (use[0] == turn and streamed[use[1]] <= part)):
                    link = max(link, now) + copy_s[streamed[use[1]]]
                    weights[use] = link
                    issued += 1
                elif part is not None:
                    link = max(link, now) + block_s
                    blocks.append(link)
                    parts += 1
                else:
                    break
        if turn >= _PASSES // 2:
            longest = max(longest, now - begun)
    return longest


def most_blocks(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The most blocks, up to `most`, for which seconds(blocks) is at most `limit_s`; seconds must not fall with blocks."""
    low, high = 0, most
    if most <= 0 or seconds(most) <= limit_s:
        return max(0, most)
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= limit_s else (low, middle)
    return low
