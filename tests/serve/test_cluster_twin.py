"""The twin of a cluster: conservation, links, ideal cases against closed forms, and what must come out by construction."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from bench.lab.kunserve.twin.events import Events
from bench.lab.kunserve.twin.host import HostPool
from bench.lab.kunserve.twin.loads import LENGTHS, bursts
from bench.lab.kunserve.twin.network import HOST, Links, Sent
from bench.lab.kunserve.twin.pipeline import Pipeline, Request
from bench.lab.kunserve.twin.results import percentile
from bench.lab.kunserve.twin.setup import CLUSTER_A, CLUSTER_B, Hardware
from bench.lab.kunserve.twin.systems import SYSTEMS
from bench.lab.kunserve.twin.world import BLOCK_TOKENS, World
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.priority_link_des import Piece, waits
from remap_serve.cluster.messages import Part
from remap_serve.policy.cluster.exchange import Priority
from remap_serve.policy.cluster.lookahead import ChunkCost
from remap_serve.policy.cluster.pipeline import round_s
from remap_serve.sim.pools import CountedPool
from remap_serve.sim.roofline import prefill_pairs
from remap_serve.sim.sequences import Work
from remap_serve.sim.workload import Item

FOUR = Hardware("A800-80GB", "Qwen2.5-14B", 4, 25e9)
TWO = Hardware("A800-80GB", "Qwen2.5-14B", 2, 25e9)
BURST = bursts("longbench", 2.2, 50.0, 0, (5.0,), 40.0)
"""More KV than four instances have."""


# ---------------------------------------------------------------------------------------------------------------- links


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40), st.sampled_from("abc"), st.sampled_from(["a", "b", "c", HOST]), st.integers(1, 30)
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_a_port_carries_one_piece_and_everything_arrives(
    asked: list[tuple[int, str, str, int]], coordinated: bool
) -> None:
    events, log, come = Events(), list[Sent](), list[int]()
    links = Links(events, 10.0, 5.0, 0.01, coordinated=coordinated, log=log)
    wanted = [each for each in asked if each[1] != each[2]]
    for number, (at, target, source, size) in enumerate(wanted):
        priority = Priority(number % 4)

        def send(number: int = number, s: str = source, t: str = target, n: int = size, p: Priority = priority) -> None:
            links.send(s, t, n, p, lambda: come.append(number), 7)

        events.at(at / 4, send)
    while events.step():
        pass
    assert sorted(come) == list(range(len(wanted)))
    assert sum(links.sent.values()) == sum(size for _, _, _, size in wanted)
    ports = defaultdict(list)
    for one in log:
        for port in (("host", one.target),) if one.source == HOST else (("out", one.source), ("in", one.target)):
            ports[port].append((one.begin_s, one.end_s))
    for pieces in ports.values():
        pieces.sort()
        assert all(before[1] <= after[0] + 1e-9 for before, after in zip(pieces, pieces[1:]))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 9)), max_size=10, unique_by=lambda x: x[1])
)
def test_one_link_is_the_reference(asked: list[tuple[int, int, int]]) -> None:
    """Between two instances, pieces by priority, then by when they were asked for."""
    events, log = Events(), list[Sent]()
    links = Links(events, 1.0, 1.0, 0.0, log=log)
    for priority, at, size in asked:
        events.at(at, lambda p=priority, n=size: links.send("a", "b", n, Priority(p), lambda: None))  # type: ignore[misc]
    while events.step():
        pass
    pieces = [Piece(priority, float(at), number, float(size)) for number, (priority, at, size) in enumerate(asked)]
    expected = sorted(asked[flow][1] + waited for flow, waited in waits(pieces))
    assert [one.begin_s for one in log] == pytest.approx(expected)


def test_activations_wait_for_a_chunk_and_without_coordination_for_all_of_it() -> None:
    for coordinated, expected in ((True, 2.0), (False, 10.0)):
        events, log = Events(), list[Sent]()
        links = Links(events, 1.0, 1.0, 0.0, coordinated=coordinated, log=log)
        links.send("a", "b", 10, Priority.EXCHANGE, lambda: None, 2)
        events.at(1.0, lambda: links.send("a", "b", 1, Priority.ACTIVATION, lambda: None))  # noqa: B023
        while events.step():
            pass
        assert next(one.begin_s for one in log if one.priority == Priority.ACTIVATION) == expected


def test_nothing_begins_on_a_port_that_a_higher_priority_waits_for() -> None:
    """The activation from a to b needs both: a third instance does not take a's way out meanwhile."""
    events, log = Events(), list[Sent]()
    links = Links(events, 1.0, 1.0, 0.0, log=log)
    links.send("c", "b", 4, Priority.EXCHANGE, lambda: None)
    links.send("a", "b", 1, Priority.ACTIVATION, lambda: None)
    links.send("a", "c", 9, Priority.EXCHANGE, lambda: None)
    while events.step():
        pass
    assert [(one.source, one.target, one.begin_s) for one in log] == [("c", "b", 0.0), ("a", "b", 4.0), ("a", "c", 5.0)]


