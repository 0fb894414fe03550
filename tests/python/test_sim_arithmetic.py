"""The figures of a simulated run, reckoned again by hand: times, tokens, blocks, stalls; and what policies have in common."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import remap
from remap.cli.simulate_report import tables
from remap.cli.told import writable
from remap.errors import InvalidArgument
from remap.kv.spec import KVGeometry
from remap.sim import running
from remap.sim.hardware import Machine, Model, machine
from remap.sim.loads import load
from remap.sim.policies import find
from remap.sim.results import HEADLINE, PolicyResult, Targets, report
from remap.sim.serving import Setup, TenantSetup, simulate, tenants
from remap.sim.workload import Item
from remap.sim.worlds import _spec, make_world

MIB = 1 << 20
LAYERS = 8
BLOCK = 16
KV_BLOCKS = 96
ON = machine("GH200-96GB").with_(name="drawn", iteration_gap_s=0.5)


def tiny(layers: int = LAYERS, context: int = 1024) -> Model:
    """16 MiB a layer; a block of 16 tokens is 32 KiB a layer."""
    return Model(
        "tiny", layers, 512, 8, 8, 64, 32000, 2, 16 * MIB, 0, (("all", 512, 16384),), (512, 32000), context
    )  # fmt: skip


class Seconds:
    """A pass: 0.125 s a layer for each prompt of it, 0.25 s a layer if it decodes. Every sum is exact."""

    def layer_s(self, prefill_tokens: int, prefill_pairs: int, decode_rows: int, decode_context: int) -> float:
        return 0.125 * bool(prefill_tokens) + 0.25 * bool(decode_rows)

    def ends_s(self, tokens: int, sampled_rows: int) -> float:
        return 0.0


def one(sharing: str = "temporal", on: Machine = ON, **options: Any) -> Setup:
    settings: dict[str, Any] = {"activation_bytes": 0, "quantum_s": 1.0, **options}
    blocks = settings.pop("kv_blocks", KV_BLOCKS)
    model = settings.pop("model", tiny())
    memory = model.layers * 16 * MIB + 64 * MIB
    tenant = TenantSetup("t", model, memory, kv_blocks=blocks, cost=settings.pop("cost", Seconds()))
    return Setup(on, (tenant,), sharing, **settings)


def only(found: PolicyResult) -> Any:
    (tenant,) = found.tenants
    return tenant


# -- a run by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["temporal", "spatial", "mig"])
def test_a_run_by_hand(sharing: str) -> None:
    """A prompt takes 1 s, a token 2 s, the gap 0.5 s. A comes at 10 and B at 14.25.

    A: prompt 10 to 11, tokens 11.5 to 13.5 and 14 to 16 (B has come meanwhile). B: prompt 16.5 to 17.5. Both: 18 to 20, 20.5 to
    22.5. So A's tokens come at 11, 13.5, 16, 20 and 22.5, and B's at 17.5, 20 and 22.5.
    """
    items = [Item("t", 10.0, 40, 5), Item("t", 14.25, 20, 3)]
    found = simulate(one(sharing), items, "recompute")
    tenant = only(found)
    assert tenant.ttft_s == pytest.approx((1.0, 17.5 - 14.25), rel=1e-9)
    gaps: dict[float, int] = {}
    for gap, count in tenant.tbt:
        gaps[round(gap, 6)] = gaps.get(round(gap, 6), 0) + count
    # A: 2.5, 2.5, 4.0 (B's prompt between), 2.5. B: 2.5, 2.5.
    assert gaps == {2.5: 5, 4.0: 1}
    assert tenant.tpot_s == pytest.approx(((22.5 - 11.0) / 4, (22.5 - 17.5) / 2), rel=1e-9)
    assert found.virtual_s == pytest.approx(12.5, rel=1e-9)  # from 10 to 22.5
    # First tokens after 1 and 3.25 s, tokens every 2.875 and every 2.5 s.
    for targets, good in (
        (Targets(3.3, 2.9), 2),
        (Targets(3.2, 2.9), 1),
        (Targets(3.3, 2.8), 1),
        (Targets(3.2, 2.8), 0),
    ):
        assert replace(found, targets=targets).goodput_per_s == pytest.approx(good / 12.5, rel=1e-9)
    assert found.tokens_per_s == pytest.approx(8 / 12.5, rel=1e-9)
    assert (tenant.compute_s, tenant.stall_s, found.stall_fraction) == (2 * 1.0 + 4 * 2.0, 0.0, 0.0)
    assert (tenant.passes, tenant.output_tokens, tenant.preemptions) == (6, 8, 0)
    assert found.tbt_mean_s == pytest.approx((5 * 2.5 + 4.0) / 6, rel=1e-9)
    assert found.ttft_p50_s == pytest.approx(1.0, rel=1e-9) and found.ttft_p99_s == pytest.approx(3.25, rel=1e-9)
    assert found.tbt_p50_s == pytest.approx(2.5, rel=1e-9) and found.tbt_p99_s == pytest.approx(4.0, rel=1e-9)


def test_preemption_by_hand() -> None:
    """4 blocks of 16: A and B of 31 tokens take 2 each. The first decode computes token 32, and the second one token 33, for
    which A needs a third block and takes B's.
    """
    items = [Item("t", 0.0, 31, 6), Item("t", 0.0, 31, 6)]
    found = simulate(one(kv_blocks=4, scheduling={"watermark": 0.0}), items, "recompute")
    tenant = only(found)
    assert tenant.preemptions == 1
    assert tenant.recomputed_tokens == 32  # B's prompt and its first token had KV
    assert (tenant.finished, tenant.output_tokens) == (2, 12)
    # B: tokens at 1 and 3.5. A's decode from 4 on preempts it, and A's tokens come at 6, 8.5, 11 and 13.5. Then B's 33 tokens
    # are computed, from 14 to 15, which gives its third token.
    gaps: dict[float, int] = {}
    for gap, count in tenant.tbt:
        gaps[round(gap, 6)] = gaps.get(round(gap, 6), 0) + count
    assert gaps == {2.5: 9, 11.5: 1}
    assert found.virtual_s == pytest.approx(15.0 + 3 * 2.5, rel=1e-9)


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    found = simulate(one(), [Item("t", 0.0, 40, 1), Item("t", 0.0, 40, 2)], "recompute")
    tenant = only(found)
    assert len(tenant.ttft_s) == 2 and tenant.tpot_s == (None, pytest.approx(2.5, rel=1e-9))
    assert found.tpot_p99_s == pytest.approx(2.5, rel=1e-9)


def test_partitions_end_when_the_last_one_does() -> None:
    """From the first arrival of all to the last finish of all, though partitions know nothing of each other."""
    model = tiny()
    memory = 8 * 16 * MIB + 64 * MIB
    pair = tuple(TenantSetup(name, model, memory, kv_blocks=KV_BLOCKS, cost=Seconds()) for name in "ab")
    items = [Item("a", 5.0, 10, 1), Item("b", 50.0, 10, 1)]
    for sharing in ("temporal", "spatial", "mig"):
        found = simulate(replace(one(sharing), tenants=pair), items, "recompute")
        assert found.virtual_s == pytest.approx(46.0, rel=1e-9), sharing


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_static_streaming_has_the_blocks_of_so_many_layers(layers: int) -> None:
    found = only(simulate(one(), [Item("t", 0.0, 10, 3)], f"static:{layers}"))
    pages = layers * 8  # of 2 MiB: what alpha layers give; the two buffers come out of alpha + 2 streamed ones
    extra = pages * 2 * MIB // (BLOCK * tiny().kv_bytes_per_token)
    assert found.kv_blocks_start == found.kv_blocks_peak == KV_BLOCKS + extra
    assert found.layers_remapped_peak == layers


def test_every_policy_has_the_pages_of_every_other() -> None:
    """Weights and KV of all tenants, in pages; of Pie, in blocks of whole layers."""
    setup, totals = one(kv_blocks=91), {}
    for policy in ("recompute", "swap", "static:2", "remap", "remap:pool", "remap:slices"):
        world = make_world(setup, find(policy))
        totals[policy] = world.session.snapshot().pages.total
        world.close()
    spec, _ = _spec(setup, setup.tenants[0], find("recompute"))
    assert set(totals.values()) == {8 * 8 + KVGeometry(spec, 2 * MIB).pages_for_blocks(91)}
    world = make_world(setup, find("pie"))
    assert world.engines["t"].tenant.kv.base == 91
    world.close()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["pie", "pie:1.5", "pie:4", "recompute", "remap"])
def test_models_of_next_to_no_layers(layers: int, policy: str) -> None:
    """Pie keeps two layers' room on the device; so with one or two layers there is nothing to swap, and nothing is refused."""
    items = [Item("t", 0.0, 100, 20) for _ in range(30)]
    found = only(simulate(one(model=tiny(layers), kv_blocks=20), items, policy))
    assert found.finished == 30
    if policy.startswith("pie") and layers < 3:
        assert found.kv_blocks_peak == 20 and found.stall_s == 0.0


