"""The process that serves, with instances in threads: requests answered through mergers, deaths and refusals."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from cluster_double import LocalConnection, TinyInstance
from control_worlds import MODEL, NETWORK, token

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster.control import Control, GroupPolicy, NoCopy, OtherModel
from remap_serve.cluster.front import Front, InstanceFailed
from remap_serve.cluster.ledger import Submission
from remap_serve.cluster.messages import Died, Evict, InstanceReport, Tick
from remap_serve.cluster.seen import cluster_state
from remap_serve.engine.request import Request, SamplingParams

Body = Callable[[Front[Request], list[LocalConnection]], Coroutine[Any, Any, None]]


def serving(folder: Path, names: str, body: Body, policy: str = "remap", **arguments: Any) -> None:
    """Run `body` beside a front with these instances."""

    async def run() -> None:
        connections = [LocalConnection(name, folder=str(folder), **arguments.get(name, {})) for name in names]
        control = Control(MODEL, NETWORK, GroupPolicy(policy, 2), timeout_s=5.0)
        front = Front[Request](control, connections, lambda request: len(request.prompt))
        try:
            await front.start()
            await body(front, connections)
            assert front.failure is None
        finally:
            await front.close()
            for connection in connections:
                connection.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


async def answer(front: Front[Request], id: str, prompt: int = 3, length: int = 5) -> list[int]:
    found, reason = list[int](), None
    async for delivery in front.generate(id, Request(id, tuple(range(prompt)), SamplingParams(max_tokens=length))):
        assert delivery.first == len(found)
        found += delivery.tokens
        reason = delivery.finish_reason
    assert reason == "length"
    return found


def expected(id: str, length: int = 5) -> list[int]:
    return [token(id, place) for place in range(length)]


async def until(holds: Callable[[], bool]) -> None:
    """Wait until this holds; the test's own limit ends the wait."""
    while not holds():
        await asyncio.sleep(0.01)


