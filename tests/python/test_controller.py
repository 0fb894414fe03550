"""The single-tenant policy: growth and shrinking case by case, and the no-thrash claims against arbitrary demand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.policy.controller import Controller, Decision, Demand, Knobs, LayerSeconds, TenantView
from remap.policy.donors import supply
from remap.policy.donors.supply import Quote
from remap.policy.link import Neighbour
from remap.policy.views import NeedQuotes, Take

Stall = Callable[[LayerSeconds, int, int], float]


@dataclass(frozen=True)
class Times:
    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    wait_s: float = 0.0
    alone: float = 1.0


def times_of(layers: int = 20, compute: float = 1e-3, transfer: float = 4e-3) -> Times:
    return Times((compute,) * layers, (transfer,) * layers)


def closed_form(times: LayerSeconds, alpha: int, buffers: int) -> float:
    """Theory section 2, equal layers, many buffers: (alpha + beta) T_T - n T_c, if positive."""
    return max(0.0, (alpha + buffers) * times.transfer_s[0] - math.fsum(times.compute_s)) if alpha else 0.0


def bound_of(slowdown: float = 0.02, buffers: int = 2):
    def bound(times: LayerSeconds) -> tuple[int, int]:
        allowed = slowdown * math.fsum(times.compute_s)
        layers = len(times.compute_s)
        fits = [alpha for alpha in range(layers - buffers + 1) if closed_form(times, alpha, buffers) <= allowed]
        return max(fits), buffers

    return bound


def controller(stall=closed_form, bound=None, **config: object) -> Controller:
    settings_ = Knobs(**config)  # type: ignore[arg-type]
    return Controller(settings_, bound=bound or bound_of(settings_.slowdown), stall=stall)


PRESENT = {"layers": 20, "remapped": 0, "buffers": 0, "streamable": 20, "max_remapped": 18, "blocks_per_layer": 10.0}
BLOCKS = {"usable_blocks": 100, "free_blocks": 50, "live_blocks": 50, "free_pool_blocks": 0}


def view(**changes: object) -> TenantView:
    return TenantView(**{**PRESENT, **BLOCKS, "times": times_of(), **changes})  # type: ignore[arg-type]


def run(policy: Controller, count: int, **changes: object) -> list[Decision]:
    return [policy.decide(view(remapped=3, buffers=2, **changes), Demand(0)) for _ in range(count)]


WRONG: dict[str, tuple[object, ...]] = {
    "slowdown": (-0.1, math.nan), "contention": (math.inf,), "map_s": ("1ms",), "dwell": (0,), "reserve_blocks": (-1,),
    "hysteresis_blocks": (0.5,), "max_layers": (-1,), "smoothing": (0.0, 1.5), "blocks": (-1, 1.5, True, "4", None),
    **dict.fromkeys(("ttft_s", "tbt_s"), (0.0, -1.0, math.nan, math.inf, "1", True)),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_config_and_demand_are_validated(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        (Demand if field == "blocks" else Knobs)(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("demand", "reserve", "present", "expected"),
    [
        # Free pages first, then as many layers as the rest needs: action, pages' blocks, layers, what stays unmet.
        (60, 5, {"free_pool_blocks": 40}, ("grow", 15, 0, 0)),
        (74, 0, {"free_pool_blocks": 3}, ("grow", 3, 3, 0)),
        # r = 4, n = 20, 2 buffers: (alpha + 2) 4 <= 20 * 1.02, so 3 layers at most.
        (200, 0, {}, ("grow", 0, 3, 120)),
        (200, 0, {"remapped": 3, "buffers": 2, "free_blocks": 80}, ("none", 0, 3, 120)),
        (0, 8, {"free_blocks": 5, "max_remapped": 0}, ("none", 0, 0, 0)),  # headroom is not unmet demand
        (0, 8, {"free_blocks": 5}, ("grow", 0, 1, 0)),
        (200, 0, {"times": None}, ("grow", 0, 1, 140)),  # no measurement yet: one layer
        (200, 0, {"times": None, "remapped": 1, "buffers": 1}, ("none", 0, 1, 150)),
    ],
)
def test_what_it_grows_by(demand: int, reserve: int, present: dict[str, object], expected: tuple[object, ...]) -> None:
    found = controller(reserve_blocks=reserve).decide(view(**present), Demand(demand))
    assert (found.action, found.free_pool_blocks_to_take, found.remapped, found.unmet_blocks) == expected
    assert found.action == "none" or "blocks wanted" in found.reason


@pytest.mark.parametrize(
    ("changes", "config", "remapped"),
    [
        *(({"max_remapped": 2}, {}, 2), ({"streamable": 4}, {}, 2), ({"streamable": 1}, {}, 0)),
        *(({}, {"max_layers": 1}, 1), ({}, {"max_layers": 0}, 0)),
        *(({"times": times_of(transfer=1e-5)}, {}, 15), ({"times": times_of(transfer=1.0)}, {}, 0)),
        *(({"max_blocks": 125}, {}, 3), ({"max_blocks": 100}, {}, 0)),
    ],
)
def test_growth_respects_every_cap(changes: dict[str, object], config: dict[str, object], remapped: int) -> None:
    decision = controller(reserve_blocks=0, **config).decide(view(**changes), Demand(200))
    assert decision.remapped == remapped
    assert decision.action == ("grow" if remapped else "none")
    gained = min(10 * remapped, changes.get("max_blocks", 1000) - 100)  # type: ignore[operator]
    assert decision.unmet_blocks == 150 - gained


def test_buffers_stay_while_layers_are_remapped() -> None:
    # single buffering hides one layer here, double buffering three
    def stall(times: LayerSeconds, alpha: int, buffers: int) -> float:
        return 0.0 if alpha <= (1, 3)[buffers - 1] else 1.0

    policy = controller(stall=stall, reserve_blocks=0)
    present = view(remapped=1, buffers=1, free_blocks=0)
    decision = policy.decide(present, Demand(20))
    assert (decision.action, decision.remapped, decision.buffers) == ("none", 1, 1)
    decision = policy.decide(replace(present, remapped=0, buffers=0), Demand(30))
    assert (decision.action, decision.remapped, decision.buffers) == ("grow", 3, 2)


def test_an_alpha_that_stalls_between_two_that_do_not_is_avoided() -> None:
    def stall(times: LayerSeconds, alpha: int, buffers: int) -> float:
        return 1e-3 if alpha == 2 else 0.0

    policy = controller(stall=stall, reserve_blocks=0, hysteresis_blocks=0, dwell=1, map_s=0.0)
    assert policy.decide(view(free_blocks=0), Demand(20)).remapped == 3
    assert policy.decide(view(free_blocks=0, max_remapped=2), Demand(20)).remapped == 1
    decisions = run(policy, 10, free_blocks=20)
    assert [d.action for d in decisions] == ["none"] * 9 + ["shrink"]
    assert decisions[-1].remapped == 1
    assert {d.action for d in run(policy, 30, free_blocks=19)} == {"none"}  # two layers' worth is not free


SLOW = {"times": times_of(transfer=8e-3)}


@pytest.mark.parametrize(
    ("knobs", "present", "after"),
    [
        ({}, {}, 13),  # hidden copies: kappa T_T = 0.4 ms a pass against T_T + T_map = 5 ms
        ({"dwell": 1}, SLOW, 2),  # S(3) - S(2) = T_T = 8 ms, and kappa T_T, of 9 ms: the second pass pays for it
        ({"dwell": 4}, SLOW, 4),
        ({}, {"times": None}, 10),  # without measurement, 1 / kappa steps
        ({"contention": 0.0}, {}, None),  # copies that cost nothing
        ({}, {"free_blocks": 10, "shrink_blocks": 10}, 13),  # the exact loss, where it is known
        ({}, {"free_blocks": 10, "shrink_blocks": 11}, None),
    ],
)
def test_it_shrinks_when_the_credit_pays_for_one_reload(knobs, present, after) -> None:
    policy = controller(reserve_blocks=0, hysteresis_blocks=0, **knobs)
    decisions = run(policy, after or 200, **present)
    assert [one.action for one in decisions[:-1]] == ["none"] * (len(decisions) - 1)
    assert decisions[-1].action == ("shrink" if after else "none")
    if after:
        assert (decisions[-1].remapped, policy.credit) == (0 if present is SLOW else 2, 0.0)
        assert f"for {after} steps" in decisions[-1].reason


@pytest.mark.parametrize(("free", "fewer"), [(200, 3), (74, 3), (73, 4), (34, 7)])
def test_a_stall_beyond_what_is_allowed_ends_in_one_change_if_there_are_blocks(free: int, fewer: int) -> None:
    """20 layers of 1 ms hide 5 copies of 4 ms: 3 layers through 2 buffers. 10 were remapped when a pass took twice as long."""
    policy = controller(reserve_blocks=0, hysteresis_blocks=4, dwell=1)
    slow = replace(times_of(), compute_s=(2.4e-3,) * 20)
    at = {"remapped": 10, "buffers": 2, "free_blocks": free, "usable_blocks": 200 + free, "live_blocks": 200}
    assert policy.decide(view(**at, times=slow), Demand(0)).action == "none", "nothing stalls: rent is not due yet"
    decision = policy.decide(view(**at), Demand(0))
    assert (decision.action, decision.remapped) == ("shrink", fewer)
    assert (10 - fewer) * 10 + 4 <= free
    assert decision.predicted_stall_s == closed_form(times_of(), fewer, 2)


def test_credit_is_forfeited_when_the_condition_fails() -> None:
    policy = controller(reserve_blocks=5, hysteresis_blocks=5)
    run(policy, 12, free_blocks=20)  # 0 + 5 + 10 + 5
    assert policy.credit > 0.9
    assert run(policy, 1, free_blocks=19)[0].action == "none"
    assert policy.credit == 0.0
    assert [d.action for d in run(policy, 13, free_blocks=20)] == ["none"] * 12 + ["shrink"]
    run(policy, 12, free_blocks=20)
    policy.decide(view(remapped=3, buffers=2, free_blocks=0, max_remapped=3), Demand(10))
    assert policy.credit == 0.0


def test_a_rise_within_sigma_does_not_end_the_guard() -> None:
    policy = controller(hysteresis_blocks=5)
    assert run(policy, 13, usable_blocks=100, live_blocks=85, free_blocks=15)[-1].action == "shrink"
    less = {"remapped": 2, "buffers": 2, "usable_blocks": 90}
    policy.decide(view(**less, live_blocks=50, free_blocks=40), Demand(0))
    # The rise by 38 blocks is remembered; what is wanted now is within 5 blocks of what it was when the layer was given back.
    for _ in range(8):
        assert policy.decide(view(**less, live_blocks=88, free_blocks=2), Demand(0)).action == "none"
    assert policy.decide(view(**less, live_blocks=91, free_blocks=2), Demand(0)).action == "grow"


@dataclass
class Tenant:
    """Applies decisions exactly, and keeps live blocks within what is usable (an engine allocates what it can)."""

    policy: Controller
    stall: Stall
    times: Times
    blocks_per_layer: float
    pool: int
    base: int = 40
    alpha: int = 0
    buffers: int = 0
    log: list[tuple[Decision, int, int]] = field(default_factory=list)  # decision, live + demand, layers before

    def usable(self, alpha: int) -> int:
        return self.base + math.floor(alpha * self.blocks_per_layer)

    def play(self, wanted: list[tuple[int, int]], share: float) -> None:
        """For so many steps, so many blocks in all, of which `share` are allocated already as far as they exist."""
        for blocks, steps in wanted:
            for _ in range(steps):
                self.step(blocks, share)

    def step(self, wanted: int, share: float) -> None:
        usable = self.usable(self.alpha)
        live = min(int(wanted * share), usable)
        seen = TenantView(
            **{**PRESENT, "remapped": self.alpha, "buffers": self.buffers, "blocks_per_layer": self.blocks_per_layer},
            usable_blocks=usable,
            free_blocks=usable - live,
            live_blocks=live,
            free_pool_blocks=self.pool,
            times=self.times,
        )
        decision = self.policy.decide(seen, Demand(wanted - live))
        self.log.append((decision, wanted, self.alpha))
        if decision.action == "none":
            assert decision.remapped in (self.alpha, 0)
            assert decision.free_pool_blocks_to_take == 0
            return
        assert 0 <= decision.free_pool_blocks_to_take <= self.pool
        assert (decision.remapped < self.alpha) == (decision.action == "shrink")
        self.pool -= decision.free_pool_blocks_to_take
        self.base += decision.free_pool_blocks_to_take
        self.alpha, self.buffers = decision.remapped, decision.buffers
        assert self.usable(self.alpha) >= live  # a shrink never takes what is live


CONFIGS = st.builds(
    Knobs,
    slowdown=st.sampled_from([0.0, 0.02, 1.0, 50.0]),
    reserve_blocks=st.one_of(st.none(), st.integers(0, 20)),
    hysteresis_blocks=st.one_of(st.none(), st.integers(0, 20)),
    contention=st.sampled_from([0.05, 0.1, 0.5]),
    map_s=st.sampled_from([0.0, 1e-3]),
    dwell=st.integers(1, 4),
    smoothing=st.sampled_from([0.125, 0.5, 1.0]),
)
WANTED = st.lists(st.tuples(st.integers(0, 250), st.integers(1, 8)), min_size=1, max_size=25)  # (blocks, steps)


@st.composite
def tenants(draw: st.DrawFn) -> Tenant:
    config = draw(CONFIGS)
    table = draw(st.lists(st.integers(0, 8), min_size=20, max_size=20))  # any stalls at all, or the closed form

    def stall(times: LayerSeconds, alpha: int, buffers: int) -> float:
        return table[alpha] * 1e-3 if draw_table else closed_form(times, alpha, buffers)

    draw_table = draw(st.booleans())
    policy = Controller(config, bound=bound_of(config.slowdown), stall=stall)
    times, blocks_per_layer = times_of(transfer=draw(st.sampled_from([1e-4, 1e-3, 4e-3]))), [0.7, 3.5, 10.0]
    return Tenant(policy, stall, times, draw(st.sampled_from(blocks_per_layer)), draw(st.sampled_from([0, 15])))


def largest_credit(tenant: Tenant) -> float:
    """The most that one step can earn, over all alpha: written from the definition."""
    config, times = tenant.policy.config, tenant.times
    copy, best = times.transfer_s[0], 0.0
    for alpha in range(1, 19):
        for fewer in range(alpha):
            saved = max(0.0, tenant.stall(times, alpha, 2) - tenant.stall(times, fewer, 2))
            count = alpha - fewer
            best = max(best, (saved + config.contention * count * copy) / (count * copy + config.map_s))
    return best


@settings(max_examples=examples(150), deadline=None)
@given(tenants(), WANTED, st.sampled_from([0.0, 0.5, 1.0]))
def test_no_thrashing_under_any_demand(tenant: Tenant, wanted: list[tuple[int, int]], share: float) -> None:
    tenant.play(wanted, share)
    shrinks = [i for i, (d, _, _) in enumerate(tenant.log) if d.action == "shrink"]
    spacing = max(tenant.policy.config.dwell, math.ceil(1 / largest_credit(tenant) - 1e-6))
    assert len(shrinks) <= len(tenant.log) // spacing
    changes = [i for i, (d, _, _) in enumerate(tenant.log) if d.action != "none"]
    for i in shrinks:  # at least `spacing` steps after the last change, or after the start
        assert i - max((c for c in changes if c < i), default=-1) >= spacing
    layers = [(d.remapped - before) for d, _, before in tenant.log if d.action != "none"]
    grown, shrunk = sum(k for k in layers if k > 0), -sum(k for k in layers if k < 0)
    most = max((d.remapped for d, _, _ in tenant.log), default=0)
    assert most <= bound_of(tenant.policy.config.slowdown)(tenant.times)[0]
    assert grown <= most + shrunk


@settings(max_examples=examples(150), deadline=None)
@given(tenants(), WANTED, st.sampled_from([0.0, 0.5, 1.0]))
def test_growing_after_a_shrink_takes_a_rise_of_demand_beyond_sigma(tenant, wanted, share) -> None:
    at_shrink = None
    for blocks, steps in wanted:
        for _ in range(steps):
            tenant.step(blocks, share)
            decision, fixed = tenant.log[-1][0], tenant.policy.config.hysteresis_blocks
            if decision.action == "shrink":
                sigma = max(tenant.policy.variation, 0.5 * tenant.blocks_per_layer) if fixed is None else fixed
                at_shrink = (blocks, sigma)
            elif decision.action == "grow" and at_shrink is not None:
                assert blocks - at_shrink[0] > at_shrink[1]
                at_shrink = None


# -- beside other active tenants ---------------------------------------------------------------------------------------


def beside(allowed_s: float) -> list[Neighbour]:
    """One that streams all of two layers through one buffer: 4 ms of copies in a pass of 10 ms, and 2 more to wait."""
    return [Neighbour("n", (5e-3, 5e-3), (2e-3, 2e-3), (1, 1), (0, 1), 1, 0.0, allowed_s)]


def sharing(allowed_s: float, longest: Callable[[int, int], float]) -> Controller:
    return Controller(Knobs(reserve_blocks=0), bound=bound_of(), stall=closed_form, longest=longest)


def with_quotes(
    policy: Controller, seen: TenantView, demand: Demand, others: Callable[[int], list[list[Quote]]]
) -> Decision:
    """The decision of a tenant that shares its device: asked once, and again with what the others give."""
    asked = policy.decide(replace(seen, shares=True, neighbours=None), demand)
    assert isinstance(asked, NeedQuotes)
    return policy.decide_with(replace(seen, shares=True), demand, others(asked.blocks))


@pytest.mark.parametrize(("longest_s", "grows"), [(0.0, True), (3.9e-3, True), (5.9e-3, False)])
def test_growth_spares_the_certificates_of_other_active_tenants(longest_s: float, grows: bool) -> None:
    """One buffer: each copy follows the layer before it, so every copy of n is waited for already."""
    allowed = beside(0.0)[0].stall(4e-3)
    policy = sharing(allowed, lambda alpha, buffers: longest_s)
    seen = view(neighbours=beside(allowed))
    decision = policy.decide(seen, Demand(60))
    assert (decision.remapped == 1) is grows
    assert [quote.step for quote in policy.offers(seen)] == ([(n, 2) for n in (1, 2, 3)] if grows else [])


def test_beside_others_and_with_a_tbt_s_nothing_streams_before_a_decode_pass_was_measured() -> None:
    policy = sharing(0.0, lambda alpha, buffers: 0.0)
    for decision in (policy.decide(view(times=None, neighbours=[]), Demand(100)), grown({"times": None}, tbt_s=1.0)):
        assert (decision.action, decision.remapped) == ("none", 0) and "no decode pass" in decision.reason
    assert policy.decide(view(times=None), Demand(60)).remapped == 1


def test_one_decision_lets_at_most_one_active_tenant_copy_more() -> None:
    def other(need: int) -> list[list[Quote]]:
        return [[Quote("d", "active", 10, 0.0, 1.0, 0.0, Take("d", "active", 10, 1, 2))]]

    policy = sharing(0.0, lambda alpha, buffers: 0.0)
    both = with_quotes(policy, view(remapped=0), Demand(85), other)
    assert both.remapped == 3 and both.takes  # alone on the link
    one = with_quotes(policy, view(neighbours=[]), Demand(85), other)
    assert (one.remapped, one.takes) == (3, ()) and one.unmet_blocks == 5


def test_the_reason_names_what_is_taken_of_whom() -> None:
    def other(need: int) -> list[list[Quote]]:
        takes = [Take("a", "idle_kv", 3), Take("b", "paused_kv", 4), Take("c", "inactive", 5, 2, 2, "suffix")]
        takes.append(Take("d", "active", 6, 1, 2, "onward", 0.0015))
        return [[Quote(take.donor, take.kind, take.blocks, 0.0, 0.0, 0.0, take)] for take in takes]

    decision = with_quotes(sharing(0.0, lambda alpha, buffers: 0.0), view(), Demand(68), other)
    assert decision.reason == (
        "68 blocks wanted and 0 kept in reserve, 50 free: take 0 from free pages, 3 from unused KV of a, "
        "4 from KV of b that goes to host memory, 5 from layers of c (2 of them away then), "
        "6 from layers of d (1 of them away then, stalling it 1.5 ms a pass) and remap 0 more layers, "
        "0 in all, stalling 0 ms a pass"
    )


def test_the_reason_says_by_how_much_a_plan_may_miss_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(need: int) -> list[list[Quote]]:
        return [[Quote(f"{n}", "active", 3, 0.001 * n, 0.0, 0.0, Take(f"{n}", "active", 3, 1, 2))] for n in range(9)]

    policy = sharing(0.0, lambda alpha, buffers: 0.0)
    assert "cheapest" not in with_quotes(policy, view(), Demand(90), other).reason
    monkeypatch.setattr(supply, "MOST_PLANS", 2)
    decision = with_quotes(policy, view(), Demand(90), other)
    assert re.search(r"at most [0-9.]+ ms a pass dearer than the cheapest plan", decision.reason)


# -- the targets of the model's requests -------------------------------------------------------------------------------


def grown(changes: dict[str, object] | None = None, waited_s: float = 0.0, **config: object) -> Decision:
    """20 layers, 20 ms of computation; 3 layers hide, 4 stall for 4 ms (closed_form). Demand of about 9 layers."""
    return controller(reserve_blocks=0, **config).decide(view(**changes or {}), Demand(140, waited_s=waited_s))


@pytest.mark.parametrize(
    ("changes", "config", "remapped", "limit"),
    [
        ({}, {}, 3, "slowdown=0.02"),
        ({}, {"slowdown": 1.0}, 8, "slowdown=1.0"),
        ({}, {"slowdown": 1.0, "tbt_s": 0.028}, 5, "tbt_s=0.028"),
        ({}, {"slowdown": 1.0, "tbt_s": 0.0279}, 4, "tbt_s=0.0279"),
        ({}, {"slowdown": 1.0, "tbt_s": 0.010}, 3, "tbt_s=0.01"),  # missed anyway: what stalls nothing lifts nothing
        ({}, {"slowdown": 0.02, "tbt_s": 9.0}, 3, "slowdown=0.02"),
        ({}, {"slowdown": 1.0, "tbt_s": 0.028, "max_layers": 2}, 2, "max_layers=2"),
        (
            {"streamable": 4, "max_remapped": 2},
            {"slowdown": 1.0, "tbt_s": 0.028},
            2,
            "memory (no more layers can stream)",
        ),
    ],
)
def test_growth_stops_at_the_tightest_bound_and_names_it(changes, config, remapped: int, limit: str) -> None:
    decision = grown(changes, **config)
    assert decision.remapped == remapped and decision.unmet_blocks == 140 - 50 - 10 * remapped
    assert decision.reason.endswith(f"limited by {limit}")
    assert 0.020 + decision.predicted_stall_s <= max(0.020, config.get("tbt_s", 1.0)) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("waited_s", "ttft_s", "remapped"),
    [(99.0, None, 3), (0.48, 0.5, 3), (0.481, 0.5, 8)],
)
def test_requests_wait_rather_than_break_tbt_s_while_they_can_meet_ttft_s(waited_s, ttft_s, remapped) -> None:
    decision = grown(waited_s=waited_s, slowdown=1.0, tbt_s=0.020, ttft_s=ttft_s)
    assert decision.remapped == remapped
    assert decision.reason.endswith("limited by " + ("tbt_s=0.02" if remapped == 3 else "slowdown=1.0"))


def measured_on_a_line(**config: object) -> Callable[..., Decision]:
    """Passes of 8 ms and 0.1 ms for each live block were seen. decide(live, waited_s, ...): 100 blocks more are wanted."""
    policy = controller(reserve_blocks=0, **config)

    def decide(live: int, blocks: int = 100, waited_s: float = 0.0) -> Decision:
        usable = max(150, live)
        times = times_of(compute=(8e-3 + 1e-4 * live) / 20)
        counts = {"usable_blocks": usable, "free_blocks": usable - live, "live_blocks": live, "times": times}
        return policy.decide(view(**counts, free_pool_blocks=1000), Demand(blocks, waited_s=waited_s))

    for live in range(80, 150, 7):
        decide(live, blocks=0)
    return decide


def test_no_growth_lifts_a_full_pool_s_pass_above_tbt_s() -> None:
    """A pass that reads all blocks, those that come as well: 8 + 0.1 b <= 24 / 1.02 ms, so 155 blocks are useful."""
    decide = measured_on_a_line(tbt_s=0.024)
    decision = decide(live=150)
    assert decision.free_pool_blocks_to_take == 5 and decision.unmet_blocks == 95 and decision.remapped == 0
    assert decision.reason.endswith("limited by tbt_s=0.024")
    missed = decide(live=160)  # it is missed by now: nothing more, and the next request waits
    assert (missed.action, missed.unmet_blocks) == ("none", 100) and missed.reason.endswith("limited by tbt_s=0.024")
    assert "longer than the target" in missed.reason
    for wide in ({}, {"tbt_s": 0.1}):
        assert measured_on_a_line(**wide)(live=150).free_pool_blocks_to_take == 100


def test_whoever_is_alone_or_would_miss_ttft_s_is_served_whatever_tbt_s_says() -> None:
    decide = measured_on_a_line(tbt_s=0.001)
    assert decide(live=0, blocks=400).free_pool_blocks_to_take == 250  # or it would wait for ever
    assert decide(live=1, blocks=400).free_pool_blocks_to_take == 0
    decide = measured_on_a_line(tbt_s=0.024, ttft_s=0.5)
    assert decide(live=150, waited_s=0.1).free_pool_blocks_to_take == 5
    assert decide(live=150, waited_s=0.49).free_pool_blocks_to_take == 100


def test_others_get_only_what_tbt_s_leaves() -> None:
    offered = controller(slowdown=1.0, tbt_s=0.024).offers(view())
    assert [quote.step for quote in offered] == [(n, 2) for n in range(1, 5)]


def test_an_idle_model_may_be_late_by_what_its_target_leaves() -> None:
    assert Knobs().late_s(5.0) == 0.1 and Knobs(reload_s=2.0).late_s(5.0) == 2.0
    assert Knobs(ttft_s=3.0).late_s(1.0) == 2.0 and Knobs(ttft_s=3.0, reload_s=9.0).late_s(5.0) == 0.0


def test_the_reason_says_that_and_why_passes_wait_for_longer_than_allowed() -> None:
    decision = grown({"remapped": 5, "buffers": 2}, slowdown=0.02)
    assert decision.action == "none" and "wait for 8 ms and 0.4 ms are allowed" in decision.reason
    assert "are allowed" not in grown(slowdown=0.02).reason


@pytest.mark.parametrize("base", [0, 1, 3])
def test_the_layers_of_an_idle_tenant_come_home_though_no_blocks_are_left_then(base: int) -> None:
    """The average of what its demand varied fades for ever, and one block more than there were was to be free."""
    policy = controller(reserve_blocks=0, dwell=1, map_s=0.0)
    policy.decide(view(usable_blocks=base, free_blocks=base, live_blocks=0), Demand(8))
    present = {"remapped": 1, "buffers": 2, "usable_blocks": base + 10, "live_blocks": 0, "free_blocks": base + 10}
    found = [policy.decide(view(**present), Demand(0)) for _ in range(200)]
    assert "shrink" in {each.action for each in found}
    assert found[0].action == "none"  # not before it has faded
