"""`remap trace` writes what sessions do as Chrome's trace events, in order, and changes nothing. No test looks at how long
anything took."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")
pytest.importorskip("typer", reason="the command line needs typer")

from arena_worlds import make_layers, make_spec
from broker_member import PAGE, attached, opened
from test_broker import JOIN, raw, refusal
from typer.testing import CliRunner

import remap
from remap.broker import messages
from remap.broker.messages import MOST_BYTES, MOST_EVENTS, MOST_PARTS, ShownEvent, decode_to_member, encode
from remap.broker.observer import Observer, Seen
from remap.broker.report import events_in
from remap.broker.server import Broker
from remap.cli.main import app
from remap.cli.trace_events import Recording
from remap.memory import trace
from remap.memory.trace import Trace

PAGES = 96


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def loaded(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document, and its events without those that are names. Checks what each has to have."""
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    names = [each for each in document["traceEvents"] if each["ph"] == "M"]
    events = document["traceEvents"][len(names) :]
    assert all(each["ph"] in "XiC" for each in events)
    rows = {(each["pid"], each["tid"]) for each in names if each["name"] == "thread_name"}
    for each in events:
        assert each["ts"] > 0 and isinstance(each["pid"], int) and isinstance(each["args"], dict)
        assert (each["ph"] == "X") is ("dur" in each) and each.get("dur", 0) >= 0
        assert each["ph"] == "C" or (each["pid"], each["tid"]) in rows
    assert [each["ts"] for each in events] == sorted(each["ts"] for each in events)
    return document, events


def a_pass(tenant: remap.Tenant) -> None:
    with tenant.forward():
        for layer in range(4):
            tenant.wait(layer)
            tenant.done(layer)


def test_members_of_a_broker_are_traced_while_they_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, opened(broker) as one, opened(broker) as two:
        tenants = attached(one, "one"), attached(two, "two")
        looks: list[float] = []

        def between(seconds: float) -> None:
            """Two looks: in the first time they work, in the second somebody interrupts."""
            looks.append(seconds)
            if len(looks) == 2:
                raise KeyboardInterrupt
            assert one._trace.now() > 0 and two._trace.now() > 0
            for session, tenant in zip((one, two), tenants):
                a_pass(tenant)
                session.step({tenant.name: remap.Demand(40)})
                a_pass(tenant)

        monkeypatch.setattr("remap.broker.member.ANSWER_S", 60.0)
        monkeypatch.setattr("remap.broker.server.FRESH_S", -1.0)
        monkeypatch.setattr("remap.broker.server.LOOK_S", 60.0)
        monkeypatch.setattr("remap.cli.trace.time", SimpleNamespace(monotonic=time.monotonic, sleep=between))
        said = run("trace", out, "--socket", broker.path, "--seconds", 3600)
    assert said.exit_code == 0 and "of 2 sessions" in said.output and "lost" not in said.output
    document, events = loaded(out)
    assert document["otherData"]["lost"] == 0
    for name in ("one", "two"):
        # Both sessions are of this process: a row is told by its events.
        rows = [each for each in document["traceEvents"] if each["name"] == "thread_name"]
        (row,) = {each["tid"] for each in rows if each["args"]["name"] == name}
        mine = [each for each in events if each["ph"] == "X" and each["cat"] == "pass" and each["tid"] == row]
        assert len(mine) >= 2 and mine[0]["name"] == "decode"
        assert mine[0]["ts"] + mine[0]["dur"] <= mine[1]["ts"] + 1e-3
    order = [each["cat"] for each in events if "cat" in each and each["pid"] == 1]
    assert order.index("pass") < order.index("ask") < order.index("granted") < order.index("decision")
    assert {"step", "granted"} <= set(order)
    assert all(each["args"]["pages"] > 0 for each in events if each.get("cat") == "granted")
    assert any(each["args"].get("why") for each in events if each.get("cat") == "decision")


