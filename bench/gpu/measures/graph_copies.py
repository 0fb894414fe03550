"""A pass that streams layers: a graph a layer between wait and done, or one graph that has the copies in it as well?

What a layer computes is the same everywhere: a sum over its own weights, compared with the master copy's, then matrix
products. In turns:

    pieces                  what the library does: `wait`, replay a layer's graph, `done`; the prefetcher copies
    one graph               the whole pass. Copies are its nodes, on a stream that forks from the layers' and joins it
    open graph              the same, but the first layers' copies for the next pass are enqueued behind the graph, on a
                            stream of their own, and tied to it by events that outlive a replay
    one graph, no copies    the bound: as many layers with the same bytes, all resident, in other memory

The first three use the same ring buffers and copy in the library's order, one copy after the other. They differ where a pass
ends. The library brings the first layers for the next pass as soon as their buffers are free, and the next pass waits for each
of them when it gets there. A graph has ended when all that is in it has. So in "one graph" those copies come last, behind
their buffers' last readers and beside the layers that are left. (At its beginning the first layer, which is streamed in
every uniform choice, would wait for its whole copy.) It still loses something: its next replay waits for the last of
them, where the library's next pass waits for the first. "open graph" waits as the library does, and so has the same
chance; it costs a few calls a pass.

Copies are whole on all sides. Times are of passes enqueued one behind the other, between marks on the layers' stream. One pass
that is not timed comes before, so that each timed one pays for as many copies as it uses. Only "pieces" are passes of the
library's; an engine that had the graphs would have the bracket around them too (overhead.py), on the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, ratio, seconds
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks, timed
from bench.gpu.work import Products, calibrated

import remap
from remap.internals import internals

LAYERS = 12
PIECES, ONE, OUTSIDE, BOUND = "pieces", "one graph", "open graph", "one graph, no copies"
MOST_UNITS = 1000  # of work a layer; a graph of more nodes says nothing more

# -- what is recorded --------------------------------------------------------------------------------------------------

MAIN, COPIES, BESIDE = "layers", "copies", "copies beside"
"""The streams: of the computation, of the copies in the graph, and of those that no graph contains."""


@dataclass(frozen=True)
class Compute:
    """The layer's computation, on MAIN. buffer: the ring buffer in which it reads; None: it is resident."""

    layer: int
    buffer: int | None


@dataclass(frozen=True)
class Copy:
    """The layer's bytes, from host memory into the ring buffer."""

    stream: str
    layer: int
    buffer: int


@dataclass(frozen=True)
class Record:
    """The event is where the stream is now."""

    stream: str
    event: tuple[str, int]


@dataclass(frozen=True)
class Wait:
    """What comes next on the stream comes behind the event as it was recorded last."""

    stream: str
    event: tuple[str, int]


Step = Compute | Copy | Record | Wait


