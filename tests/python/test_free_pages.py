"""Which of a tenant's places are free: the arena's answers against obvious ones, and growth, which lists no page but its own."""

from __future__ import annotations

from arena_worlds import PAGE
from hypothesis import given, settings
from hypothesis import strategies as st

from remap import _core

PAGES = 24


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(PAGES)), st.integers(0, PAGES), st.integers(0, PAGES + 2), st.integers(0, PAGES))
def test_the_first_free_ones_of_any_order(order: list[int], taken: int, most: int, cut: int) -> None:
    arena = _core.Arena(_core.make_host_backend(PAGES * PAGE, PAGE), PAGES * PAGE, PAGE, _core.Mode.aliased)
    held = set(arena.take(taken, _core.Owner.params, 1))
    pages = _core.PageOrder(order[cut:])
    expected = [page for page in order[cut:] if page not in held]
    draft = _core.Draft(arena)
    assert draft.count_free(pages) == len(expected)
    assert draft.first_free(pages, most) == expected[:most]
    if held:
        arena.remove_tenant(1)
    arena.close()
