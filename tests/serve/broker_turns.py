"""A member of a broker whose requests run, are paused and go on, told what to do a line at a time:
`python broker_turns.py SOCKET NAME LAYERS VALUE`.

The engine is the real one, without a model: its passes write bytes into the blocks of their requests, and read all that earlier
ones have written. Every second byte is VALUE, so nothing of another process is taken for its own."""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Sequence as Listed
from dataclasses import replace
from typing import Any

import numpy as np
from arena_worlds import make_spec
from broker_member import DIM, Member, listen
from broker_serving import arm

import remap
from remap.errors import OutOfMemory
from remap.internals import internals
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.engine import Engine
from remap_serve.engine.request import Request, SamplingParams, Sequence
from remap_serve.engine.scheduler import Scheduler

MIN, MOST, HOST = 8, 4000, 600
LONGEST = 100
"""Tokens of a request, at most: it fits into the first blocks, so that none ever waits for another process."""


class ByteEngine(Engine):
    """A request is as many blocks of bytes."""

    def __init__(self, tenant: Any, session: Any, runner: Bytes) -> None:
        kv = internals(tenant).kv
        scheduler = Scheduler(swap=kv.open_host() > 0, block_tokens=kv.block_tokens, max_num_seqs=64, chunk_align=1)
        super().__init__(tenant, scheduler, runner, session=session)

    def add_request(self, request: Request, *, arrived_s: float | None = None) -> None:
        self._queue(Sequence.of(request, next(self._orders), self._clock()))


class Bytes:
    """The passes."""

    def __init__(self, member: Member) -> None:
        self._tenant, self._memory, self._value = member.tenant, member.memory, member.value
        self._layers, self._ranges = len(member.masters), member.ranges
        self._size = internals(member.tenant).kv.block_tokens

    def run(self, chunks: Listed[Chunk]) -> tuple[list[Chunk], list[int]]:
        with self._tenant.forward():
            for layer in range(self._layers):
                self._tenant.wait(layer)
                self._tenant.done(layer)
            for chunk in chunks:
                for place, block in enumerate(chunk.sequence.blocks[: -(-chunk.end // self._size)]):
                    if place * self._size < chunk.start:
                        self.check(chunk.sequence, place)
                    else:
                        self._write(chunk.sequence, place, block)
        return (found := [chunk for chunk in chunks if chunk.samples]), [0] * len(found)

    def _tag(self, sequence: Sequence, place: int) -> int:
        return 1 + (7 * sequence.order + place) % 250

    def _write(self, sequence: Sequence, place: int, block: int) -> None:
        for address, nbytes in self._ranges(block):
            found = np.frombuffer(self._memory.read(address, nbytes), np.uint8)
            others = set(np.unique(found[::2]).tolist()) - {0, self._value}
            assert not others, f"block {block} has bytes {others} of another process"
            if self._memory.here:
                data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
                data[::2], data[1::2] = self._value, self._tag(sequence, place)
            else:
                self._memory.fill(address, nbytes, self._value)

    def check(self, sequence: Sequence, place: int) -> None:
        tag = self._tag(sequence, place) if self._memory.here else self._value
        for address, nbytes in self._ranges(sequence.blocks[place]):
            found = np.frombuffer(self._memory.read(address, nbytes), np.uint8)
            right = (found[::2] == self._value).all() and (found[1::2] == tag).all()
            assert right, f"block {place} of request {sequence.id} was overwritten"


class Turns(Member):
    """See the module. Its layers stay."""

    def __init__(self, path: str, name: str, layers: int, value: int) -> None:
        super().__init__(path, name, layers, value)
        self.engine = ByteEngine(self.tenant, self.session, Bytes(self))
        self.asked = self.ended = 0

    def _spec(self, layers: int) -> remap.KVSpec:
        return replace(make_spec(layers, min_blocks=MIN, max_blocks=MOST, dim=DIM), host_blocks=HOST)

    def ask(self, requests: int, tokens: int) -> str:
        """So many requests more, each of so many tokens at most."""
        for number in range(requests):
            self.asked += 1
            length = max(2, min(LONGEST, tokens) - 5 * (number % 4))
            sampling = SamplingParams(max_tokens=max(1, length // 2))
            self.engine.add_request(Request(str(self.asked), (0,) * (length - length // 2), sampling))
        return "asked"

    def serve(self, steps: int, blocks: int = 0) -> str:
        """So many steps, if it has so much to do. How many requests are left. blocks: for so many it asks ahead of need."""
        if blocks:
            self.session.expect(self.name, blocks=blocks)
        for _ in range(steps if self.tenant.active else 0):
            if not self.engine.unfinished:
                break
            self._note(self.engine.step())
        return str(self.engine.unfinished)

    def _note(self, step: Any) -> None:
        self.ended += len(step.finished)

    def finish(self) -> str:
        """All requests. How many of those that were asked for have ended."""
        while self.engine.unfinished:
            self._note(self.engine.step())
        return f"{self.ended} of {self.asked}"

    def pause(self) -> str:
        """Its turn is over."""
        if self.tenant.active:
            self.engine.pause()
            self.session.deactivate(self.name)
        return "paused"

    def rest(self) -> str:
        """As a loop that has nothing else to do, until it is told something. How many blocks it still has."""
        while not select.select([0], [], [], 0.002)[0]:
            if not self.tenant.active:
                self.engine.give_way()
        return str(self.tenant.kv.live_blocks)

    def stop(self) -> str:
        """Rest no longer."""
        return "stopped"

    def resume(self) -> str:
        """Its turn begins. "cold": there are no pages for its layers."""
        if not self.tenant.active:
            try:
                assert self.session.activate(self.name).activated
            except OutOfMemory:
                return "cold"
            self.engine.bring_back()
        return "active"

    def idle_steps(self) -> str:
        """The controller forgets the burst."""
        for _ in range(200 if self.tenant.active else 0):
            self._note(self.engine.step())
        return "idle"

    def check(self) -> str:
        """Whether its books are right and its bytes are its own."""
        remap.advanced.check(self.session)
        size = internals(self.tenant).kv.block_tokens
        for sequence in self.engine.scheduler.running:
            for place in range(-(-sequence.computed // size)):
                self.engine.runner.check(sequence, place)  # type: ignore[attr-defined]
        return super().check()

    def die(self, point: int, passages: int) -> str:
        """It kills itself when it has come to this point so many times more."""
        die_at(self, POINTS[point], passages)
        return "armed"

    def left(self) -> str:
        del self.engine
        return super().left()


POINTS = ("taken out", "given", "wanted", "freed", "granted", "coming in", "come in")
"""Of a member: pages that it gives are nobody's here, and not given yet; they are given, and the broker has no answer yet; its
engine is to free KV; it has, and the pages have not gone; a grant was read; it is about to be taken in; it was."""


def die_at(member: Turns, point: str, passages: int) -> None:
    outside: Any = member.session._other_processes
    owner, name, happens, behind = {
        "taken out": (outside, "_give", lambda result, pages: bool(pages), False),
        "given": (outside, "_give", lambda result, pages: bool(pages), True),
        "wanted": (outside, "_ask_engines", lambda result, *given: bool(result), True),
        "freed": (member.engine, "release", lambda result, blocks: result > 0, True),
        "granted": (outside._membership, "_take", lambda result, *given: bool(outside._membership._late), True),
        "coming in": (outside, "take_in", lambda result, pages: bool(pages), False),
        "come in": (outside, "take_in", lambda result, pages: bool(pages), True),
    }[point]
    arm(owner, name, happens, behind, passages)


if __name__ == "__main__":
    listen(Turns, *sys.argv[1:])