# -- policies ----------------------------------------------------------------------------------------------------------


def test_swapping_is_paid_for() -> None:
    """With a link that takes 1 s for a block each way, every block out and in makes its pass longer, and is told as a stall."""
    block = BLOCK * tiny().kv_bytes_per_token
    on = ON.with_(h2d_bytes_per_s=float(block), d2h_bytes_per_s=float(block), copy_setup_s=0.0)
    items = [Item("t", 0.0, 31, 6), Item("t", 0.0, 31, 6)]
    setup = one(on=on, kv_blocks=4, scheduling={"watermark": 0.0})
    free = only(simulate(replace(setup, machine=ON), items, "swap"))
    paid = only(simulate(setup, items, "swap"))
    assert paid.preemptions == free.preemptions == 1 and paid.recomputed_tokens == 0
    assert paid.swapped_bytes == 2 * 2 * block  # two blocks, there and back
    assert paid.stall_s == pytest.approx(4.0, rel=1e-9)
    assert paid.compute_s == free.compute_s
    slow, quick = (simulate(each, items, "swap").virtual_s for each in (setup, replace(setup, machine=ON)))
    assert slow - quick == pytest.approx(4.0 - free.stall_s, rel=1e-6)


def much(names: str = "t", count: int = 60) -> list[Item]:
    rng = random.Random(5)
    return [Item(rng.choice(names), rng.uniform(0, 20), rng.randint(20, 300), rng.randint(2, 60)) for _ in range(count)]


