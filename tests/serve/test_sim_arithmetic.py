"""The figures of a simulated run, reckoned again by hand: times, tokens, blocks, stalls; and what policies have in common."""

from __future__ import annotations

import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import remap
from remap.cli.errors import writable
from remap.errors import InvalidArgument
from remap.policy.hardware import Machine, Model, machine
from remap_serve.cli.simulate_report import tables
from remap_serve.sim import running
from remap_serve.sim.policies import find
from remap_serve.sim.results import PolicyResult, Targets
from remap_serve.sim.serving import Setup, TenantSetup, simulate
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import make_world

approx = pytest.approx
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


def gaps_of(tenant: Any) -> dict[float, int]:
    gaps: dict[float, int] = {}
    for gap, count in tenant.tbt:
        gaps[round(gap, 6)] = gaps.get(round(gap, 6), 0) + count
    return gaps


@pytest.mark.parametrize("sharing", ["temporal", "spatial", "mig"])
def test_a_run_by_hand(sharing: str) -> None:
    """A prompt takes 1 s, a token 2 s, the gap 0.5 s. A comes at 10 and B at 14.25.

    A: prompt 10 to 11, tokens 11.5 to 13.5 and 14 to 16 (B has come meanwhile). B: prompt 16.5 to 17.5. Both: 18 to 20, 20.5 to
    22.5. So A's tokens come at 11, 13.5, 16, 20 and 22.5, and B's at 17.5, 20 and 22.5.
    """
    items = [Item("t", 10.0, 40, 5), Item("t", 14.25, 20, 3)]
    found = simulate(one(sharing), items, "recompute")
    tenant = only(found)
    assert tenant.ttft_s == approx((1.0, 17.5 - 14.25), rel=1e-9)
    # A: 2.5, 2.5, 4.0 (B's prompt between), 2.5. B: 2.5, 2.5.
    assert gaps_of(tenant) == {2.5: 5, 4.0: 1}
    assert tenant.tpot_s == approx(((22.5 - 11.0) / 4, (22.5 - 17.5) / 2), rel=1e-9)
    assert (found.virtual_s, found.tokens_per_s) == approx((12.5, 8 / 12.5), rel=1e-9)  # from 10 to 22.5
    assert (tenant.compute_s, tenant.stall_s, found.stall_fraction) == (2 * 1.0 + 4 * 2.0, 0.0, 0.0)
    assert (tenant.passes, tenant.output_tokens, tenant.preemptions) == (6, 8, 0)
    assert (found.ttft_p50_s, found.ttft_p99_s) == approx((1.0, 3.25), rel=1e-9)
    assert (found.tbt_mean_s, found.tbt_p50_s, found.tbt_p99_s) == approx(((5 * 2.5 + 4.0) / 6, 2.5, 4.0), rel=1e-9)
    for ttft, tpot, good in ((3.3, 2.9, 2), (3.2, 2.9, 1), (3.3, 2.8, 1), (3.2, 2.8, 0)):  # TPOT: 2.875 and 2.5 s
        assert replace(found, targets=Targets(ttft, tpot)).goodput_per_s == approx(good / 12.5, rel=1e-9)
    single = only(simulate(one(sharing), [Item("t", 0.0, 40, 1), Item("t", 0.0, 40, 2)], "recompute"))
    assert len(single.ttft_s) == 2 and single.tpot_s == (None, approx(2.5, rel=1e-9))
    # From the first arrival of all to the last finish of all, though partitions know nothing of each other.
    setup = one(sharing)
    pair = tuple(replace(setup.tenants[0], name=name) for name in "ab")
    found = simulate(replace(setup, tenants=pair), [Item("a", 5.0, 10, 1), Item("b", 50.0, 10, 1)], "recompute")
    assert found.virtual_s == approx(46.0, rel=1e-9)


