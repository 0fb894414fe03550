"""Several tenants over plain bytes in one arena, and engines that keep a known byte in every block they hold."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import arena_worlds
from arena_worlds import (
    PAGE,
    External,
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
from remap.errors import Error
from remap.internals import internals
from remap.policy.cost import LayerTimes

POISON = 0xDF
SMALL = 4096  # bytes of a page, where there are many worlds
# Returns are worth it and nothing is kept in reserve: what a step does is known.
EAGER: dict[str, Any] = {
    "reserve_blocks": 0,
    "hysteresis_blocks": 0,
    "min_idle": 0.0,
    "map_s": 0.0,
    "contention": 9.0,
    "dwell": 1,
    "reload_s": 1e9,
}


def spec(layers: int, page_bytes: int = PAGE, *, min_blocks: int = 2, max_blocks: int = 400) -> remap.KVSpec:
    # A block is exactly a quarter page for 2 layers, half a page for 4, and so on: it straddles pages for most counts.
    return make_spec(layers, min_blocks=min_blocks, max_blocks=max_blocks, tokens=page_bytes // 2048)


class Engine:
    """Holds blocks, each filled with a value of its own, and looks after them as the reports say."""

    def __init__(
        self,
        session: remap.Session,
        name: str,
        sizes: Sequence[int],
        tag: int,
        *,
        kv: remap.KVSpec | None = None,
        page_bytes: int = PAGE,
        data: list[bytes] | None = None,
        **options: Any,
    ) -> None:
        self.session, self.name = session, name
        self.data = data or make_layers(sizes, tag, page_bytes)
        self.tenant = session.attach_bytes(self.data, name=name, kv=kv or spec(len(sizes), page_bytes), **options)
        self.held: dict[int, int] = {}
        self.external: External | None = None
        self._next = tag * 40

    @property
    def kv(self) -> Any:
        return internals(self.tenant).kv

    def allocate(self, count: int) -> None:
        for block in self.kv.allocate(count):
            self._next = self._next % 250 + 1
            write_block(self.tenant, block, self._next)
            self.held[block] = self._next

    def fill(self, leave: int = 0) -> None:
        """Live blocks up to the highest ids; the lowest become free again, so that blocks have to move."""
        self.allocate(self.kv.free_blocks)
        self.free(sorted(self.held)[:leave])

    def hold(self, count: int) -> None:
        """The highest ones that are free, so that a shrink has to move them."""
        before = list(self.held)
        self.fill()
        self.free([block for block in self.held if block not in before][:-count])

    def poison(self) -> None:
        """All free blocks are written and read, so that a layer which still shows them reads wrong."""
        own = self.kv.pool.external
        ids = sorted(self.external.free) if own and self.external else self.kv.allocate(self.kv.free_blocks)
        for block in ids:
            write_block(self.tenant, block, POISON)
        for block in ids:
            assert read_block(self.tenant, block) == {POISON}
        if not own:
            self.kv.free(ids)

    def free(self, blocks: Any = None) -> None:
        """All that are held by default."""
        blocks = list(self.held if blocks is None else blocks)
        self.kv.free(blocks)
        for block in blocks:
            del self.held[block]

    def patch(self, moved: Mapping[int, int]) -> None:
        after = {moved.get(block, block): value for block, value in self.held.items()}
        self.held.clear()
        self.held.update(after)

    def check(self) -> None:
        if self.kv.pool.external:
            if self.external is not None:
                self.external.check()
            return
        assert set(self.held) == set(self.kv.pool.live_ids()), f"{self.name} was not told of a move"
        for block, value in self.held.items():
            assert read_block(self.tenant, block) == {value}, f"{self.name}: block {block} has changed"

    def serve(self) -> None:
        forward(self.session, self.tenant, self.data)


class Shared:
    """A session with several engines. sizes: name -> pages of each layer. A context manager."""

    def __init__(
        self,
        sizes: Mapping[str, Sequence[int]],
        *,
        spare: int = 0,
        mode: str = "aliased",
        config: remap.advanced.Knobs | None = None,
        around: Callable[[Any], Any] = lambda backend: backend,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        page_bytes: int = PAGE,
    ) -> None:
        kv_pages = sum(-(-2 * spec(len(each), page_bytes).block_bytes // page_bytes) for each in sizes.values())
        total = sum(max(1, n) for each in sizes.values() for n in each) + kv_pages + spare
        self.backend = around(make_backend(total * page_bytes, page_bytes))
        self.session = session_on(self.backend, total * page_bytes, page_bytes, mode, config)
        self.engines: dict[str, Engine] = {}
        for tag, (name, each) in enumerate(sizes.items(), 1):
            more = (options or {}).get(name, {})
            self.engines[name] = Engine(self.session, name, each, tag, page_bytes=page_bytes, **more)

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def tell(self, report: Any) -> Any:
        """Every engine patches its tables."""
        for name, moved in (getattr(report, "moved", None) or {}).items():
            self.engines[name].patch(moved)
        return report

    def step(self, **demand: int) -> Any:
        wanted = {name: remap.Demand(blocks=blocks) for name, blocks in demand.items()}
        report = self.tell(self.session.step(wanted))
        remap.advanced.check(self.session)
        return report

    def remap(self, *args: Any, **named: Any) -> Any:
        return self.tell(remap.advanced.remap(self.session, *args, **named))

    def lend(self, *args: Any, **named: Any) -> Any:
        return self.tell(remap.advanced.lend(self.session, *args, **named))

    def place(self, *args: Any, **named: Any) -> Any:
        return self.tell(remap.advanced.place(self.session, *args, **named))

    def activate(self, name: str, **how: Any) -> Any:
        """Preempts what it is told to, and tries again: twice at most."""
        report = self.tell(self.session.activate(name, **how))
        if not report.activated:
            for other, blocks in report.preempt.items():
                self.engines[other].free([block for block in blocks if block in self.engines[other].held])
            report = self.tell(self.session.activate(name, **how))
        remap.advanced.check(self.session)
        return report

    def detach(self, name: str) -> None:
        self.session.detach(name)
        del self.engines[name]

    def owners(self) -> list[Any]:
        return self.session._arena.owners()

    def check(self, serve: bool = True) -> None:
        remap.advanced.check(self.session)
        pages = self.session.snapshot().pages
        assert pages.free + pages.params + pages.kv + pages.ring + pages.outside + pages.quarantine == pages.total
        for engine in self.engines.values():
            if serve and engine.tenant.active:
                engine.serve()
            elif serve and internals(engine.tenant)._state.kv.due_moves:  # no pass of its own finishes them
                remap.advanced.settle(self.session)
            engine.check()

    def churn(self, rng: random.Random) -> None:
        """Some engine allocates or frees some of its blocks."""
        engine = self.engines[rng.choice(sorted(self.engines))]
        if engine.kv.free_blocks and rng.random() < 0.6:
            engine.allocate(rng.randint(1, engine.kv.free_blocks))
        elif engine.held:
            engine.free(rng.sample(sorted(engine.held), rng.randint(1, len(engine.held))))


class Faulty(Shared):
    """Behind a fault decorator, with injected times: what is done is the same each time."""

    SIZES: ClassVar = {"a": (1, 2, 1, 1, 3, 1, 1), "b": (2, 1, 2, 3, 1, 2, 2, 1), "c": (1, 1, 1, 1, 1)}
    OPTIONS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, mode: str = "aliased", *, spare: int = 8, **config: Any) -> None:
        knobs = remap.advanced.Knobs(**{**EAGER, "slowdown": 9.0, **config})
        super().__init__(
            self.SIZES,
            spare=spare,
            mode=mode,
            config=knobs,
            around=_core.make_fault_backend,
            options=self.OPTIONS,
            page_bytes=SMALL,
        )
        self.fault, self.mode = self.backend, mode
        for engine in self.engines.values():
            set_times(engine, times_of(engine.tenant.layers, 1.0, 0.1), copy_s=0.1)

    def attach(self, name: str, sizes: Sequence[int], tag: int, **options: Any) -> Engine:
        self.engines[name] = Engine(self.session, name, sizes, tag, page_bytes=SMALL, **options)
        return self.engines[name]

    def settle(self) -> None:
        remap.advanced.settle(self.session)
        for engine in self.engines.values():
            internals(engine.tenant)._state.prefetcher.drain()

    def works(self) -> None:
        self.check()

    def close(self, *, silent_failure: bool = False) -> None:
        """silent_failure: a call may have failed inside a destructor, which has nobody to tell and keeps what it had."""
        self.backend.disarm()
        self.session.close()
        kept = {name for name, held in self.backend.usage().items() if held}
        assert kept <= ({"streams", "events"} if silent_failure else set()), self.backend.usage()


class Hosting(Faulty):
    """a's KV can go to host memory, and stream from there."""

    OPTIONS: ClassVar = {
        "a": {"kv": dataclasses.replace(spec(7, SMALL), layout="layer_major", host_blocks=24, streamed_blocks=8)}
    }

    def __init__(self, mode: str = "aliased") -> None:
        super().__init__(mode, spare=80)
        self.hosts: list[int] = []
        self.shown: list[int] = []

    @property
    def kv(self) -> Any:
        return self.engines["a"].kv

    def copy_out(self, count: int, below: int | None = None) -> None:
        self.engines["a"].allocate(count)
        self.kv.join()
        self.hosts += self.kv.copy_out(sorted(self.engines["a"].held)[-count:], below)

    def stream(self, count: int) -> None:
        self.shown += self.kv.stream(self.hosts[:count])

    def forget_host(self) -> None:
        """All of it, by the books: who never saw ids finds them there. Then everything can go out once more, and come in."""
        kv = self.kv
        kv.free([kv.streamed.first + host for host in kv.streamed.shows(range(kv.streamed.total))])
        kv.free_host(kv.host.live_ids())
        assert (kv.host.free_blocks, kv.streamed.used_blocks, kv.streamed.stop) == (kv.host.total, 0, 0)
        blocks = list(kv.pool.live_ids())[:4]
        hosts = kv.copy_out(blocks, len(blocks))
        assert hosts == list(range(len(blocks)))
        kv.join(kv.copy_in(hosts, blocks))
        kv.free_host(hosts)