@pytest.mark.parametrize("policy", ["recompute", "swap", "pie", "static:2", "remap", "remap:slices"])
def test_alone_sharing_is_nothing(policy: str) -> None:
    """One tenant in turns, at once with nobody, or on a partition that is everything: the same passes at the same times."""
    items = sorted(much(), key=lambda item: item.time_s)
    runs = [simulate(one(sharing, cost=None, on=ON.with_(iteration_gap_s=0.001)), items, policy)
            for sharing in ("temporal", "spatial", "mig")]  # fmt: skip
    for other in runs[1:]:
        mine, first = only(other), only(runs[0])
        assert mine.ttft_s == pytest.approx(first.ttft_s, rel=1e-6)
        assert (mine.preemptions, mine.output_tokens, mine.kv_blocks_peak) == (
            first.preemptions, first.output_tokens, first.kv_blocks_peak,
        )  # fmt: skip
        assert other.virtual_s == pytest.approx(runs[0].virtual_s, rel=1e-9)
        assert mine.compute_s == pytest.approx(first.compute_s, rel=1e-9)


@pytest.mark.parametrize("sharing", ["temporal", "spatial"])
@pytest.mark.parametrize("policy", ["recompute", "swap", "pie", "remap"])
def test_the_last_sample_is_the_total(policy: str, sharing: str) -> None:
    found = simulate(one(sharing, kv_blocks=40, cost=None), much(), policy)
    tenant, last = only(found), found.timeline[-1]
    assert (last.preemptions, last.stall_s) == (tenant.preemptions, tenant.stall_s)
    assert (last.running, last.waiting, last.kv_used_blocks) == (0, 0, 0)
    assert last.time_s >= found.virtual_s


