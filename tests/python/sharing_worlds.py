"""Several tenants over plain bytes in one arena, and engines that keep a known byte in every block they hold."""

from __future__ import annotations

import random
from typing import Any

import arena_worlds
from arena_worlds import (
    PAGE,
    forward,
    make_backend,
    make_layers,
    make_spec,
    read_block,
    session_on,
    write_block,
)
from arena_worlds import times_of as times_of

import remap
from remap import _core
from remap.policy.cost import LayerTimes

TOKENS = 32


def spec(layers: int, *, min_blocks: int = 2, max_blocks: int = 400) -> remap.KVSpec:
    # A block is exactly a quarter page for 2 layers, half a page for 4, and so on: it straddles pages for most counts.
    return make_spec(layers, min_blocks=min_blocks, max_blocks=max_blocks, tokens=TOKENS)


class Engine:
    """Holds blocks, each filled with a value of its own, and looks after them as the reports say."""

    def __init__(self, session: remap.Session, name: str, layers: int, pages: int, tag: int, **options: Any) -> None:
        self.session, self.name = session, name
        self.data = make_layers([pages] * layers, tag)
        kv = options.pop("kv", None) or spec(layers)
        self.tenant = session.attach_bytes(self.data, name=name, kv=kv, **options)
        self.held: dict[int, int] = {}
        self._next = tag * 40

    def allocate(self, count: int) -> None:
        for block in self.tenant.kv.allocate(count):
            self._next = self._next % 250 + 1
            write_block(self.tenant, block, self._next)
            self.held[block] = self._next

    def free(self, blocks: Any) -> None:
        blocks = list(blocks)
        self.tenant.kv.free(blocks)
        for block in blocks:
            del self.held[block]

    def patch(self, moved: Any) -> None:
        self.held = {moved.get(block, block): value for block, value in self.held.items()}

    def check(self) -> None:
        for block, value in self.held.items():
            assert read_block(self.tenant, block) == {value}, f"{self.name}: block {block} has changed"

    def serve(self) -> None:
        forward(self.session, self.tenant, self.data)


class Shared:
    """A session with several engines. `shapes`: name -> (layers, pages a layer). A context manager."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int]],
        *,
        spare: int = 0,
        mode: str = "aliased",
        config: remap.advanced.Knobs | None = None,
        trace: bool = False,
        options: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        kv_pages = sum(-(-2 * spec(layers).block_bytes // PAGE) for layers, _ in shapes.values())
        total = sum(layers * pages for layers, pages in shapes.values()) + kv_pages + spare
        backend = make_backend(total * PAGE)
        self.backend = _core.make_trace_backend(backend) if trace else backend
        self.session = session_on(self.backend, total * PAGE, page_bytes=PAGE, mode=mode, config=config)
        self.engines: dict[str, Engine] = {}
        for tag, (name, (layers, pages)) in enumerate(shapes.items(), 1):
            self.engines[name] = Engine(self.session, name, layers, pages, tag, **(options or {}).get(name, {}))

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def tell(self, report: Any) -> Any:
        """Every engine patches its tables."""
        for name, moved in report.moved.items():
            self.engines[name].patch(moved)
        return report

    def step(self, **demand: int) -> Any:
        wanted = {name: remap.Demand(blocks=blocks) for name, blocks in demand.items()}
        report = self.tell(self.session.step(wanted))
        remap.advanced.check(self.session)
        return report

    def activate(self, name: str, *, alone: bool = False, partial: bool = False) -> Any:
        """Preempts what it is told to, and tries again: twice at most."""
        report = self.tell(self.session.activate(name, alone=alone, partial=partial))
        if not report.activated:
            for other, blocks in report.preempt.items():
                self.engines[other].free([block for block in blocks if block in self.engines[other].held])
            report = self.tell(self.session.activate(name, alone=alone, partial=partial))
        remap.advanced.check(self.session)
        return report

    def check(self, serve: bool = True) -> None:
        remap.advanced.check(self.session)
        pages = self.session.snapshot().pages
        assert pages.free + pages.params + pages.kv + pages.ring + pages.quarantine == pages.total
        for engine in self.engines.values():
            engine.check()
            if serve and engine.tenant.active:
                engine.serve()

    def churn(self, rng: random.Random) -> None:
        """Some engine allocates or frees some of its blocks."""
        engine = self.engines[rng.choice(sorted(self.engines))]
        if engine.tenant.kv.free_blocks and rng.random() < 0.6:
            engine.allocate(rng.randint(1, engine.tenant.kv.free_blocks))
        elif engine.held:
            engine.free(rng.sample(sorted(engine.held), rng.randint(1, len(engine.held))))


def set_times(
    engine: Engine, decode: LayerTimes, prefill: LayerTimes | None = None, copy_s: float | None = None
) -> None:
    arena_worlds.set_times(engine.tenant, decode, prefill, copy_s)