def test_requests_are_answered_by_instances_alone(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        ids = [f"r{number}" for number in range(12)]
        assert await asyncio.gather(*(answer(front, id) for id in ids)) == [expected(id) for id in ids]
        assert front.unfinished == 0
        assert front.restarts == 0

    serving(tmp_path, "abc", body)


def test_a_burst_merges_instances_and_they_part_again(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        ids = [f"r{number}" for number in range(24)]
        tasks = [asyncio.create_task(answer(front, id, 8, 30)) for id in ids]
        await until(lambda: any(len(view.stages) > 1 for view in front.groups))
        assert await asyncio.gather(*tasks) == [expected(id, 30) for id in ids]
        await until(lambda: all(len(view.stages) == 1 and view.phase == "serving" for view in front.groups))
        assert any("fetch" in connection.calls for connection in connections)

    serving(tmp_path, "abc", body)


def test_a_request_that_is_too_long_for_one_instance_is_served_by_two(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        others = [asyncio.create_task(answer(front, f"r{number}")) for number in range(6)]
        assert await answer(front, "long", 30, 50) == expected("long", 50)  # alone an instance has room for 40 tokens
        assert await asyncio.gather(*others) == [expected(f"r{number}") for number in range(6)]

    serving(tmp_path, "ab", body)


def test_a_call_that_fails_ends_nothing_but_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = []
    plain = TinyInstance.release

    def release(self: TinyInstance, id: str) -> int | None:
        if not failed:
            failed.append(id)
            raise InvalidState("the loop has ended")
        return plain(self, id)

    monkeypatch.setattr(TinyInstance, "release", release)

    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        await until(lambda: max(len(view.stages) for view in front.groups) == 2)
        # The others are full, so that it comes to the one that is left over, which has no room for it.
        full = [asyncio.create_task(answer(front, f"r{number}", 30, 50)) for number in range(4)]
        assert await asyncio.gather(*full) == [expected(f"r{number}", 50) for number in range(4)]

    serving(tmp_path, "abc", body, "pipeline")
    assert failed


def test_who_refuses_a_request_is_not_asked_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have lost a peer, and control hears of that later: no more than once in a tick."""
    refused, ticks, plain, on = [], [], TinyInstance.submit, Control.on

    def submit(self: TinyInstance, request: Request, attempt: int, tokens: Any, epoch: int) -> None:
        if len(refused) < 10:
            refused.append(attempt)
            raise InvalidState("a peer is gone")
        plain(self, request, attempt, tokens, epoch)

    def counted(self: Control, event: Any, now_s: float) -> Any:
        ticks.append(event) if refused and isinstance(event, Tick) else None
        return on(self, event, now_s)

    monkeypatch.setattr(TinyInstance, "submit", submit)
    monkeypatch.setattr(Control, "on", counted)

    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        assert await answer(front, "r") == expected("r")
        assert len(refused) == 10 and len(ticks) >= 8

    serving(tmp_path, "a", body)


def test_what_an_older_attempt_is_refused_for_is_not_the_callers(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        asking = asyncio.create_task(answer(front, "r"))
        await until(lambda: "r" in front.service.ledger and front.service.ledger.attempt("r") == 1)
        too_long = Request("r", (1,) * 200, SamplingParams(max_tokens=1))
        await front._submit(connections[0], Submission("r", too_long, 0, ()), 1)
        assert await asking == expected("r")

    serving(tmp_path, "a", body)


def test_an_instance_that_fails_at_a_submission_is_replaced_and_the_request_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, plain = [], LocalConnection.call

    async def call(self: LocalConnection, method: str, *arguments: object) -> Any:
        if method == "submit" and not failed:
            failed.append(self.instance)
            raise InstanceFailed("the answer was lost")
        return await plain(self, method, *arguments)

    monkeypatch.setattr(LocalConnection, "call", call)

    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        assert await answer(front, "r") == expected("r")
        assert failed[0] not in [connection.instance for connection in connections]
        assert front.restarts == 1

    serving(tmp_path, "ab", body)


def test_who_comes_back_as_another_model_is_not_waited_for(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        connections[0].arguments["config"] = "other"
        connections[0].kill()
        await until(lambda: "a" in front.rejected)
        connections[1].returns = False
        connections[1].kill()
        await until(lambda: "b" in front.rejected)
        with pytest.raises(NoCopy):
            await answer(front, "r")

    serving(tmp_path, "ab", body)


def test_a_request_that_is_too_long_for_all_instances_ends_and_the_others_do_not(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        found = []
        async for delivery in front.generate("long", Request("long", (1,) * 30, SamplingParams(max_tokens=100))):
            found += delivery.tokens
            reason = delivery.finish_reason
        assert reason == "out_of_blocks" and found == expected("long", len(found)) and len(found) >= 90 - 30
        assert await answer(front, "r") == expected("r")

    serving(tmp_path, "ab", body)


@pytest.mark.parametrize("policy", ["alone", "pipeline"])
def test_a_killed_instance_comes_back_and_each_token_is_delivered_once(tmp_path: Path, policy: str) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        if policy == "pipeline":
            await until(lambda: len(front.groups) == 1 and front.groups[0].phase == "serving")
        ids = [f"r{number}" for number in range(6)]
        tasks = [asyncio.create_task(answer(front, id, 4, 30)) for id in ids]
        ledger, epoch = front.service.ledger, front.service.control.epoch
        await until(
            lambda: any(
                ledger.tokens(id) and "b" in front.service.control.members(ledger.where(id) or "") for id in ledger.ids
            )
        )
        connections[1].kill()
        assert await asyncio.gather(*tasks) == [expected(id, 30) for id in ids]
        assert front.restarts > 0
        assert front.service.control.epoch > epoch
        await until(lambda: {part.instance for view in front.groups for part in view.stages} == {"a", "b"})

    serving(tmp_path, "ab", body, policy)


def test_who_stops_listening_cancels(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        stream = front.generate("r", Request("r", (1, 2), SamplingParams(max_tokens=90)))
        async for _ in stream:
            break
        await stream.aclose()
        assert front.unfinished == 0
        await until(lambda: "cancel" in connections[0].calls)
        await until(lambda: not front.reports["a"].requests)
        assert await answer(front, "r") == expected("r")  # the id is free again

    serving(tmp_path, "a", body)


def test_what_cannot_be_served_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        first = asyncio.create_task(answer(front, "r", 3, 30))
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgument):
            await answer(front, "r")
        with pytest.raises(InvalidArgument):
            await answer(front, "long", 100, 100)
        assert await first == expected("r", 30)
        assert front.unfinished == 0

    serving(tmp_path, "a", body)


def test_an_instance_of_another_model_does_not_join(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        assert list(front.rejected) == ["b"]
        assert isinstance(front.rejected["b"], OtherModel)
        assert await answer(front, "r") == expected("r")

    serving(tmp_path, "ab", body, b={"config": "other"})


def test_without_an_instance_that_may_join_nothing_starts(tmp_path: Path) -> None:
    async def run() -> None:
        connections = [LocalConnection("a", folder=str(tmp_path))]
        front = Front[Request](Control(MODEL, NETWORK), connections, lambda request: len(request.prompt))
        connections[0].returns = False
        connections[0].kill()
        with pytest.raises(Exception) as caught:
            await front.start()
        assert caught.value.instance == "a"

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_the_start_waits_for_others_only_so_long(tmp_path: Path) -> None:
    """One of two does not come up, again and again: the other serves."""

    async def run() -> None:
        connections = [LocalConnection(name, folder=str(tmp_path)) for name in "ab"]
        connections[1].slow = True
        front = Front[Request](Control(MODEL, NETWORK), connections, lambda request: len(request.prompt))
        await front.start(patience_s=0.1)
        assert [part.instance for view in front.groups for part in view.stages] == ["a"]
        assert await answer(front, "r") == expected("r")
        connections[1].slow = False
        await until(lambda: len(front.groups) == 2)
        await front.close()
        for connection in connections:
            connection.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_front_that_did_not_run_for_a_while_blames_nobody(tmp_path: Path) -> None:
    slept = [0.0]

    async def run() -> None:
        connections = [LocalConnection(name, folder=str(tmp_path)) for name in "ab"]
        control = Control(MODEL, NETWORK, GroupPolicy("remap"), timeout_s=600.0)
        clock = lambda: time.monotonic() + slept[0]  # noqa: E731
        front = Front[Request](control, connections, lambda request: len(request.prompt), clock)
        await front.start()
        epoch, ticks = control.epoch, list[Any]()
        plain = control.on

        def counted(event: Any, now_s: float) -> Any:
            ticks.append(now_s)
            return plain(event, now_s)

        control.on = counted  # type: ignore[method-assign]
        for _ in range(3):
            slept[0] += 10_000.0
            await until(lambda: len(ticks) > 20)
            assert ticks == sorted(ticks)
            ticks.clear()
            assert await answer(front, "r") == expected("r")
        assert (control.epoch, front.restarts) == (epoch, 0)  # nobody was evicted, nobody recovers
        await front.close()
        for connection in connections:
            connection.instance.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_when_the_last_instance_is_gone_for_good_requests_are_declined(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        task = asyncio.create_task(answer(front, "r", 3, 90))
        await until(lambda: "submit" in connections[0].calls)
        connections[0].returns = False
        connections[0].kill()
        with pytest.raises(NoCopy):
            await task
        with pytest.raises(NoCopy):
            await answer(front, "s")
        assert front.over.is_set()

    serving(tmp_path, "a", body)


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """What the front said, from this level on, since the last call: each a line."""
    found = [record.getMessage() for record in caplog.records if record.levelno >= level]
    caplog.clear()
    assert not any("\n" in text for text in found)
    return found


def test_each_end_of_an_instance_is_said_once_and_each_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "remap_serve.cluster")

    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        back = lambda: {part.instance for view in front.groups for part in view.stages} == {"a", "b"}  # noqa: E731
        assert sorted(text.partition(":")[0] for text in said(caplog)) == [
            "instance a joined",
            "instance b joined",
        ]

        # It dies with calls on their way, each of which fails.
        tasks = [asyncio.create_task(answer(front, f"r{number}", 4, 30)) for number in range(6)]
        await until(lambda: all(front.service.ledger.attempt(id) for id in front.service.ledger.ids))
        connections[1].kill()
        await asyncio.gather(*tasks)
        await until(back)
        gone, *more = said(caplog)
        joined, again = sorted(more, reverse=True)  # it may be back before they start again
        assert re.fullmatch(r"\d requests start again, behind \d+ tokens that they have", again)
        assert gone == "the instance is gone" and joined.startswith("instance b joined")
        assert cluster_state(front)["deaths"] == [{"instance": "b", "node": "", "why": "the instance is gone"}]

        # It is evicted; its death comes of that.
        front._carry_out([Evict("b", "no report")])
        front._event(Died("b"))
        await until(lambda: not back())
        await until(back)
        evicted, joined = said(caplog)
        assert evicted == "instance b is evicted: no report" and joined.startswith("instance b joined")

        # It fails in several calls at once.
        front._replace(connections[1], InstanceFailed("broken"))
        front._replace(connections[1], InstanceFailed("broken"))
        await until(back)
        failed, joined = said(caplog)
        assert failed == "instance b failed and is killed: broken" and joined.startswith("instance b joined")

    serving(tmp_path, "ab", body)


def test_an_instance_that_cannot_be_made_says_why_and_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TinyInstance.describe

    def describe(self: TinyInstance) -> Any:
        if self._double.name == "b":
            raise InvalidArgument("its files are broken")
        return plain(self)

    monkeypatch.setattr(TinyInstance, "describe", describe)

    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        assert isinstance(front.rejected["b"], InvalidArgument) and connections[1].calls == ["describe"]
        assert await answer(front, "r") == expected("r")
        assert said(caplog, logging.WARNING) == ["instance b may not join: its files are broken"]
        assert not front.over.is_set()

    serving(tmp_path, "ab", body)


def test_who_comes_after_the_end_is_told_so(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        task = asyncio.create_task(answer(front, "r", 3, 90))
        await until(lambda: "r" in front.service.ledger)
        front.stop()
        for asked in (task, answer(front, "s")):
            with pytest.raises(InvalidState):
                await asked
        assert front.unfinished == 0

    serving(tmp_path, "a", body)


def test_closing_answers_what_is_unfinished(tmp_path: Path) -> None:
    async def body(front: Front[Request], _: list[LocalConnection]) -> None:
        task = asyncio.create_task(answer(front, "r", 3, 90))
        await until(lambda: "r" in front.service.ledger)
        await front.close()
        with pytest.raises(InvalidState):
            await task

    serving(tmp_path, "a", body)


def test_a_defect_fails_every_request_and_does_not_hang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        connections = [LocalConnection("a", folder=str(tmp_path))]
        front = Front[Request](Control(MODEL, NETWORK), connections, lambda request: len(request.prompt))
        await front.start()
        task = asyncio.create_task(answer(front, "r", 3, 90))
        await until(lambda: "r" in front.service.ledger)

        def broken(event: object, now_s: float) -> list[object]:
            raise ZeroDivisionError

        front.service.control.on = broken  # type: ignore[method-assign]
        with pytest.raises(InvalidState) as caught:
            await task
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(InvalidState):
            await answer(front, "s")
        assert isinstance(front.failure, ZeroDivisionError) and front.over.is_set()
        assert said(caplog, logging.CRITICAL) == ["the front failed: ZeroDivisionError: "]
        assert isinstance(front.reports["a"], InstanceReport)
        await front.close()
        connections[0].instance.stop()

    asyncio.run(asyncio.wait_for(run(), 30.0))


# -- An instance whose process is replaced -------------------------------------------------------------------------------------


def test_a_rolling_update_replaces_each_instance_and_no_request_starts_again(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        before = [each.instance for each in connections]
        done, answered = False, 0

        async def load(lane: int) -> None:
            nonlocal answered
            while not done:
                id = f"r{lane}-{answered}"
                assert await answer(front, id, 4, 20) == expected(id, 20)
                answered += 1

        lanes = [asyncio.create_task(load(lane)) for lane in range(4)]
        await until(lambda: answered > 4)
        await front.renew_all()
        done = True
        await asyncio.gather(*lanes)
        assert all(each.instance is not old for each, old in zip(connections, before, strict=True))
        assert front.restarts == 0
        assert front.service.control.leaving == frozenset()

    serving(tmp_path, "abc", body, policy="alone")


def test_an_instance_without_patience_is_replaced_and_what_it_had_goes_on_elsewhere(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        ids = [f"r{number}" for number in range(16)]
        tasks = [asyncio.create_task(answer(front, id, 8, 30)) for id in ids]
        await until(lambda: any(len(view.stages) > 1 and view.phase == "serving" for view in front.groups))
        group = next(view for view in front.groups if len(view.stages) > 1)
        await front.renew(group.stages[-1].instance, patience_s=0.0)
        assert [death.outside for death in front.service.deaths] == [True]  # it counts against no request
        assert await asyncio.gather(*tasks) == [expected(id, 30) for id in ids]
        assert front.restarts > 0

    serving(tmp_path, "ab", body)


def test_a_replacement_that_is_called_off_changes_nothing(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        first = asyncio.create_task(answer(front, "first", 3, 25))
        await until(lambda: front.unfinished > 0)
        renewal = asyncio.create_task(front.renew("a"))
        await until(lambda: front.service.control.leaving == {"a"})
        renewal.cancel()
        with pytest.raises(asyncio.CancelledError):
            await renewal
        assert front.service.control.leaving == frozenset()
        assert await first == expected("first", 25) and front.restarts == 0

    serving(tmp_path, "a", body)


def test_requests_of_the_only_instance_are_answered_while_it_is_replaced(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        first = asyncio.create_task(answer(front, "first", 3, 25))
        await until(lambda: front.unfinished > 0)
        renewal = asyncio.create_task(front.renew("a"))
        await until(lambda: front.service.control.leaving == {"a"})
        assert await answer(front, "second") == expected("second")
        assert await first == expected("first", 25)
        await renewal
        assert await answer(front, "third") == expected("third")

    serving(tmp_path, "a", body)


def test_what_cannot_be_replaced_is_refused_and_a_rolling_update_ends_with_it(tmp_path: Path) -> None:
    async def body(front: Front[Request], connections: list[LocalConnection]) -> None:
        with pytest.raises(InvalidArgument) as caught:
            await front.renew("z")
        assert caught.value.fields == {"instance": "z"}
        connections[0].slow = True
        connections[0].kill()
        await until(lambda: not front.up["a"])
        with pytest.raises(InvalidState) as later:
            await front.renew("a")
        assert later.value.fields == {"instance": "a"}
        connections[0].slow = False
        await until(lambda: front.up["a"])
        connections[0].arguments["config"] = "another"  # the new process has another model
        front.renew_soon()
        await until(lambda: "a" in front.rejected)
        await until(lambda: not front._renewing)
        assert front.up == {"a": False, "b": True}
        assert await answer(front, "r") == expected("r")

    serving(tmp_path, "ab", body)