def test_preemption_by_hand() -> None:
    """4 blocks of 16: A and B of 31 tokens take 2 each. The first decode computes token 32, and the second one token 33, for
    which A needs a third block and takes B's.
    """
    items = [Item("t", 0.0, 31, 6), Item("t", 0.0, 31, 6)]
    found = simulate(one(kv_blocks=4, scheduling={"watermark": 0.0}), items, "recompute")
    tenant = only(found)
    assert (tenant.preemptions, tenant.recomputed_tokens) == (1, 32)  # B's prompt and its first token had KV
    assert (tenant.finished, tenant.output_tokens) == (2, 12)
    # B: tokens at 1 and 3.5. A's decode from 4 on preempts it, and A's tokens come at 6, 8.5, 11 and 13.5. Then B's 33 tokens
    # are computed, from 14 to 15, which gives its third token.
    assert gaps_of(tenant) == {2.5: 9, 11.5: 1}
    assert found.virtual_s == approx(15.0 + 3 * 2.5, rel=1e-9)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["pie", "pie:1.5", "pie:4", "recompute", "remap"])
def test_models_of_next_to_no_layers(layers: int, policy: str) -> None:
    """Pie keeps two layers' room on the device; so with one or two layers there is nothing to swap, and nothing is refused."""
    items = [Item("t", 0.0, 100, 20) for _ in range(30)]
    found = only(simulate(one(model=tiny(layers), kv_blocks=20), items, policy))
    assert found.finished == 30
    if policy.startswith("pie") and layers < 3:
        assert found.kv_blocks_peak == 20 and found.stall_s == 0.0


def test_swapping_is_paid_for() -> None:
    """With a link that takes 1 s for a block each way, every block out and in makes its pass longer, and is told as a stall."""
    block = BLOCK * tiny().kv_bytes_per_token
    on = ON.with_(h2d_bytes_per_s=float(block), d2h_bytes_per_s=float(block), copy_setup_s=0.0)
    items = [Item("t", 0.0, 31, 6), Item("t", 0.0, 31, 6)]
    setup = one(on=on, kv_blocks=4, scheduling={"watermark": 0.0})
    slow, quick = (simulate(each, items, "swap") for each in (setup, replace(setup, machine=ON)))
    paid, free = only(slow), only(quick)
    assert paid.pauses == free.pauses == 1 and paid.preemptions == paid.recomputed_tokens == 0
    assert paid.swapped_bytes == 2 * 2 * block  # two blocks, there and back
    assert paid.stall_s == approx(4.0, rel=1e-9) and paid.compute_s == free.compute_s
    assert slow.virtual_s - quick.virtual_s == approx(4.0 - free.stall_s, rel=1e-6)


def much(names: str = "t", count: int = 60) -> list[Item]:
    rng = random.Random(5)
    return [Item(rng.choice(names), rng.uniform(0, 20), rng.randint(20, 300), rng.randint(2, 60)) for _ in range(count)]


WEIGHTS = ("remap:weights", "remap:weights+slices")


@pytest.mark.parametrize("policy", ["recompute", "swap", "pie", "static:2", *WEIGHTS, "remap", "remap:slices"])
def test_alone_sharing_is_nothing(policy: str) -> None:
    """One tenant in turns, at once with nobody, or on a partition that is everything: the same passes at the same times."""
    items, on = sorted(much(), key=lambda item: item.time_s), ON.with_(iteration_gap_s=0.001)
    runs = [simulate(one(sharing, cost=None, on=on), items, policy) for sharing in ("temporal", "spatial", "mig")]
    first = only(runs[0])
    for other in runs:
        mine, last = only(other), other.timeline[-1]
        # A page that is everybody's is mapped one step sooner or later: a microsecond.
        assert mine.ttft_s == approx(first.ttft_s, rel=1e-6, abs=2e-6 if find(policy).pooled < 1 else 0.0)
        for figure in ("preemptions", "output_tokens", "kv_blocks_peak"):
            assert getattr(mine, figure) == getattr(first, figure)
        assert (other.virtual_s, mine.compute_s) == approx((runs[0].virtual_s, first.compute_s), rel=1e-9)
        # The last sample is the total.
        assert (last.preemptions, last.stall_s) == (mine.preemptions, mine.stall_s)
        assert (last.running, last.waiting, last.kv_used_blocks) == (0, 0, 0)
    if policy == "static:2":  # what two layers give; the two buffers come out of four streamed ones
        extra = 2 * 16 * MIB // (BLOCK * tiny().kv_bytes_per_token)
        assert first.kv_blocks_start == first.kv_blocks_peak == KV_BLOCKS + extra and first.layers_remapped_peak == 2


