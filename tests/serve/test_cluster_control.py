"""Control of a cluster: random worlds in which nothing is lost, and each rule of a change by itself."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from control_worlds import (
    FINGERPRINT,
    LAYERS,
    MEMORY,
    MODEL,
    NETWORK,
    TIMEOUT_S,
    Chaos,
    World,
    description,
    joined,
)
from effort import some
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument, OutOfMemory
from remap_serve.cluster.control import Control, GroupPolicy, NoCopy, OtherModel
from remap_serve.cluster.groups import GroupView
from remap_serve.cluster.messages import (
    NOTHING,
    Abort,
    BringHome,
    ChangeRefused,
    Command,
    Commit,
    Death,
    Decline,
    Description,
    Died,
    Evict,
    Fingerprint,
    Finished,
    GiveUp,
    InstanceReport,
    Joined,
    Leaving,
    PlacementAsked,
    Prepare,
    Prepared,
    Recover,
    Reported,
    Restart,
    Route,
    TakeAway,
    Tick,
)
from remap_serve.cluster.service import MOST_FAULTS, Fatal
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.placement import InstanceLoad, Layer, Offer, ServedLayers

REMAP = GroupPolicy()
FULL = InstanceLoad(4, 38, (20, 20))
"""Of an instance that has room for 40 tokens alone."""


def told(
    control: Control, name: str, load: InstanceLoad = NOTHING, now_s: float = 0.0, **more: object
) -> list[Command]:
    """This instance reports, as a member of the group that it is in."""
    epoch = more.pop("epoch", control.epoch_of(name))
    return control.on(Reported(InstanceReport(name, epoch, load=load, **more)), now_s)


def pair(policy: GroupPolicy = REMAP, now_s: float = 0.0) -> tuple[Control, list[Command]]:
    """Two instances, of which one asks for more than it has: and what control does about it."""
    control = Control(MODEL, NETWORK, policy, TIMEOUT_S)
    joined(control, "a", "b", now_s=now_s)
    told(control, "a", FULL, now_s)
    told(control, "b", InstanceLoad(4, 36, (20,)), now_s)
    return control, control.on(Tick(), now_s)


def merged(policy: GroupPolicy = REMAP) -> Control:
    """Two instances that serve together, at second 0."""
    control, prepares = pair(policy)
    epoch = prepares[0].plan.epoch
    for name in "ab":
        control.on(Prepared(name, epoch), 0.0)
    for name in "ab":
        told(control, name, phase="exchanging")
    for name in "ab":
        told(control, name)
    (view,) = control.groups
    assert (view.phase, view.epoch, len(view.stages)) == ("serving", epoch, 2)
    return control


def fetching(control: Control, now_s: float = 1.0) -> int:
    """Its group is idle and begins to dissolve; the epoch of that."""
    for tick in range(10):
        for name in control.members("a"):
            told(control, name, now_s=now_s)
        commands = control.on(Tick(), now_s + tick / 100)
        if commands:
            assert {type(command) for command in commands} == {BringHome}
            return commands[0].epoch
    raise AssertionError("the group did not begin to dissolve")


def shape(control: Control) -> list[tuple[object, ...]]:
    return [(view.epoch, view.stages) for view in control.groups]


# -- Random worlds ------------------------------------------------------------------------------------------------------------


def burst(world: World, requests: int, until_s: float) -> None:
    """Requests of random lengths at random times, most in the first half; some are too long for one instance, some for all, and
    some are cancelled."""
    for number in range(requests):
        prompt, length = world.random.randint(1, 12), world.random.randint(1, 20)
        if world.random.random() < 0.02:
            prompt, length = world.random.randint(20, 120), world.random.randint(20, 60)  # alone there is room for 40
        at_s = world.random.triangular(0.5, until_s, until_s / 3)
        world.later(at_s, lambda id=f"r{number}", prompt=prompt, length=length: world.ask(id, prompt, length))
        if world.random.random() < 0.1:
            world.later(at_s + world.random.random() * 3, lambda id=f"r{number}": world.cancel(id))


@pytest.mark.parametrize("policy", ["remap", "kunserve", "alone", "pipeline"])
@settings(max_examples=some(6, 15), deadline=None)
@given(
    instances=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    refuse=st.sampled_from([0.0, 0.1, 0.5]),
    die=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.03]),
    delay_s=st.sampled_from([0.001, 0.05, 0.5]),
    offers=st.sampled_from([(), (Offer(16, 0.0),), (Offer(40, 9.0),), (Offer(16, 0.0), Offer(56, 9.0))]),
)
def test_no_request_is_lost_or_answered_twice_whatever_happens(
    policy: str,
    instances: int,
    seed: int,
    refuse: float,
    die: float,
    hang: float,
    delay_s: float,
    offers: tuple[Offer, ...],
) -> None:
    world = World(instances, GroupPolicy(policy, 2), seed, Chaos(refuse, die, hang, delay_s, until_s=15.0), offers)
    burst(world, 15 * instances, 10.0)
    world.run(60.0)
    world.all_answered()
    # With so many failures some are there at three of them, and at the last on trial.
    assert all(isinstance(error, Fatal) and error.faults >= MOST_FAULTS for error in world.declined.values())
    if policy != "pipeline":
        assert world.alone, world.control.groups


@pytest.mark.parametrize("policy", ["remap", "kunserve", "alone", "pipeline"])
@pytest.mark.parametrize("place", [0, 7])
def test_a_request_that_ends_whoever_computes_it_ends_three_instances_and_no_other_request(
    policy: str, place: int
) -> None:
    """It ends them at its first token, or at a later one; one of a group, or who is alone."""
    for seed in range(some(2, 6)):
        world = World(3, GroupPolicy(policy, 2), seed, poisons={"poison": place})
        burst(world, 40, 6.0)
        world.later(2.0, lambda world=world: world.ask("poison", 4, 20))
        world.run(60.0)
        world.all_answered()
        assert list(world.declined) == ["poison"] and isinstance(world.declined["poison"], Fatal)
        assert world.ends["poison"] == world.declined["poison"].faults == MOST_FAULTS
        assert len(world.given["poison"]) <= place


def test_random_worlds_reach_every_phase() -> None:
    phases: set[str] = set()
    for seed in range(6):
        world = World(4, GroupPolicy("remap"), seed, Chaos(0.1, 0.03, 0.02, 0.1, until_s=15.0))
        burst(world, 80, 8.0)
        world.run(60.0)
        world.all_answered()
        phases |= set(world.phases)
    assert phases == {"recovering", "serving", "fetching", "preparing", "switching", "exchanging"}


def test_a_calm_burst_merges_instances_and_leaves_them_alone_again() -> None:
    for policy in ("remap", "kunserve"):
        world = World(4, GroupPolicy(policy), 1)
        burst(world, 100, 4.0)
        world.run(40.0)
        world.all_answered()
        assert world.largest >= 2
        assert world.alone


def test_equal_seeds_give_equal_worlds() -> None:
    def trace(seed: int) -> object:
        world = World(3, GroupPolicy(), seed, Chaos(0.2, 0.05, 0.05, 0.1, until_s=10.0))
        burst(world, 40, 8.0)
        world.run(30.0)
        return world.control.epoch, world.phases, shape(world.control)

    assert trace(5) == trace(5) != trace(6)


def test_instances_that_do_not_come_back_are_mourned_and_their_requests_served_elsewhere() -> None:
    for seed in range(8):
        world = World(4, GroupPolicy(), seed, Chaos(0.0, 0.1, 0.0, 0.05, until_s=12.0, gone=0.5))
        burst(world, 50, 10.0)
        world.run(60.0)
        left = {part.instance for view in world.control.groups for part in view.stages}
        assert left == {name for name, double in world.doubles.items() if double.alive}
        if not world.declined:
            world.all_answered()
        else:
            assert len(world.service.ledger) == 0


def test_a_request_goes_where_the_whole_line_is_shortest() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    told(control, "a", InstanceLoad(1, 2, (1, 30)))
    told(control, "b", InstanceLoad(1, 10))
    assert control.on(PlacementAsked("r", 1), 0.0) == [Route("r", "b")]


# -- Requests that are too long ------------------------------------------------------------------------------------------------


def stuck(control: Control, name: str, tokens: int, now_s: float = 0.0) -> list[Command]:
    """This instance has nothing but a request of so many tokens, and no room for it: and what control does about it."""
    told(control, name, InstanceLoad(0, 0, (tokens,), tokens), now_s, stuck=("long", tokens))
    return control.on(Tick(), now_s)


def test_a_request_that_is_too_long_makes_a_group_although_memory_suffices() -> None:
    control = Control(MODEL, NETWORK, REMAP, TIMEOUT_S)
    joined(control, "a", "b", "c")
    told(control, "b", InstanceLoad(2, 30))
    commands = stuck(control, "a", 41)
    assert [type(command) for command in commands] == [Prepare, Prepare]
    assert {part.instance for part in commands[0].plan.stages} == {"a", "c"}  # c has less to do than b


def test_a_request_goes_to_a_group_that_has_room_for_it_already() -> None:
    control = Control(MODEL, NETWORK, GroupPolicy("pipeline", 2), TIMEOUT_S)
    joined(control, "a", "b", "c")
    prepares = control.on(Tick(), 0.0)
    for phase in ("prepared", "exchanging", "serving"):
        for name in "ab":
            if phase == "prepared":
                control.on(Prepared(name, prepares[0].plan.epoch), 0.0)
            else:
                told(control, name, phase=phase)
    assert stuck(control, "c", 90) == [TakeAway("c", "long")]
    assert control.on(Tick(), 0.0) == []  # asked once; until the next report
    assert control.on(PlacementAsked("long", 40), 0.0) == [
        Route("long", "a")
    ]  # c would have room for these, and had none
    control.on(Finished("long"), 0.0)
    told(control, "a", InstanceLoad(1, 20))
    assert control.on(PlacementAsked("long", 40), 0.0) == [Route("long", "c")]  # another request


def test_a_request_does_not_go_back_to_where_it_was_stuck() -> None:
    """A head may have less room than control counts."""
    control = Control(MODEL, NETWORK, GroupPolicy("alone"), TIMEOUT_S)
    for name, memory in (("a", MEMORY), ("b", 2 * MEMORY)):
        (recover,) = control.on(Joined(description(name, memory)), 0.0)
        control.on(Reported(InstanceReport(name, recover.epoch)), 0.0)
    told(control, "b", InstanceLoad(1, 60))
    assert stuck(control, "a", 36) == [TakeAway("a", "long")]
    told(control, "a")
    assert control.on(PlacementAsked("long", 36), 0.0) == [Route("long", "b")]  # where more is wanted than at a
    assert stuck(control, "b", 36) == [GiveUp("b", "long")]


def test_a_request_that_comes_back_is_counted_once() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    assert control.on(PlacementAsked("r", 30), 0.0) == [Route("r", "a")]
    assert control.on(PlacementAsked("r", 30), 0.0) == [Route("r", "a")]  # a had refused it: nothing is there
    assert [view.load.wanted for view in control.groups] == [30, 0]


@pytest.mark.parametrize("policy", ["remap", "kunserve"])
def test_groups_that_stand_in_the_way_of_a_larger_one_are_divided_anew(policy: str) -> None:
    control = Control(MODEL, NETWORK, GroupPolicy(policy, restores=False), TIMEOUT_S)
    joined(control, "a", "b", "c", "d")
    prepares = stuck(control, "a", 100)
    names = {command.instance for command in prepares}
    assert len(names) == 3
    for name in names:
        control.on(Prepared(name, control.epoch), 0.0)
    for phase in ("exchanging", "serving"):
        for name in names:
            told(control, name, phase=phase)
    (other,) = {"a", "b", "c", "d"} - names
    # With one more, stages of three layers remain: room for 123. Four that are divided anew have room for 190.
    commands = stuck(control, other, 147)
    assert {type(command) for command in commands} == {BringHome} and {
        command.instance for command in commands
    } == names
    assert stuck(control, other, 147) == []  # it waits


@pytest.mark.parametrize("policy", ["remap", "kunserve", "alone", "pipeline"])
def test_a_request_that_no_group_has_room_for_ends(policy: str) -> None:
    control = Control(MODEL, NETWORK, GroupPolicy(policy, 3), TIMEOUT_S)
    joined(control, "a", "b")
    assert stuck(control, "a", 91) == [GiveUp("a", "long")]  # two together have room for 90
    control.on(Died("b", True), 0.0)
    assert stuck(control, "a", 91) == []  # and who comes back may be larger
    control.on(Died("b", False), 0.0)
    assert stuck(control, "a", 41) == [GiveUp("a", "long")]


def test_a_group_with_a_request_that_is_too_long_for_one_does_not_dissolve() -> None:
    for policy in (REMAP, GroupPolicy("kunserve")):
        for longest in (41, 10):
            control = merged(policy)
            head = control.groups[0].stages[0].instance
            commands: list[Command] = []
            for tick in range(2000):
                now_s = 1.0 + tick / 10
                for name in "ab":
                    told(control, name, InstanceLoad(1, 4, (), longest) if name == head else NOTHING, now_s)
                commands += control.on(Tick(), now_s)
            assert any(isinstance(command, BringHome) for command in commands) == (longest == 10)


# -- Merging ------------------------------------------------------------------------------------------------------------------


def test_a_cluster_that_lacks_kv_prepares_a_group() -> None:
    control, commands = pair()
    assert [type(command) for command in commands] == [Prepare, Prepare]
    plan = commands[0].plan
    assert plan == commands[1].plan
    assert {command.instance for command in commands} == {"a", "b"}
    assert [(part.first, part.end) for part in plan.stages] == [(0, 4), (4, 8)]
    assert len(plan.before) == 2
    assert plan.fingerprint == FINGERPRINT
    assert [view.phase for view in control.groups] == ["preparing", "preparing"]
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_requests_go_on_being_routed_while_a_group_is_prepared_and_none_while_it_switches() -> None:
    control, prepares = pair()
    (route,) = control.on(PlacementAsked("r", 5), 0.0)
    assert route == Route("r", "b")
    epoch = prepares[0].plan.epoch
    assert control.on(Prepared("a", epoch), 0.0) == []
    assert control.on(Prepared("a", epoch), 0.0) == []  # told twice is told once
    assert control.on(Prepared("b", epoch), 0.0) == [Commit("a", epoch), Commit("b", epoch)]
    assert control.on(PlacementAsked("s", 5), 0.0) == []
    assert len(control._held) == 1
    told(control, "a", phase="exchanging")
    assert told(control, "b", phase="exchanging") == [Route("s", "a")]


def test_epochs_go_on_above_those_that_instances_were_told_by_another_control() -> None:
    control = Control(MODEL, NETWORK)
    for name, told, first in (("a", 7, 8), ("b", 3, 9), ("c", 20, 21)):
        assert control.on(Joined(replace(description(name), epoch=told)), 0.0) == [Recover(name, first)]


def test_layers_come_from_hosts_at_the_least_measured_rate() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a")
    assert control.network == NETWORK  # nobody measured
    for name, rate in (("b", 30.0), ("c", 20.0), ("d", 40.0)):
        control.on(Joined(replace(description(name), host_bytes_per_s=rate)), 0.0)
    assert control.network == replace(NETWORK, host_bytes_per_s=20.0)
    # What pieces on their way have shown of the network, in the middle.
    for name, rate in (("a", 5e8), ("b", 0.0), ("c", 7e8), ("d", 1e6)):
        told(control, name, bytes_per_s=rate)
    control.on(Tick(), 0.0)
    assert control.network == replace(NETWORK, bytes_per_s=5e8, host_bytes_per_s=20.0)


def test_a_group_that_is_being_made_counts_requests_until_a_report_shows_them() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    assert control.on(PlacementAsked("r", 5), 0.0) == [Route("r", "a")]
    told(control, "a")  # older than the submission
    assert control.groups[0].load == InstanceLoad(0, 0, (5,), 5)
    assert control.on(PlacementAsked("s", 1), 0.0) == [Route("s", "b")]
    told(control, "a", InstanceLoad(1, 6), requests=(("r", 1),))
    assert control.groups[0].load == InstanceLoad(1, 6)
    control.on(Finished("s"), 0.0)
    assert control.groups[1].load == InstanceLoad()


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_refusal_leaves_the_placement_as_it_was(first: str) -> None:
    control, prepares = pair()
    before, epoch = shape(control), prepares[0].plan.epoch
    control.on(Prepared("b" if first == "a" else "a", epoch), 0.0)
    found = control.on(ChangeRefused(first, epoch, "OutOfBlocks", "no room"), 0.0)
    assert found == [Abort("a", epoch), Abort("b", epoch)]
    assert shape(control) == before
    assert control.on(Prepared(first, epoch), 0.0) == []  # too late
    assert control.on(Tick(), 0.1) == []  # not at once again
    for name, load in (("a", FULL), ("b", FULL)):
        told(control, name, load, TIMEOUT_S)
    again = control.on(Tick(), TIMEOUT_S)
    assert again[0].plan.epoch > epoch


def test_a_plan_that_is_not_answered_in_time_is_aborted() -> None:
    control, prepares = pair()
    before, epoch = shape(control), prepares[0].plan.epoch
    control.on(Prepared("a", epoch), 0.0)
    for name in "ab":
        told(control, name, FULL, TIMEOUT_S)
    assert control.on(Tick(), TIMEOUT_S) == []
    assert control.on(Tick(), TIMEOUT_S + 0.01) == [Abort("a", epoch), Abort("b", epoch)]
    assert shape(control) == before


def test_a_death_while_preparing_aborts_and_nothing_happens_to_the_others() -> None:
    control, prepares = pair()
    epoch = prepares[0].plan.epoch
    assert control.on(Died("b"), 0.0) == [Abort("a", epoch), Restart(("b",), Death("b"))]
    assert [(view.phase, view.stages[0].instance) for view in control.groups] == [("serving", "a")]


def test_alone_never_merges() -> None:
    assert pair(GroupPolicy("alone"))[1] == []


def test_load_that_fits_elsewhere_merges_nobody() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    told(control, "a", InstanceLoad(1, 38, (10,)))
    assert control.on(Tick(), 0.0) == []


@pytest.mark.parametrize("policy", ["remap", "kunserve", "pipeline"])
def test_an_instance_that_takes_part_in_no_change_is_asked_for_none(policy: str) -> None:
    control = Control(MODEL, NETWORK, GroupPolicy(policy, 2), TIMEOUT_S)
    joined(control, "a", "b", merges=False)
    for name in "ab":
        told(control, name, InstanceLoad(4, 38, (30, 30)))
    assert control.on(Tick(), 0.0) == []
    assert stuck(control, "a", 60) == [GiveUp("a", "long")]  # which the two together would have room for
    assert control.on(PlacementAsked("r", 5), 0.0) == [Route("r", "a")]
    assert control.on(Died("a"), 0.0) == [Restart(("a",), Death("a"))]
    assert control.on(PlacementAsked("r", 5), 0.0) == [Route("r", "b")]


@pytest.mark.parametrize("policy", ["remap", "kunserve", "pipeline"])
def test_instances_merge_beside_one_that_does_not(policy: str) -> None:
    control = Control(MODEL, NETWORK, GroupPolicy(policy, 2), TIMEOUT_S)
    joined(control, "a", merges=False)
    joined(control, "b", "c")
    for name in "abc":
        told(control, name, InstanceLoad(4, 38, (30,)))
    assert {command.instance for command in control.on(Tick(), 0.0)} == {"b", "c"}


def test_an_instance_that_is_to_be_replaced_gets_no_request_while_another_serves_and_does_not_merge() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    assert control.on(Leaving("a"), 0.0) == control.on(Leaving("nobody"), 0.0) == []
    assert control.leaving == {"a"}
    told(control, "b", InstanceLoad(4, 38, (30,)))
    told(control, "a", InstanceLoad(4, 38, (30,)))
    assert control.on(Tick(), 0.0) == []
    assert control.on(PlacementAsked("r", 5), 0.0) == [Route("r", "b")]
    assert stuck(control, "a", 60) == []  # it waits: its instance will be another one
    assert control.on(Died("a"), 0.0) == [Restart(("a",), Death("a"))]
    assert control.leaving == {"a"}
    joined(control, "a")
    assert control.leaving == frozenset()
    assert control.on(PlacementAsked("s", 5), 0.0) == [Route("s", "a")]
    control.on(Leaving("a"), 0.0)
    control.on(Leaving("b"), 0.0)
    assert len(control.on(PlacementAsked("t", 5), 0.0)) == 1  # none stays: any is better than none
    control.on(Died("a", returns=False), 0.0)
    assert control.leaving == {"b"}


CHEAP, DEAR = Offer(16, 1e-6), Offer(16, 10.0)
"""Two tokens more than the 40 of an instance alone. Two that merge have 90."""


def asking(control: Control, load: InstanceLoad, offer: Offer, now_s: float = 0.0) -> list[Command]:
    """Each of two instances alone reports this; and what control does about it."""
    for name in "ab":
        told(control, name, load, now_s, offers=(offer,))
    return control.on(Tick(), now_s)


def test_instances_merge_when_they_ask_for_more_than_streaming_gives() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    assert asking(control, InstanceLoad(4, 41, (1,)), CHEAP) == []
    assert [view.capacity for view in control.groups] == [42, 42]
    commands = asking(control, InstanceLoad(4, 41, (2,)), CHEAP)
    assert [type(command) for command in commands] == [Prepare, Prepare]
    # Prepared, it still has what streams; merged, it has not.
    assert [view.capacity for view in control.groups] == [42, 42]
    for name in "ab":
        control.on(Prepared(name, commands[0].plan.epoch), 0.0)
    assert [view.capacity for view in control.groups] == [90]


def test_instances_merge_sooner_where_that_costs_less_than_streaming() -> None:
    for running in (38, 42):  # some of it streams already, since ticks are apart
        control = Control(MODEL, NETWORK)
        joined(control, "a", "b")
        assert asking(control, InstanceLoad(4, 38, (2,)), DEAR) == []
        assert [type(each) for each in asking(control, InstanceLoad(4, running, (3,)), DEAR)] == [Prepare, Prepare]
    # More runs in what streams than a group has room for: there is nothing to gain.
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    assert asking(control, InstanceLoad(4, 45, (3,)), Offer(48, 10.0)) == []
    assert {view.phase for view in control.groups} == {"serving"}


def test_requests_go_where_there_is_room_that_streams() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a", "b")
    told(control, "a", InstanceLoad(1, 20))
    told(control, "b", InstanceLoad(1, 21), offers=(Offer(80, 0.0),))  # 21 of 50 are a smaller share than 20 of 40
    assert control.on(PlacementAsked("r", 5), 0.0) == [Route("r", "b")]


def test_a_request_that_was_lost_goes_to_another_node_or_else_another_instance_with_room_for_it() -> None:
    control = Control(MODEL, NETWORK)
    for name in ("a1", "a2", "b1"):
        control.on(Joined(replace(description(name), node=name[0])), 0.0)
        told(control, name)
    deaths = (Death("a1", "a"),)
    assert control.on(PlacementAsked("r", 5, deaths), 0.0) == [Route("r", "b1")]
    assert control.on(PlacementAsked("s", 5), 0.0) == [Route("s", "a1")]  # others go where least is wanted
    deaths += (Death("b1", "b"),)
    assert control.on(PlacementAsked("r", 5, deaths), 0.0) == [Route("r", "a2")]
    deaths += (Death("a2", "a"),)
    assert len(control.on(PlacementAsked("r", 5, deaths), 0.0)) == 1  # any is better than none
    told(control, "a1", offers=(Offer(80, 0.0),))
    assert control.on(PlacementAsked("long", 60, (Death("a1", "a"),)), 0.0) == [Route("long", "a1")]


def test_pipelines_are_made_of_those_who_are_there() -> None:
    control = Control(MODEL, NETWORK, GroupPolicy("pipeline", 2))
    joined(control, "a", "b", "c", "d", "e")
    prepares = control.on(Tick(), 0.0)
    assert [[part.instance for part in command.plan.stages] for command in prepares[::2]] == [["a", "b"], ["c", "d"]]
    assert len({command.plan.epoch for command in prepares}) == 2
    assert control.on(Tick(), 0.0) == []


# -- Dissolving ---------------------------------------------------------------------------------------------------------------


def test_an_idle_group_brings_its_layers_home_and_dissolves() -> None:
    control = merged()
    epoch = fetching(control)
    half = frozenset(range(4)), frozenset(range(4, 8))
    by_name = {part.instance: half[0] if part.first else half[1] for part in control.groups[0].stages}
    assert told(control, "a", arrived=frozenset({*by_name["a"]} - {3, 7})) == []
    assert told(control, "b", arrived=by_name["b"]) == []
    prepares = told(control, "a", arrived=by_name["a"])
    assert [type(command) for command in prepares] == [Prepare, Prepare]
    assert [command.plan.head for command in prepares] == [command.instance for command in prepares]
    assert {command.plan.epoch for command in prepares} == {epoch}
    assert len(prepares[0].plan.before) == 1
    control.on(Prepared("a", epoch), 1.0)
    assert {type(command) for command in control.on(Prepared("b", epoch), 1.0)} == {Commit}
    for name in "abab":
        told(control, name)  # nothing to exchange
    assert all(view.phase == "serving" and len(view.stages) == 1 for view in control.groups)


def test_a_restoration_is_given_up_when_demand_no_longer_fits_alone() -> None:
    control = merged()
    before, epoch = shape(control), fetching(control)
    head = control.groups[0].stages[0].instance
    told(control, head, InstanceLoad(2, 60, (40, 40)), 1.2)
    assert control.on(Tick(), 1.2) == [Abort(name, epoch) for name in control.members("a")]
    assert shape(control) == before
    assert control.groups[0].phase == "serving"


def test_a_refused_fetch_ends_the_restoration_for_a_while() -> None:
    control = merged()
    before, epoch = shape(control), fetching(control)
    assert {type(each) for each in control.on(ChangeRefused("b", epoch, "OutOfBlocks", "live"), 1.2)} == {Abort}
    assert shape(control) == before
    for _ in range(10):
        for name in "ab":
            told(control, name, now_s=1.3)
        assert control.on(Tick(), 1.3) == []


def test_a_restoration_that_does_not_go_on_is_given_up() -> None:
    """Each layer that arrives gives it as long again."""
    control = merged()
    before, epoch = shape(control), fetching(control)
    (part,) = [part for part in control.groups[0].stages if part.instance == "b"]
    layer = next(layer for layer in range(LAYERS) if not part.first <= layer < part.end)

    def passed(seconds: float) -> list[Command]:
        now_s = 1.1 + seconds * TIMEOUT_S
        for name in "ab":
            told(control, name, now_s=now_s, arrived=frozenset({layer} if name == "b" else ()))
        return control.on(Tick(), now_s)

    for seconds in (0.5, 0.9, 1.4):
        assert passed(seconds) == []
    assert passed(1.6) == [Abort(name, epoch) for name in control.members("a")]
    assert shape(control) == before


def test_a_restoration_has_as_long_as_its_longest_copy_takes() -> None:
    """A layer that takes longer than the deadline would never come else, however often it is tried."""
    control = merged()
    rate = MODEL.layers[0].weight_bytes / (3 * TIMEOUT_S)
    for name in "ab":
        told(control, name, bytes_per_s=rate)
    control.network = replace(control.network, host_bytes_per_s=rate / 100)
    epoch = fetching(control)

    def passed(seconds: float) -> list[Command]:
        now_s = 1.1 + seconds * TIMEOUT_S
        for name in "ab":
            told(control, name, now_s=now_s)
        return control.on(Tick(), now_s)

    for seconds in (0.9, 1.8, 2.7, 3.5, 4.4, 5.3, 6.2, 6.9):
        assert passed(seconds) == []
    assert passed(7.2) == [Abort(name, epoch) for name in control.members("a")]


def test_a_group_that_is_slower_than_its_parts_pays_rent_until_it_dissolves() -> None:
    control, now_s = merged(), 0.0
    head = control.groups[0].stages[0].instance
    for _ in range(2000):
        now_s += 0.1
        for name in "ab":
            told(control, name, InstanceLoad(4, 20) if name == head else InstanceLoad(), now_s)
        if control.on(Tick(), now_s):
            break
    assert control.groups[0].phase == "fetching"
    assert now_s > 0.5  # not before there was rent to pay


def test_a_group_whose_demand_leaves_no_margin_stays() -> None:
    control, now_s = merged(), 0.0
    head = control.groups[0].stages[0].instance
    for _ in range(300):
        now_s += 0.1
        for name in "ab":  # 37 of 40 tokens each, and a tenth is the margin
            told(control, name, InstanceLoad(4, 74) if name == head else InstanceLoad(), now_s)
        assert control.on(Tick(), now_s) == []


def test_a_group_dissolves_only_when_its_demand_fits_beside_all_layers_and_does_not_merge_again() -> None:
    """Whatever streams, or costs, before and afterwards."""
    control, now_s, offers = merged(), 0.0, ((), (CHEAP,), (CHEAP, DEAR))
    head = control.groups[0].stages[0].instance

    def pass_time(tokens: int, until_s: float) -> list[Command]:
        """Each of the two asks for so many tokens."""
        nonlocal now_s
        while now_s < until_s:
            now_s += 0.1
            alone = len(control.groups) > 1
            for name in "ab":
                share = InstanceLoad(4, tokens) if alone else InstanceLoad(8, 2 * tokens) if name == head else NOTHING
                told(control, name, share, now_s, **({"offers": offers[int(now_s) % 3]} if alone else {}))
            if commands := control.on(Tick(), now_s):
                return commands
        return []

    for tokens in (42, 41, 40, 37):  # two of them could stream; or they fit without the margin
        assert pass_time(tokens, now_s + 30.0) == []
    fetches = pass_time(36, now_s + 300.0)
    assert {type(command) for command in fetches} == {BringHome}
    epoch = fetches[0].epoch
    everything = frozenset(range(LAYERS))
    for name in "ab":
        (part,) = [part for part in control.groups[0].stages if part.instance == name]
        told(control, name, InstanceLoad(8, 72) if name == head else NOTHING, now_s,
             arrived=everything - {*range(part.first, part.end)})  # fmt: skip
    for name in "ab":
        control.on(Prepared(name, epoch), now_s)
    for phase in ("exchanging", "serving"):
        for name in "ab":
            told(control, name, InstanceLoad(4, 36), now_s, phase=phase)
    assert [view.phase for view in control.groups] == ["serving", "serving"]
    assert pass_time(36, now_s + 30.0) == []
    assert {type(command) for command in pass_time(43, now_s + 1.0)} == {Prepare}


def test_the_papers_rule_dissolves_below_half() -> None:
    control = merged(GroupPolicy("kunserve"))
    head = control.groups[0].stages[0].instance
    told(control, head, InstanceLoad(4, 40), 0.1)
    assert control.on(Tick(), 0.1) == []
    told(control, head, InstanceLoad(4, 39), 0.2)
    assert {type(command) for command in control.on(Tick(), 0.2)} == {BringHome}


# -- Faults -------------------------------------------------------------------------------------------------------------------


def test_when_a_stage_dies_the_others_serve_alone_and_all_requests_start_again() -> None:
    control = merged()
    last = control.epoch
    found = control.on(Died("b"), 0.0)
    assert found == [Recover("a", last + 1), Restart(control_names(found), Death("b"))]
    assert control.on(PlacementAsked("r", 5), 0.0) == []  # nobody serves yet
    assert told(control, "a", phase="recovering") == []
    assert told(control, "a", epoch=last) == []  # an old report says nothing
    assert told(control, "a") == [Route("r", "a")]


def control_names(found: list[Command]) -> tuple[str, ...]:
    (restart,) = [each for each in found if isinstance(each, Restart)]
    assert set(restart.instances) == {"a", "b"}
    return restart.instances


@pytest.mark.parametrize("phase", ["switching", "exchanging"])
def test_who_fails_in_what_was_decided_is_evicted(phase: str) -> None:
    control, prepares = pair()
    epoch = prepares[0].plan.epoch
    for name in "ab":
        control.on(Prepared(name, epoch), 0.0)
    if phase == "exchanging":
        for name in "ab":
            told(control, name, phase="exchanging")
    found = control.on(ChangeRefused("b", epoch, "DriverError", "broken"), 0.0)
    assert [type(each) for each in found] == [Evict, Recover, Restart]
    assert found[0].instance == "b"
    assert [(view.phase, view.stages[0].instance) for view in control.groups] == [("recovering", "a")]


def test_who_does_not_switch_in_time_is_evicted() -> None:
    control, prepares = pair()
    epoch = prepares[0].plan.epoch
    for name in "ab":
        control.on(Prepared(name, epoch), 0.0)
    told(control, "a", now_s=TIMEOUT_S)
    told(control, "b", now_s=TIMEOUT_S, epoch=epoch - 1)
    found = control.on(Tick(), TIMEOUT_S + 0.01)
    assert [type(each) for each in found] == [Evict, Recover, Restart]
    assert found[0].instance == "b"


def test_who_is_silent_is_evicted_and_what_it_says_later_is_not_heard() -> None:
    control = Control(MODEL, NETWORK, timeout_s=TIMEOUT_S)
    joined(control, "a", "b")
    told(control, "a", now_s=TIMEOUT_S)
    found = control.on(Tick(), TIMEOUT_S + 0.01)
    assert [type(each) for each in found] == [Evict, Restart]
    assert control.on(Reported(InstanceReport("b", 2)), TIMEOUT_S + 0.1) == []
    assert [view.stages[0].instance for view in control.groups] == ["a"]


def test_who_does_not_recover_in_time_is_evicted() -> None:
    control = merged()
    control.on(Died("b"), 0.0)
    told(control, "a", now_s=TIMEOUT_S, phase="recovering")
    assert isinstance(control.on(Tick(), TIMEOUT_S + 0.01)[0], Evict)


def test_one_that_comes_back_before_its_death_was_noticed_is_a_new_one() -> None:
    control = merged()
    found = control.on(Joined(description("b")), 1.0)
    assert [type(each) for each in found] == [Recover, Restart, Recover]
    assert [each.instance for each in found if isinstance(each, Recover)] == ["a", "b"]
    assert control.on(Died("b"), 1.0)[-1] == Restart(("b",), Death("b"))


def test_when_nobody_is_left_requests_are_declined_by_name() -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a")
    control.on(Died("a", why="it was ended by SIGKILL"), 0.0)
    assert control.on(PlacementAsked("r", 3), 0.0) == []  # it comes back
    (declined,) = control.on(Died("a", returns=False), 0.0)
    assert isinstance(declined, Decline)
    assert isinstance(declined.error, NoCopy)
    assert (declined.id, declined.error.instances) == ("r", 0)
    assert "a (it was ended by SIGKILL)" in str(declined.error)
    assert len(control._held) == 0
    joined(control, "a")
    assert control.on(PlacementAsked("s", 3), 0.0) == [Route("s", "a")]


# -- Who may join ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (Fingerprint("huge", "float32", "1", LAYERS), ("config",)),
        (Fingerprint("tiny", "bfloat16", "2", LAYERS), ("dtype", "version")),
        (Fingerprint("tiny", "float32", "1", LAYERS + 1), ("layers",)),
        (Fingerprint("tiny", "float32", "1", LAYERS, "finetuned"), ("weights",)),
        (Fingerprint("tiny", "float32", "1", LAYERS, block_tokens=32), ("block_tokens",)),
    ],
)
def test_an_instance_of_another_model_is_refused_by_name(other: Fingerprint, differs: tuple[str, ...]) -> None:
    control = Control(MODEL, NETWORK)
    joined(control, "a")
    before, epoch = shape(control), control.epoch
    with pytest.raises(OtherModel) as caught:
        control.on(Joined(description("b", fingerprint=other)), 0.0)
    assert (caught.value.instance, caught.value.differs) == ("b", differs)
    assert (shape(control), control.epoch) == (before, epoch)
    # Nor is it taken when nobody else is left: requests may be half answered.
    control.on(Died("a"), 1.0)
    with pytest.raises(OtherModel) as caught:
        control.on(Joined(description("a", fingerprint=other)), 1.0)
    assert (caught.value.instance, caught.value.differs) == ("a", differs)
    assert control.groups == []


def test_an_instance_whose_layers_have_other_sizes_is_refused_by_name() -> None:
    control = Control(MODEL, NETWORK)
    other = ServedLayers((Layer(11, 1, Line(0.0, 0.0)),) * LAYERS)
    with pytest.raises(OtherModel) as caught:
        control.on(Joined(Description("a", FINGERPRINT, other, MEMORY)), 0.0)
    assert caught.value.differs == ("layers' bytes",)
    assert control.groups == []


def test_an_instance_without_room_for_the_model_is_refused() -> None:
    control = Control(MODEL, NETWORK)
    with pytest.raises(OutOfMemory):
        control.on(Joined(description("a", memory=79)), 0.0)
    assert control.groups == []
    joined(control, "b")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        GroupPolicy("better")
    with pytest.raises(InvalidArgument):
        GroupPolicy("pipeline", 0)
    with pytest.raises(InvalidArgument):
        Control(MODEL, NETWORK, timeout_s=0.0)


def test_what_there_is_to_show() -> None:
    control, prepares = pair()
    epoch = prepares[0].plan.epoch
    assert [type(view) for view in control.groups] == [GroupView] * 2
    assert [(view.changing, view.capacity) for view in control.groups] == [(epoch, 40), (epoch, 40)]
    assert control.members("a") == ("a",)
    assert control.members("nobody") == ()
    assert control.epoch_of("nobody") is None
