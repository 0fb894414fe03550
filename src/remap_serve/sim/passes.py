# SPDX-License-Identifier: Apache-2.0
"""The duration of a simulated pass, and its work on the device.

    SessionPass   on a stream of the sim backend, through `tenant.forward`: as the production path on a GPU. Streamed
                  layers are waited for and given back layer by layer; the copies, and how long they hold the computation up,
                  are the prefetcher's and the backend's, not a formula's.
    PiePass       Pie's pipeline in closed form (see there): it has no counterpart in the library.

Computation is layer by layer from the roofline; the embedding comes before the first layer, the norm and the head after the last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from remap.internals import internals
from remap.policy.hardware import Machine, Model
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.streaming import streamed
from remap_serve.sim.sequences import Work

__all__ = ["Cost", "Pass", "PiePass", "PieTimes", "SessionPass", "sampled"]


class Cost(Protocol):
    """The time of computing: `Roofline`, or something measured."""

    def layer_s(self, prefill_tokens: int, prefill_pairs: int, decode_rows: int, decode_context: int) -> float:
        """Seconds of one layer over one batch."""

    def ends_s(self, tokens: int, sampled_rows: int) -> float:
        """Seconds of the work outside of layers."""


class Pass(ABC):
    """The runner of a simulated engine: a pass takes the time that computing would.

    passes, compute_s: how many there have been, and their seconds without stalls. slow >= 1: how many times as long computation
    takes now because others compute beside it. copied_bytes: of whole requests or KV layers, both directions; parameters are
    not in it. copied_out_bytes: of them, device to host.
    """

    def __init__(self, clock: Any, model: Model, cost: Cost) -> None:
        self.clock = clock
        self.model = model
        self.cost = cost
        self.slow = 1.0
        self.passes = 0
        self.compute_s = 0.0

    @property
    @abstractmethod
    def copied_bytes(self) -> int:
        """Of whole requests or KV layers."""

    @property
    @abstractmethod
    def copied_out_bytes(self) -> int:
        """Of them, device to host."""

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """As `remap_serve.engine.engine.Runner`: from the start of the pass to its end."""
        self.clock.advance_to(self.start(chunks))
        return sampled(chunks)

    def start(self, chunks: Sequence[Chunk]) -> float:
        """Enqueue the pass. Returns the virtual time when it ends."""
        work = Work.of(chunks)
        layer_s = self.slow * self.cost.layer_s(
            work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_context
        )
        ends_s = self.slow * self.cost.ends_s(work.tokens, work.parts)
        self.passes += 1
        return self._enqueue(work, layer_s, ends_s)

    @property
    @abstractmethod
    def stall_s(self) -> float:
        """Seconds for which passes have waited for copies, as far as is known."""

    @abstractmethod
    def _enqueue(self, work: Work, layer_s: float, ends_s: float) -> float:
        """layer_s: of computing one layer; ends_s: of the work outside of layers. Returns when the pass ends."""


def sampled(chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
    """The result of a pass: the chunks that have a token more, and tokens that stand for any."""
    samplers = [chunk for chunk in chunks if chunk.start + chunk.count == chunk.sequence.length]
    return samplers, [0] * len(samplers)


class SessionPass(Pass):
    """Passes of an attached tenant, on a stream of its own. KV copied to and from host memory for requests that are
    swapped is enqueued there, so the next pass waits for it."""

    def __init__(self, backend: Any, tenant: Any, cost: Cost, model: Model) -> None:
        super().__init__(backend, model, cost)
        self._backend = backend
        self._tenant = tenant
        self._layers = model.layers
        self.stream: int = backend.create_stream()
        self._swap_s = 0.0
        self._streamed: list[int] = []

    def start(self, chunks: Sequence[Chunk]) -> float:
        self._streamed = streamed(chunks)
        return super().start(chunks)

    @property
    def stall_s(self) -> float:
        return self._swap_s + float(internals(self._tenant).stats().stall_s)

    def _enqueue(self, work: Work, layer_s: float, ends_s: float) -> float:
        backend, tenant, stream = self._backend, self._tenant, self.stream
        if tenant.kv.host.total:  # its last pass has ended, so it still waits for copies alone
            self._swap_s += max(0.0, backend.stream_end(stream) - backend.now)
        with tenant.forward(phase=work.phase, tokens=work.tokens, stream=stream, streamed=self._streamed):
            if not tenant.streaming:
                backend.compute(stream, self._layers * layer_s + ends_s)
            else:
                self._layer_by_layer(layer_s, ends_s)
        self.compute_s += self._layers * layer_s + ends_s
        return float(backend.stream_end(stream))

    def _layer_by_layer(self, layer_s: float, ends_s: float) -> None:
        # Layers that are in place need no waiting: they are computed together with what follows them.
        backend, tenant, stream = self._backend, self._tenant, self.stream
        ready, wait, done = internals(tenant).ready, tenant.wait, tenant.done
        pending = 0.0
        for layer in range(self._layers):
            if ready(layer):
                pending += layer_s
                continue
            if pending:
                backend.compute(stream, pending)
            wait(layer)
            backend.compute(stream, layer_s)
            done(layer)
            pending = 0.0
        backend.compute(stream, pending + ends_s)

    @property
    def copied_bytes(self) -> int:
        kv = internals(self._tenant).kv
        return int(kv.copied_out_bytes + kv.copied_in_bytes + internals(self._tenant).stats().block_bytes)

    @property
    def copied_out_bytes(self) -> int:
        return int(internals(self._tenant).kv.copied_out_bytes)


@dataclass(frozen=True)
class PieTimes:
    """One pass with m of n layers' KV in host memory: seconds of computation, and of the whole."""

    compute_s: float
    pass_s: float

    @property
    def stall_s(self) -> float:
        return self.pass_s - self.compute_s


