"""Pie event by event (its paper, sections 3.2 to 3.4 and 4.1), as a policy of simulated serving.

    layer starts    before a layer computes, Pie looks at its mapping table. If no layer is coming in, the hottest one in host
                    memory comes, if there is a place; if none is going out, the coldest one goes, unless all in host memory are
                    colder. A layer that is not there is waited for. Nothing is decided in between, so the link idles from the
                    end of a copy to the start of the next layer
    two phases      a place is taken when its copy begins and free when that has ended: m + 2 layers are away or on their way
    synchronising   a look takes `LOOK_S`, while nothing computes: the host must know that the last layer has ended
    reallocating    the expansion changes by one layer. Each layer gets its new size when it next comes in; new blocks can be
                    used once all have come in. Fewer: blocks beyond the new size are given to nobody from then on
    the next token  layers that only the next token needs come in if they are among its first `FEW`, or are to be reallocated
    adaptive        `Adaptive`

`pie-events` is adaptive, `pie-events:1.6` a fixed expansion. `pie-anytime`, `pie-anytime:1.6`: another reading, in which Pie
also decides when a copy ends while a layer is computed, and needs no look for that. Where the paper is silent it is read in
Pie's favour: only blocks in use are copied; room for a layer's new size is found at once and costs nothing; the numbers of
`Adaptive` are the best of some twenty that were tried with `pie-events` on three loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from remap.policy.hardware import Machine, Model
from remap_serve.engine.scheduler import Schedule
from remap_serve.sim.engine import SimEngine
from remap_serve.sim.passes import Cost, Pass
from remap_serve.sim.policies import Policy, find
from remap_serve.sim.pools import PiePool, VirtualClock
from remap_serve.sim.sequences import Work

__all__ = ["ANYTIME", "LOOK_S", "POLICY", "PREFIX", "Adaptive", "EventEngine", "LayerSwaps", "Window", "policy_of"]

PREFIX, ANYTIME = "pie-events", "pie-anytime"
LOOK_S = 8.3e-6
"""Of a look at the table: how soon the host sees that work on the device has ended, if it looks again and again (measured on an
H100: gpu-h100.json)."""

FEW = 4
"""Layers of the next token that may come in while this one is computed."""

HERE, LEAVING, AWAY, COMING = range(4)
_NOW_S = 1e-9
"""What is over so soon is over."""


@dataclass
class Window:
    """Some passes at one expansion. rows, seconds, passes: of those that only decode. computed_s, waited_s: of all. looks: those
    at which a layer could come in; early: of them, those at which this token needed none that is away. live: the most blocks in
    use. short: whether a request waited for blocks."""

    rows: int = 0
    seconds: float = 0.0
    passes: int = 0
    computed_s: float = 0.0
    waited_s: float = 0.0
    looks: int = 0
    early: int = 0
    live: int = 0
    short: bool = False

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass
class Adaptive:
    """How many layers should be away (section 3.4.2), decided after each window of `passes` passes that only decode.

    fewer   passes waited, for more than `forgiven` of what they computed
            or the workload has stopped scaling: with one layer fewer there were more tokens a second, by more than `margin`
            or it is low: the blocks that the last layer gave are not used, and no request waited for any
    more    the link has room: at more than `early` of the looks this token needed no layer that is away, or none is away; and
            one layer more is not known to bring waits, or no more tokens a second
    probe   what is known is forgotten after `probe` windows
    """

    passes: int = 16
    forgiven: float = 0.1
    margin: float = 0.3
    early: float = 0.1
    probe: int = 16
    windows: int = 0
    records: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Layers away -> (tokens a second, in which window). 0: passes waited."""

    def next(self, swapped: int, most: int, window: Window, blocks_at: Callable[[int], int]) -> int:
        """Layers that should be away after this window, with `swapped` away in it."""
        self.windows += 1
        self.records = {m: one for m, one in self.records.items() if self.windows - one[1] < self.probe}
        now = window.tokens_per_s
        waited = window.waited_s > self.forgiven * window.computed_s
        self.records[swapped] = 0.0 if waited and swapped else now, self.windows
        fewer, more = (self.records.get(m, (None,))[0] for m in (swapped - 1, swapped + 1))
        if swapped:
            stopped = fewer is not None and fewer > now * (1 + self.margin)
            low = not window.short and window.live <= blocks_at(swapped - 1)
            if waited or stopped or low:
                return swapped - 1
        room = not swapped or window.early > self.early * window.looks
        if room and swapped < most and (more is None or more > now * (1 + self.margin)):
            return swapped + 1
        return swapped