@dataclass(frozen=True)
class Plan:
    """graph: recorded once and replayed each pass. after: enqueued behind each replay, in no graph. first: (layer, buffer) that
    are in place before the first pass, and after each."""

    graph: tuple[Step, ...]
    after: tuple[Step, ...]
    first: tuple[tuple[int, int], ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Those of one pass, in their order."""
        return tuple(step for step in (*self.graph, *self.after) if isinstance(step, Copy))

    @property
    def lasting(self) -> frozenset[tuple[str, int]]:
        """The events that tie a graph to what lies outside."""

        def of(steps: Sequence[Step]) -> set[tuple[str, int]]:
            return {step.event for step in steps if isinstance(step, Record | Wait)}

        return frozenset(of(self.graph) & of(self.after))


def plan(layers: int, streamed: Sequence[int], buffers: int, *, outside: bool = False) -> Plan:
    """The steps of a pass of which `streamed` (ascending; none, or more than buffers) stream. outside: the copies for the
    next pass are in `after`.

    The j-th streamed layer uses buffer j mod buffers; one that no other layer uses keeps its bytes. Copies are in the order of
    their uses, one at a time, each behind the last reader of its buffer. No step is there that another one makes superfluous.
    """
    size = len(streamed)
    position = {layer: j for j, layer in enumerate(streamed)}
    last = {j % buffers: j for j in range(size)}
    due = [(j, j - buffers) for j in range(buffers, size)]  # (position to copy, position that reads the buffer before)
    ahead = [(j, last[j]) for j in range(min(buffers, size)) if last[j] != j]  # the same, for the next pass
    queue = due + ahead
    arriving = {j for j, _ in (queue if outside else due)}  # layers wait for these
    graph: list[Step] = []
    after: list[Step] = []
    awaited = {COPIES: -1, BESIDE: -1}  # the last position whose end the stream has waited for
    # Two streams would copy side by side. Before its first copy each waits for the other's last one.
    turn: dict[str, Wait] = {}
    if outside and due:
        if ahead[0][1] < size - 1:  # else the last copy has been read when that buffer is free
            turn[BESIDE] = Wait(BESIDE, ("all copied", 0))
        if ahead[-1][0] > 0:  # else it has been read when the first buffer is free
            turn[COPIES] = Wait(COPIES, ("copied", streamed[ahead[-1][0]]))
    for layer in range(layers):
        j = position.get(layer)
        if j in arriving:
            graph.append(Wait(MAIN, ("copied", layer)))
        graph.append(Compute(layer, None if j is None else j % buffers))
        while j is not None and queue and queue[0][1] <= j:
            copied, reader = queue.pop(0)
            beside = outside and copied < buffers
            stream, steps = (BESIDE, after) if beside else (COPIES, graph)
            if reader > awaited[stream]:  # then it is j: what came before it in the queue waited for no more
                awaited[stream] = reader
                graph.append(Record(MAIN, ("done", layer)))
                steps.append(Wait(stream, ("done", layer)))
            if stream in turn:
                steps.append(turn.pop(stream))
            steps.append(Copy(stream, streamed[copied], copied % buffers))
            if copied == size - 1 and BESIDE in turn:
                steps.append(Record(stream, ("all copied", 0)))
            if copied in arriving:
                steps.append(Record(stream, ("copied", streamed[copied])))
    if due and not outside:
        graph += [Record(COPIES, ("all copied", 0)), Wait(MAIN, ("all copied", 0))]
    return Plan(tuple(graph), tuple(after), tuple((streamed[j], j) for j in range(min(buffers, size))))


class Carrier:
    """Carries steps out with torch, on streams: as they are, or to be recorded."""

    def __init__(
        self, torch: Any, main: Any, made: Plan, compute: Callable[[int], object], copy: Callable[[int], object]
    ) -> None:
        """main: the stream of the computation. `compute(layer)` and `copy(layer)` enqueue on torch's current stream."""
        self._torch, self._plan, self._compute, self._copy = torch, made, compute, copy
        self._streams = {MAIN: main, COPIES: torch.cuda.Stream(), BESIDE: torch.cuda.Stream()}
        self._events: dict[tuple[str, int], Any] = {name: torch.cuda.Event(external=True) for name in made.lasting}
        for event in self._events.values():
            event.record(main)  # to wait for an event that was never recorded would not be recorded either
        main.synchronize()

    def graph(self) -> None:
        """What is to be recorded. On MAIN."""
        self._carry_out(self._plan.graph)

    def after(self) -> None:
        """What comes behind it each time. On MAIN."""
        self._carry_out(self._plan.after)

    def wait(self) -> None:
        """Wait for all copies that no graph contains."""
        self._streams[BESIDE].synchronize()

    def _carry_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step.layer)
                continue
            stream = self._streams[step.stream]
            if isinstance(step, Copy):
                with self._torch.cuda.stream(stream):
                    self._copy(step.layer)
            elif isinstance(step, Record):
                if step.event not in self._events:
                    self._events[step.event] = self._torch.cuda.Event()
                self._events[step.event].record(stream)
            else:
                stream.wait_event(self._events[step.event])


# -- what runs ---------------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """run: enqueue one pass. rest: wait for what it has left behind, beside the layers' stream. wrong: counts readings of a layer
    that found another sum than the master copy's."""

    run: Callable[[], object]
    rest: Callable[[], object]
    wrong: Any
    passes: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    ran: int = 0


def _events_last(torch: Any) -> bool:
    """Whether this torch has events that a graph records or waits for anew at each replay."""
    try:
        torch.cuda.Event(external=True)
    except TypeError:
        return False
    return True


