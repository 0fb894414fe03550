"""Block tables against a model that gives every sequence its own tokens: no row ever writes where another one reads."""

from __future__ import annotations

import contextlib
import gc
import random

import pytest
from pools import OwnPool

from remap.adapters.block_tables import BatchTable, SharedBlocks
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.kv.pool import KVGeometry, KVSpec

SIZE = 4


class Pool:
    """A real block pool with all of its pages."""

    def __init__(self, blocks: int) -> None:
        shape = {"layers": 1, "kv_heads": 1, "head_dim": 8, "block_tokens": SIZE, "dtype": "int8"}
        self.spec = KVSpec(**shape, min_blocks=0, max_blocks=blocks)
        geometry = KVGeometry(self.spec, self.spec.block_bytes)
        self.pool = OwnPool(geometry)
        self.pool.add_pages(range(geometry.region_pages))
        self.allocate, self.free = self.pool.allocate, self.pool.free


class World:
    """One table whose blocks' bytes are a dict; `texts` says what every sequence has to read."""

    def __init__(self, pool: Pool, blocks: SharedBlocks, memory: dict[tuple[int, int], int]) -> None:
        self.pool, self.table, self.memory = pool.pool, blocks.table(), memory
        self.texts: list[list[int]] = []

    def write(self, rows: int, tokens: int, rng: random.Random) -> None:
        growth = self.table.plan(rows, tokens)
        free = self.pool.free_blocks
        copies = self.table.extend(growth)
        assert free - self.pool.free_blocks == growth.blocks
        for old, new in copies:
            self.copy(old, new)
        self.texts = self.texts or [[] for _ in range(rows)]
        for row, text in zip(self.table.rows, self.texts):
            for position in range(len(text), len(text) + tokens):
                text.append(rng.randrange(1 << 30))
                self.memory[row[position // SIZE], position % SIZE] = text[-1]
        self.table.tokens += tokens
        assert self.table.tokens == growth.tokens

    def copy(self, old: int, new: int) -> None:
        self.memory.update({(new, offset): self.memory.get((old, offset), -1) for offset in range(SIZE)})

    def check(self) -> None:
        for row, text in zip(self.table.rows, self.texts, strict=True):
            assert [self.memory[row[p // SIZE], p % SIZE] for p in range(self.table.tokens)] == text


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_read_back_what_each_sequence_wrote(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(120)
    blocks = SharedBlocks(pool)
    memory: dict[tuple[int, int], int] = {}
    worlds = [World(pool, blocks, memory) for _ in range(2)]
    for _ in range(150):
        world = rng.choice(worlds)
        rows = len(world.table.rows)
        call = rng.choice(["write", "write", "write", "fail", "select", "copy", "crop", "clear", "move"])
        if call == "write":
            before = [list(row) for row in world.table.rows]
            try:
                world.write(rows or rng.randint(1, 4), rng.randint(1, 9), rng)
            except OutOfBlocks:
                assert [list(row) for row in world.table.rows] == before
                world.table.clear()
                world.texts = []
        elif call == "fail" and rows:  # a pass that wrote into its blocks, and did not end
            with contextlib.suppress(OutOfBlocks):
                tokens, texts = world.table.tokens, [list(text) for text in world.texts]
                world.write(rows, rng.randint(1, 9), rng)
                world.table.tokens, world.texts = tokens, texts
        elif call == "copy" and rows:
            other = worlds[1 - worlds.index(world)]
            other.table, other.texts = world.table.copy(), [list(text) for text in world.texts]
            gc.collect()
            blocks.collect()
        elif call == "select" and rows:
            chosen = [rng.randrange(rows) for _ in range(rng.randint(1, 5))]
            world.table.select(chosen)
            world.texts = [list(world.texts[index]) for index in chosen]
        elif call == "crop":
            keep = rng.randint(0, world.table.tokens)
            world.table.crop(keep)
            world.texts = [text[:keep] for text in world.texts]
        elif call == "clear" and rng.random() < 0.2:
            world.table.clear()
            world.texts = []
        elif call == "move" and len(blocks._shown) and pool.pool.free_blocks:
            old = rng.choice([block for each in worlds for row in each.table.rows for block in row] or [None])
            if old is not None:
                (new,) = pool.allocate(1)
                pool.free([old])
                world.copy(old, new)
                blocks.relocate({old: new})
        for each in worlds:
            each.check()
        shown = {block for each in worlds for row in each.table.rows for block in row}
        assert shown == set(pool.pool.live_ids())
        assert len(blocks._shown) == len(shown)
        pool.pool.check()


@pytest.fixture
def table() -> BatchTable:
    return SharedBlocks(Pool(9)).table()


def fill(table: BatchTable, rows: int, tokens: int) -> None:
    table.extend(table.plan(rows, tokens))
    table.tokens += tokens


def test_of_rows_that_share_a_block_all_but_one_get_a_copy(table: BatchTable) -> None:
    fill(table, 1, 6)
    table.select([0, 0, 0])
    growth = table.plan(3, 1)
    assert (growth.blocks, growth.missing) == (2, (0, 0, 0))
    assert len(table.extend(growth)) == 2
    assert len({row[0] for row in table.rows}) == 1, "what is full is shared for good"
    assert len({row[1] for row in table.rows}) == 3
    table.tokens = 8
    table.select([2, 2, 0])
    with pytest.raises(InvalidArgument):
        table.select([0, 3])
    with pytest.raises(InvalidState) as wrong:
        table.plan(2, 1)
    assert (wrong.value.rows, wrong.value.expected) == (2, 3)
    assert table.plan(3, 1).shared == (), "the last block is full: nobody writes into it"


def test_blocks_of_a_table_that_is_gone_are_free_after_collect_wherever_they_have_moved() -> None:
    pool = Pool(9)
    blocks = SharedBlocks(pool)
    fill(blocks.table(), 2, 5)
    gc.collect()
    assert pool.pool.live_blocks == 4
    (new,) = pool.allocate(1)
    pool.free([0])
    blocks.relocate({0: new})
    blocks.collect()
    assert pool.pool.live_blocks == len(blocks._shown) == 0
