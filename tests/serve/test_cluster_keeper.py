"""A cluster that several servers share: servers that go, a keeper that is started again, callers that come back. Instances are
doubles in threads; no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra cluster")

from cluster_double import LocalConnection
from control_worlds import MODEL, NETWORK
from test_cluster_front import expected, until

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster import keeper as keeper_module
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front, InstanceFailed, Lost
from remap_serve.cluster.keeper import DESERTED, KEPT, SILENT, WAITING, Keeper
from remap_serve.cluster.ledger import Delivery
from remap_serve.cluster.shared_front import SharedFront
from remap_serve.engine.request import Request, SamplingParams


class World:
    """A keeper, as its servers reach it. lost: answers of this method do not come."""

    name = "keeper"

    def __init__(self, folder: Path, names: str = "ab") -> None:
        self.instances = [LocalConnection(name, folder=str(folder)) for name in names]
        self.keeper: Keeper | None = None
        self.front: Front[Request]
        self.lost: str | None = None
        self.asked = 0

    async def begin(self) -> None:
        control = Control(MODEL, NETWORK, GroupPolicy("remap"), timeout_s=5.0)
        self.front = Front[Request](control, self.instances, lambda request: len(request.prompt))
        made = Keeper(self.front, {"model": "tiny"})
        await made.start()
        self.keeper = made

    async def end(self) -> None:
        """As if its process had ended: instances have what they had."""
        keeper, self.keeper = self.keeper, None
        assert keeper is not None
        for one in keeper._accepted.values():  # nothing is cancelled by a process that has ended
            assert one.task is not None
            one.task.cancel()
        self.front._carry_out = lambda actions: None  # type: ignore[method-assign]
        await keeper.close()

    async def call(self, method: str, *arguments: object) -> Any:
        if self.keeper is None:
            raise Lost("the keeper is gone", instance="keeper", returns=True)
        self.asked += method == "ask"
        found = getattr(self.keeper, method)(*arguments)
        found = await found if asyncio.iscoroutine(found) else found
        if self.keeper is None:
            raise Lost("the keeper is gone", instance="keeper", returns=True)
        if method == self.lost and (method != "poll" or found.deliveries):
            self.lost = None
            raise InstanceFailed("the answer did not come", instance="keeper", method=method, cause="RayError")
        return found

    def kill(self) -> None:
        raise AssertionError("no server ends the keeper")

    async def server(self) -> SharedFront:
        made = SharedFront(self, {"model": "tiny"})
        await made.start()
        return made

    def submitted(self) -> int:
        return sum(each.calls.count("submit") for each in self.instances)


Body = Callable[[World], Coroutine[Any, Any, None]]


def shared(folder: Path, body: Body) -> None:
    async def run() -> None:
        world = World(folder)
        await world.begin()
        try:
            await body(world)
        finally:
            if world.keeper is not None:
                await world.keeper.close()
                assert world.front.failure is None
            for each in world.instances:
                each.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def request(id: str, length: int = 30) -> Request:
    return Request(id, (0, 1, 2), SamplingParams(max_tokens=length))


async def answer(server: SharedFront, id: str, length: int = 30, keyed: bool = True) -> list[int]:
    found, reason = list[int](), None
    async for delivery in server.generate(id, request(id, length), keyed):
        assert delivery.first == len(found)
        found += delivery.tokens
        reason = delivery.finish_reason
    assert reason == "length"
    return found


async def silence(server: SharedFront) -> None:
    """As if its process had ended."""
    assert server._polling is not None
    server._polling.cancel()
    await asyncio.gather(server._polling, return_exceptions=True)


def looks(world: World, count: int) -> None:
    assert world.keeper is not None
    for _ in range(count):
        world.keeper._look()


def test_servers_answer_together_and_the_same_key_is_computed_once(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, other = await world.server(), await world.server()
        apart = [answer(each, f"r{number}", 5, keyed=False) for number, each in enumerate((one, other) * 4)]
        assert await asyncio.gather(*apart) == [expected(f"r{number}") for number in range(8)]
        before = world.submitted()
        both = await asyncio.gather(answer(one, "same"), answer(other, "same"), answer(one, "same"))
        assert both == [expected("same", 30)] * 3
        assert await answer(other, "same") == expected("same", 30)  # an answer is kept
        assert world.submitted() == before + 1
        with pytest.raises(InvalidArgument) as caught:
            await answer(one, "same", 31)
        assert caught.value.fields["id"] == "same"
        await one.close()
        assert world.keeper is not None and not world.keeper.over.is_set()
        await other.close()
        assert world.keeper.over.is_set()

    shared(tmp_path, body)


def test_what_a_server_that_died_had_with_a_key_goes_on_for_another_and_the_rest_is_cancelled(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, other = await world.server(), await world.server()
        hung = [asyncio.create_task(answer(one, id, 60, id != "plain")) for id in ("keyed", "plain", "unclaimed")]
        begun = one.generate("begun", request("begun", 60), keyed=True)
        had = await anext(begun)
        await silence(one)
        looks(world, SILENT + 1)  # and so does the other, which polls
        # A client comes back to the other server while its request runs, and has what it had, and the rest.
        again = await answer(other, "begun", 60)
        assert again == expected("begun", 60) and again[: len(had.tokens)] == list(had.tokens)
        assert await answer(other, "keyed", 60) == expected("keyed", 60)
        assert world.front.restarts == 0 and world.submitted() == 4
        await until(lambda: world.front.unfinished == 0 or world.front.service.ledger.ids[0].startswith("unclaimed"))
        looks(world, WAITING + 1)
        await until(lambda: world.front.unfinished == 0)
        assert world.keeper is not None and "plain" not in world.keeper._accepted
        for each in hung:
            each.cancel()
        await asyncio.gather(*hung, begun.aclose(), return_exceptions=True)
        await other.close()

    shared(tmp_path, body)


def test_when_the_keeper_is_started_again_callers_get_each_token_once(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, other = await world.server(), await world.server()
        for life in range(3):
            ids = [f"r{life}.{number}" for number in range(6)]
            tasks = [asyncio.create_task(answer((one, other)[at % 2], id, 60, at < 3)) for at, id in enumerate(ids)]
            await until(lambda: any(0 < len(call.had.tokens) < 50 for call in one._calls.values()))
            await world.end()
            asked = world.asked
            late = asyncio.create_task(answer(one, f"late{life}", 10, keyed=False))  # while there is none
            await asyncio.sleep(0)
            await world.begin()
            assert await late == expected(f"late{life}", 10)
            assert await asyncio.gather(*tasks) == [expected(id, 60) for id in ids]
            assert world.asked > asked
        await until(lambda: world.front.unfinished == 0)
        await one.close()
        await other.close()

    shared(tmp_path, body)


@pytest.mark.parametrize("method", ["ask", "poll"])
def test_an_answer_of_the_keeper_that_is_lost_loses_and_doubles_no_token(tmp_path: Path, method: str) -> None:
    async def body(world: World) -> None:
        one = await world.server()
        world.lost = method
        assert await answer(one, "r", keyed=False) == expected("r", 30)
        assert world.lost is None and world.asked > 1
        await one.close()

    shared(tmp_path, body)


def test_a_caller_that_goes_away_cancels_also_with_a_key(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, other = await world.server(), await world.server()
        stays = asyncio.create_task(answer(other, "both", 60))
        for id in ("alone", "both"):
            found = one.generate(id, request(id, 60), keyed=True)
            await anext(found)
            await found.aclose()
        assert await stays == expected("both", 60)
        await until(lambda: world.front.unfinished == 0)
        assert world.keeper is not None and list(world.keeper._accepted) == ["both"]
        await one.close()
        await other.close()

    shared(tmp_path, body)


def test_a_request_that_fails_is_not_kept(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one = await world.server()
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="150 tokens"):
                await answer(one, "long", 200)
        assert world.submitted() == 2
        await one.close()

    shared(tmp_path, body)


def test_answers_are_kept_for_a_while_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "MOST_KEPT", 2)

    async def body(world: World) -> None:
        one = await world.server()
        for id in ("first", "second", "third"):
            await answer(one, id, 3)
        looks(world, 1)
        assert world.keeper is not None and list(world.keeper._accepted) == ["second", "third"]
        for _ in range(KEPT + 1):
            looks(world, 1)
            world.keeper._known(one.name).silent = 0
        assert not world.keeper._accepted
        await one.close()

    shared(tmp_path, body)


def test_a_cluster_without_servers_ends_and_one_with_other_options_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 600.0)  # the test's own looks alone count

    async def body(world: World) -> None:
        assert world.keeper is not None
        with pytest.raises(InvalidArgument) as caught:
            await SharedFront(world, {"model": "tiny", "threads": 2}).start()
        assert caught.value.fields["differs"] == ("threads",)
        looks(world, DESERTED)
        assert not world.keeper.over.is_set()
        looks(world, 1)
        assert world.keeper.over.is_set()

    shared(tmp_path, body)


def test_a_server_that_was_suspended_asks_again(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one = await world.server()
        task = asyncio.create_task(answer(one, "r", 60, keyed=False))
        await until(lambda: any(call.had.tokens for call in one._calls.values()))
        assert world.keeper is not None
        world.keeper._drop(one.name)  # it did not poll for a while
        assert await task == expected("r", 60)
        await one.close()

    shared(tmp_path, body)


def test_a_server_that_stops_tells_its_callers_and_its_requests_wait_for_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, other = await world.server(), await world.server()
        task = asyncio.create_task(answer(one, "r", 60))
        await until(lambda: any(call.had.tokens for call in one._calls.values()))
        one.stop()
        with pytest.raises(InvalidState, match="send it again elsewhere"):
            await task
        await one.close()
        with pytest.raises(InvalidState):
            await answer(one, "new")
        assert await answer(other, "r", 60) == expected("r", 60)
        assert world.submitted() == 1
        await other.close()

    shared(tmp_path, body)


def test_a_call_takes_each_token_once() -> None:
    from remap_serve.cluster.shared_front import _Call

    call = _Call("r", request("r"), True)
    assert call.take(Delivery(0, (1, 2), None)) and call.take(Delivery(1, (2, 3), None))
    assert call.take(Delivery(0, (1, 2, 3), None)) and not call.take(Delivery(4, (5,), None))
    assert call.take(Delivery(3, (4,), "length"))

    async def run() -> list[Delivery]:
        return [delivery async for delivery in call.caller]

    assert asyncio.run(run()) == [Delivery(0, (1, 2), None), Delivery(2, (3,), None), Delivery(3, (4,), "length")]
