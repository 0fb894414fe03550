"""`Session(host_kv=)`: how much host memory a tenant's KV gets, when, and what is said where there is none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import _core
from remap.errors import InvalidArgument, InvalidState, LimitExceeded, OutOfBlocks, OutOfMemory
from remap.internals import internals
from remap.kv.spec import KVSpec
from remap.memory import host_memory

CAPACITY = 64 * PAGE
BLOCK = KVSpec(layers=2, kv_heads=1, head_dim=64, min_blocks=0, max_blocks=1).block_bytes


def session_of(tenants: str = "m", most: int = 20, **session: Any) -> remap.Session:
    made = remap.Session(CAPACITY, page_bytes=PAGE, **session)
    for name in tenants:
        attach(made, name, most)
    return made


def attach(session: remap.Session, name: str, most: int = 20, **more: Any) -> remap.Tenant:
    spec = KVSpec(layers=2, kv_heads=1, head_dim=64, min_blocks=2, max_blocks=most, **more)
    return session.attach_bytes(make_layers((1, 1)), name=name, kv=spec)


def held(session: remap.Session) -> int:
    return sum(host.allocated_bytes for host in session._host._held)


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """spare(nbytes): the machine can spare so much, beside what the arena has yet to touch of its pages."""

    def say(nbytes: int, why: str = "machine") -> None:
        untouched = (64 - 2) * PAGE  # one tenant's layers have been touched
        monkeypatch.setattr(host_memory, "host_room", lambda budget: (untouched + nbytes, why))

    return say


def kv_places(kvs: list[Any]) -> set[tuple[int, int]]:
    """(first, end) of each host store."""
    return {(kv.host.address, kv.host.address + kv.host.nbytes) for kv in kvs}


@pytest.mark.parametrize("asks", ["open_host", "offer", "copy_out"])
def test_whoever_asks_has_as_many_blocks_as_its_kv_can_ever_have(asks: str) -> None:
    with session_of(most=20) as session:
        kv = session._tenants["m"].kv
        ids = kv.allocate(1)
        if asks == "open_host":
            assert kv.open_host() == 20
        elif asks == "offer":
            kv.offer(0)
            assert kv.reclaims
        hosts = kv.copy_out(ids)
        books, address = kv.host.books, kv.host.address
        kv.offer(0)
        assert kv.open_host() == kv.host.total == 20 and (kv.host.books, kv.host.address) == (books, address)
        assert held(session) == 20 * BLOCK
        kv.join(kv.copy_in(hosts, ids))
    with pytest.raises(InvalidState):  # nothing is taken for who has gone
        kv.open_host()
    with session_of("ab", most=10**6) as session:
        assert session._tenants["a"].kv.open_host() == CAPACITY // BLOCK
        kv = session._tenants["b"].kv  # nobody who does not ask takes any
        assert kv.spec.host_blocks is None and kv.host.total == 0 and not kv.reclaims


def test_by_itself_it_takes_at_most_half_of_what_can_be_spared(spare: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "remap.host_kv")
    with session_of("m", most=1000) as session:
        spare(31 * BLOCK)
        assert session._tenants["m"].kv.open_host() == 15
    (line,) = caplog.records
    assert line.levelno == logging.INFO and "'m': 15 host blocks" in line.getMessage()


@pytest.mark.parametrize(("wanted", "spared"), [("auto", BLOCK), ("auto", 0), ("auto", -(10**9)), (0, 100 * BLOCK)])
def test_a_machine_without_spare_memory_serves_as_before(
    wanted: Any, spared: int, spare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """So does one of which none is wanted, and says nothing."""
    with session_of(host_kv=wanted) as session:
        spare(spared, "cgroup")
        kv = session._tenants["m"].kv
        kv.offer(0)
        assert kv.open_host() == 0 and not kv.reclaims and held(session) == 0
        with pytest.raises(OutOfBlocks, match="host_kv"):
            kv.copy_out(kv.allocate(1))
    told = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert len(told) == (wanted == "auto") and all("cgroup" in line for line in told)


def test_engines_that_are_made_one_after_another_have_equal_parts(caplog: pytest.LogCaptureFixture) -> None:
    """Each asks when the next model is not there yet: the first one's part is all there is, until another asks."""
    with session_of("", host_kv=60 * BLOCK) as session:
        assert held(session) == 0
        stores = []
        for name, parts in (("a", [60]), ("b", [30, 30]), ("c", [20, 20, 20])):
            stores.append(internals(attach(session, name, most=1000)).kv)
            assert stores[-1].open_host() == parts[-1]
            assert [kv.host.total for kv in stores] == parts and held(session) == 60 * BLOCK
            assert len(kv_places(stores)) == len(stores)
        # What lies in a part stays there, and whoever comes then gets nothing of it.
        tenant = session._tenants["b"]
        hosts = tenant.kv.copy_out(tenant.kv.allocate(1))
        late = attach(session, "late", most=1000).kv.host
        assert late.open() == 0 and "'late' gets no host memory" in caplog.text
        assert [kv.host.total for kv in stores] == [20, 20, 20]
        tenant.kv.join(tenant.kv.copy_in(hosts, tenant.kv.allocate(1)))
        session.detach("b")
        assert attach(session, "next", most=1000).kv.host.open() == 20
        number = attach(session, "number", host_blocks=7).kv.host  # beside them
        assert number.total == number.open() == 7