class PiePass(Pass):
    """Pie (section 3): the KV of m layers is in host memory at any time; before a layer runs its KV is copied in, and that of the
    layer last used is copied out. Copies are in first in, first out order over m + 2 layers, so a pass copies m + 2 layers' KV in
    and as many out:

        pass = max(computation, (m + 2) t_in, (m + 2) t_out)

    (Eq. 5 of Oneiros has the same form.) Where copies are hidden that is exact. Where they are not, Pie's protocol, run event by
    event, takes a little longer if copies begin at any time, about n / (n - 1) of it with up to half of the layers away and more
    beyond, and far longer if they begin when a layer starts alone: the simulation is on Pie's side. Only with directions as
    unequal as a GH200's and few layers away is it up to 6 % quicker, as not every copy is in the slower direction's way.

    t = setup + bytes of one layer's KV in use / bandwidth, and both directions run at once, so each has the share `duplex` of its
    bandwidth. While copies run they take their share of the device memory's bandwidth from the computation, as the sim backend
    charges it.
    """

    def __init__(
        self,
        clock: Any,
        machine: Machine,
        model: Model,
        cost: Cost,
        used_tokens: Callable[[], int],
        swapped_layers: Callable[[], int],
    ) -> None:
        super().__init__(clock, model, cost)
        self._machine = machine
        self._used_tokens = used_tokens
        self._swapped_layers = swapped_layers
        self._stall_s = 0.0
        self._copied_bytes = 0
        # Of the last pass that only decoded; and its computation if nothing were copied.
        self.last = PieTimes(0.0, 0.0)
        self._alone_s = 0.0

    @property
    def stall_s(self) -> float:
        return self._stall_s

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes

    @property
    def copied_out_bytes(self) -> int:
        return self._copied_bytes // 2

    def times(self, layer_s: float, ends_s: float, used_tokens: int, swapped: int) -> PieTimes:
        """A pass with `swapped` = m layers' KV in host memory and KV of `used_tokens` tokens in all. Pure."""
        machine, n = self._machine, self.model.layers
        compute = n * layer_s + ends_s
        if swapped == 0:
            return PieTimes(compute, compute)
        nbytes = used_tokens * self.model.kv_bytes_per_token_layer
        moved = min(swapped + 2, n)
        rate_in, rate_out = machine.h2d_bytes_per_s * machine.duplex, machine.d2h_bytes_per_s * machine.duplex
        copy_in = moved * (machine.copy_setup_s + nbytes / rate_in)
        copy_out = moved * (machine.copy_setup_s + nbytes / rate_out)
        taken = (rate_in + rate_out) / machine.hbm_bytes_per_s
        beside = min(compute / (1.0 - taken), min(copy_in, copy_out))
        slowed = compute + beside * taken
        return PieTimes(slowed, max(slowed, copy_in, copy_out))

    def _enqueue(self, work: Work, layer_s: float, ends_s: float) -> float:
        swapped = self._swapped_layers()
        # A pass of prompts alone reads no request's KV: only its own is copied, and out. Charged as if both ways.
        used = self._used_tokens() if work.decode_rows else work.prefill_tokens
        times = self.times(layer_s, ends_s, used, swapped)
        if not work.prefill_tokens:
            self.last, self._alone_s = times, self.model.layers * layer_s + ends_s
        self.compute_s += times.compute_s
        self._stall_s += times.stall_s
        if swapped:
            moved = min(swapped + 2, self.model.layers)
            self._copied_bytes += 2 * moved * used * self.model.kv_bytes_per_token_layer
        return float(self.clock.now) + times.pass_s

    def hidden(self, used_tokens: int, most: int, slack: float = 0.0) -> int:
        """The largest m <= most whose copies the last decoding pass would have hidden, with KV of `used_tokens` in use:
        (m + 2) max(t_in, t_out) <= computation (1 + slack), as slow as it is while copies run."""
        machine = self._machine
        nbytes = used_tokens * self.model.kv_bytes_per_token_layer
        rate = min(machine.h2d_bytes_per_s, machine.d2h_bytes_per_s) * machine.duplex
        copy = machine.copy_setup_s + nbytes / rate
        taken = (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s) * machine.duplex / machine.hbm_bytes_per_s
        return max(0, min(most, math.floor(self._alone_s / (1.0 - taken) * (1.0 + slack) / copy) - 2))
