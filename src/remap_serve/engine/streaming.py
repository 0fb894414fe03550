# SPDX-License-Identifier: Apache-2.0
"""Which blocks of running sequences stream from host memory in each pass. Pure, as the scheduler, which calls this.

A block that is complete never changes, so once host memory has it, passes can read it from there (`kv.host.stream`) and its
pages are free: nothing is ever copied out a second time. The first blocks of a sequence go first, so that
those which stream are the first `streamed` of it, and copies are long. They come back when no other sequence wants the blocks:
that costs as much as one pass that streams them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remap.errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed

    from remap_serve.engine.block_pool import SchedulerBlocks
    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.due import Due
    from remap_serve.engine.request import Sequence

__all__ = ["bring_home", "forget_host", "make_room", "settle", "show", "streamed"]

_RUN = 16
"""Blocks that go out together where one would do: of each layer they are two copies, as one block is."""


def streamed(chunks: Listed[Chunk]) -> list[int]:
    """The blocks of a pass over these chunks that stream: what `tenant.forward(streamed=)` takes."""
    found: list[int] = []
    for chunk in chunks:
        if chunk.sequence.streamed:  # of most passes nothing does
            found += chunk.sequence.blocks[: chunk.sequence.streamed]
    return found


def make_room(running: Listed[Sequence], blocks: int, pool: SchedulerBlocks, block_tokens: int, due: Due) -> bool:
    """Free `blocks` blocks by letting complete ones of these sequences stream, the oldest's first, as far as the passes'
    certificate (`pool.streamable_blocks`) goes. False if that was not enough; freed blocks stay free. Raises the
    pool's error; every sequence is consistent then."""
    freed = 0
    for sequence in running:
        if freed >= blocks:
            break
        count = min(sequence.computed // block_tokens - sequence.streamed, max(_RUN, blocks - freed))
        if count > 0 and sequence.homing is None:
            freed += _stream(sequence, count, pool, due)
    return freed >= blocks


def show(sequence: Sequence, blocks: int, pool: SchedulerBlocks, block_tokens: int) -> None:
    """Let complete blocks of a sequence that has none of the pool stream, its first, up to `blocks` of them: as many of their
    host blocks as are below the certificate's bound. Nothing is copied. Raises the pool's error; nothing has changed then."""
    most = min(blocks, sequence.computed // block_tokens)
    if most > 0 and pool.kept(sequence.host):
        limit, have = pool.streamable_blocks, sequence.host[:most]
        count = next((index for index, host in enumerate(have) if host >= limit), most)
        if count:
            sequence.blocks, sequence.streamed = pool.stream(have[:count]), count


def bring_home(running: Listed[Sequence], spare: int, pool: SchedulerBlocks, due: Due) -> None:
    """Start copying blocks that stream back, up to `spare`, the youngest's first and of each the last. Raises the pool's
    error; the rest stays as it is then."""
    for sequence in reversed(running):
        count = min(spare, sequence.streamed)
        if count > 0 and sequence.homing is None:
            hosts, before = sequence.host[sequence.streamed - count : sequence.streamed], due.ids
            due.ids = [*before[0], *pool.allocate(count)], before[1]  # until the copies have begun
            blocks = due.ids[0][len(before[0]) :]
            sequence.homing, due.ids = (pool.copy_in(hosts, blocks), blocks), before
            spare -= count


def settle(running: Listed[Sequence], pool: SchedulerBlocks, due: Due) -> list[Sequence]:
    """Let blocks that have come back be the sequences' own again. Returns those of which bytes that stream never reached host
    memory: they have to be computed anew. Raises the pool's error if copies back have failed; streaming goes on."""
    for sequence in running:
        if sequence.homing is None:
            continue
        ticket, blocks = sequence.homing
        try:
            if not pool.arrived(ticket):
                continue
        except Error:
            sequence.homing, due.ids = None, due.more(blocks, [])
            due.give_surely(pool)
            raise
        first = sequence.streamed - len(blocks)
        ids = due.more(sequence.blocks[first : sequence.streamed], [])
        table = [*sequence.blocks[:first], *blocks, *sequence.blocks[sequence.streamed :]]
        sequence.blocks, sequence.streamed, sequence.homing, due.ids = table, first, None, ids
        due.give(pool)
    return [one for one in running if one.streamed and not pool.kept(one.host[: one.streamed])]


def forget_host(sequence: Sequence, keep: int, pool: SchedulerBlocks, due: Due) -> None:
    """Free its host blocks but for the first `keep`, and those that stream."""
    keep = max(keep, sequence.streamed)
    if len(sequence.host) > keep:
        sequence.host, due.ids = sequence.host[:keep], due.more([], sequence.host[keep:])
        due.give(pool)


def _stream(sequence: Sequence, count: int, pool: SchedulerBlocks, due: Due) -> int:
    """Let its next blocks stream, at most `count`. Returns how many do: those whose host blocks are below the certificate's
    bound, or can be."""
    if not pool.kept(sequence.host):
        forget_host(sequence, 0, pool, due)
    first, limit = sequence.streamed, pool.streamable_blocks
    have = sequence.host[first : first + count]
    near = next((index for index, host in enumerate(have) if host >= limit), len(have))
    more = min(count - near, pool.free_streamable_blocks) if near == len(have) else 0
    end = first + near + more
    if end == first:
        return 0
    if more:
        sequence.host = sequence.host + pool.copy_out(sequence.blocks[first + near : end], limit)
    hosts, ids = sequence.host[first:end], due.more(sequence.blocks[first:end], [])
    low, high = sequence.blocks[:first], sequence.blocks[end:]
    sequence.blocks, sequence.streamed, due.ids = [*low, *pool.stream(hosts), *high], end, ids
    due.give(pool)
    return end - first
