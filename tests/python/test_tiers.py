"""Which master copies are page-locked, where not all can be: by use, in place, beside whatever goes on.

On the emulated CUDA driver, which counts the copies of memory that is not page-locked: there must be none.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec

import remap
from remap import _core
from remap.internals import internals
from remap.memory import host_memory, tiers
from remap.memory.tiers import PRICE

SIZES = [2, 3, 2, 2]
MODEL = sum(SIZES) * PAGE  # bytes of its master copies, at most
BUDGET = MODEL + PAGE  # one model's


class World:
    """Models of which one has room in page-locked memory and on the device."""

    def __init__(self, names: str, **options: Any) -> None:
        pages, budget = options.pop("pages", 14), options.pop("host_budget", BUDGET)
        where = {"platform": options.pop("platform")} if "platform" in options else {"device": "cuda:0"}
        self.session = remap.Session(pages * PAGE, page_bytes=PAGE, host_budget=budget, host_kv=0, **where, **options)
        self.models: dict[str, Any] = {}
        for tag, name in enumerate(names, 1):
            self.attach(name, tag)

    def attach(self, name: str, tag: int, sizes: Sequence[int] = SIZES, **options: Any) -> None:
        layers, kv = make_layers(sizes, tag), make_spec(len(sizes), max_blocks=600)
        options = options or {"pages": "none"}
        self.models[name] = self.session.attach_bytes(layers, name=name, kv=kv, active=False, **options), layers

    def detach(self, name: str) -> None:
        self.session.detach(name)
        del self.models[name]

    def turn(self, names: str) -> None:
        """All of the model loads, computes, and goes, one after the other."""
        for name in names:
            assert self.session.activate(name, alone=True).activated
            forward(self.session, *self.models[name])
            self.session.deactivate(name, pages="none")

    def turns(self, name: str, locked: str = "") -> int:
        """How many it takes until those are page-locked: itself by default."""
        for turns in range(40):
            if self.locked == (locked or name):
                return turns
            self.turn(name)
            self.settled()
        raise AssertionError(f"{self.locked} are page-locked")

    def settled(self) -> None:
        """No page-locking is under way, and what came of it is known."""
        locking = self.session._tiers._locking
        if locking is not None:
            locking.join()
            self.session._tiers.consider()

    @property
    def locked(self) -> str:
        """The models whose master copies are page-locked."""
        return "".join(name for name, (tenant, _) in self.models.items() if not internals(tenant)._state.host.staged)

    def in_use(self) -> int:
        """Bytes that the session's books say are page-locked."""
        return sum(internals(tenant)._state.host.nbytes for tenant, _ in self.models.values())


