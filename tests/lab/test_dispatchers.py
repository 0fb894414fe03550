"""Where the twin's requests go: by demand, which sees no line, and in turn, whatever the load."""

from __future__ import annotations

from bench.lab.kunserve.twin.dispatchers import DISPATCHERS, InTurn, by_demand
from bench.lab.kunserve.twin.systems import SYSTEMS
from bench.lab.kunserve.twin.world import World
from test_cluster_twin import BURST, FOUR, TWO

from remap_serve.policy.cluster.dispatch import whole_lines
from remap_serve.policy.cluster.placement import InstanceLoad
from remap_serve.sim.workload import Item


def test_by_demand_lines_behind_the_head_do_not_count() -> None:
    loads = [InstanceLoad(1, 10, (1, 50, 50)), InstanceLoad(1, 20)]
    assert by_demand(loads, [100, 100], [5]) == [0] and whole_lines(loads, [100, 100], [5]) == [1]
    assert by_demand(loads, [100, 100], [5, 5, 5]) == [0, 0, 1]  # what is sent together counts in full


def test_in_turn_as_often_as_there_is_room() -> None:
    turns, loads = InTurn(), [InstanceLoad(9, 90)] + [InstanceLoad()] * 2
    assert turns(loads, [10, 10, 10], [1, 1]) == [0, 1] and turns(loads, [10, 10, 10], [1, 1]) == [2, 0]
    assert turns(loads, [20, 10, 10], [1] * 8) == [0, 0, 1, 2, 0, 0, 1, 2]
    assert turns(loads, [20, 10, 10], [15, 30]) == [0, 0]  # only where it fits, or the largest


def test_requests_go_where_the_dispatcher_says() -> None:
    for name in DISPATCHERS:
        result = World(FOUR, SYSTEMS["remap"], BURST, dispatcher=name).run()
        assert all(one.first_s is not None for one in result.answers)


def test_an_autoscaler_starts_what_no_drop_frees() -> None:
    """Two instances have room for 480,000 tokens, and as a pair for 610,000: for what else is asked three more do."""
    items = [Item("all", 1.0, 16_000, 200) for _ in range(80)]
    few, more = (World(TWO, SYSTEMS["remap"], items, cold_s=cold_s) for cold_s in (None, 10.0))
    assert few.run().end_s > more.run().end_s and len(few.pipelines) == 2 and len(more.pipelines) == 5
    assert few.control.lacking.instances == 0  # nobody waits at the end
    calm = World(TWO, SYSTEMS["remap"], items[:10], cold_s=10.0)
    calm.run()
    assert len(calm.pipelines) == 2
