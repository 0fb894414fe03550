"""Whole simulated runs: repeatable, nothing lost, equal memory for all policies, and who computes when."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from bench.lab.twin.calibrated import CalibratedCost, MeasuredPass, Recording, calibrate, rerun
from sim_models import MIB, recording, tiny

import remap
from remap.config import Knobs
from remap.errors import InvalidArgument, InvalidState
from remap.policy.hardware import Machine, machine
from remap_serve.cli.simulate_report import table_rows
from remap_serve.sim.policies import find
from remap_serve.sim.results import PolicyResult
from remap_serve.sim.serving import COMBINATIONS, SHARINGS, Setup, TenantSetup, simulate, tenants
from remap_serve.sim.workload import Arrivals, Item, Lengths, Load, Lognormal, generate
from remap_serve.sim.worlds import make_world

FAST = replace(machine("GH200-96GB"), iteration_gap_s=0.001)
# A machine on which what small models compute takes as long as copying does: the constants are of no machine.
SMALL = FAST.with_(
    name="small", hbm_bytes=2 << 30, hbm_bytes_per_s=100e9, flops=5e12, h2d_bytes_per_s=45e9, d2h_bytes_per_s=40e9
)


def two(sharing: str = "temporal", scheduler: str = "prefill-first", on: Machine = SMALL, **options: Any) -> Setup:
    """Two tenants of 8 layers and 96 blocks each."""
    memory = 8 * 16 * MIB + 24 * MIB
    settings = {"quantum_s": 0.05, "activation_bytes": 0, **options}
    return Setup(
        on, (TenantSetup("a", tiny(), memory), TenantSetup("b", tiny(), memory)), sharing, scheduler, **settings
    )


def work(rate: float, seconds: float = 3.0, seed: int = 3) -> tuple[Item, ...]:
    lengths = Lengths(Lognormal(200, 0.8, 4, 900), Lognormal(80, 0.8, 2, 300))
    return generate([Load(name, Arrivals(rate=rate), lengths) for name in ("a", "b")], seconds, seed)


MUCH, LITTLE = work(14.0), work(1.0)
ABLATED = ("remap", "remap:slices", "remap:weights", "remap:weights+oneiros", "remap:weights+pool+preempt")
NAMES = ("recompute", "swap", "pie", "pie:1.5", "static:2", *ABLATED, "ideal")


def same(result: PolicyResult) -> PolicyResult:
    return replace(result, wall_s=0.0)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("policy", NAMES)
def test_runs_repeat_bit_for_bit_and_lose_nothing(policy: str, sharing: str) -> None:
    seen: list[tuple[int, int]] = []
    found = simulate(two(sharing), MUCH, policy, lambda done, total: seen.append((done, total)))
    assert same(simulate(two(sharing), MUCH, policy)) == same(found)
    assert seen == sorted(seen) and seen[-1] == (len(MUCH), len(MUCH))
    for tenant in found.tenants:
        mine = [item for item in MUCH if item.tenant == tenant.tenant]
        asked = sum(min(item.output_tokens, 1024 - min(item.prompt_tokens, 1023)) for item in mine)
        assert (tenant.requests, tenant.finished, tenant.output_tokens) == (len(mine), len(mine), asked)
        assert len(tenant.ttft_s) == len(mine) and sum(count for _, count in tenant.tbt) == asked - len(mine)
        assert min(tenant.ttft_s) > 0 and tenant.tbt[0][0] > 0
        assert tenant.compute_s > 0 and tenant.stall_s >= 0 and tenant.kv_blocks_peak >= tenant.kv_blocks_start
        assert (tenant.recomputed_tokens > 0) == (tenant.preemptions > 0 and not find(policy).swaps)
    everything = math.fsum(seconds * count for seconds, count in found.tbt) + math.fsum(found.ttft_s)
    assert everything <= len(MUCH) * found.virtual_s
    times = [sample.time_s for sample in found.timeline if sample.tenant == "a"]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["recompute", "kv-pool+swap", "sleep+swap", "pie", "remap"])
def test_a_latent_of_layers_that_stay_takes_its_blocks(policy: str) -> None:
    """As DeepSeek's: one KV head of an odd size, and two of ten layers have no place in the arena."""
    latent = tiny(kv_heads=1, head_dim=289, dense_layers=2, resident_bytes=4 * MIB)
    assert latent.kv_bytes_per_token == 10 * 2 * 289 * 2
    memory = 8 * 16 * MIB + 4 * MIB + 96 * 16 * latent.kv_bytes_per_token
    setup = replace(two(), tenants=(TenantSetup("a", latent, memory), TenantSetup("b", tiny(), 152 * MIB)))
    assert [setup.kv_blocks(each) for each in setup.tenants] == [96, 96]
    found = simulate(setup, MUCH, policy)
    assert found.requests_finished == len(MUCH) and found.tenants[0].kv_used_peak > 90


