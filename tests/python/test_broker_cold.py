"""Models of several processes that take turns with the pages of one broker: an idle one gives its layers up when another needs
pages for its own, and takes others when it is to serve again."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import numpy as np
from arena_worlds import make_spec
from broker_member import PAGE, SessionBytes, opened, until

import remap
from remap.broker.ledger import Ledger
from remap.broker.messages import Grant, Recall, pages_of, runs_of
from remap.broker.server import Broker
from remap.errors import OutOfMemory
from remap.internals import internals
from remap.policy.turns import PresentTurn
from remap.ranks import Rank, ids

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
LAYERS, LAYER_PAGES = 6, 4
BLOCKS = 8
KV = 3  # pages of these blocks; the first one has two whole ones
WHOLE = LAYERS * LAYER_PAGES + KV
PAGES = WHOLE + 7  # room for one model and a bit


def check_layers(session: remap.Session, tenant: remap.Tenant, masters: list[np.ndarray], memory: SessionBytes) -> None:
    """A pass finds every layer's bytes. (Outside of one, layers that were asked back may still be loading.)"""
    remap.advanced.check(session)
    with tenant.forward():
        for layer, master in enumerate(masters):
            tenant.wait(layer)
            address = remap.advanced.layer_address(session, tenant.name, layer)
            assert memory.read(address, len(master)) == master.tobytes()
            tenant.done(layer)


class Model:
    """A session of its own, with one tenant."""

    def __init__(self, broker: Broker, name: str, value: int, *, idle: bool = True, **more: Any) -> None:
        self.name, self.session = name, opened(broker)
        self.masters = [np.full(LAYER_PAGES * PAGE - 99, value + layer, dtype=np.uint8) for layer in range(LAYERS)]
        # min_idle: it gives as soon as it is inactive.
        knobs = remap.advanced.Knobs(reserve_blocks=0, min_idle=0.0 if idle else 1e9, **more)
        spec = make_spec(LAYERS, min_blocks=BLOCKS, max_blocks=4 * PAGES)
        self.tenant = self.session.attach_bytes(self.masters, name=name, kv=spec, config=knobs)
        self.memory = SessionBytes(self.session)

    @property
    def cold(self) -> int:
        return len(self.session.snapshot().tenants[self.name].cold)

    def sleep(self, pages: str = "own") -> None:
        self.session.deactivate(self.name, pages=pages)

    def wake(self) -> remap.ActivationReport:
        return self.session.activate(self.name)

    def check(self) -> None:
        check_layers(self.session, self.tenant, self.masters, self.memory)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as made:
        yield made


@pytest.fixture
def opened_here() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def two(broker: Broker, stack: ExitStack) -> tuple[Model, Model]:
    """Both attached: the first one has given the second one its layers."""
    models = []
    for name, value in (("one", 10), ("two", 60)):
        models.append(Model(broker, name, value))
        stack.callback(models[-1].session.close)
        models[-1].check()
        models[-1].sleep()
    return models[0], models[1]


def test_models_that_do_not_fit_together_take_turns(broker: Broker, opened_here: ExitStack) -> None:
    one, two_ = two(broker, opened_here)
    assert one.cold >= LAYERS - 1 and two_.cold == 0
    for _ in range(3):
        for model, other in ((one, two_), (two_, one)):
            report = model.wake()
            assert report.activated and set(report.restored) | {0} == set(range(LAYERS))
            model.check()
            assert model.cold == 0 and other.cold >= LAYERS - 1
            model.sleep()
    assert sum(broker.ledger.held.values()) + broker.ledger.free == PAGES
    assert not broker.ledger.lent


def test_what_is_in_use_stays_and_the_other_waits(broker: Broker, opened_here: ExitStack) -> None:
    one, other = two(broker, opened_here)
    other.wake()
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="until other processes serve less") as refused:
            one.wake()
        assert refused.value.fields["short"] > 0 and refused.value.fields["broker"] == ""
        assert one.cold >= LAYERS - 1 and not one.tenant.active
        # What came was too little, and is the broker's again.
        assert one.session.snapshot().pages.free == 0
    other.check()
    other.sleep()
    assert one.wake().activated
    one.check()


