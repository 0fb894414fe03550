"""Instances in threads: alone, merged, dissolved again; whatever happens, the tokens are those of one engine."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import count, product
from types import SimpleNamespace

import pytest
from effort import some, spread

from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from cluster_instances import PAGE, Cluster, expected_tokens, requests_for  # noqa: E402
from models import LAYERS, kv_spec, make, minimum_bytes  # noqa: E402

import remap  # noqa: E402
from remap.errors import InvalidArgument, InvalidState, StalePlan  # noqa: E402
from remap_serve.cluster import beside, change, own_layers, passes  # noqa: E402
from remap_serve.cluster.exchange import Exchange  # noqa: E402
from remap_serve.cluster.head import Head  # noqa: E402
from remap_serve.cluster.instance import ClusterInstance  # noqa: E402
from remap_serve.cluster.instance_loop import InstanceLoop  # noqa: E402
from remap_serve.cluster.messages import Part  # noqa: E402
from remap_serve.cluster.resources import KVLost  # noqa: E402
from remap_serve.cluster.transport import PeerLost  # noqa: E402
from remap_serve.cluster.wire import Shrink, decode  # noqa: E402
from remap_serve.engine import Request, SamplingParams  # noqa: E402
from remap_serve.policy.activations import Line  # noqa: E402
from remap_serve.policy.cluster.pipeline import Network  # noqa: E402
from remap_serve.policy.cluster.placement import IncompleteCopy, Instance, PlannedStage  # noqa: E402
from remap_serve.policy.cluster.stages import Splits  # noqa: E402

ANY = remap.Config(slowdown=1e9)
"""As many layers stream as there are, however long they take: what these tests see does not depend on measured times."""


def test_one_instance_alone_answers_as_an_engine():
    model, requests = make("llama"), requests_for(1, count=10)
    with Cluster(model, 1, blocks=14) as cluster:
        cluster.submit("i0", requests)
        assert cluster.answers(requests) == expected_tokens(model, requests)


@pytest.mark.parametrize(
    "stages",
    [
        (("i0", 3), ("i1", 6)),
        (("i1", 1), ("i0", 6)),
        (("i0", 2), ("i1", 2), ("i2", 6)),
        (("i2", 0), ("i0", 6), ("i1", 6)),
    ],
    ids=str,
)
def test_a_fixed_group_answers_as_an_engine(stages):
    model, requests = make("qwen2"), requests_for(len(stages), count=12)
    with Cluster(model, len(stages), blocks=14) as cluster:
        cluster.change(stages)
        cluster.submit(stages[0][0], requests)
        assert cluster.answers(requests) == expected_tokens(model, requests)
        capacity = cluster.reports[stages[0][0]].capacity
        assert (
            capacity
            >= 14 * 4 * LAYERS // max(end - cut for (_, end), cut in zip(stages, [0, *(e for _, e in stages)])) - 8
        )


def some_tokens(cluster, requests, least=2):
    """Wait until each of these has a few tokens, or its end."""
    wanted = [one.id for one in requests]
    cluster.until(lambda: all(id in cluster.ends or len(cluster.tokens.get(id, ())) >= least for id in wanted))


def long_requests(seed, count):
    """That run on through several changes."""
    return [
        Request(one.id, one.prompt, replace(one.sampling, max_tokens=60)) for one in requests_for(seed, count, high=30)
    ]


@pytest.fixture
def resumed(monkeypatch):
    """What new heads did with the requests that they took over: (id, whether its KV came along)."""
    found = []
    plain = Head.adopt

    def adopt(self, handed, computed, blocks):
        found.append((handed.id, bool(blocks)))
        plain(self, handed, computed, blocks)

    monkeypatch.setattr(Head, "adopt", adopt)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["moved", "computed-again"])
def test_requests_run_on_while_instances_merge_and_part(again, resumed):
    model, requests = make("llama"), long_requests(5, 8)
    network = Network(Line(0.0, 0.0), 1.0 if again else 1e12)  # bytes a second: KV that is too dear to move, or free
    with Cluster(model, 2, blocks=120, network=network) as cluster:
        cluster.submit("i0", requests[:3])
        cluster.submit("i1", requests[3:5])
        some_tokens(cluster, requests[:5])
        cluster.change((("i0", 4), ("i1", 6)))
        with pytest.raises(InvalidState):
            cluster.submit("i1", requests[5:])
        cluster.submit("i0", requests[5:])
        some_tokens(cluster, requests)
        cluster.fetch("i0", "i1")
        cluster.change((("i0", 6),), (("i1", 6),))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        for _, tenant, _ in cluster.attached.values():
            assert tenant.kv.live_blocks == 0
        assert {id for id, _ in resumed[:5]} == {one.id for one in requests[:5]}
        assert {moved for _, moved in resumed} == {not again}


def test_a_request_that_is_too_long_for_one_instance_waits_for_two():
    model, requests = make("llama"), [Request("long", tuple(range(1, 60)), SamplingParams(max_tokens=60))]
    with Cluster(model, 2, blocks=20, kv={"config": remap.Config(max_layers=0)}) as cluster:
        size = cluster.instances["i0"].describe().fingerprint.block_tokens
        cluster.submit("i0", requests)
        cluster.until(lambda: cluster.reports["i0"].stuck is not None)
        assert cluster.reports["i0"].stuck == ("long", cluster.reports["i0"].capacity + size)
        assert cluster.instances["i0"].release("nobody") is None
        assert cluster.instances["i0"].release("long") == 1 and cluster.instances["i0"].release("long") is None
        made = cluster.delivered("long")
        cluster.instances["i1"].submit(requests[0], 2, made)
        cluster.until(lambda: cluster.reports["i1"].stuck is not None)
        assert cluster.reports["i0"].requests == ()
        cluster.change((("i0", 3), ("i1", 6)))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert cluster.reports["i0"].stuck is None
        cluster.fetch("i0", "i1")
        cluster.change((("i0", 6),), (("i1", 6),))
        cluster.ends.clear()
        cluster.submit("i0", [Request("longer", (1,) * 100, SamplingParams(max_tokens=20))])
        cluster.until(lambda: cluster.reports["i0"].stuck is not None)
        cluster.instances["i0"].give_up("longer")
        cluster.until(lambda: "longer" in cluster.ends)
        assert cluster.ends == {"longer": "out_of_blocks"} and cluster.reports["i0"].requests == ()


@pytest.mark.parametrize("blocks", [36, 90], ids=["preempted", "roomy"])
def test_long_prompts_go_through_all_lanes_while_others_are_cancelled_and_groups_change(blocks):
    """Each prompt is several parts, which follow each other through the stages in different lanes."""
    model, requests = make("llama"), requests_for(blocks, count=9, low=70, high=110, tokens=8)
    with Cluster(model, 3, blocks=blocks) as cluster:
        cluster.change((("i0", 2), ("i1", 4), ("i2", 6)))
        cluster.submit("i0", requests[:7])
        for one in requests[1:7:3]:
            cluster.poll()
            cluster.instances["i0"].cancel(one.id)
        cluster.fetch("i0", "i1", "i2")
        cluster.change((("i0", 6),), (("i1", 6),), (("i2", 6),))
        cluster.change((("i2", 3), ("i1", 6)))
        cluster.submit("i2", requests[7:])
        answers, expected = cluster.answers(requests), expected_tokens(model, requests)
        for number, one in enumerate(requests):
            assert cluster.ends[one.id] in (("length", "abort") if number in (1, 4) else ("length",))
            got = answers[one.id]
            assert got == expected[one.id] or (cluster.ends[one.id] == "abort" and got == expected[one.id][: len(got)])


@pytest.mark.parametrize("parting", [True, False], ids=["parting", "merging"])
def test_what_moves_has_its_turn_while_heads_always_have_something_to_compute(parting):
    """Requests that are handed over do not wait for a moment at which nobody else runs."""
    model, requests = make("llama"), long_requests(5, 6)
    with Cluster(model, 2, blocks=120) as cluster:
        if parting:
            cluster.change((("i0", 3), ("i1", 6)))
            cluster.submit("i0", requests)
            some_tokens(cluster, requests)
            cluster.fetch("i0", "i1")
            plans = cluster.plans((("i0", 6),), (("i1", 6),))
        else:
            cluster.submit("i0", requests[:3])
            cluster.submit("i1", requests[3:])
            some_tokens(cluster, requests)
            plans = cluster.plans(
                (("i0", 5), ("i1", 6))
            )  # the second stage has the token before the head has a new one
        heads = {plan.head for plan in plans.values()} if not parting else set(plans)
        assert cluster.prepare(plans) == []
        cluster.commit(plans)
        fed = []

        def settled():
            for name in heads:
                mine = [id for id in fed if id.startswith(name) and id not in cluster.ends]
                if cluster.reports[name].epoch == cluster.epoch and len(mine) < 4:
                    fed.append(f"{name} {len(fed)}")
                    cluster.submit(name, [Request(fed[-1], (3, 4), SamplingParams(max_tokens=60))])
            return all(cluster.settled(name, cluster.epoch) for name in plans)

        cluster.until(settled)
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_pieces_of_kv_share_a_chunk(monkeypatch):
    """Between two passes as much moves as the network sends while a stage computes, not one piece of one request."""
    model, requests = make("llama"), long_requests(5, 8)
    pieces, rounds = Counter(), []
    step, launch = Exchange.step, passes.launch

    def counted(self):
        pieces[threading.get_ident()] += 1
        return step(self)

    def launched(member):
        rounds.append(pieces.pop(threading.get_ident(), 0))
        return launch(member)

    monkeypatch.setattr(Exchange, "step", counted)
    monkeypatch.setattr(passes, "launch", launched)
    with Cluster(model, 2, blocks=120) as cluster:
        cluster.submit("i0", requests[:4])
        cluster.submit("i1", requests[4:])
        some_tokens(cluster, requests)
        cluster.change((("i0", 3), ("i1", 6)))
        assert cluster.answers(requests) == expected_tokens(model, requests)
    assert max(rounds) >= 4


def test_an_older_attempt_gives_way_to_a_newer_one():
    model, request = make("llama"), Request("r", (3, 4), SamplingParams(max_tokens=100))
    with Cluster(model, 1, blocks=120) as cluster:
        cluster.submit("i0", [request])
        some_tokens(cluster, [request])
        with pytest.raises(InvalidState):
            cluster.submit("i0", [request], attempt=2)
        cluster.until(lambda: cluster.ends == {"r": "abort"})
        cluster.ends.clear()
        cluster.tokens.clear()
        cluster.submit("i0", [request], attempt=2)
        with pytest.raises(InvalidArgument):
            cluster.submit("i0", [request], attempt=2)
        assert cluster.answers([request]) == expected_tokens(model, [request])


def merged(cluster, rng, groups):
    """Stages of the one group that these become: each within what its instance has."""
    parts = [part for group in groups for part in group]
    if all(len(group) == 1 for group in groups):
        names = rng.sample([part.instance for part in parts], len(parts))
        return tuple(zip(names, [*sorted(rng.randrange(LAYERS + 1) for _ in names[1:]), LAYERS]))
    model = cluster.instances["i0"].describe().model
    stages = [
        PlannedStage(Instance(part.instance, model.weight_bytes(0, LAYERS) * 2), part.first, part.end) for part in parts
    ]
    return tuple((stage.instance.name, stage.end) for stage in Splits(model).split(stages, 1.0))


@pytest.mark.parametrize("seed", range(some(3, 6)))
def test_any_changes_with_scarce_memory(seed):
    """Groups merge and part in any order; pools are small, so requests are preempted, and some have no room when they move. In
    every other world preempted KV goes to host memory, which has room for some of it."""
    rng = random.Random(seed)
    model, requests = make(rng.choice(["llama", "opt-odd", "gpt2", "qwen3"]), seed), long_requests(seed, 12)
    pending = list(requests)
    with Cluster(model, 3, blocks=26, kv={"host_blocks": 40 * (seed % 2)}) as cluster:
        for _ in range(5):
            for request in [pending.pop() for _ in range(min(2, len(pending)))]:
                group = rng.choice(list(cluster.groups.values()))
                cluster.submit(group[0].instance, [request])
            for _ in range(rng.randrange(20)):
                cluster.poll()
            joined = [group for group in dict.fromkeys(cluster.groups.values()) if len(group) > 1]
            if joined and rng.random() < 0.6:
                names = [part.instance for part in rng.choice(joined)]
                cluster.fetch(*names, by=lambda layer: rng.random() < 0.5)
                cluster.change(*(((name, LAYERS),) for name in names))
                continue
            groups = sorted(set(cluster.groups.values()), key=str)
            if len(groups) < 2:
                continue
            cluster.change(merged(cluster, rng, rng.sample(groups, 2)))
        for request in pending:
            cluster.submit(rng.choice(list(cluster.groups.values()))[0].instance, [request])
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert set(cluster.ends.values()) <= {"length", "stop"}
        for name, group in cluster.groups.items():
            part = next(each for each in group if each.instance == name)
            holds_all = len(group) > 1 and part.first < part.end  # a stage of several holds all blocks there are
            assert (cluster.attached[name][1].kv.live_blocks > 0) == holds_all


def test_a_stage_lets_no_layer_stream():
    """What an instance remapped alone comes home when it becomes a stage, and its requests run on."""
    model, requests = make("llama"), long_requests(9, 6)
    with Cluster(model, 2, blocks=20, kv={"config": ANY}) as cluster:
        cluster.submit("i0", requests)
        tenant = cluster.attached["i0"][1]
        some_tokens(cluster, requests[:2])
        cluster.until(lambda: tenant.streamed or len(cluster.ends) == len(requests))
        assert tenant.streamed and not cluster.ends
        cluster.change((("i0", 5), ("i1", 6)))
        assert not tenant.streamed and internals(tenant).elsewhere == (5,)
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_layers_stream_before_a_group_and_after_it_and_recovery_meanwhile_loses_no_token():
    model = make("llama")
    requests = [replace(one, id=f"{turn}{one.id}") for turn in "abc" for one in long_requests(9, 6)]
    first, second, third = requests[:6], requests[6:12], requests[12:]
    with Cluster(model, 2, blocks=20, kv={"config": ANY}) as cluster:
        tenant = cluster.attached["i0"][1]
        block = tenant.kv.spec.block_bytes
        weights = cluster.instances["i0"].describe().model.weight_bytes(0, LAYERS)
        cluster.poll()
        assert 0 < sum(each.nbytes for each in cluster.reports["i0"].offers) < weights
        assert not tenant.streamed
        cluster.submit("i0", first)
        cluster.until(lambda: tenant.streamed)
        cluster.change((("i0", 5), ("i1", 6)))
        assert not tenant.streamed
        assert [cluster.reports[name].offers for name in cluster.instances] == [()] * 2
        some_tokens(cluster, first)
        cluster.fetch("i0", "i1")
        cluster.change((("i0", 6),), (("i1", 6),))
        cluster.submit("i0", second)
        cluster.until(lambda: tenant.streamed)
        cluster.until(lambda: cluster.reports["i0"].capacity > 20 * internals(tenant).kv.block_tokens)
        # Beyond what it said at most a block: of two parts, in the pages of layers that stand together.
        report = cluster.reports["i0"]
        assert (
            report.capacity
            <= (20 + sum(each.nbytes for each in report.offers) // block + 1) * internals(tenant).kv.block_tokens
        )
        expected = expected_tokens(model, requests)
        assert all(expected[each] == tokens for each, tokens in cluster.answers(first + second).items())

        cluster.submit("i0", third)
        some_tokens(cluster, third[:2], least=1)
        cluster.until(lambda: tenant.streamed)
        cluster.epoch += 1
        lost = set(cluster.instances["i0"].recover(cluster.epoch))
        assert tenant.kv.live_blocks == 0 and internals(tenant).computed == range(LAYERS)
        cluster.until(lambda: cluster.settled("i0", cluster.epoch))
        for one in third:
            if one.id in lost:
                cluster.instances["i0"].submit(one, 2, cluster.delivered(one.id))
        assert cluster.answers(requests) == expected_tokens(model, requests)


RESIDENT = {"config": remap.Config(max_layers=0)}
"""A layer that streams is not where its weights are read."""


def same_weights(model, mine):
    """All layers' bytes are the master copy's."""
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), mine.parameters(), strict=True))


@pytest.mark.parametrize(
    ("stages", "share"),
    spread([*product([(("i0", 2), ("i1", 6)), (("i2", 1), ("i0", 3), ("i1", 6))], ["all", "some"])], 2),
    ids=str,
)
def test_layers_come_home_from_each_other_and_from_the_host(stages, share, monkeypatch):
    monkeypatch.setattr("remap_serve.cluster.throughput.LEAST_BYTES", 5000)
    model, requests = make("llama"), long_requests(5, 8)
    names = sorted(name for name, _ in stages)
    by = (lambda layer: True) if share == "all" else (lambda layer: layer % 2 == 0)
    with Cluster(model, len(names), blocks=120, network=Network(Line(0.0, 0.0), 1e6), kv=RESIDENT) as cluster:
        cluster.change(stages)
        cluster.submit(stages[0][0], requests)
        some_tokens(cluster, requests)
        loaded = {name: internals(tenant).stats().copied_bytes for name, (_, tenant, _) in cluster.attached.items()}
        cluster.fetch(*names, by=by)
        layer = cluster.instances["i0"].describe().model.layers[0].weight_bytes
        lacking = {
            name: [n for n in range(LAYERS) if n not in internals(cluster.attached[name][1]).computed] for name in names
        }
        sent = sum(instance.counts()["layers_sent_bytes"] for instance in cluster.instances.values())
        assert sent == layer * sum(by(n) for layers in lacking.values() for n in layers)
        cluster.until(lambda: all(cluster.reports[name].bytes_per_s > 0 for name in names))
        cluster.change(*(((name, LAYERS),) for name in names))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        for name, (_, tenant, mine) in cluster.attached.items():
            host = sum(not by(n) for n in lacking[name])
            assert internals(tenant).stats().copied_bytes - loaded[name] == layer * host
            assert same_weights(model, mine)


def test_a_layer_that_its_source_cannot_send_comes_from_the_host(monkeypatch):
    monkeypatch.setattr("remap_serve.cluster.throughput.LEAST_BYTES", 5000)
    model, requests = make("llama"), long_requests(5, 8)
    plain, reads = remap.advanced.read_layer, []

    def sometimes(session, name, layer, *more):
        reads.append(layer)
        if reads.count(layer) > 3:
            raise InvalidState("it streams now")
        plain(session, name, layer, *more)

    monkeypatch.setattr(remap.advanced, "read_layer", sometimes)
    with Cluster(model, 2, blocks=120, network=Network(Line(0.0, 0.0), 1e6), kv=RESIDENT) as cluster:
        cluster.change((("i0", 2), ("i1", 6)))
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        cluster.fetch("i0", "i1", by=lambda layer: True)
        assert len(reads) > 6 * 3
        cluster.change((("i0", 6),), (("i1", 6),))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert all(same_weights(model, mine) for _, _, mine in cluster.attached.values())


@pytest.mark.parametrize("end", ["abort", "recover"])
def test_layers_on_their_way_from_each_other_may_be_given_up(end, monkeypatch):
    """Pieces that come later are for nobody; and the next time all of it comes anew."""
    monkeypatch.setattr("remap_serve.cluster.throughput.LEAST_BYTES", 1000)
    model, requests = make("llama"), long_requests(5, 6)
    with Cluster(model, 2, blocks=120, network=Network(Line(0.0, 0.0), 1e5), kv=RESIDENT) as cluster:
        cluster.change((("i0", 2), ("i1", 6)))
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        cluster.begin_fetch("i0", "i1", by=lambda layer: layer != 1)
        cluster.until(lambda: all(one.counts()["layers_sent_bytes"] for one in cluster.instances.values()))
        if end == "abort":
            for instance in cluster.instances.values():
                instance.abort(cluster.epoch)
            cluster.until(lambda: not any(report.arrived for report in cluster.reports.values()))
            cluster.fetch("i0", "i1", by=lambda layer: layer != 1)
            cluster.change((("i0", 6),), (("i1", 6),))
        else:
            cluster.epoch += 1
            for instance in cluster.instances.values():
                instance.recover(cluster.epoch)
                instance.poll()
            for one in requests:
                if one.id not in cluster.ends:
                    cluster.instances["i1"].submit(one, 2, cluster.delivered(one.id))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert all(same_weights(model, mine) for _, _, mine in cluster.attached.values())


def test_pages_of_an_idle_model_are_kv_before_a_group_and_after_it_and_go_back_when_it_wakes():
    model, other = make("llama"), make("qwen2", seed=3)
    requests = [replace(one, id=f"{turn}{one.id}") for turn in "abc" for one in long_requests(9, 6)]
    first, second, third = requests[:6], requests[6:12], requests[12:]
    prompt = torch.arange(1, 12)[None]
    expected = other(prompt).logits
    # What stands outside of the layers is in two parts, if it may go with them.
    spare = minimum_bytes(other, kv_spec(other), PAGE) + PAGE
    with Cluster(model, 2, blocks=20, kv={"config": remap.Config(max_layers=3), "spare": spare}) as cluster:
        session, tenant, _ = cluster.attached["i0"]
        idle, block = session.attach(other, kv=kv_spec(other), name="idle", active=False), tenant.kv.spec.block_bytes
        lent = next(each for each in remap.advanced.offers(session, "i0") if each.donor == "idle")
        cluster.instances["i0"].exclusively(lambda: session.step({}))
        cluster.until(lambda: lent.blocks * block in [each.nbytes for each in cluster.reports["i0"].offers])
        cluster.submit("i0", first)
        cluster.until(lambda: idle.streamed)
        # Whatever a group of several has across pages, nobody takes back.
        cluster.change((("i0", 5), ("i1", 6)))
        some_tokens(cluster, first, least=4)
        cluster.instances["i0"].exclusively(lambda: session.activate("idle"))
        assert not idle.streamed
        cluster.instances["i0"].exclusively(lambda: session.step({}))
        some_tokens(cluster, first, least=6)
        session.deactivate("idle")
        cluster.fetch("i0", "i1")
        cluster.change((("i0", 6),), (("i1", 6),))
        cluster.submit("i0", second)
        cluster.until(lambda: idle.streamed)
        some_tokens(cluster, second[:1])
        # Its pages hold KV of requests that run: they move, or the youngest lose theirs.
        report = cluster.instances["i0"].exclusively(lambda: session.activate("idle"))
        assert report.activated and not idle.streamed
        cluster.submit("i0", third)
        found = cluster.instances["i0"].exclusively(lambda: session.deactivate("idle") or session.step({}))
        assert found is not None
        assert cluster.answers(requests) == expected_tokens(model, requests)
        session.activate("idle")
        assert torch.equal(other(prompt).logits, expected)


@pytest.mark.parametrize("at", [("i0",), ("i1",), ("i0", "i1")], ids="+".join)
@pytest.mark.parametrize("again", [True, False], ids=["brought home", "given up"])
def test_a_restoration_may_begin_before_the_last_one_is_known_to_be_over(at, again, monkeypatch):
    """Commands are tasks of their own, and one may overtake another: at some instances the new fetch comes before the abort."""
    monkeypatch.setattr("remap_serve.cluster.throughput.LEAST_BYTES", 1000)
    model, requests = make("llama"), long_requests(5, 6)
    with Cluster(model, 2, blocks=120, network=Network(Line(0.0, 0.0), 1e5), kv=RESIDENT) as cluster:
        cluster.change((("i0", 2), ("i1", 6)))
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        cluster.begin_fetch("i0", "i1", by=lambda layer: True)
        cluster.until(lambda: all(one.counts()["layers_sent_bytes"] for one in cluster.instances.values()))
        first, copies = cluster.epoch, cluster.copies("i0", "i1")
        cluster.epoch += 1
        for name, instance in cluster.instances.items():
            calls = [lambda one: one.abort(first), lambda one: one.fetch(cluster.epoch, copies)]
            for call in reversed(calls) if name in at else calls:
                call(instance)
            instance.fetch(cluster.epoch, copies)  # and the same again
        if not again:
            for instance in cluster.instances.values():
                instance.abort(cluster.epoch)
            cluster.until(lambda: not any(report.arrived for report in cluster.reports.values()))
            cluster.fetch("i0", "i1", by=lambda layer: True)
        cluster.until(lambda: cluster.home("i0") and cluster.home("i1"))
        cluster.change((("i0", 6),), (("i1", 6),))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert all(same_weights(model, mine) for _, _, mine in cluster.attached.values())


def test_a_stage_hears_to_shrink_for_a_restoration_that_is_over_when_the_next_one_has_begun(monkeypatch):
    monkeypatch.setattr("remap_serve.cluster.throughput.LEAST_BYTES", 1000)
    model, requests = make("llama"), long_requests(5, 6)
    plain, held, holding = InstanceLoop._from_ring, [], [True]

    def late(self, epoch, source, header, payload):
        """The ring to i1 stands still from the first Shrink on."""
        if holding and self.name == "i1" and (held or isinstance(decode(header), Shrink)):
            held.append((self, epoch, source, header, payload))
        else:
            plain(self, epoch, source, header, payload)

    monkeypatch.setattr(InstanceLoop, "_from_ring", late)
    with Cluster(model, 2, blocks=120, network=Network(Line(0.0, 0.0), 1e5), kv=RESIDENT) as cluster:
        cluster.change((("i0", 2), ("i1", 6)))
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        cluster.begin_fetch("i0", "i1", by=lambda layer: True)
        cluster.until(lambda: held)
        for instance in cluster.instances.values():
            instance.abort(cluster.epoch)
        cluster.begin_fetch("i0", "i1", by=lambda layer: True)
        holding.clear()
        for each in held:
            plain(*each)
        cluster.until(lambda: cluster.home("i0") and cluster.home("i1"))
        cluster.change((("i0", 6),), (("i1", 6),))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert all(same_weights(model, mine) for _, _, mine in cluster.attached.values())


def test_an_instance_whose_pages_hold_another_models_kv_stays_alone():
    model, other = make("llama"), make("qwen2", seed=3)
    requests = long_requests(9, 4)
    spare = minimum_bytes(other, kv_spec(other), PAGE)
    with Cluster(model, 2, blocks=40, kv={"config": ANY, "spare": spare}) as cluster:
        session, tenant, _ = cluster.attached["i0"]
        beside = session.attach(other, kv=kv_spec(other, max_blocks=900), name="b")
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        other(torch.arange(1, 12)[None])
        cluster.instances["i0"].exclusively(lambda: session.step({"b": beside.kv.free_blocks + 30}))
        assert internals(tenant).lent_pages
        theirs = beside.kv.allocate(beside.kv.free_blocks)
        before = states(cluster)["i0"][:2]
        with pytest.raises(InvalidState) as found:
            cluster.instances["i0"].prepare(cluster.plans((("i0", 3), ("i1", 6)))["i0"])
        assert found.value.fields["neighbours"] == {"b": len(theirs)}
        some_tokens(cluster, requests, least=2)
        assert states(cluster)["i0"][:2] == before
        beside.kv.free(theirs)
        cluster.change((("i0", 3), ("i1", 6)))
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_who_may_wake_waits_while_a_change_is_prepared(monkeypatch):
    """Between the look at the neighbours and the switch none of them may take or borrow pages."""
    model, requests = make("llama"), long_requests(5, 4)
    found = []
    with Cluster(model, 2, blocks=40) as cluster:
        session, first = cluster.attached["i0"][0], cluster.instances["i0"]
        looked = beside.check

        def look(member):
            looked(member)
            with pytest.raises(InvalidState) as refused:
                plain_exclusively(lambda: session.step({}))
            found.append(refused.value.fields["instance"])

        # In the loop itself, as `exclusively` would be carried out right behind the look.
        plain_exclusively = lambda call: ClusterInstance.exclusively(first, call)  # noqa: E731
        monkeypatch.setattr(first._loop, "ask", lambda call: call())
        monkeypatch.setattr(beside, "check", look)
        plans = cluster.plans((("i0", 3), ("i1", 6)))
        assert cluster.prepare(plans) == []
        monkeypatch.undo()
        with pytest.raises(InvalidState):
            first.exclusively(lambda: session.step({}))
        # Decided, and the loop has not heard of it: its entries come one behind the other.
        hear = first._loop.inbox.put
        with monkeypatch.context() as patch:
            later = []
            patch.setattr(first._loop, "inbox", SimpleNamespace(put=later.append))
            first.commit(plans["i0"].epoch)
            patch.undo()
            with pytest.raises(InvalidState):
                first.exclusively(lambda: session.step({}))
            for entry in later:
                hear(entry)
        cluster.commit(plans)
        cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in plans))
        assert first.exclusively(lambda: session.step({})) is not None
        cluster.submit("i0", requests)
        assert cluster.answers(requests) == expected_tokens(model, requests)
    assert found[:1] == ["i0"]


def test_a_change_that_ended_early_is_no_change():
    """`advanced.place` may end before all is done, where part of it cannot be undone: nobody goes on as if it had."""
    model = make("llama")
    with Cluster(model, 1) as cluster:
        session, tenant, _ = cluster.attached["i0"]
        remap.advanced.place(session, "i0", 0, 4)
        plain = remap.advanced.place
        has = SimpleNamespace(session=session, name="i0", layers=LAYERS, tenant=tenant, tell=lambda moved: None)
        member = SimpleNamespace(has=has, slots=None, exchange=None, head=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remap.advanced, "place", lambda *_, **__: plain(session, "i0", 0, 4))
            with pytest.raises(InvalidState) as refused:
                own_layers.hold(member, 0, LAYERS)
        assert refused.value.fields["got"] == (range(4), [4, 5])
        own_layers.hold(member, 0, 2, range(LAYERS), (4,))
        assert internals(tenant).elsewhere == (4,)
        own_layers.hold(member, 0, LAYERS)
        assert same_weights(model, cluster.attached["i0"][2])


def states(cluster):
    """What must not change when something is refused."""
    return {
        name: (cluster.reports[name].epoch, cluster.reports[name].phase, tenant.kv.usable_blocks, tenant.kv.live_blocks)
        for name, (_, tenant, _) in cluster.attached.items()
    }


def test_plans_that_do_not_fit_are_refused_by_name_and_nothing_changes():
    with Cluster(make("llama"), 3, blocks=20, timeout_s=2.0) as cluster:
        cluster.poll()
        before = states(cluster)
        good = cluster.plans((("i0", 3), ("i1", 6)))["i0"]
        one = cluster.instances["i0"]
        other = replace(good.fingerprint, version="0.0", layers=7)
        for bad, error, fields in (
            (replace(good, epoch=0), StalePlan, {"plan_epoch": 0, "epoch": 0}),
            (replace(good, fingerprint=other), InvalidArgument, {"differs": ("version", "layers"), "got": other}),
            (replace(good, stages=(Part("i1", 0, 3), Part("i2", 3, 6))), InvalidArgument, {"instance": "i0"}),
            (replace(good, stages=(Part("i0", 0, 3), Part("i1", 4, 6))), IncompleteCopy, {"missing": (3,)}),
            (replace(good, stages=(Part("i0", 0, 3), Part("i1", 2, 6))), IncompleteCopy, {"repeated": (2,)}),
            (replace(good, before=((Part("i0", 0, 2),), (Part("i1", 0, 6),))), InvalidArgument, {}),
            (replace(good, before=(*good.before, (Part("i2", 0, 6),))), InvalidArgument, {}),  # i2 is left out
            (replace(good, stages=(Part("i0", 0, 6),), before=good.before[:1]), InvalidArgument, {}),
            (replace(good, rendezvous="here"), InvalidArgument, {"address": "here"}),
        ):
            with pytest.raises(error) as refused:
                one.prepare(bad)
            assert {key: refused.value.fields[key] for key in fields} == fields
        with pytest.raises(StalePlan):
            one.commit(good.epoch)
        cluster.poll()
        assert states(cluster) == before
        # The group that has dropped layers may not do without them.
        cluster.change((("i0", 3), ("i1", 6)))
        alone = cluster.plans((("i0", 6),), (("i1", 6),))
        errors = cluster.prepare(alone)
        assert [(type(error), error.fields["layers"]) for error in sorted(errors, key=str)] == [
            (InvalidState, (3, 4, 5)),
            (InvalidState, (0, 1, 2)),
        ]
        swapped = cluster.plans((("i2", 0), ("i1", 4), ("i0", 6)))
        assert {type(error) for error in cluster.prepare(swapped)} >= {InvalidState}


def test_what_is_aborted_changes_nothing_and_is_refused_from_then_on():
    model, requests = make("llama"), requests_for(3, count=6)
    with Cluster(model, 2, blocks=30) as cluster:
        cluster.poll()
        before = states(cluster)
        plans = cluster.plans((("i0", 3), ("i1", 6)))
        assert cluster.prepare(plans) == []
        for name in plans:
            cluster.instances[name].abort(cluster.epoch)
            with pytest.raises(StalePlan) as refused:
                cluster.instances[name].commit(cluster.epoch)
            assert refused.value.plan_epoch == cluster.epoch
            with pytest.raises(StalePlan):
                cluster.instances[name].prepare(plans[name])
        cluster.poll()
        assert states(cluster) == before
        cluster.submit("i0", requests[:3])
        cluster.submit("i1", requests[3:])
        # The next one is taken, and a newer one in its place.
        assert cluster.prepare(cluster.plans((("i1", 3), ("i0", 6)))) == []
        cluster.change((("i0", 4), ("i1", 6)))
        # Layers that came home for a change that was given up become KV again.
        capacity = cluster.reports["i0"].capacity
        cluster.fetch("i0", "i1", by=lambda layer: layer % 2 == 0)
        cluster.until(lambda: cluster.reports["i0"].capacity < capacity)
        for name in plans:
            cluster.instances[name].abort(cluster.epoch)
        cluster.until(lambda: cluster.reports["i0"].capacity == capacity)
        assert not cluster.reports["i0"].arrived and not cluster.reports["i1"].arrived
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_survivors_recover_and_requests_start_again_behind_their_tokens():
    model, requests = make("qwen3"), long_requests(11, 6)
    with Cluster(model, 3, blocks=60) as cluster:
        cluster.change((("i0", 2), ("i1", 4), ("i2", 6)))
        cluster.submit("i0", requests)
        some_tokens(cluster, requests)
        cluster.end("i1")
        cluster.epoch += 1
        lost = set()
        for name in ("i0", "i2"):
            lost.update(cluster.instances[name].recover(cluster.epoch))
            cluster.groups[name] = (Part(name, 0, LAYERS),)
            with pytest.raises(StalePlan):
                cluster.instances[name].recover(cluster.epoch)
        cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in cluster.instances))
        assert {cluster.instances[name].describe().epoch for name in ("i0", "i2")} == {cluster.epoch}
        assert lost == {one.id for one in requests} - set(cluster.ends)
        for _, tenant, _ in cluster.attached.values():
            assert tenant.kv.live_blocks == 0
        for number, one in enumerate(request for request in requests if request.id in lost):
            cluster.instances[("i0", "i2")[number % 2]].submit(one, 2, cluster.delivered(one.id))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        cluster.change((("i2", 3), ("i0", 6)))  # and they merge again


@pytest.mark.parametrize("moment", ["running", "moving"])
def test_requests_that_are_cancelled_end_once(moment):
    model, requests = make("llama"), long_requests(2, 8)
    network = Network(Line(0.0, 0.0), 1e12)
    with Cluster(model, 2, blocks=100, network=network) as cluster:
        cluster.submit("i0", requests[:4])
        cluster.submit("i1", requests[4:])
        some_tokens(cluster, requests)
        if moment == "running":
            for one in requests[::2]:
                cluster.instances["i0"].cancel(one.id)
                cluster.instances["i1"].cancel(one.id)
        else:
            plans = cluster.plans((("i0", 3), ("i1", 6)))
            assert cluster.prepare(plans) == []
            cluster.commit(plans)
            cluster.until(lambda: cluster.reports["i0"].epoch == cluster.epoch)
            for one in requests[::2]:
                cluster.instances["i0"].cancel(one.id)
            cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in plans))
        cluster.instances["i0"].cancel("nobody")
        answers, expected = cluster.answers(requests), expected_tokens(model, requests)
        for number, one in enumerate(requests):
            aborted = cluster.ends[one.id] == "abort"
            assert aborted <= (number % 2 == 0)
            assert answers[one.id] == expected[one.id][: len(answers[one.id])]
            assert aborted or answers[one.id] == expected[one.id]


def test_bad_requests_are_refused_and_one_that_never_fits_ends():
    with Cluster(make("llama"), 1, blocks=8, kv={"max_blocks": 400}) as cluster:
        one = cluster.instances["i0"]
        for bad in (Request("a", (1, 999)), Request("b", (1,) * 200)):
            with pytest.raises(InvalidArgument):
                one.submit(bad, 1)
        good = Request("c", (1, 2, 3), SamplingParams(max_tokens=4))
        one.submit(good, 1)
        with pytest.raises(InvalidArgument):
            one.submit(good, 1)
        cluster.answers([good])
        assert cluster.ends == {"c": "length"}


def recovered(cluster, model, requests):
    """Two instances recover, of which i0 had the requests; the other one answers them."""
    cluster.epoch += 1
    for name, instance in cluster.instances.items():
        assert set(instance.recover(cluster.epoch)) == ({one.id for one in requests} if name == "i0" else set())
        instance.poll()
    cluster.submit("i1", requests, attempt=2)
    assert cluster.answers(requests) == expected_tokens(model, requests)


def test_a_loop_that_hangs_is_told_by_poll(monkeypatch):
    """And one that waits for work does not hang."""
    hanging, go_on = threading.Event(), threading.Event()
    plain = passes.launch

    def stuck(member):
        if member.head is not None and not member.head.idle:
            hanging.set()
            assert go_on.wait(600.0)
        return plain(member)

    model, requests = make("llama"), requests_for(4, count=1)
    with Cluster(model, 1, blocks=20) as cluster:
        one = cluster.instances["i0"]
        monkeypatch.setattr(passes, "launch", stuck)
        cluster.until(lambda: one._loop.outbox.round_s == math.inf)
        with monkeypatch.context() as patched:
            patched.setattr("remap_serve.cluster.outbox.HUNG", 0)
            one.poll(0.05)
            one.submit(requests[0], 1)
            assert hanging.wait(600.0)
            with pytest.raises(InvalidState) as told:
                one.poll(0.05)
            assert told.value.fields["busy_s"] > 0.05
        monkeypatch.setattr(passes, "launch", plain)
        go_on.set()
        cluster.until(lambda: one._loop.outbox.round_s == math.inf)
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_an_error_of_the_model_is_raised_by_poll_until_recovery(monkeypatch):
    model, requests = make("llama"), requests_for(4, count=3)
    with Cluster(model, 2, blocks=30) as cluster:
        cluster.change((("i0", 3), ("i1", 6)))
        with monkeypatch.context() as patched:
            patched.setattr(
                cluster.attached["i1"][1], "forward", lambda **_: (_ for _ in ()).throw(ZeroDivisionError())
            )
            cluster.submit("i0", requests)
            with pytest.raises(ZeroDivisionError):
                cluster.until(lambda: False)
            with pytest.raises(ZeroDivisionError):
                cluster.instances["i1"].poll()
        recovered(cluster, model, requests)


def test_an_error_of_the_session_is_raised_by_poll_and_asked_for_once(monkeypatch):
    asked = []

    def broken(*_):
        asked.append(1)
        raise ZeroDivisionError

    with Cluster(make("llama"), 1) as cluster:
        one = cluster.instances["i0"]
        with monkeypatch.context() as patched:
            patched.setattr("remap_serve.cluster.beside.offers", broken)
            with pytest.raises(ZeroDivisionError):
                cluster.until(lambda: one.cancel("nobody"))
            for _ in range(20):
                one.cancel("nobody")
                with pytest.raises(ZeroDivisionError):
                    one.poll(0.01)
            assert asked == [1]
        one.recover(1)
        assert one.poll()[1].epoch == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_member_that_is_gone_at_any_moment_of_a_change(seed):
    """The others recover, whatever they were doing, and no token is wrong or comes twice."""
    rng = random.Random(seed)
    model, requests = make("llama"), long_requests(seed, 7)
    with Cluster(model, 3, blocks=40, network=Network(Line(0.0, 0.0), rng.choice([1e5, 1e12]))) as cluster:
        for number, one in enumerate(requests):
            cluster.submit(f"i{number % 3}", [one])
        some_tokens(cluster, requests, least=1)
        plans = cluster.plans((("i0", 2), ("i1", 4), ("i2", 6)))
        assert cluster.prepare(plans) == []
        cluster.commit(plans)
        if rng.random() < 0.5:
            cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in plans))
            cluster.begin_fetch(*plans, by=lambda layer: rng.random() < 0.5)
        for _ in range(rng.randrange(8)):
            cluster.poll()
        cluster.end(rng.choice(sorted(plans)))
        cluster.epoch += 1
        for name, instance in cluster.instances.items():
            instance.recover(cluster.epoch)
            cluster.groups[name] = (Part(name, 0, LAYERS),)
        cluster.until(lambda: all(cluster.settled(name, cluster.epoch) for name in cluster.instances))
        for one in requests:
            if one.id not in cluster.ends:
                got = cluster.tokens.get(one.id, {})
                cluster.instances[rng.choice(sorted(cluster.instances))].submit(
                    one, 2, [got[n] for n in range(len(got))]
                )
        assert cluster.answers(requests) == expected_tokens(model, requests)


HOST = {"host_blocks": 200, "config": remap.Config(max_layers=0)}


def swapped(cluster):
    """Bytes of KV that went to host memory, or came back."""
    return sum(instance.counts()["swapped_bytes"] for instance in cluster.instances.values())


def test_an_instance_alone_swaps_and_computes_nothing_again():
    model, requests = make("llama"), long_requests(3, 6)
    with Cluster(model, 1, blocks=40, kv=HOST) as cluster:
        cluster.submit("i0", requests)
        assert cluster.answers(requests) == expected_tokens(model, requests)
        assert swapped(cluster) > 0
        kv = internals(cluster.attached["i0"][1]).kv
        assert kv.host.live_ids() == [] and kv.live_blocks == 0


@pytest.mark.parametrize("seed", range(3))
def test_kv_in_host_memory_comes_back_before_instances_merge(seed, resumed):
    model, requests = make("llama"), long_requests(seed, 10)
    with Cluster(model, 2, blocks=40, kv=HOST) as cluster:
        cluster.submit("i0", requests[:8])
        cluster.submit("i1", requests[8:])
        some_tokens(cluster, requests[8:])
        cluster.until(lambda: swapped(cluster) > 0 and cluster.reports["i0"].load.waiting)
        cluster.change((("i0", 3), ("i1", 6)))
        assert any(moved for _, moved in resumed)
        for _, tenant, _ in cluster.attached.values():
            assert internals(tenant).kv.host.live_ids() == []
        some_tokens(cluster, requests)
        cluster.fetch("i0", "i1")
        cluster.change((("i0", 6),), (("i1", 6),))
        assert cluster.answers(requests) == expected_tokens(model, requests)
        for _, tenant, _ in cluster.attached.values():
            assert internals(tenant).kv.host.live_ids() == [] and tenant.kv.live_blocks == 0


def test_recovery_forgets_what_is_in_host_memory():
    model, requests = make("llama"), long_requests(3, 6)
    with Cluster(model, 1, blocks=40, kv=HOST) as cluster:
        cluster.submit("i0", requests)
        cluster.until(lambda: swapped(cluster) > 0)
        cluster.epoch += 1
        instance, kv = cluster.instances["i0"], internals(cluster.attached["i0"][1]).kv
        unfinished = set(instance.recover(cluster.epoch))
        assert kv.host.live_ids() == [] and kv.live_blocks == 0
        cluster.poll()
        again = [one for one in requests if one.id in unfinished]
        for one in again:
            instance.submit(one, 2, cluster.delivered(one.id))
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_a_connection_that_breaks_is_told_when_nobody_recovers(monkeypatch):
    """Processes that end are seen from outside. A connection between two that live is not."""
    model, requests = make("llama"), requests_for(4, count=3)
    lost = PeerLost("the connection broke", peer="i0", link="ring")
    with Cluster(model, 2, blocks=30) as cluster:
        cluster.change((("i0", 3), ("i1", 6)))
        waited = count(step=1000.0)
        with monkeypatch.context() as patched:
            for module in ("outbox", "instance_loop"):
                patched.setattr(f"remap_serve.cluster.{module}.time", SimpleNamespace(monotonic=lambda: next(waited)))
            # On this clock every round takes a thousand seconds: that is no loop that hangs.
            patched.setattr("remap_serve.cluster.outbox.HUNG", math.inf)
            patched.setattr(cluster.attached["i1"][1], "forward", lambda **_: (_ for _ in ()).throw(lost))
            cluster.submit("i0", requests)
            with pytest.raises(PeerLost):
                cluster.until(lambda: False)
        recovered(cluster, model, requests)


def test_a_cancel_of_an_older_attempt_leaves_a_newer_one():
    model, request = make("llama"), long_requests(3, 1)[0]
    with Cluster(model, 1, blocks=60) as cluster:
        cluster.submit("i0", [request], attempt=3)
        cluster.instances["i0"].cancel(request.id, 2)
        assert cluster.answers([request]) == expected_tokens(model, [request])
        cluster.ends.clear()
        cluster.tokens.clear()
        cluster.submit("i0", [request], attempt=4)
        cluster.instances["i0"].cancel(request.id, 4)
        cluster.until(lambda: cluster.ends == {request.id: "abort"})


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("seed", SamplingParams(5, temperature=1.0, seed=1 << 64)),
        ("top_k", SamplingParams(5, temperature=1.0, top_k=1 << 63)),
        ("stop_token_ids", SamplingParams(5, stop_token_ids=frozenset({-(1 << 64)}))),
    ],
)
def test_numbers_that_messages_cannot_have_are_refused(field, sampling):
    """They would end each group that the request comes to."""
    with Cluster(make("llama"), 1, blocks=60) as cluster:
        with pytest.raises(InvalidArgument) as refused:
            cluster.submit("i0", [Request("r", (3, 4), sampling)])
        assert refused.value.field == field


def test_what_was_sent_before_a_recovery_is_refused_after_it():
    """It comes late, and was started again elsewhere: two attempts of one request must never meet."""
    model, requests = make("llama"), requests_for(8, count=2)
    with Cluster(model, 2, blocks=20) as cluster:
        cluster.change((("i0", 3), ("i1", LAYERS)))
        cluster.end("i1")
        assert cluster.instances["i0"].recover(7) == ()
        with pytest.raises(InvalidState) as refused:
            cluster.instances["i0"].submit(requests[0], 1, (), 6)
        assert (refused.value.fields["epoch"], refused.value.fields["recovered"]) == (6, 7)
        cluster.poll()
        assert cluster.reports["i0"].requests == ()
        for request in requests:
            cluster.instances["i0"].submit(request, 2, (), 7)
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_kv_that_is_lost_in_a_call_fails_the_instance():
    """Whoever made the call hears of it; and so does control, for nobody may go on with that KV."""
    model, requests = make("llama"), requests_for(9, count=2)

    def torn():
        raise KVLost("blocks moved", instance="i0", moved={1: 2})

    with Cluster(model, 1, blocks=20) as cluster:
        one = cluster.instances["i0"]
        with pytest.raises(KVLost):
            one.exclusively(torn)
        with pytest.raises(KVLost):
            one.poll(60.0)
        one.recover(1)
        cluster.epoch = 1
        cluster.submit("i0", requests)
        assert cluster.answers(requests) == expected_tokens(model, requests)


def test_a_prepare_that_was_overtaken_leaves_the_newer_one_alone(monkeypatch):
    closed = []
    meet = lambda plan, *_: SimpleNamespace(plan=plan, open=lambda ears: None, close=lambda: closed.append(plan.epoch))  # noqa: E731
    monkeypatch.setattr(change, "meet", meet)
    monkeypatch.setattr(change, "_check_plan", lambda *_: None)
    changes = change.InstanceChanges("a", "127.0.0.1", None, 1.0)
    older, newer = (SimpleNamespace(epoch=epoch) for epoch in (5, 7))

    def quicker():
        changes.prepare(newer, None, lambda: None)
        changes.abort(5)

    with pytest.raises(StalePlan):
        changes.prepare(older, None, quicker)
    assert closed == [] and changes.commit(7).plan is newer


def test_what_was_aborted_leaves_nothing_in_the_store():
    with Cluster(make("llama"), 2, blocks=20) as cluster:
        one = cluster.instances["i0"]
        for _ in range(5):
            plans = cluster.plans((("i0", 3), ("i1", LAYERS)))
            assert cluster.prepare(plans) == []
            for instance in cluster.instances.values():
                instance.abort(cluster.epoch)
        assert {int(key.split("/")[1]) for key in one._store._store.list_keys()} <= {cluster.epoch}


def test_who_ends_an_instance_that_hangs_is_told(monkeypatch):
    hanging, go_on = threading.Event(), threading.Event()

    def stuck():
        hanging.set()
        assert go_on.wait(600.0)
        return cluster.attached["i0"][0].step({})

    with Cluster(make("llama"), 1, blocks=20) as cluster:
        one = cluster.instances["i0"]
        caller = threading.Thread(target=one.exclusively, args=(stuck,))
        caller.start()
        assert hanging.wait(600.0)
        with monkeypatch.context() as patched:
            patched.setattr("remap_serve.cluster.outbox.HUNG", 0)
            with pytest.raises(InvalidState):
                one.close()
        go_on.set()
        caller.join()