def test_what_is_cancelled_is_not_sent() -> None:
    events, come = Events(), list[str]()
    links = Links(events, 1.0, 1.0, 0.0)
    one = links.send("a", "b", 10, Priority.RESTORE, lambda: come.append("restored"), 2)
    links.send("a", "b", 1, Priority.RESTORE, lambda: come.append("other"))
    events.at(3.0, lambda: links.cancel([one]))
    while events.step():
        pass
    assert come == ["other"] and links.sent[Priority.RESTORE] == 5 and events.now == 5.0


# ---------------------------------------------------------------------------------------------------- one group, ideal


def _pipeline(hardware: Hardware, stages: int, tokens: list[tuple[int, float]]) -> tuple[Events, Pipeline]:
    """tokens: takes (order of the request, when) of each."""
    events = Events()
    links = Links(events, hardware.network_bytes_per_s, hardware.host_bytes_per_s, hardware.setup_s)
    count = len(hardware.model.layers)
    parts = [Part(f"i{n}", n * count // stages, (n + 1) * count // stages) for n in range(stages)]

    def on_token(request: Request, ended: bool) -> None:
        tokens.append((request.order, events.now))

    pool = CountedPool(10_000, BLOCK_TOKENS)
    return events, Pipeline(
        events, links, hardware, parts, pool, cut="tokens", swap=False, shares=False, on_token=on_token
    )


def test_one_request_alone_takes_its_passes() -> None:
    tokens: list[tuple[int, float]] = []
    events, pipeline = _pipeline(TWO, 1, tokens)
    pipeline.add(Request(0, 3000, 3))  # two chunks, of 2,048 and 952 tokens, and two tokens more
    while events.step():
        pass
    works = [
        Work(2048, prefill_pairs(2048), 0, 0, 1),
        Work(952, prefill_pairs(952, 2048), 0, 0, 1),
        Work(0, 0, 1, 3001, 1),
        Work(0, 0, 1, 3002, 1),
    ]
    layers, gap = TWO.whole.layers, TWO.machine.iteration_gap_s
    seconds = [TWO.layers_s(layers, work) + TWO.ends_s(work) + gap for work in works]
    assert [when for _, when in tokens] == pytest.approx([math.fsum(seconds[: n + 2]) for n in range(3)])
    assert pipeline.computed_tokens == 3002 and pipeline.pool.live_blocks == 0


@pytest.mark.parametrize("stages", [2, 4])
def test_a_full_pipeline_takes_round_s_for_a_token(stages: int) -> None:
    """One request in each lane: a round is what `policy.cluster.pipeline` says, the host's gap counted among the hops."""
    tokens: list[tuple[int, float]] = []
    events, pipeline = _pipeline(CLUSTER_A, stages, tokens)
    for order in range(stages):
        pipeline.add(Request(order, 100, 60))
    while events.step():
        pass
    mine = [when for order, when in tokens if order == 0]
    work = Work(0, 0, 1, 100 + 51, 1)  # of the 51st token's pass
    each = CLUSTER_A.layers_s(CLUSTER_A.whole.layers // stages, work)
    stage_s = [each] * (stages - 1) + [each + CLUSTER_A.ends_s(work)]
    hop = CLUSTER_A.network.hop_s(1)
    back = CLUSTER_A.setup_s + 8 / CLUSTER_A.network_bytes_per_s
    around = ((stages - 1) * hop + back + CLUSTER_A.machine.iteration_gap_s) / stages
    assert mine[51] - mine[50] == pytest.approx(round_s(stage_s, around, stages), rel=1e-3)


def test_lanes_that_share_send_a_prompt_with_both_microbatches() -> None:
    """So the second stage has the next part while the first computes: a prompt takes half the time, and a part of it."""

    def first_token_s(shares: bool) -> float:
        events, first = Events(), list[float]()
        links = Links(events, 25e9, 25e9, 0.0)
        pipeline = Pipeline(
            events,
            links,
            TWO,
            [Part("a", 0, 24), Part("b", 24, 48)],
            CountedPool(10_000, BLOCK_TOKENS),
            cut="tokens",
            swap=False,
            shares=shares,
            on_token=lambda request, ended: first.append(events.now),
        )
        pipeline.add(Request(0, 20 * 2048, 1))
        while events.step():
            pass
        return first[0]

    assert first_token_s(True) < 0.6 * first_token_s(False)


def test_swapped_kv_waits_for_the_link() -> None:
    events = Events()
    pool = HostPool(events, 10, BLOCK_TOKENS, 100, 50.0, 25.0)
    host = pool.copy_out([0, 0])
    first, second = pool.copy_in(host, [0, 0]), pool.copy_in([0], [0])
    assert not pool.arrived(first) and pool.kept(host)
    pool.join(first)
    assert pool.arrived(first) and not pool.arrived(second) and pool.wait_s == 8.0
    events.at(12.0, lambda: None)
    events.step()
    assert pool.arrived(second) and pool.copied_blocks == 5


# ------------------------------------------------------------------------------------------------------- whole clusters


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_request_ends_once_and_kv_stays_within_capacity(name: str) -> None:
    log: list[Sent] = []
    seen = 0

    def watch(world: World) -> None:
        nonlocal seen
        seen += 1
        if seen % 40:
            return
        for pipeline in set(world.pipelines.values()):
            held = [one for lane in pipeline.lanes for one in (*lane.running, *lane.arriving)]
            assert pipeline.pool.live_blocks >= sum(len(one.blocks) for one in (*held, *pipeline.stalled))
            most = world.system.memory * world._capacity(pipeline.stages)
            assert pipeline.pool.live_blocks <= most // BLOCK_TOKENS
            orders = [one.order for one in pipeline.requests]
            assert len(orders) == len(set(orders))
            assert not any(order in world.answers for order in orders)

    world = World(FOUR, SYSTEMS[name], BURST, log=log, watch=watch)
    result = world.run()
    assert [one.item for one in result.answers] == list(BURST)
    assert all(one.first_s is not None and one.first_s > one.item.time_s for one in result.answers)
    assert all(one.last_s >= one.first_s for one in result.answers if one.first_s and one.last_s)
    assert world._generated == sum(item.output_tokens for item in BURST)
    assert all(pipeline.pool.live_blocks == 0 for pipeline in world.pipelines.values())
    if name in ("kunserve", "remap"):
        assert result.messages["merges"] and result.sent_bytes["EXCHANGE"]


def test_equal_seeds_give_equal_results() -> None:
    results = [World(FOUR, SYSTEMS["remap"], BURST).run() for _ in range(2)]
    assert results[0] == results[1] or repr(results[0]) == repr(results[1])
    assert bursts("sharegpt-4k", 5.0, 30.0, 3) == bursts("sharegpt-4k", 5.0, 30.0, 3)
    assert bursts("sharegpt-4k", 5.0, 30.0, 3) != bursts("sharegpt-4k", 5.0, 30.0, 4)


def test_dropping_lets_those_start_who_would_wait_for_others_to_end() -> None:
    """Two instances are full of long answers; for six requests more there is room only where layers are dropped."""
    full = [Item("all", 1.0, 16_000, 3_000) for _ in range(30)]
    late = [Item("all", 90.0 + n, 6_000, 10) for n in range(6)]
    waited = {}
    for name in ("vllm", "kunserve", "remap"):
        result = World(TWO, SYSTEMS[name], [*full, *late]).run()
        waited[name] = percentile([one.ttft_s for one in result.answers[-6:]], 99)
    assert waited["vllm"] > 60.0
    assert waited["kunserve"] < 0.2 * waited["vllm"] and waited["remap"] < 0.2 * waited["vllm"]


def test_groups_end_when_the_burst_has() -> None:
    quiet = [Item("all", 200.0 + 5.0 * n, 500, 100) for n in range(10)]
    world = World(FOUR, SYSTEMS["remap"], [*BURST, *quiet])
    result = world.run()
    assert result.messages["merges"] and result.messages["dissolutions"]
    assert result.samples[-1].largest == 1 and result.sent_bytes["RESTORE"]


def test_preempted_requests_are_computed_again_or_come_back_from_the_host() -> None:
    """Short prompts and long answers: what runs grows beyond the memory."""
    items = [Item("all", 0.01 * n, 400, 3_000) for n in range(120)]
    one = Hardware("A800-80GB", "Qwen2.5-14B", 1, 25e9)
    again, swapped = (World(one, SYSTEMS[name], items).run() for name in ("vllm", "infercept"))
    assert again.preemptions and again.recomputed_tokens and not again.swapped_blocks
    assert swapped.preemptions and swapped.swapped_blocks and not swapped.recomputed_tokens


def test_running_requests_move_to_the_emptiest_instance() -> None:
    """Every second request is short: the other instance is empty soon, and takes from the one where somebody waits."""
    items = [Item("all", 1.0 + 0.1 * n, 17_000, 2 if n % 2 else 3_000) for n in range(40)]
    stay, move = (World(TWO, SYSTEMS[name], items) for name in ("vllm", "llumnix"))
    assert not stay.run().migrations
    result = move.run()
    assert result.migrations and result.sent_bytes["EXCHANGE"] and len(result.answers) == len(items)
    assert not any(pipeline.pool.live_blocks for pipeline in move.pipelines.values())


# --------------------------------------------------------------------------------------------------- setups and loads


def test_the_papers_clusters() -> None:
    # KunServe, sections 2.2 and 5.1, Table 2: 243 K tokens of KV beside a 14B model; eight instances, and four.
    assert CLUSTER_A.capacity == pytest.approx(243_000, rel=1e-3)
    assert (len(CLUSTER_A.names), len(CLUSTER_B.names)) == (8, 4)
    assert CLUSTER_A.network_bytes_per_s * 8 == 200e9
    means = {name: (round(one.prompt.cut_mean), round(one.output.cut_mean)) for name, one in LENGTHS.items()}
    for name, (prompt, output) in {
        "burstgpt": (642, 262),
        "sharegpt-4k": (1660, 373),
        "longbench": (5900, 499),
    }.items():
        assert means[name][0] == pytest.approx(prompt, rel=0.03) and means[name][1] == pytest.approx(output, rel=0.03)


def test_requests_come_twice_as_fast_in_a_burst() -> None:
    items = bursts("burstgpt", 50.0, 200.0, 0, (100.0,), 50.0)
    inside = sum(100.0 <= item.time_s < 150.0 for item in items)
    assert inside / 50.0 == pytest.approx(100.0, rel=0.05)
    assert (len(items) - inside) / 150.0 == pytest.approx(50.0, rel=0.05)


def test_what_the_planner_knows_is_near_what_computing_takes() -> None:
    """KunServe, Figure 15: attention counted, a chunk's cost is off by less than 5 %."""
    for hardware in (CLUSTER_A, CLUSTER_B):
        cost: ChunkCost = hardware.chunk_cost
        for prefix, tokens in ((0, 512), (0, 4096), (0, 16384), (8192, 1024)):
            work = Work(tokens, prefill_pairs(tokens, prefix), 0, 0, 1)
            real = hardware.layers_s(hardware.whole.layers, work) + hardware.ends_s(work)
            assert cost.batch_s + cost.chunk(prefix, tokens) == pytest.approx(real, rel=0.05)


def test_tensor_parallel_instances_pay_for_their_sums() -> None:
    work = Work(0, 0, 64, 64 * 1000, 64)
    alone = Hardware("H800-80GB", "Qwen2.5-14B", 1, 25e9)
    four = Hardware("H800-80GB", "Qwen2.5-14B", 1, 25e9, tp=4)
    assert alone.layers_s(48, work) / 4 < four.layers_s(48, work) < alone.layers_s(48, work)
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and math.isnan(percentile([], 50))
