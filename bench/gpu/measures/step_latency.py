"""What an engine's own calls cost while the worker is at work on another tenant's layers, by page size, against an idle worker.

A driver may hold locks over a mapping call that a launch needs too, and so may this library. Both show as a longer P99 here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.mover import Mover, largest_layer, mover_bytes
from bench.gpu.registry import measure, missing
from bench.gpu.results import Figure, count, figure
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks

import remap
from remap_serve.sim.results import percentile

LAYERS = 8
IN_A_ROW = 16  # calls of each kind, after which the device is waited for

Call = Callable[[], object]


def launch_of(ctx: Context, raw: DeviceTenant, made: ExitStack) -> tuple[Call, str]:
    """(one small launch on the tenant's stream, what it is)."""
    if missing("torch-cuda", emulated=ctx.emulated) is None:
        import torch

        stream = torch.cuda.ExternalStream(raw.stream)
        small = torch.zeros(1024, device="cuda")
        torch.cuda.current_stream().synchronize()
        made.enter_context(torch.cuda.stream(stream))
        return lambda: small.add_(1.0), "a kernel of torch"
    address, _ = made.enter_context(ctx.buffers(device=2 * MIB))
    return lambda: raw.backend.fill(raw.handle, address, 0, 4096), "a fill of 4 KiB"


class Calls:
    """Seconds of each kind of call, by whether the worker was at work before and after it."""

    def __init__(self, raw: DeviceTenant, mover: Mover, marks: Marks, launch: Call) -> None:
        demand = {"raw": remap.Demand(blocks=0)}
        session, tenant = raw.session, raw.tenant
        self._mover, self._raw, self._marks = mover, raw, marks
        self._bracket: Any = None

        def enter() -> None:
            self._bracket = tenant.forward(stream=raw.stream)
            self._bracket.__enter__()

        def layers() -> None:
            for layer in range(raw.layers):
                tenant.wait(layer)
                tenant.done(layer)

        def leave() -> None:
            self._bracket.__exit__(None, None, None)

        # The bracket is three calls, so that each is short enough to fall into the worker's time as a whole.
        self.kinds: dict[str, Call] = {
            "session.step": lambda: session.step(demand),
            "forward": enter,
            f"wait and done of {raw.layers} layers": layers,
            "leaving forward": leave,
            "a launch": launch,
        }
        self.busy: dict[str, list[float]] = {name: [] for name in self.kinds}
        self.idle: dict[str, list[float]] = {name: [] for name in self.kinds}

    def round(self) -> bool:
        """Each call once. Whether the worker was still at work at the end."""
        for name, call in self.kinds.items():
            before = self._mover.at_work
            begun = time.perf_counter()
            call()
            taken = time.perf_counter() - begun
            if before and self._mover.at_work:
                self.busy[name].append(taken)
            elif not before:
                self.idle[name].append(taken)
        return self._mover.at_work

    def rounds(self, most: int, *, while_busy: bool) -> None:
        """Rounds, and the device idle at the end."""
        for index in range(most):
            busy = self.round()
            if index % IN_A_ROW == IN_A_ROW - 1:
                self._marks.wait(self._marks.mark(self._raw.handle))
            if while_busy and not busy:
                break
        self._marks.wait(self._marks.mark(self._raw.handle))
        self._marks.reset()


@measure("calls beside re-pointing", full_s=24, quick_s=6)
def calls_beside_repointing(ctx: Context) -> Iterator[Figure]:
    """session.step, forward, wait and done, and a launch: P50 and P99 while the worker is at work, and while it is idle."""
    pages = ctx.pick((2 * MIB, 16 * MIB, 32 * MIB, 64 * MIB), (2 * MIB, 64 * MIB), (2 * MIB,))
    for page in pages:
        title = f"pages of {page // MIB} MiB"
        layer_bytes = largest_layer(ctx, LAYERS, ctx.pick(256 * MIB, 128 * MIB, 16 * MIB), page)
        config = remap.advanced.Knobs(dwell=10**9)
        spare = mover_bytes(LAYERS, layer_bytes, page)
        with (
            device_tenant(ctx, 4, page, page_bytes=page, spare_bytes=spare, config=config) as (raw, marks),
            ExitStack() as made,
        ):
            launch, what = launch_of(ctx, raw, made)
            mover = Mover(raw, LAYERS, layer_bytes)
            calls = Calls(raw, mover, marks, launch)
            for _ in ctx.rounds(ctx.pick(60, 20, 6), least=4, share=0.8 / len(pages)):
                calls.rounds(50, while_busy=False)
                mover.begin()
                calls.rounds(20_000, while_busy=True)
                mover.finish()
            mover.go_home()
            raw.verify(marks)
        for name in calls.kinds:
            yield from _figures(f"{name}, {title}", calls.busy[name], calls.idle[name], what)
        seen = sum(len(each) for each in calls.busy.values())
        yield count(f"calls made while the worker was at work, {title}", seen, "calls", n=mover.regions)


def _figures(title: str, busy: list[float], idle: list[float], launch: str) -> Iterator[Figure]:
    if not idle:
        raise Skip(f"{title}: the worker was never idle")
    common = {"idle_p50_us": percentile(idle, 0.5) * 1e6, "idle_p99_us": percentile(idle, 0.99) * 1e6, "launch": launch}
    if len(busy) < 3:  # the worker was faster than a call: there is nothing to tell
        return
    late = percentile(busy, 0.99)
    yield figure(f"{title}, worker at work, P99", late * 1e6, "us", busy, idle_n=len(idle), **common)
    more = late / max(1e-9, percentile(idle, 0.99))
    yield figure(f"{title}, P99 at work / idle", more, "x", busy, shown=False, **common)
