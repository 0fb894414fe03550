"""What graph_copies.py records, replayed on the host: every order that the device may choose gives every layer its own bytes.

A model of streams, events and graphs. Of each step it is known which steps are sure to have ended before it begins; what is
not sure may be the other way round. No GPU, no driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu.measures import graph_copies
from bench.gpu.measures.graph_copies import BESIDE, COPIES, MAIN, Carrier, Compute, Copy, Plan, Record, Step, Wait, plan
from bench.gpu.registry import Wrong
from conftest import needs
from test_bench_measures import on_cpu

from remap import _core
from remap.policy import schedule

REPLAYS = 4


class Fault(Exception):
    """The driver would refuse it, or a step may run too early."""


class Device:
    """`before[n]`: the steps that are sure to have ended when step n has, itself among them, as bits."""

    def __init__(self, made: Plan) -> None:
        self._made, self._lasting = made, made.lasting
        self.steps: list[Step] = []
        self.before: list[int] = []
        self._now = {MAIN: 0, BESIDE: 0}  # what each stream has before it
        self._recorded: dict[tuple[str, int], int] = {}  # events that outlive a replay

    def _ran(self, step: Step, behind: int) -> int:
        self.steps.append(step)
        self.before.append(behind | 1 << (len(self.steps) - 1))
        return self.before[-1]

    def replay(self) -> None:
        """Launch the graph, all of it behind what its stream has and before what comes next there; then what comes after."""
        as_launched = dict(self._recorded)
        streams, events = {MAIN: self._now[MAIN]}, {}
        for step in self._made.graph:
            stream = MAIN if isinstance(step, Compute) else step.stream
            if isinstance(step, Wait) and step.event not in self._lasting:
                if step.event not in events:
                    raise Fault(f"{step} is for no event of this graph")
                streams[stream] = streams.get(stream, self._now[MAIN]) | events[step.event]
                continue
            if stream not in streams:
                raise Fault(f"{step} is on a stream that is not being recorded")
            if isinstance(step, Compute | Copy) or step.event in self._lasting:  # nodes
                awaited = as_launched.get(step.event, 0) if isinstance(step, Wait) else 0
                streams[stream] = self._ran(step, streams[stream] | awaited)
            if isinstance(step, Record):
                events[step.event] = streams[stream]
                if step.event in self._lasting:
                    self._recorded[step.event] = streams[stream]
        if any(each & ~streams[MAIN] for each in streams.values()):
            raise Fault("a stream of the graph does not join")
        self._now[MAIN] = streams[MAIN]
        for step in self._made.after:
            assert not isinstance(step, Compute) and step.stream == BESIDE
            if isinstance(step, Record):
                self._recorded[step.event] = self._now[BESIDE]
            elif isinstance(step, Wait):
                self._now[BESIDE] |= self._recorded.get(step.event, 0)
            else:
                self._now[BESIDE] = self._ran(step, self._now[BESIDE])

    def sure(self, first: int, then: int) -> bool:
        """Whether step `first` has ended before step `then` begins, whatever the device does."""
        return bool(self.before[then] >> first & 1)


def check(made: Plan, layers: int, streamed: tuple[int, ...], buffers: int) -> None:
    """Raises Fault unless replays, one behind the other, are right in every order that the device may choose."""
    device = Device(made)
    holds = {buffer: layer for layer, buffer in made.first}
    for _ in range(REPLAYS):
        begun = len(device.steps)
        device.replay()
        new = device.steps[begun:]
        if [step.layer for step in new if isinstance(step, Compute)] != list(range(layers)):
            raise Fault("not every layer is computed once, in order")
        for step in new:
            if isinstance(step, Copy):
                holds[step.buffer] = step.layer
        if holds != {buffer: layer for layer, buffer in made.first}:
            raise Fault(f"a pass leaves {holds} in the buffers")
    copies = [n for n, step in enumerate(device.steps) if isinstance(step, Copy)]
    if not all(device.sure(a, b) for a, b in pairwise(copies)):
        raise Fault("two copies may run side by side")
    for n, step in enumerate(device.steps):
        if not isinstance(step, Compute) or step.layer not in streamed:
            continue
        if step.buffer != streamed.index(step.layer) % buffers:
            raise Fault(f"{step} reads another buffer than the library's")
        content = next(layer for layer, buffer in made.first if buffer == step.buffer)
        for c in copies:  # in their order
            copy = device.steps[c]
            assert isinstance(copy, Copy)
            if copy.buffer == step.buffer:
                if not device.sure(c, n) and not device.sure(n, c):
                    raise Fault(f"{copy} may run beside {step}")
                content = copy.layer if device.sure(c, n) else content
        if content != step.layer:
            raise Fault(f"{step} reads layer {content}")


def settings(*, uniform: bool) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """(layers, streamed, buffers): up to 8 layers, alpha and beta up to 3; every set of layers, or the library's usual one."""
    for layers in range(1, 9):
        for alpha in range(4):
            for beta in range(1, 4):
                if alpha + beta > layers:
                    continue
                chosen = [schedule.uniform(layers, alpha, beta)]
                if not uniform and alpha:
                    chosen = list(combinations(range(layers), alpha + beta))
                for streamed in chosen:
                    yield layers, streamed, beta