class LayerSwaps(Pass):
    """Passes whose KV is swapped layer by layer. resizes: changes of the expansion that are complete. Copies begin at layer
    starts and go on between passes. While both directions are busy each has the share `duplex` of its bandwidth, and copies
    take theirs of the memory's from the computation."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        model: Model,
        cost: Cost,
        pool: PiePool,
        look_s: float = LOOK_S,
        few: int = FEW,
        anytime: bool = False,
    ) -> None:
        super().__init__(clock, model, cost)
        self._pool, self._look_s, self._few, self._anytime = pool, look_s, few, anytime
        self._setup_s = machine.copy_setup_s
        self._rates = machine.h2d_bytes_per_s, machine.d2h_bytes_per_s
        self._duplex = machine.duplex
        alone = [1.0 - rate / machine.hbm_bytes_per_s for rate in self._rates]
        self._beside = 1.0, alone[0], alone[1], 1.0 - sum(self._rates) * machine.duplex / machine.hbm_bytes_per_s
        """What computation keeps of the memory's bandwidth: with no copy, one in, one out, both."""
        layers = model.layers
        self._now = float(clock.now)
        self.state = [HERE] * layers
        self._coming = self._leaving = -1  # the layer
        self._left = [0.0, 0.0]  # of the copy in and the copy out: seconds, were it alone
        self._here = layers
        self._away: list[int] = []
        self._swapped = self._target = 0
        self._started = False
        self._new: set[int] = set()  # layers that have their new size
        self._sized = False  # the layer that is coming has it
        self._copied = [0, 0]
        self._stall_s = 0.0
        self.resizes = 0
        self.window = Window()
        self.reset(pool.swapped)

    # -- the expansion ---------------------------------------------------------------------------------------------

    @property
    def resizing(self) -> bool:
        return self._target != self._swapped

    def reset(self, swapped: int) -> None:
        """So many layers away at once: while no KV is in use, there is nothing to move."""
        layers = len(self.state)
        self._swapped = self._target = swapped
        self.state[:] = [HERE] * (layers - swapped) + [AWAY] * swapped
        self._here, self._away = layers - swapped, list(range(layers - swapped, layers))
        self._coming = self._leaving = -1
        self.window = Window()

    def resize(self, swapped: int) -> None:
        """Begin to have so many layers away. Of fewer the blocks that will be gone are given to nobody from now on."""
        self._target = swapped
        self._new.clear()
        self._sized = False
        if swapped < self._swapped:
            self._pool.usable_blocks = self._pool.blocks_at(swapped)

    def _came(self, layer: int) -> None:
        if not self._sized or self._pool.live_blocks > self._pool.blocks_at(self._target):
            return  # blocks beyond the new size are in use
        self._new.add(layer)
        if len(self._new) == len(self.state):
            self._swapped = self._target
            self._pool.set(self._target)
            self.resizes += 1
            self.window = Window()

    # -- copies ----------------------------------------------------------------------------------------------------

    def _look(self, layer: int) -> None:
        """What Pie does when a layer is about to start."""
        deepest = max(self._swapped, self._target)
        if not deepest and self._here == len(self.state):
            return
        self._stall_s += self._look_s
        self._go_on(self._look_s)
        self._decide(layer)

    def _decide(self, layer: int) -> None:
        """Begin what copies may begin, with `layer` about to start or being computed."""
        deepest = max(self._swapped, self._target)
        state, layers = self.state, len(self.state)
        if self._coming < 0 and len(self._away) > deepest:
            hottest = min([(one - layer) % layers for one in self._away])
            hottest = (hottest + layer) % layers
            self.window.looks += 1
            self.window.early += hottest < layer
            if hottest >= layer or hottest < self._few or self.resizing:
                self._copy(0, hottest)
        if self._leaving < 0 and deepest and self._started and layers - self._here < deepest + 2:
            coldest = (layer - 1) % layers
            while state[coldest] != HERE and coldest != layer:
                coldest = (coldest - 1) % layers
            if coldest != layer:
                far = (coldest - layer) % layers
                if not self._away or min([(one - layer) % layers for one in self._away]) < far:
                    self._copy(1, coldest)

    def _copy(self, way: int, layer: int) -> None:
        nbytes = self._pool.live_blocks * self._pool.block_tokens * self.model.kv_bytes_per_token_layer
        self._copied[way] += nbytes
        self._left[way] = self._setup_s + nbytes / self._rates[way]
        if way:
            self.state[layer], self._leaving = LEAVING, layer
            self._here -= 1
        else:
            self.state[layer], self._coming, self._sized = COMING, layer, self.resizing
            self._away.remove(layer)

    def _go_on(self, seconds: float) -> None:
        """So many seconds in which nothing computes, and copies go on."""
        while seconds > 0 and (self._coming >= 0 or self._leaving >= 0):
            seconds -= self._step(seconds, 0.0)
        self._now += max(0.0, seconds)

    def _compute(self, layer: int, work: float) -> None:
        """A layer that takes `work` seconds if there are no copies."""
        while self._coming >= 0 or self._leaving >= 0:
            speed = self._beside[(self._coming >= 0) + 2 * (self._leaving >= 0)]
            step = self._step(work / speed, speed)
            work -= step * speed
            if work <= _NOW_S:
                return
            if self._anytime:
                self._decide(layer)
        self._now += work
        self.compute_s += work

    def _step(self, longest: float, speed: float) -> float:
        """To the end of a copy, or for `longest`. speed: of the computation beside it, 0 for none."""
        both = self._coming >= 0 and self._leaving >= 0
        share = self._duplex if both else 1.0
        step = longest
        if self._coming >= 0:
            step = min(step, self._left[0] / share)
        if self._leaving >= 0:
            step = min(step, self._left[1] / share)
        self._now += step
        if speed:
            self.compute_s += step
        done = step * share
        layer = self._coming
        if layer >= 0:
            self._left[0] -= done
            if self._left[0] <= _NOW_S:
                self.state[layer], self._coming = HERE, -1
                self._here += 1
                self._came(layer)
        layer = self._leaving
        if layer >= 0:
            self._left[1] -= done
            if self._left[1] <= _NOW_S:
                self.state[layer], self._leaving = AWAY, -1
                self._away.append(layer)
        return step

    # -- passes ----------------------------------------------------------------------------------------------------

    @property
    def stall_s(self) -> float:
        return self._stall_s

    @property
    def copied_bytes(self) -> int:
        return sum(self._copied)

    @property
    def copied_out_bytes(self) -> int:
        return self._copied[1]

    def catch_up(self) -> None:
        """Copies have gone on since the last pass."""
        self._go_on(self.clock.now - self._now)
        self._now = float(self.clock.now)

    def _enqueue(self, work: Work, layer_s: float, ends_s: float) -> float:
        self.catch_up()
        begun = self._now
        computed, waited = self.compute_s, 0.0
        state, last = self.state, len(self.state) - 1
        for layer in range(last + 1):
            self._look(layer)
            while state[layer] != HERE:
                before = self._now
                self._step(float("inf"), 0.0)
                waited += self._now - before
                self._look(layer)
            self._compute(layer, layer_s + (ends_s if layer == last else 0.0))
            self._started = True
        self._stall_s += waited
        window = self.window
        window.computed_s += self.compute_s - computed
        window.waited_s += waited
        window.live = max(window.live, self._pool.live_blocks)
        if not work.prefill_tokens:
            window.rows += work.decode_rows
            window.seconds += self._now - begun
            window.passes += 1
        return self._now


