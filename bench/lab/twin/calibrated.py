"""A real engine's run, simulated again: what a pass computes and takes is calibrated from that run's own measurements.

    twin = rerun(Recording(...))        # the same requests, scheduler, arena and controller, in virtual time
    twin.step_s, twin.preemptions, ...

This is how the simulator is checked against something that is not a simulator: given what passes and copies cost, do memory,
scheduling, streaming and time come out as they did?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remap.errors import InvalidArgument
from remap.policy.hardware import Machine, Model
from remap_serve.sim.policies import WEIGHTS_ONLY, find
from remap_serve.sim.serving import Setup, TenantSetup
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import make_world

__all__ = ["CalibratedCost", "MeasuredPass", "Recording", "Rerun", "RerunStep", "calibrate", "rerun"]

_SWEEPS = 20_000
_LEAST_MEMORY = 2.01  # of the link's bandwidth: the sim backend wants more than both directions together
_UNSEEN = 1e18  # bytes/s: copies beside which computing is not slowed


@dataclass(frozen=True)
class MeasuredPass:
    """One pass: what it computed (as `Roofline.layer_s` counts it), its seconds, of which it waited for layers, and the bytes of
    copies that ended meanwhile."""

    prefill_tokens: int
    prefill_pairs: int
    decode_rows: int
    decode_context: int
    sampled_rows: int
    seconds: float
    stall_s: float = 0.0
    copied_bytes: int = 0

    @property
    def compute_s(self) -> float:
        return self.seconds - self.stall_s

    @property
    def features(self) -> tuple[float, ...]:
        """What seconds are linear in; in the order of `CalibratedCost`'s fields, then the bytes."""
        return (
            1.0,
            float(self.prefill_tokens),
            float(self.prefill_pairs),
            float(self.decode_rows),
            float(self.decode_context),
            float(self.sampled_rows),
            float(self.copied_bytes),
        )


@dataclass(frozen=True)
class CalibratedCost:
    """Seconds of a pass as a linear function of what it computes; has the two methods of `Roofline`. All seconds, >= 0.

    base_s: a pass; token_s: a prompt token; pair_s: a query-key pair of prompts; row_s: a decoding sequence; context_s: a token
    of KV that decoding reads; sampled_s: a row of the head. copied_byte_s: a byte that is copied to the device meanwhile.
    """

    layers: int
    base_s: float
    token_s: float
    pair_s: float
    row_s: float
    context_s: float
    sampled_s: float
    copied_byte_s: float = 0.0

    def layer_s(self, prefill_tokens: int, prefill_pairs: int, decode_rows: int, decode_context: int) -> float:
        """Seconds of one layer over one batch."""
        return (
            self.base_s
            + self.token_s * prefill_tokens
            + self.pair_s * prefill_pairs
            + self.row_s * decode_rows
            + self.context_s * decode_context
        ) / self.layers

    def ends_s(self, tokens: int, sampled_rows: int) -> float:
        """Seconds of the head."""
        return self.sampled_s * sampled_rows


def calibrate(passes: Sequence[MeasuredPass], layers: int, copy_bytes_per_s: float = math.inf) -> CalibratedCost:
    """Least squares with no coefficient below 0, so that the mean of the passes is met.

    copy_bytes_per_s: of the link. A byte that is copied takes no more from the computation than a memory that is twice as fast as
    the link would; without this bound, and with about as many bytes in every pass, it would stand for the passes' constant part.
    Raises InvalidArgument (passes) for fewer passes than coefficients.
    """
    rows = [one.features for one in passes]
    if len(rows) < 7:
        raise InvalidArgument(
            f"a calibration takes at least 7 passes, got {len(rows)}; nothing was fitted; measure more",
            passes=len(rows),
        )
    most = [math.inf] * 6 + [1.0 / (_LEAST_MEMORY * copy_bytes_per_s)]
    return CalibratedCost(layers, *_bounded(rows, [one.compute_s for one in passes], most))


def _bounded(rows: Sequence[Sequence[float]], values: Sequence[float], most: Sequence[float]) -> list[float]:
    """x of the least sum of (row . x - value)^2 with 0 <= x <= most, by descending along one coordinate after the other: convex,
    so it ends at the best one."""
    n = len(rows[0])
    scale = [math.sqrt(math.fsum(row[i] * row[i] for row in rows)) or 1.0 for i in range(n)]
    gram = [[math.fsum(row[i] * row[j] for row in rows) / (scale[i] * scale[j]) for j in range(n)] for i in range(n)]
    right = [math.fsum(row[i] * value for row, value in zip(rows, values)) / scale[i] for i in range(n)]
    x = [0.0] * n
    for _ in range(_SWEEPS):
        moved = 0.0
        for i in range(n):
            if gram[i][i] == 0.0:  # nobody has it
                continue
            slope = right[i] - sum(g * each for g, each in zip(gram[i], x))
            new = min(max(0.0, x[i] + slope / gram[i][i]), most[i] * scale[i])
            moved = max(moved, abs(new - x[i]))
            x[i] = new
        if moved <= 1e-13 * max(x):
            break
    return [each / size for each, size in zip(x, scale)]