def test_memory_that_nobody_asked_for_does_not_look_like_a_loss() -> None:
    """Who shares unused KV asks for blocks only when they are needed: "KV blocks, peak 6,179 to 2,184 (-65 %)"."""
    few = MUCH[:3]
    recompute, ours = (simulate(two(), few, name) for name in ("recompute", "remap"))
    assert ours.kv_blocks_peak < recompute.kv_blocks_peak and ours.kv_used_peak == recompute.kv_used_peak > 0
    rows = {name: changes for name, _, changes in table_rows([recompute, ours])}
    assert rows["KV blocks used, peak"] == ["", "="] and "KV blocks, peak" not in rows


def test_this_much_work_needs_what_the_policies_are_for() -> None:
    """Or the tests above would say nothing."""
    recompute, swap = simulate(two(), MUCH, "recompute"), simulate(two(), MUCH, "swap")
    weights, ours, pie = (simulate(two(), MUCH, name) for name in ("remap:weights", "remap", "pie"))
    assert recompute.preemptions > 10 and weights.preemptions < recompute.preemptions
    for found in (weights, ours):
        assert found.decisions > 0 and found.layers_remapped_peak >= 1
        assert found.kv_blocks_peak > recompute.kv_blocks_peak
    assert [tenant.swapped_bytes > 0 for tenant in (*weights.tenants, *ours.tenants)] == [False, False, True, True]
    assert pie.kv_blocks_peak > recompute.kv_blocks_peak and pie.kv_used_peak > recompute.kv_used_peak
    copied = [(tenant.swapped_bytes, tenant.pauses) for tenant in swap.tenants]
    block = 16 * tiny().kv_bytes_per_token
    assert all(
        nbytes % (2 * block) == 0 and nbytes >= 2 * block * count > 0 for nbytes, count in copied
    )  # out and back
    assert [tenant.swapped_out_bytes for tenant in swap.tenants] == [nbytes // 2 for nbytes, _ in copied]
    assert [tenant.swapped_bytes for tenant in recompute.tenants] == [0, 0]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_with_memory_to_spare_all_policies_are_one(sharing: str) -> None:
    """Nothing differs but rounding: runs begin at different virtual times, since attaching maps other numbers of pages."""
    found = [simulate(two(sharing), LITTLE, policy) for policy in ("recompute", "swap", "pie", "remap:weights")]
    for other in found:
        assert (other.preemptions, other.layers_remapped_peak, other.stall_fraction) == (0, 0.0, 0.0)
        assert other.ttft_s == pytest.approx(found[0].ttft_s, rel=1e-9)
        assert (other.iterations, other.virtual_s) == (found[0].iterations, pytest.approx(found[0].virtual_s, rel=1e-9))
    assert same(replace(found[1], policy="recompute")) == same(found[0])  # swap: bit for bit
    # Pages that are everybody's are mapped when somebody needs them, which takes a ten thousandth of the time.
    ours = simulate(two(sharing), LITTLE, "remap")
    assert (ours.preemptions, ours.layers_remapped_peak, ours.iterations) == (0, 0.0, found[0].iterations)
    assert 0 < ours.stall_fraction < 2e-4 and ours.virtual_s == pytest.approx(found[0].virtual_s, rel=2e-4)


def test_whole_models_sleep_and_wake() -> None:
    """As sleep mode: a turn begins when all of a model is there and all of the others is away, so it waits for a whole load; and
    whoever is awake has what the others do not need."""
    found, ours, free = (simulate(two(), MUCH, name) for name in ("sleep", "remap", "whole"))
    assert same(simulate(two(), MUCH, "sleep")) == same(found)
    assert [tenant.finished for tenant in found.tenants] == [tenant.requests for tenant in found.tenants]
    for name in ("a", "b"):  # all but the last layer leave, and never a part of them
        assert {sample.alpha for sample in found.timeline if sample.tenant == name} == {0.0, 7.0}
    assert found.kv_blocks_peak > ours.kv_blocks_peak
    assert found.virtual_s > ours.virtual_s > 0 and max(found.ttft_s) > max(free.ttft_s)
    with pytest.raises(InvalidArgument, match="take turns") as caught:
        simulate(two("spatial"), MUCH, "sleep")
    assert (caught.value.fields["policy"], caught.value.fields["sharing"]) == ("sleep", "spatial")


def test_a_request_longer_than_the_context_is_cut_and_one_longer_than_the_memory_refused() -> None:
    items = [Item("a", 0.0, 5000, 10), Item("a", 0.0, 1000, 500), Item("b", 0.0, 10, 1)]
    (a, b) = simulate(two(), items, "recompute").tenants
    assert (a.finished, a.output_tokens, b.output_tokens) == (2, 1 + 24, 1)
    small = replace(two(), tenants=tuple(replace(one, kv_blocks=60) for one in two().tenants))
    (a, b) = simulate(small, items, "recompute").tenants
    assert (a.requests, a.finished, b.finished) == (2, 0, 1)
    # 60 blocks of 16 tokens: the last of 961 tokens is never fed back.
    (a, _) = simulate(small, [Item("a", 0.0, 900, 61), Item("a", 0.0, 900, 62)], "recompute").tenants
    assert (a.requests, a.finished) == (2, 1)


@pytest.mark.parametrize("policy", NAMES)
def test_all_policies_have_the_same_memory(policy: str) -> None:
    """Of each tenant 64 pages of weights and 12 of KV, however they are used; ideal has six times as much."""
    chosen = find(policy)
    world = make_world(two(), chosen)
    try:
        engines = list(world.engines.values())
        if world.session is None:  # Pie: no pages, but blocks that take as much
            assert [engine.tenant.kv.base for engine in engines] == [96, 96]
            expansions = [engine.tenant.kv.usable_blocks / 96 for engine in engines]
            assert expansions == pytest.approx([float(policy.partition(":")[2] or 1)] * 2, rel=0.07)
            return
        pages = world.session.snapshot().pages
        assert pages.total * 2 * MIB == chosen.memory * sum(tenant.memory_bytes for tenant in two().tenants)
        blocks = sum(engine.tenant.kv.usable_blocks for engine in engines)
        used = pages.params + pages.ring + blocks / 8  # 8 blocks a page
        assert pages.free + used == pages.total == 152 * chosen.memory
        assert (pages.params == 128) == (not policy.startswith("static"))
    finally:
        world.close()


@pytest.mark.parametrize("scheduler", ["prefill-first", "chunked"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_ideal_is_recompute_with_six_times_the_memory(sharing: str, scheduler: str) -> None:
    """And with nothing else: machine, requests and scheduler are the same, no session decides."""
    setup = two(sharing, scheduler=scheduler)
    recompute, ideal = simulate(setup, MUCH, "recompute"), simulate(setup, MUCH, "ideal")
    on = setup.machine.with_(hbm_bytes=6 * setup.machine.hbm_bytes)
    more = tuple(replace(one, memory_bytes=6 * one.memory_bytes) for one in setup.tenants)
    by_hand = simulate(replace(setup, machine=on, tenants=more), MUCH, "recompute")
    assert same(replace(by_hand, policy="ideal")) == same(ideal)
    assert recompute.preemptions > 0 == ideal.preemptions and ideal.ttft_p99_s < recompute.ttft_p99_s
    assert (ideal.decisions, ideal.layers_remapped_peak, ideal.stall_s) == (0, 0.0, 0.0)
    assert ideal.requests_finished == recompute.requests_finished == len(MUCH)


def test_six_times_the_memory_is_six_times_the_blocks_that_were_given() -> None:
    setup = replace(two(), tenants=tuple(replace(one, kv_blocks=60) for one in two().tenants))
    more = setup.times(6)
    assert [one.kv_blocks for one in more.tenants] == [360, 360]
    assert [one.memory_bytes for one in more.tenants] == [6 * one.memory_bytes for one in setup.tenants]
    assert replace(more, machine=setup.machine, tenants=setup.tenants) == setup and setup.times(1) == setup
    long = [Item("a", 0.0, 900, 80)]  # refused in 60 blocks of 16 tokens
    refused, served = (simulate(setup, long, policy).tenants[0] for policy in ("recompute", "ideal"))
    assert (refused.finished, served.finished, served.kv_blocks_start) == (0, 1, 360)


@pytest.mark.parametrize("sharing", ["temporal", "spatial"])
def test_pages_are_conserved_at_every_moment(sharing: str) -> None:
    world = make_world(two(sharing), find("remap"))
    checks = 0

    def check(finished: int) -> None:
        nonlocal checks
        remap.advanced.check(world.session)
        for engine in world.engines.values():
            assert engine.tenant.kv.live_blocks == engine.scheduler.used_blocks
        checks += 1

    try:
        world.runner.serve(MUCH, check)
        assert checks > 20 and world.runner.decisions > 0
        assert all(engine.tenant.kv.live_blocks == 0 for engine in world.engines.values())
    finally:
        world.close()


class Fixed:
    """Every pass takes so long, alone."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def layer_s(self, *batch: int) -> float:
        return self.seconds / 8

    def ends_s(self, tokens: int, rows: int) -> float:
        return 0.0


def timed(sharing: str, a_s: float, b_s: float, **options: Any) -> Setup:
    setup = two(sharing, gap_s=0.0, **options)
    a, b = setup.tenants
    return replace(setup, tenants=(replace(a, cost=Fixed(a_s)), replace(b, cost=Fixed(b_s))))


def gaps_of(found: PolicyResult, tenant: str) -> list[tuple[float, int]]:
    (one,) = (each for each in found.tenants if each.tenant == tenant)
    gaps: Counter[float] = Counter()
    for seconds, count in one.tbt:
        gaps[round(seconds, 6)] += count
    return sorted(gaps.items())


@pytest.mark.parametrize("policy", ["recompute", "remap", "pie"])
def test_passes_that_overlap_share_the_device(policy: str) -> None:
    """A pass of a: 10 s, alone when it begins. b comes after 1 s with passes of 1 s each, which take 2 s while a computes: tokens
    at 3, 5, 7, 9 and 11 (begun at 9, before a ends), and then, alone, at 12 and 13."""
    items = [Item("a", 0.0, 10, 1), Item("b", 1.0, 10, 7)]
    found = simulate(timed("spatial", 10.0, 1.0), items, policy)
    assert found.ttft_s == pytest.approx((10.0, 2.0), rel=1e-6)
    assert Counter(dict(gaps_of(found, "b"))) == {1.0: 2, 2.0: 4}
    assert found.virtual_s == pytest.approx(13.0, rel=1e-6)


def test_turns_by_hand() -> None:
    """Turns end with the third pass of 1 s. a: tokens at 1, 2, 3; b, waiting since 0.5, at 4, 5, 6; so on."""
    items = [Item("a", 0.0, 10, 5), Item("b", 0.5, 10, 4)]
    found = simulate(timed("temporal", 1.0, 1.0, quantum_s=2.9), items, "recompute")
    assert found.ttft_s == pytest.approx((1.0, 3.5), rel=1e-6)
    assert gaps_of(found, "a")[-1] == (4.0, 1)  # from 3 to 7
    assert gaps_of(found, "b")[-1] == (3.0, 1)  # from 6 to 9: a had no more to do after 8
    assert found.virtual_s == pytest.approx(9.0, rel=1e-6)


@pytest.mark.parametrize("policy", ["recompute", "remap"])
def test_a_partition_of_its_own_hears_nothing_of_the_others(policy: str) -> None:
    alone = [item for item in MUCH if item.tenant == "a"]
    with_others, without = simulate(two("mig"), MUCH, policy), simulate(two("mig"), alone, policy)
    assert with_others.tenants[0] == without.tenants[0]
    beside = simulate(two("spatial"), MUCH, policy), simulate(two("spatial"), alone, policy)
    assert beside[0].tenants[0] != beside[1].tenants[0]


def test_partitions_have_their_part_of_everything() -> None:
    """A pass on half a machine takes twice as long, but for what does not scale."""
    fixed = ("op_overhead_s", "attn_decode_overhead_s", "other_ops_s", "other_ops_s_per_token_per_khidden")
    whole = SMALL.with_(roofline=replace(SMALL.roofline, **dict.fromkeys(fixed, 0.0)))
    half, full = (
        simulate(two(sharing, on=whole, gap_s=0.0), [Item("a", 0.0, 500, 50)], "recompute").virtual_s
        for sharing in ("mig", "spatial")
    )
    assert half == pytest.approx(2.0 * full, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(("vllm", "recompute swap pie static remap remap:oneiros"), ("recompute:3", "recompute static:6")),
        *(("remap:fast", "oneiros slices selection"), ("remap:selection=round", "selection")),
        *(("remap:speed=3", "slowdown selection"), ("static:none", "static:6 static:10%"), ("static:2.5", "static:6")),
        ("ideal:3", "recompute ideal"),
        *(("static:-1", "static:6"), ("pie:0.5", "pie:1.6"), ("pie:lots", "pie:1.6"), ("", "recompute")),
    ],
)
def test_unknown_policies_name_the_known(name: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        simulate(two(), MUCH, name)
    assert all(word in str(caught.value) for word in words.split())


def test_options_of_a_policy_are_knobs() -> None:
    plain = find("remap").config
    for name, changes in (
        ("remap:selection=slices+buffers=2", {"selection": "slices", "buffers": 2}),
        ("remap:uniform+lru", {"selection": "uniform", "policy": "lru"}),
        ("remap:reversion=false+slowdown=0.1", {"reversion": False, "slowdown": 0.1}),
    ):
        assert find(name).config == replace(plain, **changes)
    assert not find("remap:preempt").partial
    assert [find(f"static{of}").static for of in ("", ":6", ":25%")] == [0.1, 6.0, 0.25]


@pytest.mark.parametrize(
    ("name", "pooled", "swap", "stream"),
    [
        *(("remap", 0.25, True, False), ("remap:weights", 1.0, False, False), ("remap:uniform+lru", 0.25, True, False)),
        *(("remap:weights+pool", 0.25, False, False), ("remap:weights+swap", 1.0, True, False)),
        *(("remap:weights+swap+pool", 0.25, True, False), ("remap:pool", 0.25, True, False)),
        *(("remap:pool+weights", 1.0, False, False), ("remap:stream+weights", 1.0, False, False)),
        *(("remap:stream", 0.25, True, True), ("remap:weights+stream", 1.0, True, True)),
        *(("remap:pooled=0.5", 0.5, True, False), ("remap:weights+uniform", 1.0, False, False)),
        *(("kv-pool", 0.25, False, False), ("kv-pool+swap", 0.25, True, False), ("recompute", 1.0, False, False)),
    ],
)
def test_without_words_remap_has_all_donors(name: str, pooled: float, swap: bool, stream: bool) -> None:
    """Words take some away or give them back, from left to right."""
    found = find(name)
    assert (found.pooled, found.swaps, found.stream) == (pooled, swap, stream)
    if name in ("remap", "remap:weights"):
        assert found.config == Knobs()  # no setting of a session is needed
        assert (found.kind, found.partial, found.memory, found.whole) == ("remap", None, 1, False)


@pytest.mark.parametrize(("name", "mine"), [("remap", 24), ("remap:weights", 96)])
def test_who_may_have_how_much_kv_and_host_memory(name: str, mine: int) -> None:
    """Of 96 blocks a quarter is each tenant's own, or all; only all donors have host memory. Both may grow alike."""
    world = make_world(two(), find(name))
    try:
        pools = [engine.tenant.kv for engine in world.engines.values()]
        assert [pool.spec.min_blocks for pool in pools] == [mine, mine]
        assert [pool.spec.host_blocks > 0 for pool in pools] == [name == "remap"] * 2
        assert len({pool.spec.max_blocks for pool in pools}) == 1 and pools[0].spec.max_blocks > 2 * 96
    finally:
        world.close()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"sharing": "always"}, {"sharing": "always"}),
        ({"scheduler": "lifo"}, {"scheduler": "lifo"}),
        ({"tenants": ()}, {"tenants": []}),
        ({"tenants": (TenantSetup("a", tiny(), 300 * MIB),) * 2}, {"tenants": ["a", "a"]}),
        ({"tenants": (TenantSetup("a", tiny(), 3 << 30),)}, {"requested": 3 << 30, "available": 2 << 30}),
        ({"tenants": (TenantSetup("a", tiny(), 128 * MIB),)}, {"tenant": "a", "available": 128 * MIB}),
        ({"tenants": (TenantSetup("a", tiny(), 500 * MIB, kv_blocks=0),)}, {"tenant": "a"}),
    ],
)
def test_wrong_setups(change: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replace(two(), **change)
    assert {name: caught.value.fields.get(name) for name in fields} == fields


def test_unknown_tenants_and_what_a_scheduler_does_not_have() -> None:
    with pytest.raises(InvalidArgument, match=r"no tenant 'c'.*'a', 'b'"):
        simulate(two(), [Item("c", 0.0, 10, 10)], "remap")
    with pytest.raises(InvalidArgument, match="prefill-first"):
        simulate(two(scheduler="chunked"), MUCH, "swap")
    with pytest.raises(InvalidArgument, match="no such settings"):
        simulate(two(scheduling={"speed": 3}), MUCH, "recompute")


def test_tenants_by_name() -> None:
    gh200 = machine("GH200-96GB")
    c1 = tenants("C1", gh200)
    assert [one.name for one in c1] == ["OPT-13b", "Llama-2-13b", "Llama-3-8b"]
    assert [one.memory_bytes for one in c1] == [int(part * gh200.hbm_bytes) for part in (0.35, 0.35, 0.2)]
    assert set(COMBINATIONS) == {"C1", "C2"}
    (alone,) = tenants("OPT-6.7b", gh200)
    assert alone.memory_bytes == int(0.9 * gh200.hbm_bytes)
    twice = tenants("OPT-6.7b:20%, chat=OPT-6.7b:20GiB, OPT-6.7b:15%", gh200)
    assert [one.name for one in twice] == ["OPT-6.7b", "chat", "OPT-6.7b-3"] and twice[1].memory_bytes == 20 << 30
    for wrong in ("", "OPT-6.7b,OPT-13b", "OPT-6.7b:0%", "OPT-6.7b:101%", "OPT-6.7b:x%", "GPT-9:50%", "=OPT-13b:20%"):
        with pytest.raises(InvalidArgument):
            tenants(wrong, gh200)


COST = CalibratedCost(8, 0.04, 0.001, 2e-6, 0.003, 3e-6, 0.0005, copied_byte_s=0.0)


def recorded(cost: CalibratedCost) -> Recording:
    """Passes of all kinds, as that cost has them."""
    shapes = [
        (tokens, tokens * before + tokens * (tokens + 1) // 2, rows, rows * context, rows + (tokens > 0), copied)
        for tokens, before in ((0, 0), (7, 0), (64, 0), (128, 256), (256, 0))
        for rows, context in ((0, 0), (1, 50), (9, 300), (24, 120))
        for copied in (0, 30 * MIB)
        if tokens or rows
    ]
    passes = []
    for *shape, sampled, copied in shapes:
        seconds = cost.layers * cost.layer_s(*shape) + cost.ends_s(0, sampled) + cost.copied_byte_s * copied
        passes.append(MeasuredPass(*shape, sampled, seconds + 0.25, 0.25, copied))
    return recording(tuple(passes))


@pytest.mark.parametrize("copied_byte_s", [0.0, 1e-10])
def test_a_cost_is_found_again_from_its_passes(copied_byte_s: float) -> None:
    known = replace(COST, copied_byte_s=copied_byte_s)
    found = calibrate(recorded(known).passes, 8, 4e9)
    for name, value in vars(known).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3, abs=1e-14), name


def test_no_coefficient_is_below_zero_and_the_mean_is_met() -> None:
    """Decoding that gets faster with its context: no line with a slope >= 0 fits, the flat one does best."""
    passes = [MeasuredPass(0, 0, 4, 100 * i, 4, 1.0 - 0.01 * i) for i in range(10)]
    found = calibrate(passes, 8)
    assert all(value >= 0 for value in vars(found).values()) and found.context_s == pytest.approx(0.0, abs=1e-9)
    mean = [8 * found.layer_s(0, 0, 4, 100 * i) + found.ends_s(0, 4) for i in range(10)]
    assert sum(mean) == pytest.approx(sum(one.compute_s for one in passes), rel=1e-6)
    with pytest.raises(InvalidArgument, match="at least 7"):
        calibrate(passes[:6], 8)


def test_a_rerun_serves_what_was_recorded() -> None:
    run = recorded(COST)
    found, again = rerun(run, SMALL), rerun(run, SMALL)
    assert found == again
    assert found.output_tokens == sum(output for _, output in run.requests) and len(found.ttft_s) == 20
    assert found.duration_s == pytest.approx(sum(found.step_s) - run.gap_s, rel=1e-6)
    assert sum(found.step_s) == pytest.approx(found.compute_s + found.stall_s + len(found.steps) * 0.001, rel=1e-3)
    assert found.steps[0].usable_blocks >= 80 and max(step.alpha for step in found.steps) >= 1
    # What copies take from the computation is in the pass.
    slowed = rerun(run, SMALL, replace(COST, copied_byte_s=1e-10))
    assert slowed.duration_s > found.duration_s


def test_a_request_that_can_never_run_ends_the_run() -> None:
    """Somebody else holds 90 of 96 blocks for good, and a prompt needs 63: the run is given up, it does not go on for ever."""
    world = make_world(two(), find("recompute"))
    try:
        world.engines["a"].tenant.kv.allocate(90)
        with pytest.raises(InvalidState, match="no request got on") as caught:
            world.runner.serve([Item("a", 0.0, 1000, 20)])
        assert caught.value.fields == {"waiting": 1}
    finally:
        world.close()
