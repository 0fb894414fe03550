"""SGLang's tensor parallelism without SGLang: two processes that meet over gloo, each with the hooks around stand-ins, make the
same changes at the same places, or none. Each rank's stand-in has the whole model; a real one has a part.

What they do inside the engine is tested in tests/engines/sglang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from subprocesses import run

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_sglang_adapter import World, hooks, load_other, start, versions  # noqa: E402

RANKS = 2


class RankWorld(World):
    """The world of one rank. All ranks' books are compared after each call of SGLang's scheduler."""

    def check(self) -> None:
        super().check()
        self.same(self.adapter.tokens, self.allocator.available_size(), sorted(self.adapter._opened))
        self.same(self.tenant.remapped, self.adapter.group.target, sorted(self.adapter.held.leaving))

    def same(self, *books: Any) -> None:
        everywhere = versions.gather(books)
        assert everywhere == [books] * RANKS, everywhere

    def grow(self, short: int = 5) -> int:
        self.forward()
        self.iterate()
        return self.fill(short)


def _follows(world: RankWorld, _: pytest.MonkeyPatch) -> None:
    at_start = world.grow()
    assert world.tenant.remapped >= 1 and world.adapter.tokens > at_start
    world.finish()
    world.serve()
    assert world.tenant.remapped == 0 and world.adapter.tokens == at_start


def _gives_as_many_layers_as_it_has(world: RankWorld, _: pytest.MonkeyPatch) -> None:
    """A group of blocks takes a page of each range: what is left of one layer's pages becomes a group with the next one's."""
    at_start = world.grow(1)
    seen = set()
    while world.tenant.remapped not in seen:
        seen.add(world.tenant.remapped)
        world.forward()
        world.iterate()
        world.used += world.allocator.alloc(len(world.allocator.free_pages))
        world.evict(1)
    assert len(seen) >= 3 and world.adapter.group.refusals == 0
    world.finish()
    world.serve(300)
    assert world.tenant.remapped == 0 and world.adapter.tokens == at_start


def _leaves_where_it_is_free_on_all(world: RankWorld, _: pytest.MonkeyPatch) -> None:
    """Requests may use other ids on another rank, as long as they use as many."""
    at_start = world.grow()
    world.used += world.allocator.alloc(world.allocator.available_size())
    late = world.used[-2 * RANKS :]
    mine = late[world.adapter.rank.rank :: RANKS]
    world.allocator.free([each for each in world.used if each not in mine])
    world.used = mine
    world.serve()
    assert world.tenant.remapped >= 1 and world.adapter.held.leaving.issuperset(late)
    world.finish()
    world.serve()
    assert world.tenant.remapped == 0 and world.adapter.tokens == at_start


def _changes_nothing_where_one_rank_cannot(world: RankWorld, patch: pytest.MonkeyPatch) -> None:
    expected = world.forward()
    world.iterate()
    before = world.adapter.tokens, world.adapter._opened, world.adapter.group.target
    with patch.context() as faulty:
        if world.adapter.rank.rank:
            remap_by_hand = remap.advanced.remap

            def fail(session: Any, name: str, layers: float, *more: Any, **others: Any) -> Any:
                if layers:
                    raise remap.OutOfMemory("the driver has no more")
                return remap_by_hand(session, name, layers, *more, **others)

            faulty.setattr(remap.advanced, "remap", fail)
        world.fill(5)
    assert world.adapter.group.refusals >= 1
    assert (world.adapter.tokens, world.adapter._opened, world.adapter.group.target) == before
    assert world.tenant.remapped == 0 and world.allocator.available_size() == 0
    assert torch.equal(world.forward(), expected)
    world.evict(5)  # it can now
    assert world.tenant.remapped >= 1 and world.allocator.available_size() >= 5
    assert torch.equal(world.forward(), expected)


def _replays_a_graph_everywhere_or_nowhere(world: RankWorld, patch: pytest.MonkeyPatch) -> None:
    graphs = SimpleNamespace(model_runner=world.runner)

    def may() -> bool:
        world.iterate()
        return bool(hooks.around_can_run(lambda graphs, batch: True, graphs, None))

    world.forward()
    assert may()
    with patch.context() as late:
        if world.adapter.rank.rank:
            late.setattr(type(world.tenant), "streaming", property(lambda tenant: True))  # it is still loading
        assert not may()
    assert may()
    world.fill(5)
    assert not may()


def _new_weights_reach_all_ranks(world: RankWorld, _: pytest.MonkeyPatch) -> None:
    at_start = world.grow()
    world.finish()
    assert world.tenant.remapped >= 1 and load_other(world, seed=5)[0] is True
    world.check()
    assert world.tenant.remapped == 0 and world.adapter.tokens == at_start
    expected = world.forward()
    world.fill(5)
    assert world.tenant.remapped >= 1 and torch.equal(world.forward(), expected)


def _is_flushed(world: RankWorld, _: pytest.MonkeyPatch) -> None:
    world.grow()
    world.used += world.allocator.alloc(world.allocator.available_size())
    world.serve(3)
    world.used = []
    hooks.around_clear(lambda allocator: allocator.clear_all(), world.allocator)
    world.check()
    world.serve()
    assert world.tenant.remapped == 0


def _a_newer_version_is_tried(world: RankWorld, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hooks, "_version", "0.6.0")
    tokens = world.adapter.tokens
    assert start(patch, world).passes == 3 + 1 + 3
    world.check()
    assert world.tenant.remapped == 0 and world.adapter.tokens == tokens
    world.fill(5)
    assert world.tenant.remapped >= 1


SCENARIOS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    each.__name__.strip("_"): each
    for each in (
        _follows,
        _gives_as_many_layers_as_it_has,
        _leaves_where_it_is_free_on_all,
        _changes_nothing_where_one_rank_cannot,
        _replays_a_graph_everywhere_or_nowhere,
        _new_weights_reach_all_ranks,
        _is_flushed,
        _a_newer_version_is_tried,
    )
}


def enter(rank: int, store: str) -> None:
    """One rank's process: all scenarios, one after the other. It writes the name of each that went well."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = SimpleNamespace(world_size=RANKS, cpu_group=dist.group.WORLD)
    parallel = SimpleNamespace(tp_rank=rank, tp_group=group)
    patch = pytest.MonkeyPatch()
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.runtime_context"].get_parallel = lambda: parallel  # type: ignore[attr-defined]
    for name, scenario in SCENARIOS.items():
        with patch.context() as more:
            # Ranks take the least of their capacities.
            world = RankWorld(more, ranks=RANKS, capacity=(1600 << 10) + rank * (100 << 10))
            scenario(world, more)
            world.adapter.session.close()
        sys.stdout.write(f"{name}\n")
    dist.destroy_process_group()


def test_ranks_do_the_same_or_nothing(tmp_path: Path) -> None:
    def process(rank: int) -> Any:
        return run(f"import test_sglang_ranks as t; t.enter({rank}, {str(tmp_path / 'store')!r})", timeout_s=300)

    with ThreadPoolExecutor(RANKS) as pool:
        for rank, done in enumerate(pool.map(process, range(RANKS))):
            assert done.stdout.split() == [*SCENARIOS], f"rank {rank}: {done.stdout} {done.stderr}"
