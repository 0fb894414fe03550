"""Ranks whose pages are a broker's: each has other blocks for the same ids of the engine, and the bytes are right on all.

The ranks are sessions here, on one broker or on one each, as GPUs have them. The engine is a set of ids, in another process
than the ranks as far as they know; another session takes pages and gives them back at random."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")
pytest.importorskip("torch")

from arena_worlds import forward, make_layers, make_spec, read_block, write_block
from broker_member import PAGE, opened
from sharing_worlds import set_times, times_of

import remap
from remap.adapters.vllm.apart import Apart, RankApart
from remap.broker.server import Broker
from remap.errors import DriverError, InvalidState
from remap.internals import internals
from remap.ranks import RankReport, Runs, ids

LAYERS, FIRST, PAGES = 6, 8, 48
KNOBS = remap.advanced.Knobs(
    slowdown=100.0,
    map_s=1e-9,
    contention=1.0,
    dwell=1,
    reserve_blocks=0,
    hysteresis_blocks=0,
    min_idle=0.0,
    reload_s=100.0,
)


class World:
    """leaving: ids that have to leave, and are in use. used: id -> the value in all of its bytes, on every rank."""

    def __init__(self, undo: ExitStack, folder: Path, brokers: int, count: int = 2, blocks: int = 4000) -> None:
        made = [
            undo.enter_context(Broker(folder / f"b{number}", PAGES * PAGE * count // brokers, PAGE))
            for number in range(brokers)
        ]
        on = [made[rank % brokers] for rank in range(count)]
        self.others = [undo.enter_context(opened(each)) for each in made]
        self.taken: list[list[int]] = [[] for _ in made]
        spec, theirs = make_spec(LAYERS, min_blocks=4, max_blocks=4000), make_layers([2] * LAYERS, 9)
        self.tenants = [each.attach_bytes(theirs, name="other", kv=spec, config=KNOBS) for each in self.others]
        self.layers = make_layers([2] * LAYERS, 1)
        self.ranks: list[RankApart] = []
        self.moved, self.blocks, self.may_move = 0, blocks, True
        for rank in range(count):
            session = undo.enter_context(opened(on[rank]))
            spec = make_spec(LAYERS, min_blocks=FIRST, max_blocks=4000)
            tenant = session.attach_bytes(self.layers, name="m", kv=spec, config=KNOBS)
            how: Any = {"blocks": blocks, "may_move": lambda: self.may_move, "renamed": self.renamed}
            self.ranks.append(RankApart(session, tenant, rank, **how))
            set_times(self.ranks[-1], times_of(LAYERS, 1.0, 0.1))
        self.opened, self.leaving, self.used = set[int](), set[int](), dict[int, int]()
        self.asleep, self.value, self.kept = False, 0, 0
        self.group = Apart(self.ask, count)
        self.open_now(self.group.opened)
        self.ask("listen", None)

    def renamed(self, moves: dict[int, int]) -> None:
        self.moved += len(moves)

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [getattr(rank, method)(*args) for rank in self.ranks]

    @property
    def free(self) -> list[int]:
        return sorted(self.opened - self.used.keys())

    def place(self, rank: RankApart, block: int) -> int:
        return rank.places[block] if rank.rank else block

    def open_now(self, open_ids: Runs) -> None:
        wanted = ids(open_ids)
        gone = self.opened - wanted
        self.leaving = (self.leaving | gone & self.used.keys()) - wanted
        self.opened = wanted
        self.gone = gone - self.leaving

    def take(self, report: RankReport | None) -> None:
        if report is not None:
            self.open_now(report.open)
            self.group.returned(sorted(self.gone))

    def step(self, wanted: int) -> None:
        self.wake()
        if not self.asleep:
            self.take(self.group.step(wanted, len(self.free)))

    def use(self, count: int) -> None:
        for block in self.free[:count]:
            self.value = self.value % 250 + 1
            self.used[block] = self.value
            for rank in self.ranks:
                write_block(rank.tenant, self.place(rank, block), self.value)

    def finish(self, blocks: list[int]) -> None:
        for block in blocks:
            del self.used[block]
        gone = sorted(self.leaving - self.used.keys())
        self.leaving.difference_update(gone)
        self.group.returned(gone)

    def move(self) -> None:
        """As `RankLink.leave`: the engine gives blocks in use the ids of free ones."""
        moves = dict(zip(sorted(self.leaving), self.free))
        for rank in self.ranks:
            if rank.rank:
                rank.exchange(moves)
            elif moves:
                internals(rank.tenant).kv.move(list(moves.items()))
        self.used = {moves.get(block, block): value for block, value in self.used.items()}
        self.finish([])

    def sleep(self) -> None:
        if not self.asleep:
            self.cached = {block: value for block, value in self.used.items() if block in self.opened}
            self.finish(list(self.used))
            self.ask("sleep")
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            reports = self.ask("wake")
            if None in reports:
                self.ask("sleep")
                self.cached = {}
                return
            for report in reports:
                for block in ids(report.lost):
                    self.cached.pop(block, None)
            before, self.opened = self.opened, ids(self.group.woken(reports))
            self.asleep = False
            for block, value in self.cached.items():  # as a prefix cache would find it
                if block in before & self.opened:
                    self.kept += 1
                    assert all(read_block(rank.tenant, self.place(rank, block)) == {value} for rank in self.ranks)

    def others_want(self, number: int, blocks: int) -> None:
        self.others[number].step({"other": blocks})
        kv = self.tenants[number].kv
        self.taken[number] += kv.allocate(min(blocks, kv.free_blocks))

    def others_free(self, number: int) -> None:
        self.tenants[number].kv.free(self.taken[number])
        self.taken[number] = []
        self.others[number].step({"other": 0})

    def check(self) -> None:
        for rank in self.ranks:
            remap.advanced.check(rank.session)
            for block, value in self.used.items():
                assert read_block(rank.tenant, self.place(rank, block)) == {value}, (rank.rank, block)
            if self.asleep:
                assert not rank._held, "what nobody uses goes back"
                continue
            forward(rank.session, rank.tenant, self.layers)
            pool = internals(rank.tenant).kv.pool
            places = [self.place(rank, block) for block in self.opened | self.leaving]
            assert len(set(places)) == len(places), "two of the engine's blocks in one place"
            in_use = set(rank.places.values()) if rank.rank else self.leaving
            assert rank._held <= in_use, "what nobody uses goes back"
            if rank.rank:
                assert max(places) < self.blocks, "one of them lies outside of the engine's tensors"
                assert len(self.ranks) > 2 or rank.places.keys() == self.opened | self.leaving
            assert pool.holds(places), "one of them lies in a page that others may have"


def walk(world: World, draw: random.Random) -> tuple[int, int]:
    """Returns the most blocks that the engine had, and the most layers that were away."""
    most = away = 0
    for _ in range(60):
        act = draw.choice(["step", "step", "step", "use", "finish", "move", "take", "give", "sleep"])
        if act == "step":
            world.step(draw.choice([0, 0, 20, 60, 120]))
        elif act == "take":
            world.others_want(draw.randrange(len(world.others)), draw.randrange(60))
        elif act == "give":
            world.others_free(draw.randrange(len(world.others)))
        elif act == "sleep" and draw.random() < 0.3:
            world.sleep()
        elif not world.asleep and act == "use":
            world.use(draw.randrange(60))
        elif not world.asleep and act == "finish":
            world.finish(draw.sample(sorted(world.used), len(world.used) // 2))
        elif not world.asleep and act == "move":
            world.move()
        world.check()
        most, away = max(most, len(world.opened)), max(away, world.group.target[0])
    return most, away


@pytest.mark.parametrize(("brokers", "count"), [(1, 2), (2, 2), (3, 3)])
def test_bytes_are_right_on_all_whatever_comes_and_goes(tmp_path: Path, brokers: int, count: int) -> None:
    moved = kept = 0
    for seed in range(6):
        (tmp_path / str(seed)).mkdir()
        with ExitStack() as undo:
            world = World(undo, tmp_path / str(seed), brokers, count)
            most, away = walk(world, random.Random(seed))
            assert most > FIRST and away, "it has grown by what the broker had, and by layers"
            moved, kept = moved + world.moved, kept + world.kept
    assert moved, "blocks in use had to leave a rank, and the engine heard nothing"
    assert kept, "an idle engine keeps what nobody needs"


def test_rank_0_does_not_grow_for_what_another_rank_lacks(tmp_path: Path) -> None:
    """Its own demand is met, and the engine's is not, however often it asks."""
    with ExitStack() as undo:
        world = World(undo, tmp_path, 2)
        world.check()
        world.others_want(1, 400)
        session = world.ranks[1].session
        for layer in range(LAYERS):  # nor do its layers leave
            remap.advanced.declare_registered(session, remap.advanced.layer_address(session, "m", layer), 64)
        world.step(60)
        had = world.ranks[0].tenant.kv.usable_blocks
        assert len(world.opened) < had
        for _ in range(5):
            world.step(60)
        assert world.ranks[0].tenant.kv.usable_blocks == had