def test_a_session_that_shows_itself_is_traced_and_waits_and_copies_are_in_it(tmp_path: Path) -> None:
    out, path = tmp_path / "out.json", tmp_path / "s"
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session, remap.advanced.show(session, str(path)):
        tenant = session.attach_bytes(make_layers([2] * 4), name="m", kv=make_spec(4, max_blocks=600))
        a_pass(tenant)
        assert session._trace.ask() == ()  # nobody had asked; now somebody has
        remap.advanced.remap(session, "m", 2)
        for _ in range(3):
            a_pass(tenant)
        assert run("trace", out, "--socket", path, "--seconds", 0).exit_code == 0
        stats = session.snapshot().tenants["m"]
    _, events = loaded(out)
    passes = [each["args"] for each in events if each.get("cat") == "pass"]
    numbers = [each["number"] for each in passes]
    assert len(passes) == 3 and numbers == sorted(numbers)
    assert sum(each["copies"] for each in passes) == stats.copies > 0
    assert sum(each["copied_bytes"] for each in passes) == stats.copied_bytes
    assert any(each["ph"] == "C" and set(each["args"]) == {"waited", "copies"} for each in events)


def test_nothing_is_kept_unless_somebody_asks_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("remap.memory.trace.time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = Trace()
    kept.moment("decision", "m")
    kept.add("pass", "m", kept.now())
    assert kept.ask() == ()
    began = kept.now()
    now[0] += 1.0
    kept.add("pass", "m", began, "decode", tokens=3)
    kept.moment("gave", "", pages=2)
    first, second = kept.ask()
    assert (first.begin_s, first.seconds, first.text, first.values) == (100.0, 1.0, "decode", {"tokens": 3})
    assert (first.number, second.number, second.begin_s, second.seconds) == (1, 2, 101.0, 0.0)
    now[0] += trace.KEEP_S
    kept.moment("gave", "", pages=2)
    assert kept.now() == 0.0 and len(kept.ask()) == 2


def test_what_is_lost_is_counted_and_nothing_is_there_twice() -> None:
    recording, shown = Recording(), SimpleNamespace(member=1, pid=7, name="a")
    for numbers in ((4, 5), (4, 5, 6), (), (9, 10)):
        events = tuple(ShownEvent(each, "gave", "", float(each), 0.0, "", {}) for each in numbers)
        recording.add(Seen(None, (shown,), (events,)))  # type: ignore[arg-type]
    assert (recording.events, recording.lost) == (5, 2)
    written = [each["ts"] for each in recording.document()["traceEvents"] if each["ph"] == "i"]
    assert written == [4e6, 5e6, 6e6, 9e6, 10e6]


def test_the_largest_events_are_a_message(tmp_path: Path) -> None:
    long = "\U0001f600" * 400
    values = dict.fromkeys(map(str, range(12)), 1e300)
    parts = events_in([trace.Event(each, long, long, 1e9, 1e9, long, values) for each in range(999)])
    assert len(parts) == MOST_PARTS
    assert trace.MOST_KEPT == MOST_PARTS * MOST_EVENTS == sum(len(each.events) for each in parts)
    assert all(len(encode(each)) < MOST_BYTES for each in parts)
    assert parts[-1].events[-1].number == 998
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker:
        with raw(broker) as bad:
            bad.send(JOIN)
            bad.send(encode(messages.Events(())))
            assert "not told" in refusal(bad)
        with raw(broker) as silent, raw(broker) as looker:
            silent.send(JOIN)
            silent.recv(MOST_BYTES)
            looker.send(encode(messages.Look(messages.VERSION, events=True)))
            assert decode_to_member(silent.recv(MOST_BYTES)) == messages.Tell(events=True)
            for _ in range(MOST_PARTS + 1):
                silent.send(encode(parts[0]))
            assert "too many" in refusal(silent)
        with Observer(str(broker.path)) as observer:
            assert observer.look(events=True).events == ()


def test_what_cannot_be_traced_is_said(tmp_path: Path) -> None:
    found = run("trace", tmp_path / "o", "--socket", tmp_path / "none", "--seconds", 0)
    assert found.exit_code == 2 and "no broker answers" in " ".join(found.output.split())
    found = run("trace", tmp_path, "--socket", tmp_path / "none")
    assert found.exit_code == 2 and "is no file" in " ".join(found.output.split())
    assert not (tmp_path / "o").exists()