def test_one_that_has_just_served_is_left_alone(broker: Broker, opened_here: ExitStack) -> None:
    one = Model(broker, "one", 10, idle=False)
    opened_here.callback(one.session.close)
    internals(one.tenant).calibrate_link(1 << 20)  # a slow link: its reload takes long
    one.sleep()
    session = opened(broker)
    opened_here.callback(session.close)
    with pytest.raises(OutOfMemory):
        session.attach_bytes(one.masters, name="two", kv=make_spec(LAYERS, min_blocks=BLOCKS, max_blocks=400))
    assert one.cold == 0


def test_master_copies_that_another_session_has_page_locked_are_copied(broker: Broker, opened_here: ExitStack) -> None:
    """Whole OS pages can be page-locked where they are, once in a process."""
    memory = mmap.mmap(-1, 8 * PAGE)
    masters = [np.frombuffer(memory, np.uint8, 3 * PAGE, at * PAGE) for at in (0, 4)]
    for number, master in enumerate(masters):
        master[:] = number + 1
    sessions = [opened(broker), opened(broker)]
    tenants = []
    for number, session in enumerate(sessions):
        opened_here.callback(session.close)
        tenants.append(
            session.attach_bytes(masters, name=f"t{number}", kv=make_spec(2, min_blocks=BLOCKS, max_blocks=400))
        )
        session.deactivate(f"t{number}", pages="none")
    sessions[0].close()  # it lets go of them
    assert sessions[1].activate("t1").activated
    check_layers(sessions[1], tenants[1], masters, SessionBytes(sessions[1]))


def test_first_layers_stay_while_the_others_suffice(broker: Broker, opened_here: ExitStack) -> None:
    one = Model(broker, "one", 10)
    opened_here.callback(one.session.close)
    one.check()
    one.sleep()
    session = opened(broker)
    opened_here.callback(session.close)
    free = broker.ledger.free
    few = one.masters[:4]  # 16 pages and KV
    session.attach_bytes(few, name="few", kv=make_spec(4, min_blocks=BLOCKS, max_blocks=400))
    cold = one.session.snapshot().tenants["one"].cold
    assert cold and cold == tuple(range(LAYERS - len(cold), LAYERS))
    assert len(cold) * LAYER_PAGES < 4 * LAYER_PAGES + KV + LAYER_PAGES - free + KV


@pytest.mark.parametrize("pages", ["none", "auto"])
def test_what_is_given_up_at_once_is_the_brokers(broker: Broker, opened_here: ExitStack, pages: str) -> None:
    one = Model(broker, "one", 10)
    opened_here.callback(one.session.close)
    one.sleep(pages)
    until(lambda: broker.ledger.free == PAGES - sum(broker.ledger.held.values()), "the ledger knows")
    if pages == "none":
        assert one.cold == LAYERS
        until(lambda: broker.ledger.free == PAGES, "no page is its own")
    assert one.wake().activated
    one.check()
    assert broker.ledger.free <= PAGES - WHOLE


def test_layers_that_others_had_borrowed_are_given_up_with_the_rest(broker: Broker, opened_here: ExitStack) -> None:
    one = Model(broker, "one", 10, reload_s=1e9)
    opened_here.callback(one.session.close)
    one.check()
    session = opened(broker)
    opened_here.callback(session.close)
    kv = session.attach_bytes(
        [np.zeros(PAGE, dtype=np.uint8)] * 2,
        name="kv",
        kv=make_spec(2, min_blocks=1, max_blocks=4000),
        config=remap.advanced.Knobs(reserve_blocks=0, max_layers=0),
    )
    one.sleep()
    until(lambda: session.step({"kv": 4000}) is not None and bool(broker.ledger.lent), "layers are lent")
    one.sleep("none")
    until(lambda: not broker.ledger.lent, "no page is lent any more")
    assert one.cold == LAYERS
    until(lambda: session.step({"kv": 4000}) is not None and broker.ledger.free == 0, "the other one has all")
    with pytest.raises(OutOfMemory):
        one.wake()
    kv_blocks = kv.kv.usable_blocks
    internals(kv)._state.last_pass_s = -1e9  # it has no request: all that it does not use goes
    assert one.wake().activated and kv.kv.usable_blocks < kv_blocks
    one.check()