def leaving_rank_1(world: World) -> RankApart:
    """Blocks in use there have to leave: the layers in whose pages they lie come home. There is room for them elsewhere."""
    rank = world.ranks[1]
    world.check()
    remap.advanced.remap(rank.session, "m", 2, 1, "nested")
    world.step(30)
    world.use(100)
    rank.session.step({"m": remap.Demand(20, 0)})
    remap.advanced.remap(rank.session, "m", 0, 1, "nested", drain=True)
    assert rank._held and rank._held <= set(rank.places.values())
    return rank


def test_a_move_that_fails_changes_nothing_and_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pairs: Any) -> None:
        raise DriverError("the device refuses the copy")

    with ExitStack() as undo:
        world = World(undo, tmp_path, 2)
        rank = leaving_rank_1(world)
        before = dict(rank.places)
        with monkeypatch.context() as patched:
            patched.setattr(internals(rank.tenant).kv, "move", refused)
            world.step(0)
        assert rank.places == before and rank._held and not world.moved
        world.check()
        monkeypatch.setattr(internals(rank.tenant).kv, "unfinished", True)
        rank._tidy()
        assert not world.moved, "the next pass zeroes what the device has refused to zero, also where blocks would go"
        monkeypatch.undo()
        world.step(0)
        assert world.moved and not rank._held
        world.check()