def test_more_than_the_machine_has_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "Arena", lambda *arguments: pytest.fail("an arena was made"))
    with pytest.raises(OutOfMemory, match="host memory for KV") as caught:
        session_of("", host_kv=1 << 60)
    assert caught.value.fields["requested"] == CAPACITY + (1 << 60) > caught.value.fields["limit"] > 0
    for wrong in ("some", -1, 1.5, None, True):
        with pytest.raises(InvalidArgument, match="host_kv"):
            session_of("", host_kv=wrong)


def test_what_is_refused_later(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By itself: none, and a line. A number: the error, and it can be asked again."""
    reserve, refused = host_memory.HostMemory.reserve, LimitExceeded("no more locked memory", limited_by="cgroup")

    def refuse(self: Any, nbytes: int) -> int:
        raise refused

    monkeypatch.setattr(host_memory.HostMemory, "reserve", refuse)
    with session_of() as session:
        assert session._tenants["m"].kv.open_host() == 0
        assert "no more locked memory" in caplog.text
    with session_of(host_kv=4 * BLOCK) as session:
        kv = session._tenants["m"].kv
        for ask in (kv.open_host, lambda: kv.offer(0), lambda: kv.copy_out(kv.allocate(1))):
            with pytest.raises(LimitExceeded) as caught:
                ask()
            assert caught.value is refused and kv.host.total == held(session) == 0 and not kv.reclaims
        monkeypatch.setattr(host_memory.HostMemory, "reserve", reserve)
        assert kv.open_host() == 4


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(2, 40)), max_size=12),
)
def test_all_together_never_have_more_than_the_number(blocks: int, steps: list[tuple[str, bool, int]]) -> None:
    """Whoever comes, asks and goes: all stores lie apart, and who asks has at least half of an equal part, or all that it can
    use, since nobody has used a block yet."""
    had: dict[str, bool] = {}
    with remap.Session(CAPACITY, page_bytes=PAGE, host_kv=blocks * BLOCK) as session:
        for name, asks, most in steps:
            if name not in had:
                attach(session, name, most)
                had[name] = False
            elif asks and not had[name]:
                had[name] = True
                kv = session._tenants[name].kv
                assert kv.open_host() >= min(kv.spec.max_blocks, blocks // len(had) // 2)
            elif not asks:
                session.detach(name)
                del had[name]
            kvs = [session._tenants[each].kv for each, asked in had.items() if asked]
            assert sum(kv.host.total for kv in kvs) * BLOCK <= held(session) <= blocks * BLOCK
            places = sorted(kv_places([kv for kv in kvs if kv.host.total]))
            assert all(end <= begin for (_, end), (begin, _) in zip(places, places[1:]))
            assert len(places) == sum(kv.host.total > 0 for kv in kvs)
