"""Engines on the pages of a broker, without the engines: who gives up the blocks of an engine with its own allocator, which sizes
the adapters' settings may name, and a transformers model that gets its KV cache from another process's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from broker_member import LAYER_PAGES, LAYERS, PAGE, attached, opened

import remap
from remap.adapters.arenas import SharedSession, join
from remap.adapters.settings import Settings
from remap.broker.server import Broker
from remap.errors import InvalidArgument, InvalidState
from remap.ranks import Rank, ids

PAGES = 96
OWN = LAYERS * LAYER_PAGES + 2
ON = {"REMAP_ENABLE": "1"}


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """It waits for members as long as a busy machine takes."""
    monkeypatch.setattr("remap.broker.server.RECALL_S", 60.0)
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as made:
        yield made


def read(broker: Broker, **more: str) -> Settings:
    settings = Settings.read({**ON, "REMAP_ARENA": f"unix:{broker.path}", **more})
    assert settings is not None
    return settings


class Allocator:
    """An engine's own: all blocks are its, all of them free, and it notes in which thread they come and go."""

    def __init__(self, tenant: remap.Tenant) -> None:
        self.tenant, self.threads = tenant, set[str]()
        tenant.kv.subscribe(self.changed, external=True)

    def changed(self, added: Sequence[int], withdrawn: Sequence[int]) -> None:
        self.threads.add(threading.current_thread().name)
        self.tenant.kv.returned(list(withdrawn))


# -- the blocks of an engine with its own allocator --------------------------------------------------------------------


def burst(session: remap.Session) -> Allocator:
    """It takes all pages; then its controller forgets that it has needed them."""
    allocator = Allocator(attached(session, "one"))
    session.step({"one": remap.Demand(5000, free=0)})
    for _ in range(200):
        session.step({"one": remap.Demand(0, free=allocator.tenant.kv.usable_blocks)})
    return allocator


def test_blocks_of_an_engine_that_serves_leave_in_its_own_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remap.joined.STEP_S", 60.0)
    with opened(broker) as one, opened(broker) as two:
        allocator = burst(one)
        assert broker.ledger.free == 0
        done: list[Any] = []
        other = threading.Thread(target=lambda: done.append(attached(two, "two")), name="other")
        other.start()
        while other.is_alive():  # as a scheduler steps
            one.step({"one": remap.Demand(0, free=allocator.tenant.kv.usable_blocks)})
            other.join(0.001)
        assert done
        assert broker.ledger.held[2] >= OWN
        assert allocator.threads == {threading.current_thread().name}
        remap.advanced.check(one)
        remap.advanced.check(two)


def test_those_of_one_that_sleeps_leave_at_once(broker: Broker) -> None:
    with opened(broker) as one, opened(broker) as two:
        allocator = burst(one)
        one.deactivate("one")
        allocator.threads.clear()
        attached(two, "two")  # nobody steps
        assert allocator.threads == {"remap-member"}
        assert one.activate("one").activated


def test_an_engine_that_makes_no_step_delays_others_only_for_a_while(broker: Broker) -> None:
    with opened(broker) as one, opened(broker) as two:
        allocator = burst(one)
        with pytest.raises(remap.OutOfMemory):
            attached(two, "two")
        assert broker.ledger.free == 0
        one.step({"one": remap.Demand(0, free=allocator.tenant.kv.usable_blocks)})  # now it hears of it
        end = time.monotonic() + 60
        while broker.ledger.free < OWN:
            assert time.monotonic() < end, "they come"
            time.sleep(0.005)
        attached(two, "two")


def test_a_scheduler_in_another_process_hears_of_it_when_its_engine_wakes(broker: Broker) -> None:
    pytest.importorskip("torch")
    with opened(broker) as one, opened(broker) as two:
        rank = Rank(one, attached(one, "one"), 0)
        rank.listen(None)
        grown = rank.step(5000, 0)
        assert grown is not None and broker.ledger.free == 0
        rank.sleep()
        attached(two, "two")
        woken = rank.wake()
        assert ids(woken.open) < ids(grown.open)
        assert len(ids(woken.open)) == rank.tenant.kv.usable_blocks
        assert rank.tenant.kv.live_blocks == rank.tenant.kv.usable_blocks  # nothing that has left is waited for
        remap.advanced.check(one)