def test_blocks_stay_where_tables_cannot_be_renamed(tmp_path: Path) -> None:
    with ExitStack() as undo:
        world = World(undo, tmp_path, 2)
        world.may_move = False
        rank = leaving_rank_1(world)
        before = dict(rank.places)
        world.step(0)
        assert rank.places == before and rank._held and not world.moved
        world.check()
        world.sleep()
        world.check()
        world.step(0)
        assert not world.asleep
        world.check()


def test_no_block_lies_outside_of_the_engines_tensors(tmp_path: Path) -> None:
    """They have fewer blocks than a rank may have pages for."""
    with ExitStack() as undo:
        world = World(undo, tmp_path, 2, blocks=20)
        for _ in range(3):
            world.step(60)
            world.check()
        assert len(internals(world.ranks[1].tenant).kv.pool.open_ids()) > 20


def test_layers_of_rank_0_come_home_from_blocks_that_another_rank_lacked(tmp_path: Path) -> None:
    """The engine never had these blocks, so it gives none of them back."""
    with ExitStack() as undo:
        world = World(undo, tmp_path, 2)
        world.check()
        for number in range(2):
            world.others_want(number, 400)
        session, rank = world.ranks[1].session, world.ranks[0]
        for layer in range(LAYERS):
            remap.advanced.declare_registered(session, remap.advanced.layer_address(session, "m", layer), 64)
        world.step(60)
        away = rank.tenant.remapped
        assert away and len(world.opened) < rank.tenant.kv.usable_blocks
        for _ in range(4):
            world.step(0)
            world.check()
        assert rank.tenant.remapped < away


def test_all_ranks_have_to_answer() -> None:
    """As where each of them has an engine of its own around it."""
    with pytest.raises(InvalidState) as caught:
        Apart(lambda method, *args: [RankReport(((0, 4),), (0, 0))], 2)
    assert (caught.value.fields["ranks"], caught.value.fields["answers"]) == (2, 1)
