"""Page tables change while kernels read the layers next to them: every byte that they read is compared.

Twice: kernels read one tenant's layers without a break while another tenant's are re-pointed; and passes read all layers of
one tenant, some of which are re-pointed between any two passes, without waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.mover import Mover, mover_bytes
from bench.gpu.reading import Reading, reading
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, seconds
from bench.gpu.tenants import PAGE, device_tenant
from bench.gpu.timing import Marks, timed

import remap

LAYERS = 8
IN_FLIGHT = 4  # rounds of readings that are enqueued and not over


class Background:
    """A thread that keeps a stream full of readings of all layers until `end`, which raises what went wrong there."""

    def __init__(self, what: Reading, layers: int, marks: Marks, stream: int) -> None:
        self._what, self._layers, self._marks, self._stream = what, layers, marks, stream
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readings", daemon=True)
        self._thread.start()
        self._begun.wait(60)

    def _run(self) -> None:
        ends: list[int] = []
        try:
            while not self._stop.is_set():
                for layer in range(self._layers):
                    self._what.read(layer)
                ends.append(self._marks.mark(self._stream))
                if len(ends) >= IN_FLIGHT:
                    oldest = ends.pop(0)
                    self._marks.wait(oldest)
                    self._marks.free(oldest)
                self._begun.set()
        except Exception as error:  # noqa: BLE001 - a thread's boundary: end() raises it
            self._error = error
            self._begun.set()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@measure("re-pointing beside kernels", full_s=14, quick_s=5)
def beside_kernels(ctx: Context) -> Iterator[Figure]:
    """One tenant is read without a break, the other's layers are pointed at the ring and back until there were 10^4 of them."""
    wanted = ctx.pick(10_000, 2_000, 160)
    layer_bytes = ctx.pick(8 * MIB, 8 * MIB, 2 * MIB)
    spare = mover_bytes(LAYERS, layer_bytes, PAGE)
    with (
        device_tenant(ctx, LAYERS, layer_bytes, spare_bytes=spare) as (raw, marks),
        ctx.stream() as stream,
    ):
        mover = Mover(raw, LAYERS, layer_bytes)
        handle = raw.backend.adopt_stream(stream)
        with reading(ctx, raw, stream) as what:
            its_marks = Marks(raw.backend)
            background = Background(what, LAYERS, its_marks, handle)
            taken: list[float] = []
            try:
                until = time.monotonic() + 0.6 * max(1.0, ctx.until - time.monotonic())
                while mover.regions < wanted and (time.monotonic() < until or len(taken) < 4):
                    taken.append(timed(lambda: (mover.turn(), remap.advanced.settle(mover.session))) / LAYERS)
            finally:
                background.end()
            wrong = what.wrong()
            for event in its_marks.events:
                raw.backend.destroy_event(event)
        mover.go_home()
        raw.verify(marks)
    yield count(
        "wrong bytes read beside re-pointing",
        wrong,
        "words",
        n=what.reads,
        target=0,
        regions=mover.regions,
        by=what.kind,
    )
    yield seconds("re-pointing a layer beside kernels", taken, shown=False, layer_bytes=layer_bytes)
    if wrong:
        raise Wrong(f"{wrong} wrong words were read while {mover.regions} regions next to them were re-pointed")


@measure("re-pointing between passes", full_s=12, quick_s=4)
def between_passes(ctx: Context) -> Iterator[Figure]:
    """The layers of one tenant, read in every pass; between two passes another choice of them is pointed at the ring."""
    passes = ctx.pick(1_500, 300, 30)
    layer_bytes = ctx.pick(8 * MIB, 8 * MIB, 2 * MIB)
    with device_tenant(ctx, LAYERS, layer_bytes) as (raw, marks):
        with reading(ctx, raw, raw.stream) as what:
            done = 0
            for index in ctx.rounds(passes, share=0.8):
                raw.run(what.read)
                remap.advanced.remap(raw.session, "raw", (3, 0, 6, 1)[index % 4], 1 + index // 4 % 2)
                done += 1
            wrong = what.wrong()
        raw.remap(0)
        raw.verify(marks)
    yield count(
        "wrong bytes read by passes between which layers moved",
        wrong,
        "words",
        n=what.reads,
        target=0,
        changes=done,
        by=what.kind,
    )
    if wrong:
        raise Wrong(f"{wrong} wrong words were read in {done} passes")
