"""The bindings of the core as the session uses them: page numbers as ranges and sequences."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from remap import _core
from remap.errors import InvalidArgument, OutOfMemory

PAGE = 64 << 10
TENANT = 1


@pytest.fixture
def world() -> Iterator[Any]:
    """One tenant with two layers of two pages, and four free pages with places in its KV region."""
    backend = _core.make_host_backend(8 * PAGE, PAGE)
    arena = _core.Arena(backend, 8 * PAGE, PAGE, _core.Mode.aliased)
    executor = _core.Executor(arena)
    layers = [arena.add_layer_region(TENANT, name, arena.take(2, _core.Owner.params, TENANT)) for name in "ab"]
    arena.designate(arena.add_kv_region(TENANT, 4), 0, range(4, 8))
    yield SimpleNamespace(arena=arena, executor=executor, layers=layers)
    executor.stop()
    arena.check()
    arena.close()
    assert set(backend.usage().values()) == {0}


def applied(world: Any, *steps: tuple[Any, ...]) -> Any:
    plan = _core.Plan(world.arena.epoch)
    for name, *arguments in steps:
        getattr(plan, name)(*arguments)
    done = world.executor.apply(plan)
    world.executor.commit(None)
    world.executor.drain()
    return done


@pytest.mark.parametrize("pages", [range(4, 8), range(7, 3, -1), range(4, 8, 2), [4, 6], (7,), []], ids=str)
def test_a_plan_takes_ranges_and_sequences_alike(world: Any, pages: Any) -> None:
    done = applied(world, ("set_owner", pages, _core.Owner.free, _core.Owner.kv, TENANT))
    assert done.pages_moved == len(pages)
    owners = world.arena.owners()
    assert {page for page in range(8) if owners[page] == _core.Owner.kv} == set(pages)


@pytest.mark.parametrize("pages", [range(-1, 3), range(2**32 - 1, 2**32 + 1), range(10**30), [-1], [2**32]], ids=str)
def test_what_is_no_list_of_page_numbers_is_refused(world: Any, pages: Any) -> None:
    plan = _core.Plan(world.arena.epoch)
    for call, arguments in (
        (plan.set_owner, (pages, _core.Owner.free, _core.Owner.kv, TENANT)),
        (plan.point, (world.layers[0], 0, pages, True, 0)),
        (world.arena.prepare_view, (world.layers[0], pages)),
    ):
        with pytest.raises(TypeError):
            call(*arguments)


def test_pages_are_taken_around_what_is_excluded(world: Any) -> None:
    assert world.arena.tenants() == [TENANT] * 4 + [-1] * 4
    assert world.arena.take(1, _core.Owner.kv, 2, excluded=range(4, 6)) == [6]
    assert world.arena.take(1, _core.Owner.kv, 3, [7, 0, 4]) == [5]
    with pytest.raises(OutOfMemory) as short:
        world.arena.take(2, _core.Owner.kv, 3, [7])
    assert (short.value.requested, short.value.free) == (2, 1)
    with pytest.raises(InvalidArgument) as unknown:
        world.arena.take(1, _core.Owner.kv, 3, [8])
    assert unknown.value.page == 8
    assert world.arena.tenants() == [TENANT] * 4 + [-1, 3, 2, -1]