class EventEngine(SimEngine):
    """An engine whose expansion adapts before each pass, unless it is fixed.

    A request that has the engine to itself and still does not fit gets layer after layer until it does: it would wait for ever
    otherwise.
    """

    runner: LayerSwaps

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.adaptive = Adaptive()

    def launch(self) -> Schedule:
        pool: PiePool = self.tenant.kv
        if not pool.fixed:
            self._adapt(pool)
        return super().launch()

    def _adapt(self, pool: PiePool) -> None:
        runner, scheduler = self.runner, self.scheduler
        runner.catch_up()
        if not scheduler.running and scheduler.waiting and not pool.live_blocks:
            needed, swapped = scheduler.blocks_for(scheduler.waiting[0].length), pool.swapped
            while swapped < pool.most_swapped and pool.blocks_at(swapped) < needed:
                swapped += 1
            if swapped > pool.swapped:
                pool.set(swapped)
                runner.reset(swapped)
        waiting = scheduler.waiting
        if waiting and scheduler.blocks_for(waiting[0].length) > pool.free_blocks:
            runner.window.short = True
        if runner.resizing or runner.window.passes < self.adaptive.passes:
            return
        wanted = self.adaptive.next(pool.swapped, pool.most_swapped, runner.window, pool.blocks_at)
        runner.window = Window()
        if wanted != pool.swapped:
            runner.resize(wanted)


POLICY = Policy(
    PREFIX,
    "Pie event by event: looks at layer starts, two-phase updates, layers reallocated one by one, stop rule and probe",
    "pie",
    pie=(LayerSwaps, EventEngine),
)


_ANYTIME = replace(
    POLICY,
    name=ANYTIME,
    about="the same, which decides when copies end, too",
    pie=(partial(LayerSwaps, anytime=True), EventEngine),
)


def policy_of(name: str) -> Policy | None:
    """`pie-events`, `pie-anytime`, either with `:E`; None for a policy of another name. Raises InvalidArgument for an E out of
    range."""
    kind = name.partition(":")[0]
    found = {PREFIX: POLICY, ANYTIME: _ANYTIME}.get(kind)
    return None if found is None else replace(found, name=name, static=find(name.replace(kind, "pie", 1)).static)