@dataclass(frozen=True)
class Recording:
    """A real run of one tenant: what it was given, and what its passes and copies took.

    capacity_bytes: of the arena. kv_blocks: at the start. warm, requests: (prompt tokens, output tokens); the warm ones were
    served first and count for nothing, the others came together. gap_s: of a step, what is not its pass. copy_bytes_per_s: as
    the prefetcher measured. scheduling: settings of the chunked scheduler.
    """

    model: Model
    capacity_bytes: int
    kv_blocks: int
    block_tokens: int
    page_bytes: int
    warm: tuple[tuple[int, int], ...]
    requests: tuple[tuple[int, int], ...]
    passes: tuple[MeasuredPass, ...]
    gap_s: float
    copy_bytes_per_s: float
    scheduling: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RerunStep:
    """end_s: since the start. seconds: pass and gap. usable_blocks, alpha: while it ran."""

    end_s: float
    seconds: float
    tokens: int
    usable_blocks: int
    alpha: float


@dataclass(frozen=True)
class Rerun:
    """What the simulated run gave, the warm requests left out. steps: those that computed something."""

    steps: tuple[RerunStep, ...]
    ttft_s: tuple[float, ...]
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    compute_s: float
    stall_s: float
    duration_s: float

    @property
    def step_s(self) -> tuple[float, ...]:
        return tuple(step.seconds for step in self.steps)


def rerun(
    recording: Recording, machine: Machine, cost: CalibratedCost | None = None, policy: str = WEIGHTS_ONLY
) -> Rerun:
    """Simulate the recorded run. machine: whatever is not measured, such as the cost of mapping. cost: calibrated from the
    recording by default. Raises what `make_world` raises."""
    if cost is None:
        cost = calibrate(recording.passes, recording.model.layers, recording.copy_bytes_per_s)
    setup = Setup(
        machine.with_(
            h2d_bytes_per_s=recording.copy_bytes_per_s,
            d2h_bytes_per_s=recording.copy_bytes_per_s,
            # What a byte copied beside it costs the computation is what contention is.
            hbm_bytes_per_s=max(
                _LEAST_MEMORY * recording.copy_bytes_per_s, 1.0 / max(cost.copied_byte_s, 1.0 / _UNSEEN)
            ),
            hbm_bytes=max(machine.hbm_bytes, recording.capacity_bytes),
        ),
        (
            TenantSetup(
                recording.model.name,
                recording.model,
                recording.capacity_bytes,
                kv_blocks=recording.kv_blocks,
                cost=cost,
            ),
        ),
        scheduler="chunked",
        block_tokens=recording.block_tokens,
        page_bytes=recording.page_bytes,
        gap_s=recording.gap_s,
        scheduling=recording.scheduling,
    )
    world = make_world(setup, find(policy))
    try:
        (engine,) = world.engines.values()
        steps: list[RerunStep] = []
        started = 0.0
        advance, tenant, clock = engine.advance, engine.tenant, world.clock

        def watched(begin: float | None = None) -> Any:
            begun = clock.now
            done = advance(begin)
            if done.computed:
                seconds = clock.now - begun
                now, blocks, alpha = clock.now - started, tenant.kv.usable_blocks, float(tenant.remapped)
                steps.append(RerunStep(now, seconds, done.computed, blocks, alpha))
            return done

        engine.advance = watched  # type: ignore[method-assign]
        world.runner.serve(_items(recording.model.name, recording.warm))
        steps.clear()
        before, started = engine.result(), clock.now  # of which only what the passes count goes on
        world.runner.serve(_items(recording.model.name, recording.requests))
        after = engine.result()
    finally:
        world.close()
    return Rerun(
        steps=tuple(steps),
        ttft_s=after.ttft_s,
        output_tokens=after.output_tokens,
        preemptions=after.preemptions,
        recomputed_tokens=after.recomputed_tokens,
        compute_s=after.compute_s - before.compute_s,
        stall_s=after.stall_s - before.stall_s,
        duration_s=engine.last_finish_s - started,
    )


def _items(name: str, lengths: Sequence[tuple[int, int]]) -> list[Item]:
    return [Item(name, 0.0, prompt, output) for prompt, output in lengths]
