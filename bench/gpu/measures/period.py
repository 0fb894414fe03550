"""Passes that stream against what `schedule.period` says of the same layer and copy times: what the machinery loses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks
from bench.gpu.work import Work, calibrated, work

from remap.internals import internals
from remap.policy import schedule

LAYERS = 8
WARM_UP = 3


@dataclass(frozen=True)
class Cell:
    """One setting of the grid, measured. Seconds."""

    passes: list[float]
    compute_s: list[float]
    copy_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return statistics.median(self.passes) / self.predicted_s


def run_cell(raw: DeviceTenant, marks: Marks, load: Work, units: int, passes: int) -> Cell:
    """Passes enqueued one behind the other; the layers' computations and the copies are timed in the same passes."""
    tenant, stats = raw.tenant, internals(raw.tenant)._state.prefetcher.stats
    ends: list[int] = []
    parts: list[list[tuple[int, int]]] = []

    def one_pass(keep: bool) -> None:
        row: list[tuple[int, int]] = []

        def compute(layer: int) -> None:
            if keep:
                begun = marks.mark(raw.handle)
                load.launch(units)
                row.append((begun, marks.mark(raw.handle)))
            else:
                load.launch(units)

        raw.run(compute)
        parts.append(row)

    for _ in range(WARM_UP):
        one_pass(False)
    marks.wait(marks.mark(raw.handle))
    marks.reset()
    del parts[:]
    before = stats()
    # One pass ahead of the first mark: in the steady state copies for a pass are issued during the one before.
    one_pass(False)
    ends.append(marks.mark(raw.handle))
    for _ in range(passes):
        one_pass(True)
        ends.append(marks.mark(raw.handle))
    taken = marks.gaps(ends)
    internals(tenant)._state.prefetcher.drain()
    after = stats()
    compute_s = [statistics.median(marks.between(*row[layer]) for row in parts[1:]) for layer in range(LAYERS)]
    marks.reset()
    copied = after.timed_bytes - before.timed_bytes
    copy_s = (after.copy_s - before.copy_s) / copied * raw.layer_bytes if copied else 0.0
    predicted = schedule.period(compute_s, [copy_s] * LAYERS, tenant.streamed, internals(tenant).buffers)
    return Cell(taken, compute_s, copy_s, predicted)


@measure("pass against schedule.period", full_s=20, quick_s=5)
def pass_against_period(ctx: Context) -> Iterator[Figure]:
    """A grid of alpha, beta and computation per copy; each cell in the JSON, the median and the worst in the table."""
    size = ctx.pick(128 * MIB, 64 * MIB, 2 * MIB)
    layer_bytes = ctx.fit(LAYERS * size, unit=LAYERS * 2 * MIB, host=True) // LAYERS
    lengths = ctx.pick((0.25, 1.0, 2.0), (0.5, 2.0), (0.5, 2.0))
    alphas = ctx.pick((1, 2, 4), (1, 4), (1, 4))
    grid = [(a, beta) for beta in (1, 2) for a in (*alphas, LAYERS - beta)]
    cells: list[Cell] = []
    with device_tenant(ctx, LAYERS, layer_bytes) as (raw, marks), work(ctx, raw.backend, raw.handle) as load:
        unit_s = calibrated(load, marks, raw.handle)
        raw.remap(LAYERS - 2, 2)
        copy_s = run_cell(raw, marks, load, 1, 3).copy_s
        if not copy_s:
            raise Skip("no copy was timed")
        for alpha, beta in grid:
            raw.remap(0)
            raw.remap(alpha, beta)
            for length in lengths:
                units = max(1, round(length * copy_s / unit_s))
                cell = run_cell(raw, marks, load, units, ctx.pick(16, 8, 3))
                cells.append(cell)
                yield figure(
                    f"pass / period, alpha {alpha}, beta {beta}, computation = {length:g} copies",
                    cell.ratio,
                    "x",
                    cell.passes,
                    shown=False,
                    predicted_us=cell.predicted_s * 1e6,
                    compute_us=statistics.fmean(cell.compute_s) * 1e6,
                    copy_us=cell.copy_s * 1e6,
                    work=load.kind,
                )
            raw.verify(marks)
    ratios = [cell.ratio for cell in cells]
    every = [sample for cell in cells for sample in cell.passes]
    name = f"pass / period, median of {len(cells)} settings"
    yield figure(name, statistics.median(ratios), "x", every, target=1.03, above_target=sum(r > 1.03 for r in ratios))
    yield figure("pass / period, worst of them", max(ratios), "x", every)
