"""What a broker costs: a grant of another process's weights, and a step that asks for nothing, beside one of no broker.

A grant is timed from the first step that lacks pages to the step behind which the blocks are usable: the want, the recall, the
donor's layers lent, the pages given and granted, and zeroed here. The donor serves nothing; before the next grant its layers are
home again, and a pass has compared their bytes. The broker and the donor are processes of their own.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack

import numpy as np
import pytest
from broker_processes import FIRST_BLOCKS, LAYER_PAGES, OWN, PAGE, PAGES, Process, spec
from measure import median, record, rounds

import remap
from remap.internals import internals
from remap_serve.sim.results import percentile

STILL = remap.advanced.Knobs(reserve_blocks=0, max_layers=0)
STEPS = 200


@pytest.fixture
def device(tmp_path):
    path = str(tmp_path / "s")
    with Process("serve", path):
        yield path


def _attach(session):
    masters = [np.full(LAYER_PAGES * PAGE, layer, np.uint8) for layer in range(OWN)]
    return session.attach_bytes(masters, name="taker", kv=spec(OWN), config=STILL)


def _bytes_of(tenant, block) -> set[int]:
    found: set[int] = set()
    for offset, nbytes in internals(tenant).kv.geometry.byte_ranges_of_block(block):
        found |= set(ctypes.string_at(internals(tenant).kv.address + offset, nbytes))
    return found


def test_grant_of_another_processs_weights(benchmark, device):
    times: list[float] = []
    with Process("donor", device) as donor, remap.Session(device=f"unix:{device}") as session:
        tenant = _attach(session)
        wanted = 2 * LAYER_PAGES * PAGE // tenant.kv.spec.block_bytes
        assert session.snapshot().pages.free == 0

        def one() -> None:
            assert donor("sleep") == "asleep"
            end = time.monotonic() + 60
            begin = time.perf_counter()
            while tenant.kv.free_blocks < wanted and time.monotonic() < end:
                session.step({"taker": remap.Demand(wanted)})
            times.append(time.perf_counter() - begin)
            blocks = tenant.kv.allocate(wanted)
            assert set().union(*(_bytes_of(tenant, block) for block in blocks)) == {0}
            tenant.kv.free(blocks)
            assert donor("wake") == "home"
            assert donor("verify") == "right"

        benchmark.pedantic(one, rounds=rounds(benchmark, 60), warmup_rounds=0)
        remap.advanced.check(session)
    title = f"grant of {wanted * tenant.kv.spec.block_bytes >> 20} MiB of another process's weights"
    record(benchmark, f"{title}, P50", median(times) * 1e3, "ms", times)
    record(benchmark, f"{title}, P99", percentile(times, 0.99) * 1e3, "ms", times)


def test_step_of_a_member_that_asks_for_nothing(benchmark, device):
    seconds: dict[str, list[float]] = {"member": [], "alone": []}
    with ExitStack() as stack:
        sessions = {
            "member": stack.enter_context(remap.Session(device=f"unix:{device}")),
            "alone": stack.enter_context(remap.Session(PAGES * PAGE, page_bytes=PAGE)),
        }
        tenants = {name: _attach(session) for name, session in sessions.items()}
        for name, session in sessions.items():
            while tenants[name].kv.free_blocks < 100:
                session.step({"taker": remap.Demand(100)})

        def alternate() -> None:
            for name in ("member", "alone") if len(seconds["alone"]) % 2 else ("alone", "member"):
                step, wanted = sessions[name].step, {"taker": remap.Demand(50)}
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step(wanted)
                seconds[name].append((time.perf_counter() - begin) / STEPS)

        benchmark.pedantic(alternate, rounds=rounds(benchmark, 40), warmup_rounds=0)
        for name, session in sessions.items():
            address = remap.advanced.layer_address(session, "taker", 3)
            assert set(ctypes.string_at(address, LAYER_PAGES * PAGE)) == {3}, name
            assert tenants[name].kv.usable_blocks >= FIRST_BLOCKS
            remap.advanced.check(session)
    ratio = median(member / alone for member, alone in zip(seconds["member"], seconds["alone"]))
    title = "step of a member that asks for nothing, of one without a broker"
    record(benchmark, title, ratio, "x", seconds["member"], target=1.05)
