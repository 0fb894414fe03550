"""Which of a tenant's places are free: the arena's answers against obvious ones, and growth, which lists no page but its own."""

from __future__ import annotations

from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
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


def test_growth_lists_no_more_pages_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tens of thousands of free pages such lists took most of a step's time."""
    listed = [0]

    class Draft:
        """The session's, which notes how long the lists are that it is asked for."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                found = value(*arguments)
                if isinstance(found, list):
                    listed.append(len(found))
                return found

            value = getattr(self._inner, name)
            return call if callable(value) else value

    with remap.Session(400 * PAGE, page_bytes=PAGE, device="cpu") as session:
        tenant = session.attach_bytes(make_layers([1, 1]), name="m", kv=make_spec(2, max_blocks=6000))
        held = tenant.kv.allocate(tenant.kv.free_blocks)
        assert session.snapshot().pages.free > 300
        monkeypatch.setattr(session._changes, "draft", Draft(session._changes.draft))
        report = session.step({"m": remap.Demand(blocks=tenant.kv.usable_blocks)})
        monkeypatch.undo()
        assert not report.unmet_blocks and 0 < max(listed) < 40
        tenant.kv.free(held)