@pytest.fixture
def opened(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes worlds. At the end nothing is left, and no copy was of memory that is not page-locked."""
    emulated.configure(granularity=PAGE, memory=256 << 20, jitter_us=20)
    monkeypatch.setenv("REMAP_LIBCUDA", emulated.path)
    worlds: list[World] = []

    def build(names: str, **options: Any) -> World:
        worlds.append(World(names, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.session.close()
        assert set(world.session._backend.usage().values()) == {0}
        del world.session
    worlds.clear()
    assert emulated.pageable() == 0 and emulated.violations() == []


def locking_stops(monkeypatch: pytest.MonkeyPatch, world: World, behind: bool = False) -> threading.Event:
    """The model b has turns until its first master copy is about to be page-locked (behind: has just been), which waits for the
    event."""
    begun, go_on = threading.Event(), threading.Event()
    real = host_memory.use_host

    def slow(backend: Any, address: int, nbytes: int, *, staged: bool) -> None:
        if behind:
            real(backend, address, nbytes, staged=staged)
        if not staged:
            begun.set()
            assert go_on.wait(60)
        if not behind:
            real(backend, address, nbytes, staged=staged)

    monkeypatch.setattr(host_memory, "use_host", slow)
    while not begun.is_set():
        world.turn("b")
    return go_on


def test_the_model_that_loads_most_has_the_page_locked_memory(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    def addresses() -> list[Any]:
        return [internals(tenant)._state.source.master_addresses for tenant, _ in world.models.values()]

    world = opened("ab")
    assert world.locked == "a" and world.in_use() <= BUDGET
    before = addresses()
    with caplog.at_level(logging.INFO, "remap.masters"):
        assert world.turns("b") >= 2 * PRICE  # it paid for both
    (line,) = [record.getMessage() for record in caplog.records if "are being page-locked" in record.getMessage()]
    assert "'b'" in line and "staged from now on: 'a'" in line
    world.turn("abab")
    assert world.locked == "b" and world.in_use() <= BUDGET and addresses() == before
    world.turns("a")  # and back, by the same rule


def test_models_that_load_alike_stay_where_they_are(opened: Any) -> None:
    world = opened("ab")
    for _ in range(3 * int(2 * PRICE)):
        world.turn("ab")
        world.settled()
        assert world.locked == "a"


def test_one_that_is_active_keeps_what_it_has(opened: Any) -> None:
    """Copies from it may be under way. Two tenants have room on the device here."""
    world = opened("ab")
    world.attach("c", 9, [1, 1])
    assert world.session.activate("a").activated
    for _ in range(40):
        assert world.session.activate("c").activated
        world.session.deactivate("c", pages="none")
    assert "a" in world.locked
    forward(world.session, *world.models["a"])


def test_what_is_page_locked_gives_way_to_a_model_that_is_attached(opened: Any) -> None:
    world = opened("ab")
    world.turns("b")
    world.detach("b")
    world.attach("c", 7)
    assert world.locked == "c"
    world.turn("ac")


@pytest.mark.parametrize("ends", ["detach", "close"])
def test_a_model_goes_while_its_master_copies_are_being_page_locked(
    opened: Any, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    world = opened("ab")
    go_on = locking_stops(monkeypatch, world)
    world.turn("b")  # from memory that is being page-locked
    threading.Timer(0.05, go_on.set).start()
    if ends == "close":
        world.session.close()
        return
    world.detach("b")
    world.turn("a")
    assert world.locked == ""


def faulty() -> tuple[Any, remap.advanced.Platform]:
    backend = _core.make_fault_backend(_core.make_cuda_backend(host_budget_bytes=BUDGET))
    return backend, remap.advanced.Platform(backend=backend)


def test_a_driver_that_refuses_leaves_all_right(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    backend, platform = faulty()
    world = opened("ab", platform=platform)
    backend.arm(_core.Call.use_host, 1)
    with caplog.at_level(logging.WARNING, "remap.masters"):
        for _ in range(12):
            world.turn("b")
            world.settled()
    assert [record for record in caplog.records if "'a' cannot be staged" in record.getMessage()]
    backend.disarm()
    world.turn("abab")


def test_turns_in_any_order_find_the_right_bytes(opened: Any) -> None:
    """While page-locking goes on, and three models share room for one."""
    changes = 0
    for seed in range(3):
        rng = random.Random(seed)
        world = opened("abc")
        before = world.locked
        for step in range(80):
            if step % 20 == 0:
                favourite = rng.choice("abc")
            world.turn(favourite if rng.random() < 0.85 else rng.choice("abc"))
            if rng.random() < 0.3:
                world.settled()
            changes, before = changes + (world.locked != before), world.locked
            assert world.in_use() <= BUDGET
        remap.advanced.check(world.session)
        world.session.close()
    assert changes >= 3


def test_a_weights_file_is_page_locked_where_it_is(opened: Any, tmp_path: Any) -> None:
    """As one range, since layers that lie one after another share OS pages."""
    for name in ("transformers", "safetensors"):
        pytest.importorskip(name)
    torch = pytest.importorskip("torch")
    from models import ids_for, kv_spec, logits_of, make, save_weights

    model = make("llama")
    path, ids = save_weights(model, tmp_path), ids_for(2, 8)
    expected = logits_of(model, ids)
    world = opened("a", pages=70, host_budget=2 << 20)
    while world.session._host.spare()[0] > 1 << 20:  # others have the budget, and load nothing
        world.attach(f"a{len(world.models)}", len(world.models))
    kv = kv_spec(model, max_blocks=4000)
    tenant = world.session.attach(model, name="m", kv=kv, weights=path, active=False, pages="none")
    world.models["m"] = tenant, None
    assert "m" not in world.locked and internals(tenant)._state.source.keep_alive[0].files
    for _ in range(40):
        assert world.session.activate("m", alone=True).activated
        assert torch.equal(logits_of(model, ids), expected)
        world.session.deactivate("m", pages="none")
        world.settled()
    assert "m" in world.locked and world.in_use() <= 2 << 20


def test_one_that_is_too_large_keeps_no_other_from_its_turn(opened: Any) -> None:
    world = opened("ab", pages=40)
    world.attach("c", 3, [2 * each for each in SIZES])
    for _ in range(10):
        for name in "ccb":  # of which the first can never have what it would take
            world.turn(name)
            world.settled()
    assert world.locked == "b"


@pytest.mark.parametrize("favourite", ["a", "b"])
def test_what_was_refused_midway_holds_the_budget_from_no_other(opened: Any, favourite: str) -> None:
    backend, platform = faulty()
    world = opened("ab", platform=platform)
    backend.arm(_core.Call.use_host, len(SIZES) + 2)  # the second of those that are to be page-locked
    while internals(world.models["b"][0])._state.host.nbytes == 0:
        world.turn("b")
        world.settled()
    backend.disarm()
    assert world.locked == ""  # a part of it is
    world.turns(favourite)
    assert world.in_use() <= BUDGET
    world.turn("abab")


def test_no_thread_for_it_is_a_line_of_log(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    world = opened("ab")
    with monkeypatch.context() as patched:
        patched.setattr(tiers._Locking, "start", refuse)
        world.turn("b" * 24)
    assert "can't start new thread" in caplog.text
    world.turn("abab")
    world.turns("b")


def test_copies_behind_a_pass_end_before_their_master_copies_are_staged(opened: Any, emulated: Any) -> None:
    """The ring is filled again for the next pass, which an inactive tenant does not make."""
    sizes = [2] * 6
    world = opened("", pages=40, host_budget=(sum(sizes) + 1) * PAGE)
    world.attach("a", 1, sizes, resident_layers=3)
    world.attach("b", 2, sizes)
    assert world.locked == "a"
    assert world.session.activate("a").activated
    for _ in range(12):
        forward(world.session, *world.models["a"])
    for _ in range(60):
        assert world.session.activate("b").activated
        world.session.deactivate("b", pages="none")
    assert world.locked == "a"
    emulated.change(jitter_us=100_000)
    forward(world.session, *world.models["a"])
    world.session.deactivate("a")
    world.settled()
    emulated.change(jitter_us=20)
    assert world.locked == "b"


def test_a_model_is_attached_while_another_is_being_page_locked(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget has room for either."""
    world = opened("ab")
    go_on = locking_stops(monkeypatch, world, behind=True)
    needed = sum(internals(world.models["b"][0])._state.source.layer_bytes[: len(SIZES)])
    assert world.session._host.spare()[0] <= BUDGET - needed  # all of it is taken, though a part is page-locked yet
    world.attach("c", 7)
    go_on.set()
    world.settled()
    assert world.locked == "b"
    world.turn("abc")


def test_a_session_is_dropped_while_master_copies_are_being_page_locked(
    opened: Any, monkeypatch: pytest.MonkeyPatch, emulated: Any
) -> None:
    world = World("ab")
    go_on = locking_stops(monkeypatch, world)
    (thread,) = [each for each in threading.enumerate() if each.name == "remap-tiers"]
    del world
    gc.collect()
    go_on.set()
    thread.join()
    assert thread.error is None  # type: ignore[attr-defined]