def test_a_want_without_a_broker_says_so(tmp_path: Path, opened_here: ExitStack) -> None:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as broker:
        one, other = two(broker, opened_here)
        other.wake()
    until(
        lambda: bool(one.session.exclusively(lambda core: core.other_processes.problem)), "it has seen that it has gone"
    )
    with pytest.raises(OutOfMemory, match=r"the broker at .* has gone") as refused:
        one.wake()
    assert "has gone" in str(refused.value.fields["broker"])


# -- engines with allocators of their own, in processes of their own ---------------------------------------------------


class Slept:
    """A model whose engine's blocks are its own allocator's, as vLLM's (`remap.ranks`), asleep."""

    def __init__(self, broker: Broker, name: str, value: int, turn_s: float = 1e9, **more: Any) -> None:
        self.model = Model(broker, name, value, **more)
        self.rank = Rank(self.model.session, self.model.tenant, 0, turn_s=turn_s)
        self.rank.listen(None)
        self.model.check()
        self.rank.sleep()

    @property
    def pages(self) -> int:
        owned = self.model.session.snapshot().tenants[self.model.name].pages
        return owned.params + owned.kv + owned.ring


def test_an_engine_that_is_cold_keeps_its_first_block_alone(broker: Broker, opened_here: ExitStack) -> None:
    one = Slept(broker, "one", 10)
    opened_here.callback(one.model.session.close)
    known = ids(one.rank.report().open)
    assert one.rank.turn_cold()
    assert one.pages == 1 and 0 in ids(one.rank.report().open)
    until(lambda: broker.ledger.free == PAGES - 1, "all else is the broker's")
    woken = one.rank.wake()
    assert woken is not None and ids(woken.open) == known
    assert ids(woken.lost) == known - {0, 1}  # they are open again, and have no KV
    one.model.check()
    assert not one.rank.turn_cold()  # it serves


def test_an_engine_turns_cold_by_itself_unless_it_wakes_before(broker: Broker, opened_here: ExitStack) -> None:
    model = Model(broker, "one", 10)
    opened_here.callback(model.session.close)
    rank = Rank(model.session, model.tenant, 0, cold_s=3600.0)
    rank.listen(None)
    for _ in range(3):
        rank.sleep()
        assert rank.wake() is not None
    assert not [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]
    rank = Rank(model.session, model.tenant, 0, cold_s=0.001)
    rank.sleep()
    until(lambda: model.cold == LAYERS, "nobody has asked")
    assert rank.wake() is not None
    model.check()
    rank.sleep()
    rank.close()
    assert not rank.turn_cold()


def test_an_inactive_model_for_which_others_have_too_little_starts_without_pages(
    broker: Broker, opened_here: ExitStack
) -> None:
    """By itself, as in a session of its own: it was refused."""
    one = Model(broker, "one", 10)
    opened_here.callback(one.session.close)
    one.check()
    session = opened(broker)
    opened_here.callback(session.close)
    masters = [np.zeros(LAYER_PAGES * PAGE, dtype=np.uint8)] * LAYERS
    kv = make_spec(LAYERS, min_blocks=BLOCKS, max_blocks=4 * PAGES)
    session.attach_bytes(masters, name="two", kv=kv, active=False)
    assert len(session.snapshot().tenants["two"].cold) == LAYERS
    with pytest.raises(OutOfMemory):
        session.attach_bytes(masters, name="three", kv=kv)  # one that serves at once
    one.session.deactivate("one", pages="none")
    assert session.activate("two").activated