def fill_layer(world: Shared, name: str, layer: int, first: int = 0, end: int | None = None) -> None:
    """Its bytes, as another instance would send them."""
    data = bytearray(world.engines[name].data[layer][first:end])
    if data:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        remap.advanced.settle(world.session)
        assert remap.advanced.fill_layer(world.session, name, layer, first, address, len(data))


def attempt(call: Callable[[], Any]) -> Error | None:
    """The library's error, if there is one; without its frames, which would keep alive what is released."""
    try:
        call()
    except Error as error:
        seen: BaseException | None = error
        while seen is not None:
            seen.__traceback__ = None
            seen = seen.__context__
        return error
    return None


COUNTERS = (
    *("passes", "copies", "copied_bytes", "copy_s", "misses", "stall_s", "compute_s", "seen_stall_s", "loading"),
    *("compute_times_s", "copy_times_s", "reserve_blocks"),
)


def seen(session: remap.Session) -> dict[str, Any]:
    """What a call that raised must leave as it was: the whole snapshot but for the epoch, counters and figures measured, and who
    has which page and which block."""
    snapshot, arena = session.snapshot(), session._arena
    found: dict[str, Any] = {"pages": snapshot.pages, "owners": arena.owners(), "of": arena.tenants()}
    for name, tenant in snapshot.tenants.items():
        figures = {field.name: getattr(tenant, field.name) for field in dataclasses.fields(tenant)}
        state = session._tenants[name]
        found |= {f"{name}.{key}": value for key, value in figures.items() if key not in COUNTERS}
        found[f"{name}.slots"] = state.kv.pool.owned_slots()
        found[f"{name}.ring"] = state.pages.ring
        found[f"{name}.unfilled"] = state.pages.unfilled
        # What an engine with its own allocator has returned of a change that drains, it is given and asked for again if another
        # change is tried in between and fails: it holds that until then.
        found[f"{name}.blocks"] = () if state.kv.pool.external else (state.kv.pool.live_ids(), state.kv.pool.open_ids())
    return found


def set_times(
    engine: Engine, decode: LayerTimes, prefill: LayerTimes | None = None, copy_s: float | None = None
) -> None:
    arena_worlds.set_times(engine.tenant, decode, prefill, copy_s)
