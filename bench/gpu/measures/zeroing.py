"""Free memory that belonged to somebody else: how fast it is zeroed for its next owner, and whether anybody waits."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, seconds
from bench.gpu.tenants import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, device_tenant, make_masters
from bench.gpu.timing import Marks

import remap
from remap.internals import internals

SOIL = 0x5C


class Guest:
    """A tenant that comes, takes free pages, soils them and leaves."""

    def __init__(self, session: remap.Session, number: int, masters: list[Any], blocks: int) -> None:
        self.session, self.name, self.blocks = session, f"guest-{number}", blocks
        spec = remap.KVSpec(
            layers=len(masters),
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
            min_blocks=1,
            max_blocks=blocks + 2,
        )
        self.tenant = session.attach_bytes(masters, name=self.name, kv=spec)

    def take(self) -> None:
        """Ask for all the blocks."""
        self.session.step({self.name: remap.Demand(blocks=self.blocks)})

    def ranges(self, blocks: list[int]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of these blocks."""
        kv = internals(self.tenant).kv
        for block in blocks:
            for offset, nbytes in kv.geometry.byte_ranges_of_block(block):
                yield kv.address + offset, nbytes


@measure("zeroing", full_s=7, quick_s=2)
def zeroing(ctx: Context) -> Iterator[Figure]:
    """Guests come and go; each takes the same free pages, which must read zero. Against plain fills of as many bytes."""
    spare = ctx.fit(ctx.pick(4096 * MIB, 1024 * MIB, 16 * MIB), unit=2 * MIB)
    with device_tenant(
        ctx, 4, 2 * MIB, spare_bytes=spare + 16 * MIB, config=remap.advanced.Knobs(reserve_blocks=0)
    ) as (raw, marks):
        session, backend = raw.session, raw.backend
        layers = make_masters(2, 2 * MIB)  # the guests' own: the memory of others is page-locked already
        block_bytes = 2 * len(layers) * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 2
        called: list[float] = []
        zeroed: list[float] = []
        plain: list[float] = []
        taken = 0
        for index in ctx.rounds(ctx.pick(12, 5, 2) + 1, share=0.8):
            guest = Guest(session, index, layers, spare // block_bytes)
            with guest.tenant.forward(stream=raw.stream):  # from here on the session knows its stream
                pass
            marks.wait(marks.mark(raw.handle))
            before, begun = guest.tenant.kv.usable_blocks, time.perf_counter()
            guest.take()
            back = time.perf_counter() - begun
            with guest.tenant.forward(stream=raw.stream):
                there = marks.mark(raw.handle)
            marks.wait(there)
            done = time.perf_counter() - begun
            taken = guest.tenant.kv.usable_blocks - before
            if taken < guest.blocks // 2:
                raise Wrong(f"{taken} blocks came where {guest.blocks} were asked for")
            held = guest.tenant.kv.allocate(guest.tenant.kv.free_blocks)
            _must_be_zero(ctx, backend, raw.handle, marks, list(guest.ranges(held[:: max(1, len(held) // 64)])))
            ranges = _joined(list(guest.ranges(held)))
            first = marks.mark(raw.handle)
            for address, nbytes in ranges:
                backend.fill(raw.handle, address, SOIL, nbytes)
            last = marks.mark(raw.handle)
            marks.wait(last)
            filled = marks.between(first, last) * taken / len(held)
            marks.reset()
            session.detach(guest.name)
            if index:
                called.append(back)
                zeroed.append(done)
                plain.append(filled)
        raw.verify(marks)
    nbytes = taken * block_bytes
    rate, own = nbytes / statistics.median(zeroed) / 1e9, nbytes / statistics.median(plain) / 1e9
    yield figure(f"zeroing of {nbytes // MIB} MiB that change tenant", rate, "GB/s", zeroed, plain_fill_GBps=own)
    yield seconds("taking free pages of another tenant, the call alone", called, shown=False, bytes=nbytes)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as possible."""
    joined: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((address, nbytes))
    return joined


def _must_be_zero(ctx: Context, backend: Any, stream: int, marks: Marks, ranges: list[tuple[int, int]]) -> None:
    largest = max(nbytes for _, nbytes in ranges)
    with ctx.buffers(host=largest) as (_, host):
        for address, nbytes in ranges:
            backend.copy(stream, host, address, nbytes)
            marks.wait(marks.mark(stream))
            if any(ctypes.string_at(host, nbytes)):
                raise Wrong("a page that changed tenant does not read zero")
    marks.reset()