def test_a_member_that_keeps_pages_asks_for_layers_last() -> None:
    ledger = Ledger(4)
    for member in (1, 2, 3):
        ledger.joined(member)
    ledger.wanted(1, 1, 2)
    ledger.wanted(2, 1, 2)
    asked: list[tuple[int, bool, bool]] = []
    sent = ledger.wanted(3, 1, 3, keeps=True)
    while recalls := [(member, each) for member, each in sent if isinstance(each, Recall)]:
        ((member, recall),) = recalls
        assert recall.pages == 3 and not recall.runs
        asked.append((member, recall.layers, recall.keeps))
        sent = ledger.done(member, recall.recall)
    assert asked == [(1, False, False), (2, False, False), (1, True, True), (2, True, True)]
    assert ledger.waiting == 0


def test_lent_layers_are_asked_for_who_does_not_keep_them() -> None:
    """Of two that wait, each is asked for in its own way."""
    ledger = Ledger(2)
    for member in (1, 2, 3):
        ledger.joined(member)
    ledger.wanted(1, 1, 2)
    sent = [*ledger.wanted(2, 1, 1), *ledger.wanted(3, 1, 2, keeps=True)]
    asked: list[tuple[int, bool, bool, int]] = []
    while recalls := [(member, each) for member, each in sent if isinstance(each, Recall)]:
        for member, recall in recalls:
            asked.append((member, recall.layers, recall.keeps, recall.pages))
            sent = ledger.done(member, recall.recall)
    assert (1, True, False, 1) in asked and (1, True, True, 2) in asked
    assert ledger.waiting == 0


def test_engines_take_turns_down_to_the_last_page(tmp_path: Path, opened_here: ExitStack) -> None:
    # The first block of the other may lie in the midst of its blocks: one of these is lost then.
    with Broker(tmp_path / "s", (WHOLE + 2) * PAGE, PAGE, DEVICE) as broker:
        one = Slept(broker, "one", 10)
        opened_here.callback(one.model.session.close)
        assert one.rank.turn_cold()
        other = Slept(broker, "two", 60)
        opened_here.callback(other.model.session.close)
        for _ in range(3):
            for each, idle in ((one, other), (other, one)):
                woken = each.rank.wake()
                assert woken is not None
                assert idle.pages == 1
                assert idle.rank.wake() is None and idle.pages == 1  # it waits
                each.model.check()
                each.rank.sleep()


# -- turns, of engines that have requests all the time ---------------------------------------------------------------------


def serve_by_turns(engines: list[Slept], turns: int) -> list[str]:
    """Each asks as vLLM's scheduler does, one after the other. Whose turns came, in their order."""
    seen: list[str] = []
    end = time.monotonic() + 120.0
    while len(seen) < turns:
        assert time.monotonic() < end, seen
        for each in engines:
            if each.model.tenant.active and each.rank.turn_over():
                each.rank.give_turn()
            if each.rank.wake() is not None:
                name = each.model.name
                seen += [name] if not seen or seen[-1] != name else []
                each.model.session.step({name: BLOCKS})
                each.model.check()
    return seen


@pytest.mark.parametrize("count", [2, 3])
def test_engines_that_never_pause_take_turns(broker: Broker, opened_here: ExitStack, count: int) -> None:
    """Each model's pages are the others' before; all of its bytes are right in each turn. None waits for ever: who gives its turn
    asks again later than those that wait."""
    engines = []
    for place in range(count):
        engines.append(Slept(broker, f"m{place}", 40 * place + 10, turn_s=0.0))
        opened_here.callback(engines[-1].model.session.close)
        engines[-1].rank.turn_cold()
    seen = serve_by_turns(engines, 3 * count)
    for place in range(count + 1):
        assert len(set(seen[place : place + 2 * count - 1])) == count, seen
    assert sum(broker.ledger.held.values()) + broker.ledger.free == PAGES


