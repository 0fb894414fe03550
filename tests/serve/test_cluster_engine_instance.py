"""Instances over engines that schedule themselves: their calls, one by one, and behind the front."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("torch")

from cluster_double import TinyInstance
from control_worlds import MODEL, NETWORK, token
from engine_double import EngineConnection, TinyEngine, made
from test_cluster_front import answer, expected, until

from remap.errors import Error, InvalidArgument, InvalidState, StalePlan
from remap_serve.cluster.contract import MergingInstance, ServingInstance
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.engine_instance import EngineInstance
from remap_serve.cluster.front import Front
from remap_serve.cluster.instance import ClusterInstance
from remap_serve.cluster.messages import InstanceReport, Tokens
from remap_serve.engine.request import Request, SamplingParams


def asked(id: str, tokens: int = 5, prompt: int = 3) -> Request:
    return Request(id, tuple(range(prompt)), SamplingParams(max_tokens=tokens))


class Stepped:
    """An instance whose engine computes when the test says so."""

    def __init__(self, **arguments: Any) -> None:
        self.instance, self.engine = made("a", steps=False, **arguments)

    def __call__(self, call: Callable[[], None]) -> None:
        """In the loop of the instance; what follows from it has happened then."""

        async def run() -> None:
            call()
            for _ in range(5):
                await asyncio.sleep(0)

        self.instance._ask(run())

    def go(self) -> tuple[list[Tokens], InstanceReport]:
        self(self.engine.go)
        return self.instance.poll()


@contextmanager
def stepped(**arguments: Any) -> Iterator[Stepped]:
    found = Stepped(**arguments)
    try:
        found.instance.recover(1)
        yield found
    finally:
        found.instance.close()
        assert found.engine.closed


@pytest.mark.parametrize("kind", [EngineInstance, ClusterInstance, TinyInstance])
def test_every_instance_has_the_calls_that_it_promises(kind: type) -> None:
    promised = ServingInstance if kind is EngineInstance else MergingInstance
    calls = {name for name, _ in inspect.getmembers(promised, inspect.isfunction) if not name.startswith("_")}
    for name in calls:
        wanted = list(inspect.signature(getattr(promised, name)).parameters)
        assert list(inspect.signature(getattr(kind, name)).parameters) == wanted, name
    others = {name for name, _ in inspect.getmembers(MergingInstance, inspect.isfunction)} - calls
    assert not any(hasattr(kind, name) for name in others if not name.startswith("_"))


def test_tokens_come_in_order_with_the_reason_of_the_last() -> None:
    with stepped() as one:
        one.instance.submit(asked("r", 2), 1, (), 1)
        assert one.go()[0] == [Tokens("r", 1, 0, (token("r", 0),))]
        outputs, report = one.go()
        assert outputs == [Tokens("r", 1, 1, (token("r", 1),), "length")]
        assert (report.requests, report.load.requests) == ((), 0)


def test_a_request_goes_on_behind_the_tokens_that_were_delivered() -> None:
    with stepped() as one:
        one.instance.submit(asked("r"), 3, (token("r", 0), token("r", 1)), 1)
        assert one.go()[0] == [Tokens("r", 3, 2, (token("r", 2),))]


def test_a_report_says_what_runs_and_what_waits() -> None:
    with stepped(seats=2) as one:
        assert not one.instance.describe().merges
        for name in ("r", "s", "t"):
            one.instance.submit(asked(name), 1, (), 1)
        report = one.go()[1]
        assert report.requests == (("r", 1), ("s", 1), ("t", 1))
        assert (report.load.running, report.load.tokens, report.load.waiting) == (2, 8, (4,))
        assert (report.load.longest, report.epoch, report.phase) == (5, 1, "serving")
        assert report.offers == one.engine.offers
        assert report.counts == {"passes": 1.0}


def test_a_cancelled_request_is_taken_out_of_the_engine_too() -> None:
    with stepped() as one:
        one.instance.submit(asked("r"), 2, (), 1)
        one.go()
        one.instance.cancel("r", 1)  # an older attempt: not this one
        assert one.instance.poll()[0] == []
        one.instance.cancel("r", 2)
        one.instance.cancel("r")
        one.instance.cancel("nobody")
        assert one.instance.poll()[0] == [Tokens("r", 2, 1, (), "abort")]
        one(lambda: None)
        assert one.engine.aborted == {"r": 1}
        assert one.go()[0] == []
        assert one.instance.release("r") is None
        one.instance.give_up("r")


def test_recovering_forgets_every_request_and_refuses_those_that_were_sent_before() -> None:
    with stepped() as one:
        one.instance.submit(asked("r"), 1, (), 1)
        with pytest.raises(StalePlan) as stale:
            one.instance.recover(1)
        assert stale.value.fields == {"plan_epoch": 1, "epoch": 1}
        assert one.instance.recover(7) == ("r",) and one.instance.describe().epoch == 7
        with pytest.raises(InvalidState) as late:
            one.instance.submit(asked("s"), 1, (), 1)
        assert (late.value.fields["epoch"], late.value.fields["recovered"]) == (1, 7)
        outputs, report = one.go()
        assert (outputs, report.requests, report.epoch) == ([], (), 7)
        assert one.engine.aborted == {"r": 1}


def test_an_older_attempt_gives_way_and_an_equal_one_is_refused() -> None:
    with stepped() as one:
        one.instance.submit(asked("r"), 1, (), 1)
        with pytest.raises(InvalidArgument, match="in use"):
            one.instance.submit(asked("r"), 1, (), 1)
        with pytest.raises(InvalidState):
            one.instance.submit(asked("r"), 2, (), 1)
        one.instance.submit(asked("r"), 2, (), 1)
        assert one.go()[0] == [Tokens("r", 2, 0, (token("r", 0),))]


def test_what_the_engine_refuses_is_refused_and_nothing_is_queued() -> None:
    with stepped() as one:
        with pytest.raises(InvalidArgument, match="150 tokens"):
            one.instance.submit(asked("r", 200), 1, (), 1)
        with pytest.raises(InvalidArgument):
            one.instance.submit(Request("r", (1,), SamplingParams(seed=1 << 64)), 1, (), 1)
        assert one.instance.poll()[1].requests == ()
        one.instance.submit(asked("r"), 1, (), 1)


def test_a_request_that_is_cancelled_while_it_is_queued_does_not_run() -> None:
    with stepped(slow_s=0.2) as one:
        submitting = asyncio.run_coroutine_threadsafe(one.instance._submit(asked("r"), 1, (), 1), one.instance._loop)
        while one.instance.poll()[1].requests == ():
            time.sleep(0.01)
        one.instance.cancel("r")
        submitting.result()
        assert one.engine.aborted == {"r": 1}
        assert one.engine.answers == []


def test_an_engine_that_ends_is_told_by_poll_and_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=7) RuntimeError: no memory\n"
    )  # what its own process says, and its error here does not
    monkeypatch.setattr("remap_serve.cluster.engine_instance.log_here", lambda: str(log))
    with stepped() as one:
        one.instance.submit(asked("r"), 1, (), 1)
        one(one.engine.go)
        one(lambda: one.engine.break_down(RuntimeError("out of luck")))
        assert one.instance.poll()[0] == [Tokens("r", 1, 0, (token("r", 0),))]  # first what it made before
        for call in (
            one.instance.poll,
            lambda: one.instance.submit(asked("s"), 1, (), 1),
            lambda: one.instance.recover(9),
        ):
            with pytest.raises(InvalidState, match="out of luck") as failed:
                call()
            assert failed.value.fields == {"instance": "a", "cause": "RuntimeError", "log": str(log)}
            assert f"{log} ends with: (EngineCore pid=7) RuntimeError: no memory" in str(failed.value)


def test_an_error_of_the_engine_that_is_no_refusal_ends_the_instance() -> None:
    with stepped() as one:
        one.engine.strange = RuntimeError("a defect")
        for _ in range(2):
            with pytest.raises(InvalidState, match="a defect"):
                one.instance.submit(asked("r"), 1, (), 1)
        with pytest.raises(InvalidState):
            one.instance.poll()


def test_an_engine_with_requests_that_says_nothing_hangs() -> None:
    with stepped() as one:
        one.instance._hung_s = 0.05
        time.sleep(0.1)
        one.instance.poll()  # without requests it has nothing to say
        one.instance.submit(asked("r"), 1, (), 1)
        time.sleep(0.1)
        with pytest.raises(InvalidState, match="hangs") as hung:
            one.instance.poll()
        assert hung.value.fields["silent_s"] > 0.05


def test_an_engine_that_does_not_start_says_why() -> None:
    async def start() -> TinyEngine:
        raise InvalidArgument("no such model")

    with pytest.raises(InvalidArgument, match="no such model"):
        EngineInstance("a", start)


def test_a_closed_instance_says_so() -> None:
    one, _ = made("a")
    one.close()
    one.close()
    with pytest.raises(InvalidState, match="closed"):
        one.poll()


# -- Behind the front ----------------------------------------------------------------------------------------------------------

Body = Callable[[Front[Request], list[EngineConnection]], Coroutine[Any, Any, None]]


def serving(names: str, body: Body, policy: str = "remap") -> None:
    async def run() -> None:
        connections = [EngineConnection(name) for name in names]
        front = Front[Request](
            Control(MODEL, NETWORK, GroupPolicy(policy, 2), 5.0), connections, lambda r: len(r.prompt)
        )
        try:
            await front.start()
            await body(front, connections)
            assert front.failure is None
        finally:
            await front.close()
            for connection in connections:
                connection.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("policy", ["remap", "pipeline"])
def test_a_burst_is_answered_by_instances_that_stay_alone(policy: str) -> None:
    async def body(front: Front[Request], connections: list[EngineConnection]) -> None:
        ids = [f"r{number}" for number in range(24)]
        assert await asyncio.gather(*(answer(front, id, 8, 30) for id in ids)) == [expected(id, 30) for id in ids]
        assert {len(view.stages) for view in front.groups} == {1}
        assert {call for each in connections for call in each.calls} == {"describe", "recover", "submit", "poll"}
        assert all("submit" in each.calls for each in connections)

    serving("abc", body, policy)


@pytest.mark.parametrize("how", ["its process is killed", "its engine ends"])
def test_requests_of_a_lost_instance_go_on_elsewhere_and_it_comes_back(how: str) -> None:
    async def body(front: Front[Request], connections: list[EngineConnection]) -> None:
        ids = [f"r{number}" for number in range(12)]
        tasks = [asyncio.create_task(answer(front, id, 8, 40)) for id in ids]
        first = connections[0]
        await until(lambda: any(each.made > 3 for each in first.engine.answers))
        before = first.instance
        if how == "its process is killed":
            first.kill()
        else:
            before._loop.call_soon_threadsafe(first.engine.break_down, RuntimeError("gone"))
        assert await asyncio.gather(*tasks) == [expected(id, 40) for id in ids]
        assert front.restarts > 0
        await until(lambda: all(front.up.values()))
        assert first.instance is not before

    serving("ab", body)


def test_a_caller_that_goes_away_leaves_nothing_behind() -> None:
    async def body(front: Front[Request], connections: list[EngineConnection]) -> None:
        stream = front.generate("r", asked("r", 100))
        await anext(stream)
        await stream.aclose()
        await until(lambda: connections[0].engine.aborted["r"] == 1)
        await until(lambda: not connections[0].engine.answers)

    serving("a", body)


def test_a_request_that_no_instance_takes_is_refused_to_its_caller() -> None:
    async def body(front: Front[Request], connections: list[EngineConnection]) -> None:
        with pytest.raises(Error, match="150 tokens"):
            await answer(front, "r", 100, 100)
        assert await answer(front, "s") == expected("s")

    serving("a", body)