@pytest.mark.parametrize("sharing", ["temporal", "spatial"])
def test_what_no_remapping_makes_room_for_is_refused(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region has place for it, so it was let in; but no layer may be remapped. No gap: time goes on."""
    monkeypatch.setattr(running, "_STUCK", 64)
    setup = one(sharing, on=ON.with_(iteration_gap_s=0.0), kv_blocks=20, cost=None)
    items = [Item("t", 0.0, 900, 9), Item("t", 0.0, 50, 9)]
    found = only(simulate(setup, items, "remap:weights+max_layers=0"))
    assert (found.requests, found.finished, found.output_tokens) == (2, 1, 9)
    for policy, words in (("static:7", "at most 6"), ("static:100%", "below 100"), ("static:99%", "at most 6")):
        with pytest.raises(InvalidArgument, match=words):
            simulate(one(), items, policy)
    with pytest.raises(InvalidArgument, match="context"):
        tiny(context=1)


@pytest.mark.parametrize("sharing", ["temporal", "spatial"])
def test_what_has_outgrown_the_memory_is_refused_though_its_kv_is_kept(
    sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region has place for it, and it ran until the last block was full; then its KV went to host memory, for good."""
    monkeypatch.setattr(running, "_STUCK", 64)
    setup = one(sharing, on=ON.with_(iteration_gap_s=0.0), kv_blocks=24, cost=None)
    items = [Item("t", 0.0, 24 * BLOCK - 3, 9), Item("t", 0.0, 50, 9)]
    found = only(simulate(setup, items, "remap:weights+max_layers=0+swap"))
    assert (found.requests, found.finished, found.pauses, found.preemptions) == (2, 1, 1, 0)


def test_tables_are_no_wider_than_the_terminal(tmp_path: Path) -> None:
    found = [simulate(one(), [Item("t", 0.0, 10, 3)], name) for name in ("recompute", "swap", "pie", "static", "remap")]
    for width, count in ((400, 1), (60, 4)):
        console = Console(width=width, record=True, file=StringIO())
        made = tables(found, "a title", console)
        console.print(*made)
        text = console.export_text()
        assert len(made) == count and text.count("requests finished") == count and "…" not in text
        assert text.count("recompute ") >= count
    writable(tmp_path / "new" / "folder" / "out.json")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(InvalidArgument, match="nothing was run"):
            writable(path)


def test_an_interrupt_behind_the_commit_stays_an_interrupt() -> None:
    """Between the commit of a plan and the note of it: the plan is not committed again, and the session goes on and closes."""
    world = make_world(one(cost=None), find("remap"))
    session: remap.Session = world.session
    changes = session._changes
    executor = changes._executor

    class Interrupted:
        armed = True

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def settle(self, *arguments: Any) -> None:
            executor.settle(*arguments)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

    for _ in range(2):
        changes._executor = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            remap.advanced.remap(session, "t", 3, 2, "uniform")
        remap.advanced.check(session)
        remap.advanced.remap(session, "t", 1, 2, "uniform")  # settles the interrupted plan first
        remap.advanced.check(session)
        assert session.snapshot().tenants["t"].remapped == 1
    changes._executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        remap.advanced.remap(session, "t", 3, 2, "uniform")
    world.close()