@pytest.mark.parametrize("outside", [False, True], ids=["one graph", "open graph"])
def test_every_layer_computes_on_its_own_bytes_in_every_order(outside: bool) -> None:
    tried = 0
    for layers, streamed, buffers in settings(uniform=False):
        check(plan(layers, streamed, buffers, outside=outside), layers, streamed, buffers)
        tried += 1
    assert tried == 939


def without(made: Plan, *, events: bool) -> Iterator[Plan]:
    """The plan with one step left out: a record or a wait, or a copy."""
    kinds = (Record, Wait) if events else (Copy,)
    for part in ("graph", "after"):
        steps = getattr(made, part)
        for n, step in enumerate(steps):
            if isinstance(step, kinds):
                yield replace(made, **{part: steps[:n] + steps[n + 1 :]})


@pytest.mark.parametrize("outside", [False, True], ids=["one graph", "open graph"])
@pytest.mark.parametrize("events", [True, False], ids=["an event", "a copy"])
def test_a_plan_with_one_step_left_out_is_found(outside: bool, events: bool) -> None:
    tried = 0
    for layers, streamed, buffers in settings(uniform=False):
        for broken in without(plan(layers, streamed, buffers, outside=outside), events=events):
            tried += 1
            with pytest.raises(Fault):
                check(broken, layers, streamed, buffers)
    assert tried > 3000


def test_copies_that_come_too_early_or_into_other_buffers_are_found() -> None:
    made = plan(4, (0, 1, 2, 3), 2)
    graph = list(made.graph)
    first = graph.index(Copy(COPIES, 2, 0))
    graph[first] = Copy(COPIES, 2, 1)
    with pytest.raises(Fault, match=r"may run beside|reads layer"):
        check(replace(made, graph=tuple(graph)), 4, (0, 1, 2, 3), 2)
    graph = [step for step in made.graph if step != Copy(COPIES, 2, 0)]
    graph.insert(1, Copy(COPIES, 2, 0))
    with pytest.raises(Fault, match="not being recorded"):
        check(replace(made, graph=tuple(graph)), 4, (0, 1, 2, 3), 2)


def test_nothing_is_copied_where_nothing_streams() -> None:
    for outside in (False, True):
        made = plan(3, (), 1, outside=outside)
        assert made == Plan(tuple(Compute(layer, None) for layer in range(3)), (), ())


# -- the library's order -----------------------------------------------------------------------------------------------

SIZE = 64


def librarys_copies(layers: int, streamed: tuple[int, ...], buffers: int) -> list[tuple[int, int]]:
    """(layer, buffer) of the copies of one pass of the library's prefetcher in its steady state, in their order."""
    trace = _core.make_trace_backend(_core.make_host_backend(1 << 16, 4096))
    memory = (ctypes.c_uint8 * (SIZE * (2 * layers + buffers)))()
    at = ctypes.addressof(memory)
    masters = [at + SIZE * layer for layer in range(layers)]
    regions = [at + SIZE * (layers + layer) for layer in range(layers)]
    ring = [at + SIZE * (2 * layers + buffer) for buffer in range(buffers)]
    prefetcher = _core.Prefetcher(trace, list(zip(regions, masters, [SIZE] * layers)), keep=memory)
    try:
        prefetcher.configure(streamed, ring, SIZE)
        for _ in range(3):
            trace.clear_log()
            prefetcher.begin_pass()
            for layer in range(layers):
                prefetcher.wait(layer)
                prefetcher.done(layer)
            prefetcher.end_pass()
            prefetcher.drain()
        copies = [record.args for record in trace.log() if record.call == _core.Call.copy]
    finally:
        prefetcher.close()
    return [(masters.index(source), ring.index(to)) for _, to, source, *_ in copies]


