"""Models per GPU: the world's arithmetic against the obvious, what no strategy may do, and that the pages say what is stored."""

from __future__ import annotations

import json
import random
from statistics import median_low

import pytest
from bench.lab import ROOT
from bench.lab.market import page
from bench.lab.market.strategies import STRATEGIES, Ours
from bench.lab.market.world import Ask, Device, Tenant, _late, arrivals, serve

from remap.policy.hardware import machine, model
from remap_serve.sim.roofline import Roofline

ON = machine("H100-SXM")
NAMES = ("Qwen3-4B", "Llama-3-8b")
TIMES = {name: Roofline(ON, model(name)) for name in NAMES}


def tenants(count: int) -> list[Tenant]:
    return [Tenant.of(i, model(NAMES[i % 2]), TIMES[NAMES[i % 2]]) for i in range(count)]


def test_late_tokens_are_counted_as_one_by_one() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        device = Device(ON, 0, rng.uniform(0, 3), rng.choice([0.05, 0.1]))
        ask = Ask(rng.uniform(0, 5), 1, 100, rng.randrange(50))
        begin, each, passes = rng.uniform(0, 15), rng.uniform(0.01, 0.2), rng.randrange(1, 60)
        ends = [begin + (i + 1) * each for i in range(passes)]
        late = sum(end > ask.at_s + device.ttft_s + (ask.made + i) * device.tbt_s for i, end in enumerate(ends))
        assert _late(ask, begin, each, passes, device) == late


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_serves_all_and_keeps_to_the_memory(name: str) -> None:
    device = Device(ON, 40_000_000_000, 10.0, 0.1)
    mine = tenants(6)
    strategy = STRATEGIES[name](device, mine)
    if not strategy.fits(device, mine):
        assert name in ("static", "kvcached")
        return
    asked = arrivals([0.05] * 6, 60.0, 3)
    served = serve(device, mine, asked, strategy)
    assert served.tokens == sum(output for *_, output in asked) and 0 <= served.on_time <= served.tokens
    assert not any(one.waiting or one.running for one in mine) and served.busy_s <= served.seconds
    if "ample" not in name:
        assert sum(strategy.have) <= strategy.room and served.link_s > 0
    else:
        assert served.on_time >= 0.9 * served.tokens


def test_a_first_token_waits_for_the_slower_of_loading_and_computing() -> None:
    """One request for a model that is nowhere: ours begins with the first layer, a whole model with the last one."""
    device, asked = Device(ON, 40_000_000_000, 1.0, 0.1), [(1.0, 1, 512, 2)]
    ends = {}
    for name in ("ours", "LRU", "ample, due"):
        mine = tenants(2)
        ends[name] = serve(device, mine, asked, STRATEGIES[name](device, mine)).seconds
    cold = tenants(2)[1]
    load_s = cold.weights / ON.h2d_bytes_per_s
    assert ends["LRU"] - ends["ample, due"] == pytest.approx(load_s)
    assert load_s * 0.9 < ends["ours"] - ends["ample, due"] < load_s + 1e-3
    assert ends["ours"] <= ends["LRU"] + 1e-3


def test_a_model_that_is_given_up_keeps_what_the_certificate_says() -> None:
    tight = Ours(Device(ON, 40_000_000_000, 0.2, 0.1), tenants(4))
    loose = Ours(Device(ON, 40_000_000_000, 1.0, 0.1), tenants(4))
    assert max(loose.keep) == 0 < min(tight.keep[1::2]) < tenants(2)[1].weights


def test_the_pages_say_what_is_stored() -> None:
    stored = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    assert set(stored["cells"]) == {cell.key for cell in page.CELLS} and stored["seeds"] == page.SEEDS
    assert page.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page.page(stored)
    tenants_page = (ROOT / "docs/notes/tenants.md").read_text(encoding="utf-8")
    for target in page.TARGETS:
        assert page.table(stored, *target) in tenants_page
    more, fewer = {}, {}
    cells = stored["cells"].values()
    for name in page.SHOWN:
        pairs = [[median_low(page.models_of(cell, each)) for each in ("ours", name)] for cell in cells]
        more[name], fewer[name] = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    assert len({more[name] for name in ("static", "kvcached", "sleep mode", "LRU")}) == 1
    assert max(fewer[name] for name in page.SHOWN[:4]) == 0
    said = " ".join(tenants_page.split())
    for sentence in (
        f"In {len(cells)} cells, by medians, ours serves more than static, kvcached, sleep mode and LRU in {more['LRU']}. "
        f"It serves more than round robin in {more['round robin']} (fewer in {fewer['round robin']}), than Aegaeon in "
        f"{more['Aegaeon']}, and than whole, due in {more['whole, due']}; never fewer",
        f"whole models with our turns serve as many in {len(cells) - more['whole, due']}",
    ):
        assert sentence in said
    assert fewer["Aegaeon"] == fewer["whole, due"] == 0
