"""What a notebook shows of sessions, tenants, KV caches and snapshots: escaped, and whatever has become of them."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

import remap
from remap.errors import InvalidArgument, InvalidState

SPEC = remap.KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float32", min_blocks=4, max_blocks=64)
HOSTILE = '<script>"&'


class Cells(HTMLParser):
    """The text of every cell and caption; fails on a tag that is no part of a table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"table", "caption", "thead", "tbody", "tr", "th", "td"}, tag
        self.open.append(tag)
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def cells(shown: Any) -> str:
    return " | ".join(text for text in Cells(shown._repr_html_()).texts if text)


@pytest.fixture
def session() -> Iterator[remap.Session]:
    with remap.Session("2MiB", "cpu", page_bytes="16KiB") as opened:
        yield opened


def attach(session: remap.Session, name: str) -> remap.Tenant:
    return session.attach_bytes([bytes([layer]) * (64 << 10) for layer in range(2)], name=name, kv=SPEC)


def test_all_four_say_what_they_are_and_escape_a_tenants_name(session: remap.Session) -> None:
    tenant = attach(session, HOSTILE)
    tenant.kv.allocate(3)
    usable, free = tenant.kv.usable_blocks, tenant.kv.free_blocks
    assert HOSTILE not in session._repr_html_() + tenant._repr_html_()
    assert f"tenant {HOSTILE} | state | active" in cells(tenant) and "2, of which 0 stream" in cells(tenant)
    assert f"{usable} usable, {free} of them free" in cells(tenant)
    assert f"{usable} usable, {free} of them free" in cells(tenant.kv) and "64 at most" in cells(tenant.kv)
    assert cells(session) == cells(session.snapshot())
    assert "2 MiB at epoch" in cells(session) and "of 128 pages of 16 KiB" in cells(session)
    assert f"{HOSTILE} | yes | 2 | 0 | 0 | {usable}" in cells(session)
    assert repr(session) == f"<remap.Session of 2 MiB on cpu: {HOSTILE}>"
    assert repr(tenant) == f"<remap.Tenant {HOSTILE}: active, 0 of 2 layers stream, {usable} KV blocks usable>"
    assert repr(tenant.kv) == f"<remap KV cache: {usable} of 64 blocks usable, {free} free>"
    session.deactivate(HOSTILE)
    assert "state | inactive" in cells(tenant) and f"{HOSTILE} | no" in cells(session)


def test_nothing_raises_once_tenant_and_session_have_gone(session: remap.Session) -> None:
    tenant = attach(session, "a")
    seen = session.snapshot()
    session.detach("a")
    assert "detached" in cells(tenant) and "gone" in cells(tenant.kv) and "epoch" in cells(session)
    session.close()
    assert repr(session) == "<remap.Session of 2 MiB on cpu: closed>"
    assert ": detached, " in repr(tenant) and repr(tenant.kv)
    assert "state | closed" in cells(session) and "capacity | 2 MiB" in cells(session)
    assert "detached" in cells(tenant) and "gone" in cells(tenant.kv) and "a | yes" in cells(seen)


def test_a_session_that_cannot_be_asked_says_why(session: remap.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: remap.Session) -> remap.Snapshot:
        raise InvalidState("not <now>")

    monkeypatch.setattr(remap.Session, "snapshot", refuse)
    assert "InvalidState: not <now>" in cells(session)


def test_tenants_are_the_attached_ones_by_name_and_read_only(session: remap.Session) -> None:
    a, b = (attach(session, name) for name in "ab")
    with pytest.raises(InvalidArgument):
        attach(session, "a")
    tenants = session.tenants
    assert list(tenants) == ["a", "b"] and tenants["a"] is a and tenants["b"] is b
    with pytest.raises(TypeError):
        tenants["c"] = a  # type: ignore[index]
    session.detach("a")
    assert dict(session.tenants) == {"b": b} and list(tenants) == ["a", "b"]  # as of then
    session.close()
    assert dict(session.tenants) == {}