def test_a_turn_lasts(broker: Broker, opened_here: ExitStack) -> None:
    one, other = (Slept(broker, name, value, turn_s=1e6) for name, value in (("one", 10), ("two", 60)))
    for each in (one, other):
        opened_here.callback(each.model.session.close)
    assert one.rank.wake() is not None
    for _ in range(3):
        assert other.rank.wake() is None and not one.rank.turn_over()
    unmet = one.model.session.exclusively(lambda core: core.other_processes.unmet)
    assert unmet.pages > 0 and unmet.since_s < unmet.asked_s
    # It lasts for as long as the load of its model took, too, and is over then.
    one.rank.turn.turn_s = 0.0
    one.rank.turn.present = PresentTurn("this", time.monotonic(), 1e6)
    assert not one.rank.turn_over()
    one.rank.turn.present = PresentTurn("this", time.monotonic() - 1.0)
    assert one.rank.turn_over()
    one.rank.give_turn()
    assert one.rank.wake() is None  # the other one has not asked since
    assert other.rank.wake() is not None and one.rank.wake() is None
    other.model.check()


def test_who_lends_nothing_gives_no_turn(broker: Broker, opened_here: ExitStack) -> None:
    other = Slept(broker, "two", 60)
    opened_here.callback(other.model.session.close)
    other.rank.turn_cold()
    one = Slept(broker, "one", 10, turn_s=0.0, lends=False)
    opened_here.callback(one.model.session.close)
    assert one.rank.wake() is not None
    assert other.rank.wake() is None and not one.rank.turn_over()


def test_what_is_free_is_set_aside_for_who_waits_longest() -> None:
    ledger = Ledger(10)
    for member in (1, 2, 3):
        ledger.joined(member)
    serials = Counter[int]()

    def ask(member: int, pages: int, **how: bool) -> int:
        """How many it gets, if everybody answers that there is nothing. What is too little it gives back, as an activation."""
        serials[member] += 1
        sent, got = ledger.wanted(member, serials[member], pages, **how), list[int]()
        while sent:
            ((to, message), *rest) = sent
            if isinstance(message, Grant):
                got += pages_of(message.runs)
            sent = [*rest, *(ledger.done(to, message.recall) if isinstance(message, Recall) else [])]
        if 0 < len(got) < pages:
            give(member, got)
        return len(got)

    def give(member: int, pages: list[int]) -> None:
        for runs in runs_of(pages):
            ledger.gave(member, runs)

    assert ask(1, 6) == 6
    assert ask(2, 7, keeps=True) == 4 and ledger.unmet == (2,)
    assert ask(3, 5, keeps=True) == 4 and ledger.unmet == (2, 3)  # neither could have all
    give(1, [0, 1, 2, 3])  # 8 are free: enough for the first
    assert ask(3, 5, keeps=True) == 1 and ask(3, 5, ahead=True) == 1
    assert ask(3, 5) == 5  # KV may have them meanwhile
    give(3, [page for page in range(10) if page not in (4, 5)][:5])
    assert ask(2, 7, keeps=True) == 7 and ledger.unmet == (2, 3)
    assert ask(2, 1, keeps=True) == 1  # more, of the same activation
    give(2, [0])  # it serves, and gives some: if it waits again it is behind
    assert ledger.unmet == (3,)
    give(2, [1, 2, 3, 6, 7, 8, 9])
    assert ask(2, 8, keeps=True) == 3 and ledger.unmet == (3, 2)
    assert ask(3, 0, keeps=True) == 0  # it has found what it lacked
    assert ask(2, 8, keeps=True) == 8 and ledger.unmet == (3, 2)
    give(2, [0])
    ledger.forgotten(3)
    assert ledger.unmet == ()
    for end in (ledger.left, ledger.ended):
        assert ask(3, 9, keeps=True) <= 1 and ledger.unmet == (3,)
        end(3)
        assert ledger.unmet == ()
        ledger.ended(3)
        ledger.joined(3)
        serials[3] = 0


