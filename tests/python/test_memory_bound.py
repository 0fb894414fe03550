"""Promise 3 and 5: device memory never exceeds the capacity, as the operating system counts it, and addresses never change.

About the host backend, whose pages the operating system can count.

In a process of its own: the memfd's pages are counted twice over, by its blocks and by /proc/self/smaps.
"""

from __future__ import annotations

import pytest
from subprocesses import expect_ok

PROGRAM = """
import os, random
import remap
from arena_worlds import forward, make_layers, make_spec, write_block
from remap.internals import internals

PAGE, TOTAL = 256 << 10, 40
CAPACITY = PAGE * TOTAL

def memfd():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("/memfd:remap"):
                return int(name)
        except OSError:
            continue
    raise AssertionError("no memfd")

def resident():
    remap.advanced.settle(session)  # smaps is no snapshot: what moves while it is read is counted twice
    by_blocks = os.fstat(memfd()).st_blocks * 512
    by_maps, ours = 0, False
    for line in open("/proc/self/smaps"):
        word = line.split(None, 1)[0]
        if not word.endswith(":"):
            ours = "/memfd:remap" in line
        elif ours and word == "Pss:":
            by_maps += int(line.split()[1]) * 1024
    # Pss divides a page by the number of mappings that show it, rounding down: it can only be too small by that.
    assert by_blocks <= CAPACITY, (by_blocks, CAPACITY)
    assert by_maps <= CAPACITY, (by_maps, CAPACITY)
    return by_blocks, by_maps

session = remap.Session(CAPACITY, "cpu", page_bytes=PAGE, mode=MODE)
layers = make_layers([2, 3, 3, 2, 3, 3], 1, PAGE)
tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=600, tokens=64))
resident()
addresses = [remap.advanced.layer_address(session, "m", i) for i in range(6)] + [internals(tenant).kv.address]
rng = random.Random(7)
for round_ in range(60):
    buffers = rng.choice([1, 2])
    remap.advanced.remap(session, "m", rng.randint(0, 6 - buffers), buffers, rng.choice(["uniform", "nested"]))
    if round_ == 30:
        session.step({"m": remap.Demand(blocks=10_000)})  # takes all free pages too
        remap.advanced.remap(session, "m", 0)
    ids = tenant.kv.allocate(tenant.kv.free_blocks)
    for block in ids:
        write_block(tenant, block, 1 + round_)
    resident()
    forward(session, tenant, layers)
    tenant.kv.free(ids)
    resident()
    now = [remap.advanced.layer_address(session, "m", i) for i in range(6)] + [internals(tenant).kv.address]
    assert now == addresses
remap.advanced.remap(session, "m", 4)
ids = tenant.kv.allocate(tenant.kv.free_blocks)
for block in ids:
    write_block(tenant, block, 1)
by_blocks, by_maps = resident()
assert by_blocks > CAPACITY * 0.7, (by_blocks, CAPACITY)  # the bound was really met
assert by_maps > CAPACITY * 0.6, (by_maps, CAPACITY)
session.close()
try:
    left = os.fstat(memfd()).st_blocks
except AssertionError:
    left = 0
assert left == 0, left
"""


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_resident_memory_stays_within_capacity(mode: str) -> None:
    expect_ok(PROGRAM.replace("MODE", repr(mode)))