def test_copies_are_the_librarys_in_its_order() -> None:
    for layers, streamed, buffers in settings(uniform=True):
        theirs = librarys_copies(layers, streamed, buffers) if streamed else []
        for outside in (False, True):
            made = plan(layers, streamed, buffers, outside=outside)
            assert [(copy.layer, copy.buffer) for copy in made.copies] == theirs, (layers, streamed, buffers)


# -- what carries the steps out ----------------------------------------------------------------------------------------


class FakeCuda:
    """torch.cuda as far as a Carrier calls it; `did` has the steps as they came."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.streams: list[Any] = []
        self.current: Any = None

    def Stream(self) -> Any:
        made = SimpleNamespace(synchronize=lambda: None)
        made.wait_event = lambda event: self.did.append(("wait", made, event))
        self.streams.append(made)
        return made

    def Event(self, external: bool = False) -> Any:
        made = SimpleNamespace(external=external)
        made.record = lambda stream: self.did.append(("record", stream, made))
        return made

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before


@pytest.mark.parametrize("outside", [False, True])
def test_a_carrier_does_the_steps_on_their_streams_with_the_events_that_they_name(outside: bool) -> None:
    cuda = FakeCuda()
    main = cuda.Stream()
    made = plan(7, (0, 2, 3, 4, 6), 2, outside=outside)
    carrier = Carrier(
        SimpleNamespace(cuda=cuda),
        main,
        made,
        lambda layer: cuda.did.append(("compute", cuda.current or main, layer)),
        lambda layer: cuda.did.append(("copy", cuda.current, layer)),
    )
    known = {id(event) for _, _, event in cuda.did}
    assert len(known) == len(made.lasting) and all(event.external for _, _, event in cuda.did)
    cuda.did.clear()
    carrier.graph()
    carrier.after()
    by_name = dict(zip((MAIN, COPIES, BESIDE), cuda.streams))
    events: dict[tuple[str, int], Any] = {}
    assert len(cuda.did) == len(made.graph) + len(made.after)
    for step, (what, stream, subject) in zip((*made.graph, *made.after), cuda.did):
        assert what == type(step).__name__.lower()
        assert stream is (main if isinstance(step, Compute) else by_name[step.stream])
        if isinstance(step, Compute | Copy):
            assert subject == step.layer
        else:
            assert events.setdefault(step.event, subject) is subject
            assert (id(subject) in known) == subject.external == (step.event in made.lasting)
    assert len({id(event) for event in events.values()}) == len(events)


def test_a_graph_that_copies_the_wrong_layer_is_found(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("torch")
    real = graph_copies.plan

    def swapped(*arguments: Any, **more: Any) -> Plan:
        made = real(*arguments, **more)
        at = [n for n, step in enumerate(made.graph) if isinstance(step, Copy)][:2]
        graph = list(made.graph)
        for n, other in zip(at, reversed(at)):
            graph[n] = made.graph[other]
        return replace(made, graph=tuple(graph))

    monkeypatch.setattr(graph_copies, "plan", swapped)
    figures = []
    with on_cpu(), pytest.raises(Wrong, match="found other bytes"):
        figures.extend(graph_copies.graph_copies(small))


def test_where_torch_has_no_gpu_it_says_so(emulated_gpu: Any) -> None:
    from bench.gpu import registry

    each = next(each for each in registry.all_measures() if each.name == "copies inside graphs")
    assert [registry.missing(need, emulated=True) for need in each.needs] == [
        "needs torch on a GPU; this is the emulated driver"
    ]
    assert each.call == "serve"  # the call `measure` has no time for it