def test_nothing_is_set_aside_for_a_model_that_serves_by_pages_of_its_own_session(
    broker: Broker, opened_here: ExitStack
) -> None:
    """Others had too few for it, and another model of its process gave the rest. For two seconds attachments were refused as by a
    full broker: so many free pages were set aside for the one that serves."""
    one = Model(broker, "one", 10)
    opened_here.callback(one.session.close)
    one.sleep("none")
    spec = make_spec(LAYERS, min_blocks=BLOCKS, max_blocks=4 * PAGES)
    one.session.attach_bytes(one.masters, name="beside", kv=spec, config=remap.advanced.Knobs(min_idle=0.0))
    one.session.deactivate("beside")
    assert one.wake().activated
    one.sleep("none")
    until(lambda: broker.ledger.free >= WHOLE, "it has given them back")
    two_ = Model(broker, "two", 60)
    opened_here.callback(two_.session.close)
    two_.check()


def test_a_turn_that_was_given_in_vain_makes_the_next_one_longer(broker: Broker, opened_here: ExitStack) -> None:
    """Who waits needs more than the tenant can give."""
    one, session = Slept(broker, "one", 10, turn_s=0.0), opened(broker)
    for each in (one.model.session, session):
        opened_here.callback(each.close)
    assert one.rank.wake() is not None
    many = [np.zeros(LAYER_PAGES * PAGE, dtype=np.uint8)] * (PAGES // LAYER_PAGES)
    kv = make_spec(len(many), min_blocks=BLOCKS, max_blocks=4 * PAGES)
    session.attach_bytes(many, name="large", kv=kv, active=False, pages="none")

    def asks() -> bool:
        with pytest.raises(OutOfMemory):
            session.activate("large")
        return True

    longer = []
    for _ in range(3):
        one.rank.turn.present = PresentTurn("this", time.monotonic() - 100.0)
        until(lambda: asks() and one.rank.turn_over(), "its turn is over")
        one.rank.give_turn()
        assert asks() and one.rank.wake() is None
        until(lambda: asks() and one.rank.wake() is not None, "it serves again")
        one.model.check()
        longer.append(one.rank.turn.longer)
    assert longer == [2, 4, 8]
    one.rank.turn.present = PresentTurn("this", time.monotonic() - 7.0)
    assert asks() and not one.rank.turn_over()
    # However long the other one has waited: a turn of minutes is one, whether by REMAP_TURN_S or behind vain ones.
    outside = one.model.session.exclusively(lambda core: core.other_processes)
    for turn_s, longer in ((300.0, 1), (5.0, 64)):
        one.rank.turn.turn_s, one.rank.turn.longer = turn_s, longer
        for served_s, over in ((turn_s * longer - 10.0, False), (turn_s * longer + 1.0, True)):
            one.rank.turn.present = PresentTurn("this", time.monotonic() - served_s)
            assert asks()
            outside._unmet = outside._unmet._replace(since_s=time.monotonic() - 200.0)
            assert one.rank.turn_over() is over


def test_one_that_needs_the_pages_of_two_has_them_when_both_have_given_their_turns(
    tmp_path: Path, opened_here: ExitStack
) -> None:
    with Broker(tmp_path / "s", 2 * PAGES * PAGE, PAGE, DEVICE) as broker:
        small = [Slept(broker, name, value, turn_s=1.0) for name, value in (("one", 10), ("two", 60))]
        session = opened(broker)
        for each in (*(one.model.session for one in small), session):
            opened_here.callback(each.close)
        many = [np.zeros(LAYER_PAGES * PAGE, dtype=np.uint8)] * (PAGES // LAYER_PAGES + 3)
        kv = make_spec(len(many), min_blocks=BLOCKS, max_blocks=4 * PAGES)
        session.attach_bytes(many, name="large", kv=kv, active=False, pages="none")
        assert all(one.rank.wake() is not None for one in small)

        def serves() -> bool:
            for one in small:
                if one.model.tenant.active and one.rank.turn_over():
                    one.rank.give_turn()
                elif one.rank.wake() is not None:
                    one.model.check()
            try:
                return session.activate("large").activated
            except OutOfMemory:
                return False

        until(serves, "the large one serves")
        assert not any(one.model.tenant.active for one in small)
        session.deactivate("large", pages="none")
        until(lambda: all(one.rank.wake() is not None for one in small), "both serve again")
        for one in small:
            one.model.check()
