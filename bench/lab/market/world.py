"""One GPU that many models share in virtual time: a request has lengths, a pass the time that the roofline says, and the link
copies one thing after another. A strategy decides what is on the device, and whose turn it is.

Not `remap_serve.sim`, which runs the library's own session token by token: too slow for a hundred models, thousands of requests
and a search. Of the library it uses the roofline, the certificate of first layers and the rule of turns. Decode passes of one
batch are taken together up to the next event, at the context of their middle.

A token is on time if it comes within ttft_s + i tbt_s of its request's arrival, i = 0 for the first.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from remap.policy.hardware import Machine, Model
from remap.policy.turns import Next, PresentTurn, Queue
from remap_serve.sim.loads import SHAREGPT_PAPER
from remap_serve.sim.roofline import Roofline, prefill_pairs

__all__ = ["Ask", "Device", "Served", "Strategy", "Tenant", "arrivals", "serve"]

MOST_ROWS = 64
"""Requests of one model that run at once."""
PROMPT_TOKENS = 2048
"""Of one prefill pass."""
GAP_S = 1e-3
"""Between two passes."""


@dataclass
class Ask:
    """One request. late: tokens that came late."""

    at_s: float
    prompt: int
    output: int
    made: int = 0
    late: int = 0


@dataclass
class Tenant:
    """One model on this machine, with its requests. since_s: when it began to wait for a turn."""

    number: int
    model: Model
    times: Roofline
    layer_bytes: int  # with its part of the head
    layer_s: float  # to load one layer
    waiting: deque[Ask] = field(default_factory=deque)
    running: list[Ask] = field(default_factory=list)
    since_s: float = 0.0

    @classmethod
    def of(cls, number: int, model: Model, times: Roofline) -> Tenant:
        """The head comes and goes with the layers, here a part with each. An embedding that is the head as well does so with it;
        another one lies in host memory (`attach(embedding="host")`)."""
        table = model.vocab * model.hidden * model.dtype_bytes
        tied = model.resident_bytes < 1.5 * table
        ends = model.resident_bytes - (0 if tied else table)
        nbytes = model.layer_bytes + ends // model.layers
        machine = times.machine
        return cls(
            number,
            model,
            times,
            nbytes,
            nbytes / machine.h2d_bytes_per_s + machine.copy_setup_s,
        )

    @property
    def weights(self) -> int:
        """Bytes that may come and go."""
        return self.model.layers * self.layer_bytes

    @property
    def kv_bytes(self) -> int:
        """Of what runs."""
        return sum(each.prompt + each.made for each in self.running) * self.model.kv_bytes_per_token

    def prefill_s(self, tokens: int) -> float:
        """Of one layer."""
        return self.times.layer_s(tokens, prefill_pairs(tokens), 0, 0)

    def due_s(self, ttft_s: float, tbt_s: float) -> float:
        """Of its next token."""
        dues = [each.at_s + ttft_s + each.made * tbt_s for each in self.running]
        if self.waiting:
            dues.append(self.waiting[0].at_s + ttft_s)
        return min(dues, default=math.inf)


@dataclass(frozen=True)
class Device:
    """The machine, bytes for weights and KV of all models, and the targets."""

    machine: Machine
    nbytes: int
    ttft_s: float
    tbt_s: float


class Strategy(Protocol):
    """The place of each model, and whose turn it is."""

    name: str

    def fits(self, device: Device, tenants: list[Tenant]) -> bool: ...

    def decide(self, now_s: float, turn: PresentTurn | None, busy: list[Tenant]) -> Next: ...

    def arrived(self, tenant: Tenant, now_s: float) -> None:
        """A request for a model that had none."""

    def begin(self, tenant: Tenant, now_s: float, pass_layer_s: float) -> float:
        """Its turn begins, with a pass of `pass_layer_s` seconds a layer. By how much later that pass ends."""


@dataclass(frozen=True)
class Served:
    """tokens, on_time; busy_s: of computation, link_s: of copies, of `seconds`; turns that copied something."""

    tokens: int
    on_time: int
    busy_s: float
    link_s: float
    seconds: float
    turns: int

    @property
    def attained(self) -> float:
        """Share of the tokens on time; of requests that never finished all that is lacking is late."""
        return self.on_time / self.tokens if self.tokens else 1.0


def arrivals(rates: list[float], seconds: float, seed: int) -> list[tuple[float, int, int, int]]:
    """(time, tenant, prompt, output) of Poisson arrivals at these rates, with ShareGPT's lengths."""
    found = []
    for number, rate in enumerate(rates):
        rng, at = random.Random(f"{seed} {number}"), 0.0
        while True:
            at += rng.expovariate(rate)
            if at >= seconds:
                break
            prompt, output = SHAREGPT_PAPER.draw(rng)
            found.append((at, number, prompt, output))
    return sorted(found)