def test_the_file_has_the_keys_that_were_asked_for() -> None:
    found = simulate(one(), [Item("t", 0.0, 10, 3)], "recompute")
    written = report({}, [found])["policies"]
    (entry,) = written.values() if isinstance(written, dict) else written
    assert set(HEADLINE) <= set(entry)
    assert HEADLINE == (
        "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s", "preemptions", "kv_blocks_peak",
        "layers_remapped_peak", "stall_fraction", "requests_finished", "goodput_per_s",
    )  # fmt: skip
    assert {name: entry[name] for name in HEADLINE} == found.headline()


# -- what stands still -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["temporal", "spatial"])
def test_what_no_remapping_makes_room_for_is_refused(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region has place for it, so it was let in; but no layer may be remapped. No gap: time goes on."""
    monkeypatch.setattr(running, "_STUCK", 64)
    setup = one(sharing, on=ON.with_(iteration_gap_s=0.0), kv_blocks=20, cost=None)
    items = [Item("t", 0.0, 900, 9), Item("t", 0.0, 50, 9)]
    found = only(simulate(setup, items, "remap:max_layers=0"))
    assert (found.requests, found.finished, found.output_tokens) == (2, 1, 9)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_before_anything_does() -> None:
    for policy, words in (("static:7", "at most 6"), ("static:100%", "below 100"), ("static:99%", "at most 6")):
        with pytest.raises(InvalidArgument, match=words):
            simulate(one(), [Item("t", 0.0, 10, 3)], policy)
    with pytest.raises(InvalidArgument, match="no name before"):
        tenants("=Llama-3-8b:20%", machine("GH200-96GB"))
    with pytest.raises(InvalidArgument, match="larger rate"):
        load(["a"], requests=5, rate=1e-300)
    with pytest.raises(InvalidArgument, match="context"):
        tiny(context=1)


def test_tables_are_no_wider_than_the_terminal(tmp_path) -> None:
    found = [
        simulate(one(), [Item("t", 0.0, 10, 3)], policy) for policy in ("recompute", "swap", "pie", "static", "remap")
    ]
    for width, count in ((400, 1), (60, 4)):
        console = Console(width=width, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
        made = tables(found, "a title", console)
        for each in made:
            console.print(each)
        text = console.export_text()
        assert len(made) == count and text.count("requests finished") == count and "…" not in text
        assert text.count("recompute ") >= count


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path) -> None:
    writable(tmp_path / "new" / "folder" / "out.json")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(InvalidArgument, match="nothing was run"):
            writable(path)


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_behind_the_commit_stays_an_interrupt() -> None:
    """Between the commit of a plan and the note of it: the plan is not committed again, and the session goes on and closes."""
    setup = one(cost=None)
    world = make_world(setup, find("remap"))
    session: remap.Session = world.session
    changes = session._changes
    executor = changes._executor

    class Interrupted:
        armed = True

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def commit(self, *arguments: Any) -> None:
            executor.commit(*arguments)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

    changes._executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        remap.advanced.remap(session, "t", 3, 2, "uniform")
    remap.advanced.check(session)
    remap.advanced.remap(session, "t", 1, 2, "uniform")  # settles the interrupted plan first
    remap.advanced.check(session)
    assert session.snapshot().tenants["t"].remapped == 1
    changes._executor = again = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        remap.advanced.remap(session, "t", 3, 2, "uniform")
    assert not again.armed
    world.close()