class Bench:
    """A tenant, its layers' bytes once more in other memory of the device, and how long a copy and a unit of work take."""

    def __init__(self, ctx: Context, torch: Any, raw: DeviceTenant, marks: Marks) -> None:
        from remap_serve.engine.graphs import TorchCudaGraphs

        self.ctx, self.torch, self.raw, self.marks = ctx, torch, raw, marks
        self.main = torch.cuda.ExternalStream(raw.stream)
        self.graphs = TorchCudaGraphs(self.main)
        self.load = Products(raw.stream, ctx.pick(2048, 2048, 16))
        self._masters = [torch.from_numpy(each) for each in raw.masters]
        if not ctx.emulated and not all(each.is_pinned() for each in self._masters):
            raise Skip("the master copies could not be page-locked where they lie")
        addresses = [remap.advanced.layer_address(raw.session, "raw", layer) for layer in range(LAYERS)]
        self._regions = [raw.session._memory(at, raw.layer_bytes) for at in addresses]
        self._elsewhere = [torch.empty(raw.layer_bytes, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        for here, master in zip(self._elsewhere, self._masters):
            here.copy_(master)
        self._sums = torch.stack([each.view(torch.int64).sum() for each in self._masters]).to("cuda")
        torch.cuda.current_stream().synchronize()
        unused = torch.zeros((), dtype=torch.int64, device="cuda")
        reading = self.computing(self._elsewhere, unused, 0)
        with torch.cuda.stream(self.main):
            self.copy_s = statistics.median(self._copy_times())
            self.unit_s = calibrated(self.load, marks, raw.handle)
            self.read_s = statistics.median(marks.timed(raw.handle, partial(reading, layer)) for layer in range(LAYERS))

    def _copy_times(self) -> Iterator[float]:
        for layer in range(LAYERS):
            into = partial(self._elsewhere[layer].copy_, self._masters[layer], non_blocking=True)
            yield self.marks.timed(self.raw.handle, into)

    def units(self, length: float) -> int:
        """Units of work that, with the reading, make a layer's computation `length` copies long, about."""
        left = length * self.copy_s - self.read_s
        return max(0, min(round(left / self.unit_s), self.ctx.pick(MOST_UNITS, MOST_UNITS, 2)))

    def computing(self, weights: Sequence[Any], wrong: Any, units: int) -> Callable[[int], None]:
        """compute(layer): enqueue it on the current stream, which has to be the layers'."""
        words = [each.view(self.torch.int64) for each in weights]

        def compute(layer: int) -> None:
            wrong.add_(words[layer].sum() != self._sums[layer])
            self.load.launch(units)

        return compute

    def sides(self, units: int) -> dict[str, Side]:
        """All of them, recorded for what is remapped now. The ring buffers hold what they do between passes."""
        torch, raw, streamed, buffers = (
            self.torch,
            self.raw,
            self.raw.tenant.streamed,
            internals(self.raw.tenant).buffers,
        )
        wrong = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in (PIECES, ONE, OUTSIDE, BOUND)}
        torch.cuda.current_stream().synchronize()
        compute = {
            name: self.computing(self._elsewhere if name == BOUND else self._regions, wrong[name], units)
            for name in wrong
        }

        def copy(layer: int) -> None:
            self._regions[layer].copy_(self._masters[layer], non_blocking=True)  # its region shows its ring buffer

        def nothing() -> None:
            """All is behind the layers' stream."""

        pieces = [self.graphs.capture(partial(compute[PIECES], layer)) for layer in range(LAYERS)]
        made = {
            PIECES: Side(
                partial(raw.run, lambda layer: pieces[layer]()),
                internals(raw.tenant)._state.prefetcher.drain,
                wrong[PIECES],
            )
        }
        one = Carrier(torch, self.main, plan(LAYERS, streamed, buffers), compute[ONE], copy)
        made[ONE] = Side(self.graphs.capture(one.graph), nothing, wrong[ONE])
        if _events_last(torch):
            beside = Carrier(torch, self.main, plan(LAYERS, streamed, buffers, outside=True), compute[OUTSIDE], copy)
            replay = self.graphs.capture(beside.graph)
            beside.after()  # recording has run the pass once, which leaves the last layers in the buffers
            beside.wait()

            def with_copies_beside() -> None:
                replay()
                beside.after()

            made[OUTSIDE] = Side(with_copies_beside, beside.wait, wrong[OUTSIDE])
        resident = Carrier(torch, self.main, plan(LAYERS, (), 1), compute[BOUND], copy)
        made[BOUND] = Side(self.graphs.capture(resident.graph), nothing, wrong[BOUND])
        for each in wrong.values():
            each.zero_()  # recording a layer alone reads whatever is there
        return made

    def take_turns(self, sides: dict[str, Side], rounds: int, passes: int, share: float) -> None:
        """Fills in what the sides take. Each begins on an idle device, with the first layers in their buffers."""
        for index in self.ctx.rounds(rounds + 1, least=min(3, rounds + 1), share=share):
            order = list(sides.values())
            for side in order if index % 2 else order[::-1]:
                side.run()
                ends, host = [self.marks.mark(self.raw.handle)], []
                for _ in range(passes):
                    host.append(timed(side.run))
                    ends.append(self.marks.mark(self.raw.handle))
                taken = self.marks.gaps(ends)
                self.marks.reset()
                side.rest()
                side.ran += passes + 1
                if index:
                    side.passes += taken
                    side.host += host


def measured(bench: Bench, length: float, share: float) -> dict[str, Side]:
    """All sides with computations `length` copies long. Raises Wrong if the library copied other bytes than the graphs."""
    ctx, raw = bench.ctx, bench.raw
    stats = internals(raw.tenant)._state.prefetcher.stats
    with bench.torch.cuda.stream(bench.main):
        raw.run()
        internals(raw.tenant)._state.prefetcher.drain()
        bench.main.synchronize()
        sides = bench.sides(bench.units(length))
        before = stats().copied_bytes
        bench.take_turns(sides, ctx.pick(12, 6, 1), ctx.pick(5, 4, 2), share)
        bench.main.synchronize()
    copies = len(plan(LAYERS, raw.tenant.streamed, internals(raw.tenant).buffers).copies)
    copied, wanted = stats().copied_bytes - before, sides[PIECES].ran * copies * raw.layer_bytes
    if copied != wanted:
        raise Wrong(f"the library copied {copied} bytes where the graphs copy {wanted}")
    return sides


@measure("copies inside graphs", needs=("torch-cuda",), full_s=20, quick_s=5)
def graph_copies(ctx: Context) -> Iterator[Figure]:
    """Each side's pass and host time, over computations of a quarter, one and four copies; readings of wrong bytes."""
    import torch

    settings = ctx.pick(((2, 2), (1, 1), (6, 2)), ((2, 2),), ((2, 2),))
    lengths = ctx.pick((0.25, 1.0, 4.0), (0.25, 1.0, 4.0), (0.25, 4.0))
    size = ctx.pick(32 * MIB, 32 * MIB, 2 * MIB)
    layer_bytes = ctx.fit(3 * LAYERS * size, unit=3 * LAYERS * 2 * MIB, host=True) // (3 * LAYERS)
    wrong = readings = 0
    with device_tenant(ctx, LAYERS, layer_bytes) as (raw, marks):
        bench = Bench(ctx, torch, raw, marks)
        cells = [(alpha, beta, length) for alpha, beta in settings for length in lengths]
        for number, (alpha, beta, length) in enumerate(cells):
            raw.remap(0)
            raw.remap(alpha, beta)
            sides = measured(bench, length, 0.85 / (len(cells) - number))
            raw.verify(marks)
            title = f"computation = {length:g} copies, alpha {alpha}, beta {beta}"
            bound = statistics.median(sides[BOUND].passes)
            for name, side in sides.items():
                wrong += int(side.wrong)
                readings += side.ran * LAYERS
                yield seconds(f"pass of {LAYERS} layers, {name}, {title}", side.passes, shown=False,
                              copy_us=bench.copy_s * 1e6, compute_us=bound / LAYERS * 1e6, layer_bytes=layer_bytes)  # fmt: skip
                yield seconds(f"enqueueing it, {name}, {title}", side.host, shown=False)
            for name in [name for name in sides if name != PIECES]:
                shown = (alpha, beta) == settings[0] and name != BOUND
                yield ratio(f"{name} / pieces, {title}", sides[name].passes, sides[PIECES].passes, shown=shown)
    yield count("layers read with other bytes than their master copy's", wrong, "layers", n=readings, target=0)
    if wrong:
        raise Wrong(f"{wrong} of {readings} readings of a layer found other bytes than its master copy's")