def serve(
    device: Device,
    tenants: list[Tenant],
    asked: list[tuple[float, int, int, int]],
    strategy: Strategy,
    enough: float = 0.0,
) -> Served:
    """Until all are served, or until the late tokens are so numerous that at most the share `enough` can be on time."""
    pending = deque(asked)
    now, turns, busy_s = 0.0, 0, 0.0
    turn: PresentTurn | None = None
    tokens, late = sum(output for *_, output in asked), 0
    made, most_late = 0, (1.0 - enough) * tokens
    while late <= most_late:
        while pending and pending[0][0] <= now:
            at, number, prompt, output = pending.popleft()
            tenant = tenants[number]
            if not tenant.waiting and not tenant.running:
                tenant.since_s = at
                strategy.arrived(tenant, now)
            tenant.waiting.append(Ask(at, prompt, output))
        busy = [tenant for tenant in tenants if tenant.waiting or tenant.running]
        if not busy:
            if not pending:
                break
            now = pending[0][0]
            continue
        found = strategy.decide(now, turn, busy)
        tenant = tenants[int(found.name or busy[0].number)]
        delay = 0.0
        begins = turn is None or int(turn.name) != tenant.number
        until = min(found.at_s, pending[0][0] if pending else math.inf)
        room = MOST_ROWS - len(tenant.running)
        if tenant.waiting and room:
            batch: list[Ask] = []
            count = 0
            while tenant.waiting and room and (not batch or count + tenant.waiting[0].prompt <= PROMPT_TOKENS):
                batch.append(tenant.waiting.popleft())
                count, room = count + batch[-1].prompt, room - 1
            pairs = sum(prefill_pairs(each.prompt) for each in batch)
            layer_s = tenant.times.layer_s(count, pairs, 0, 0)
            seconds = tenant.model.layers * layer_s + tenant.times.ends_s(count, len(batch)) + GAP_S
            if begins:
                delay = strategy.begin(tenant, now, layer_s)
            end = now + delay + seconds
            for each in batch:
                each.made = 1
                late += end > each.at_s + device.ttft_s
            made += len(batch)
            tenant.running += batch
            passes = 0
        else:
            rows = len(tenant.running)
            context = sum(each.prompt + each.made for each in tenant.running)
            shortest = min(each.output - each.made for each in tenant.running)
            layer_s = tenant.times.layer_s(0, 0, rows, context)
            if begins:
                delay = strategy.begin(tenant, now, layer_s)
            one = tenant.times.pass_s(0, 0, rows, context) + GAP_S
            passes = max(1, min(shortest, math.ceil((until - now - delay) / one) if until < math.inf else shortest))
            each_s = tenant.times.pass_s(0, 0, rows, context + rows * passes // 2) + GAP_S
            seconds = passes * each_s
            for each in tenant.running:
                late += _late(each, now + delay, each_s, passes, device)
                each.made += passes
            made += passes * rows
            end = now + delay + seconds
        busy_s += seconds
        if begins:
            if turn is not None:
                tenants[int(turn.name)].since_s = now
            turns += delay > 0
            turn = PresentTurn(str(tenant.number), now, delay)
        tenant.running = [each for each in tenant.running if each.made < each.output]
        now = end
    link_s = float(getattr(strategy, "link_s", 0.0))
    return Served(tokens, made - late, busy_s, link_s, now, turns)


def _late(ask: Ask, begin_s: float, each_s: float, passes: int, device: Device) -> int:
    """How many of the next `passes` tokens, one each_s seconds, are late."""
    due = ask.at_s + device.ttft_s + ask.made * device.tbt_s  # of the first of them
    first = begin_s + each_s - due  # by how much that is late
    drift = each_s - device.tbt_s
    if first <= 0 and first + (passes - 1) * drift <= 0:
        return 0
    if first > 0 and first + (passes - 1) * drift > 0:
        return passes
    cross = -first / drift  # late from here on, or until here
    return passes - 1 - math.floor(cross) if drift > 0 else math.ceil(cross)


def queue_of(tenant: Tenant, device: Device, switch_s: float) -> Queue:
    """The queue that `policy.turns` asks for."""
    prompt = tenant.waiting[0].prompt if tenant.waiting else 0
    pass_s = tenant.model.layers * tenant.prefill_s(prompt) if prompt else tenant.times.pass_s(0, 0, 1, 512)
    return Queue(tenant.since_s, tenant.due_s(device.ttft_s, device.tbt_s), switch_s, pass_s)
