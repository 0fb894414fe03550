"""A slow, obvious simulation of passes with streamed layers, to test `remap.schedule` against.

Nothing here knows the recurrence, (max, +) algebra or a closed form. There is a compute engine, a copy engine with a
FIFO queue, ring buffers that remember which layer they hold and how many uses still need it, and a heap of events.
Times are integers, so the state is compared exactly: once the state at the start of a pass, relative to that
moment, has been seen before, everything repeats, and the seconds per pass are an exact fraction.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Copy:
    use: int  # which use of a streamed layer, counted over all passes
    slot: int
    layer: int


@dataclass
class Machine:
    compute: list[int]
    transfer: list[int]
    streamed: list[int]
    buffers: int
    slots: str
    now: int = 0
    events: list[tuple[int, int, str, int]] = field(default_factory=list)
    sequence: int = 0
    queue: deque[Copy] = field(default_factory=deque)
    queued_uses: int = 0
    promised: dict[int, int] = field(default_factory=dict)  # slot -> layer it will hold after all queued copies
    last_user: dict[int, int] = field(default_factory=dict)  # slot -> the last use queued on it
    waits_for: dict[int, int | None] = field(default_factory=dict)  # use -> the use that must finish first
    arrived: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    copying: Copy | None = None
    copy_ends: int = 0
    layer: int = 0
    computing: bool = False
    pass_starts: list[int] = field(default_factory=list)

    def slot_of(self, use: int) -> int:
        position = use % len(self.streamed)
        return position % self.buffers if self.slots == "fixed" else use % self.buffers

    def enqueue_until(self, use: int) -> None:
        """Queue copies, in order of use, up to `use`. A buffer that will already hold the layer needs no copy."""
        if not self.streamed:
            return
        while self.queued_uses <= use:
            k = self.queued_uses
            slot, layer = self.slot_of(k), self.streamed[k % len(self.streamed)]
            if self.promised.get(slot) == layer:
                self.arrived.add(k)
            else:
                self.waits_for[k] = self.last_user.get(slot)
                self.queue.append(Copy(k, slot, layer))
            self.promised[slot] = layer
            self.last_user[slot] = k
            self.queued_uses += 1

    def after(self, seconds: int, kind: str, value: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + seconds, self.sequence, kind, value))

    def current_use(self) -> int:
        """The use that computing the current layer is, or -1 if the layer is resident."""
        if self.layer not in self.streamed:
            return -1
        return (len(self.pass_starts) - 1) * len(self.streamed) + self.streamed.index(self.layer)

    def try_start(self) -> None:
        if self.copying is None and self.queue:
            head = self.queue[0]
            previous = self.waits_for[head.use]
            if previous is None or previous in self.finished:
                self.copying = self.queue.popleft()
                self.copy_ends = self.now + self.transfer[head.layer]
                self.after(self.transfer[head.layer], "copied", head.use)
        if not self.computing:
            use = self.current_use()
            if use == -1 or use in self.arrived:
                self.computing = True
                self.after(self.compute[self.layer], "computed", use)

    def handle(self, kind: str, use: int) -> bool:
        """Apply one event. True when a pass has just ended."""
        if kind == "copied":
            self.arrived.add(use)
            self.copying = None
            return False
        if use >= 0:
            self.finished.add(use)
        self.computing = False
        self.layer += 1
        if self.layer < len(self.compute):
            return False
        self.layer = 0
        self.pass_starts.append(self.now)
        return True

    def state(self) -> tuple[object, ...]:
        """Everything that decides the future, relative to now and to the first use of the pass about to start."""
        base = (len(self.pass_starts) - 1) * len(self.streamed)
        pending = []
        for copy in self.queue:
            previous = self.waits_for[copy.use]
            waits = None if previous is None or previous in self.finished else previous - base
            pending.append((copy.use - base, copy.slot, copy.layer, waits))
        running = None if self.copying is None else (self.copying.use - base, self.copy_ends - self.now)
        there = tuple(sorted(use - base for use in self.arrived if use >= base))
        rotation = base % self.buffers if self.slots == "rotating" else 0
        return tuple(pending), running, there, rotation


def seconds_per_pass(
    compute: list[int], transfer: list[int], streamed: list[int], buffers: int, slots: str, most_passes: int = 20_000
) -> Fraction:
    """Steady-state time per pass. Starts with empty buffers; raises if nothing repeats in `most_passes`."""
    machine = Machine(compute, transfer, sorted(streamed), buffers, slots)
    machine.pass_starts.append(0)
    seen: dict[tuple[object, ...], int] = {}
    look_ahead = 2 * buffers + 2 * len(streamed) + 2  # more than the buffers can hold, so the queue never runs dry
    machine.enqueue_until(look_ahead)
    machine.try_start()
    while len(machine.pass_starts) <= most_passes:
        at, _, kind, use = heapq.heappop(machine.events)
        machine.now = at
        ended = machine.handle(kind, use)
        # Events of the same moment belong together: apply them all before anything new starts.
        while machine.events and machine.events[0][0] == at and not ended:
            _, _, kind, use = heapq.heappop(machine.events)
            ended = machine.handle(kind, use)
        if ended:
            machine.enqueue_until((len(machine.pass_starts) - 1) * len(streamed) + look_ahead)
            machine.try_start()
            # A copy due at this very moment may be pending: its remaining time (0) is part of the state.
            state = (*machine.state(), machine.current_use() == -1 or machine.computing)
            this = len(machine.pass_starts) - 1
            if state in seen:
                earlier = seen[state]
                return Fraction(machine.pass_starts[this] - machine.pass_starts[earlier], this - earlier)
            seen[state] = this
        else:
            machine.try_start()
    raise AssertionError(f"no repetition in {most_passes} passes")