def test_a_request_is_not_preempted_while_others_are_asked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose requests cannot wait gets what an idle engine elsewhere gives."""
    pytest.importorskip("torch")
    monkeypatch.setattr("remap.ranks._PATIENT_S", 60.0)
    with opened(broker) as one, opened(broker) as two:
        allocator = burst(one)
        one.deactivate("one")
        rank = Rank(two, attached(two, "two"), 0)
        rank.listen(None)
        had = rank.tenant.kv.usable_blocks
        assert broker.ledger.free == 0
        report = rank.step(40, 0)
        assert report is not None and report.unmet == 0
        assert rank.tenant.kv.usable_blocks >= had + 40
        assert allocator.tenant.kv.usable_blocks >= 8


def test_a_wait_that_brings_nothing_is_not_repeated_soon(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with opened(broker) as alone:
        rank = Rank(alone, attached(alone, "alone"), 0)
        rank.listen(None)
        with monkeypatch.context() as at_once:
            at_once.setattr("remap.ranks._PATIENT_S", 0.0)
            rank.step(5000, 0)
        assert broker.ledger.free == 0
        waits: list[float] = []
        monkeypatch.setattr("remap.ranks._AGAIN_S", 0.0)
        monkeypatch.setattr("remap.ranks.time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
        assert rank.step(5000, 0) is None
        assert waits
        waits.clear()
        monkeypatch.setattr("remap.ranks.time", SimpleNamespace(sleep=waits.append, monotonic=lambda: 0.0))
        assert rank.step(5000, 0) is None
        assert not waits


# -- the settings --------------------------------------------------------------------------------------------------------


def test_capacity_and_page_size_are_the_brokers(broker: Broker) -> None:
    for more in ({}, {"REMAP_CAPACITY": str(PAGES * PAGE), "REMAP_PAGE_BYTES": str(PAGE)}):
        with join(read(broker, **more), "cpu") as session:
            assert (session.capacity_bytes, session.broker) == (PAGES * PAGE, str(broker.path))
    for name, value in (("REMAP_CAPACITY", 1 << 20), ("REMAP_PAGE_BYTES", 1 << 21)):
        with pytest.raises(InvalidArgument, match=name) as refused:
            join(read(broker, **{name: str(value)}), "cpu")
        assert (refused.value.name, refused.value.value) == (name, value)
        assert refused.value.broker == {"REMAP_CAPACITY": PAGES * PAGE, "REMAP_PAGE_BYTES": PAGE}[name]


def test_what_cannot_join_says_why(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="cuda:0") as refused:
        join(read(broker), "cuda:0")
    assert refused.value.device == "cuda:0"
    with pytest.raises(InvalidArgument, match="remap serve") as missing:
        join(read(broker, REMAP_ARENA=f"unix:{tmp_path}/nobody"), "cpu")
    assert missing.value.path == f"{tmp_path}/nobody"
    with pytest.raises(InvalidArgument, match="REMAP_ARENA"):
        read(broker, REMAP_ARENA="unix:")


def test_engines_of_one_process_are_one_member(broker: Broker) -> None:
    arena, settings = SharedSession(), read(broker)
    size = {"capacity": PAGES * PAGE, "device": "cpu", "page_bytes": PAGE, "copy_chunk_bytes": 0}
    names = []
    for _ in range(2):
        assert arena.join(settings, "cpu") == PAGES * PAGE
        session = arena.enter(**size)
        names.append(arena.name_for("models/llama"))
        attached(session, names[-1])
    assert names == ["llama", "llama-2"]
    assert broker.ledger.held == {1: 2 * OWN}
    for name in names:
        arena.leave(name)
    assert session.closed


def test_a_start_that_failed_leaves_nothing_to_the_next_one(broker: Broker) -> None:
    arena, settings = SharedSession(), read(broker)
    arena.join(settings, "cpu")  # and its engine failed
    before = arena.session
    arena.join(settings, "cpu")
    assert before.closed and not arena.session.closed
    arena.session.close()


# -- transformers --------------------------------------------------------------------------------------------------------


def test_a_transformers_model_joins_by_the_environment_alone(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member has all the pages that the answer takes, and gives them while `generate` waits."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from attached_models import llama

    monkeypatch.setenv("REMAP_ARENA", f"unix:{broker.path}")
    torch.manual_seed(0)
    model = llama()
    prompt = torch.arange(1, 9)[None]
    alone = model.generate(prompt, max_new_tokens=50, do_sample=False)
    with opened(broker) as other, remap.attach(model) as mine:
        assert mine.session.broker == str(broker.path)
        tenant = attached(other, "other")
        other.step({"other": remap.Demand(5000)})
        assert broker.ledger.free == 0
        for _ in range(200):
            other.step({"other": remap.Demand(0)})
        had, first = broker.ledger.held, tenant.kv.usable_blocks
        assert torch.equal(model.generate(prompt, max_new_tokens=50, do_sample=False), alone)
        now = broker.ledger.held
        assert (now[1] < had[1], now[2] > had[2]) == (True, True)  # numbered in the order of joining
        assert tenant.kv.usable_blocks < first
    with pytest.raises(InvalidArgument, match="broker's"):
        remap.attach(model, 1 << 20, f"unix:{broker.path}")
