"""Who looks at a broker sees what its members have and decide, changes nothing, and waits for nobody for long."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from arena_worlds import make_layers, make_spec
from broker_member import PAGE, Process, attached, opened
from rich.console import Console
from rich.text import Text
from test_broker import JOIN, raw, refusal, until
from test_cli import run

import remap
from remap.broker import server
from remap.broker.member import Membership
from remap.broker.messages import (
    MOST_BYTES,
    MOST_DECISIONS,
    MOST_NAME,
    MOST_REASON,
    MOST_TENANTS,
    VERSION,
    Grant,
    Join,
    Look,
    Report,
    Shown,
    State,
    Tell,
    TenantReport,
    Want,
    Welcome,
    decode_to_broker,
    decode_to_member,
    encode,
)
from remap.broker.observer import Observer
from remap.broker.report import report_of
from remap.broker.server import Broker
from remap.broker.window import MOST_CONNECTIONS, Window
from remap.cli.options import print_whole, whole
from remap.cli.top_broker import tables
from remap.errors import InvalidArgument, InvalidState
from remap.report import DecisionRecord

PAGES = 96


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as made:
        yield made


def test_top_shows_what_the_members_have_and_why(broker: Broker) -> None:
    with opened(broker) as one, opened(broker) as two:
        tenant = attached(one, "one")
        attached(two, "[red]two\x1b[2J")
        one.step({"one": remap.Demand(100)})
        unmet = one.step({"one": remap.Demand(5000)}).unmet_blocks["one"]
        live = len(tenant.kv.allocate(50))
        shown = run("top", "--json", "--socket", str(broker.path))
        assert shown.exit_code == 0, shown.output
        found, snapshot = json.loads(shown.output), one.snapshot()
        assert found["pages"] == PAGES and found["page_bytes"] == PAGE and found["free"] == broker.ledger.free
        first, second = found["members"]
        assert {each["member"]: each["held"] for each in found["members"]} == broker.ledger.held
        pages = snapshot.pages
        assert [first["report"][name] for name in ("free", "params", "kv", "ring")] == [
            pages.free,
            pages.params,
            pages.kv,
            pages.ring,
        ]
        (said,) = first["report"]["tenants"]
        own = snapshot.tenants["one"]
        same = {each.name for each in fields(own)} & said.keys() - {"streamed", "cold", "pages"}
        assert {name: said[name] for name in same} == {name: getattr(own, name) for name in same}
        assert (said["live_blocks"], said["shortages_met"], said["shortages_unmet"]) == (live, 1, 1)
        assert first["report"]["decisions"][-1]["reason"] == snapshot.decisions[-1].reason
        text = run("top", "--once", "--socket", str(broker.path)).output
        assert str(unmet) in text and "[red]two?[2J" in text and "\x1b[2J" not in text
        assert second["report"]["tenants"][0]["name"] == "[red]two\x1b[2J"


def test_top_goes_on_until_it_is_interrupted(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(broker) as session:
        tenant, looks = attached(session, "one"), []

        def sleep(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) > 2:
                raise KeyboardInterrupt
            time.sleep(2 * server.FRESH_S)  # what is shown next is of another moment
            tenant.kv.allocate(1)

        monkeypatch.setattr("remap.cli.top.time", SimpleNamespace(sleep=sleep))
        shown = run("top", "--socket", str(broker.path))
        assert shown.exit_code == 0 and len(looks) == 3
        assert "lent" in shown.output and "models" in shown.output


def test_on_a_narrow_terminal_a_table_is_records_with_whole_words_and_numbers(broker: Broker) -> None:
    """At 60 columns headings and numbers were broken. A file has the table."""
    with opened(broker) as one:
        attached(one, "one")
        with Observer(str(broker.path)) as observer:
            members, models = tables(observer.look())
        for width, terminal, narrow in ((60, True, True), (110, True, False), (60, False, False)):
            out = io.StringIO()
            console = Console(file=out, width=width, force_terminal=terminal, no_color=True)
            print_whole(console, members)
            text = Text.from_ansi(out.getvalue()).plain
            assert max(map(len, text.splitlines())) <= max(width, 110)
            assert "weights" in text and ("  weights: " in text) is narrow
        console = Console(file=io.StringIO(), width=60, force_terminal=True, no_color=True)
        shown = whole(console, models)
        assert isinstance(shown, Text) and "KV blocks used: " in shown.plain and "model: one" in shown.plain


def test_looking_changes_nothing_and_nothing_is_told_unless_somebody_looks(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    send = Membership._send

    def sent(self: Membership, message: Any, joins: int = 0) -> bool:
        told.append(message)
        return send(self, message, joins)

    with opened(broker) as session:
        tenant = attached(session, "one")
        session.step({"one": remap.Demand(100)})
        monkeypatch.setattr(Membership, "_send", sent)
        with tenant.forward(), Observer(str(broker.path)) as first:  # beside a pass
            before = session.snapshot()
            assert not told
            seen = first.look()
            assert [type(each) for each in told] == [Report]
            assert seen.members[0].report == report_of(before)
            assert session.snapshot() == before
            for layer in range(tenant.layers):
                tenant.wait(layer)
                tenant.done(layer)


def test_who_hangs_is_shown_as_it_was_and_delays_nobody_for_long(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FRESH_S", 0.0)
    one = Process(str(broker.path), "one")
    try:
        with Observer(str(broker.path)) as observer, opened(broker) as session:
            attached(session, "two")
            assert all(each.report is not None for each in observer.look().members)
            one.signal(signal.SIGSTOP)
            until(lambda: one.state() == "T", "it has stopped")
            first, second = observer.look().members
            assert first.report is not None and first.age_s > max(server.LOOK_S, second.age_s)
            one.signal(signal.SIGCONT)
            until(lambda: observer.look().members[0].age_s < server.LOOK_S, "it reports again")
            one.kill()
            until(lambda: len(observer.look().members) == 1, "it has gone")
        with Observer(str(broker.path)) as last:
            until(lambda: last.look().members == (), "all have left")
    finally:
        if one.process.poll() is None:
            one.kill()


def test_the_largest_report_is_a_message_and_a_larger_one_is_none(broker: Broker) -> None:
    with opened(broker) as session:
        attached(session, "one")
        snapshot = session.snapshot()
    long = "\U0001f40c" * 1000
    tenant = replace(snapshot.tenants["one"], name=long, copied_bytes=(1 << 63) - 1, stall_s=float("inf"))
    record = DecisionRecord(1 << 62, long, long + "\ud800", float("nan"), 1 << 40)
    large = replace(
        snapshot, tenants={str(each): tenant for each in range(3 * MOST_TENANTS)}, decisions=100 * (record,)
    )
    report = report_of(large)
    assert (len(report.tenants), report.attached, len(report.decisions)) == (32, 96, MOST_DECISIONS)
    packet = encode(report)
    assert len(packet) < MOST_BYTES * 3 // 4 and decode_to_broker(packet) == report

    def but(**changes: Any) -> Report:
        return msgspec.structs.replace(report, tenants=(msgspec.structs.replace(report.tenants[0], **changes),))

    for wrong in (
        msgspec.structs.replace(report, tenants=(*report.tenants, report.tenants[0])),
        msgspec.structs.replace(report, decisions=(*report.decisions, report.decisions[0])),
        msgspec.structs.replace(report, kv=-1),
        but(name="x" * (MOST_NAME + 1)),
        but(stall_s=float("nan")),
        but(stall_s=float("inf")),
        but(passes=-1),
        msgspec.structs.replace(
            report, decisions=(msgspec.structs.replace(report.decisions[0], reason="x" * (MOST_REASON + 1)),)
        ),
    ):
        with pytest.raises(InvalidState, match="no message"):
            decode_to_broker(encode(wrong))
    assert {each.name for each in msgspec.structs.fields(TenantReport)} > {"shortages_met", "shortages_unmet"}


EMPTY = Report(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, (), ())


@pytest.mark.parametrize(
    ("packets", "why"),
    [
        ([encode(Look(VERSION - 1))], f"version {VERSION}"),
        ([JOIN, encode(Look(VERSION))], "does not look"),
        ([encode(EMPTY)], "first message must be Join"),
        ([JOIN, encode(EMPTY)], "not told to"),
    ],
    ids=["version", "a member looks", "no join", "unasked"],
)
def test_who_looks_or_reports_otherwise_is_told_why(broker: Broker, packets: list[bytes], why: str) -> None:
    with raw(broker) as bad:
        for packet in packets:
            bad.send(packet)
        assert why in refusal(bad)


def test_who_looks_twice_at_once_or_joins_meanwhile_is_told_why(broker: Broker) -> None:
    with raw(broker) as silent:
        silent.send(JOIN)  # and never reports
        silent.recv(MOST_BYTES)
        for second, why in ((Look(VERSION), "before it is answered"), (Join(VERSION), "cannot join")):
            with raw(broker) as bad:
                bad.send(encode(Look(VERSION)))
                bad.send(encode(second))
                assert why in refusal(bad)
        with Observer(str(broker.path)) as observer:
            (member,) = observer.look().members
            assert member.report is None and member.connected


def test_who_leaves_with_pages_is_not_waited_for(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 1e6)
    with raw(broker) as looker:
        with raw(broker) as silent:
            silent.send(JOIN)
            silent.send(encode(Want(1, 1)))
            told = [decode_to_member(silent.recv(MOST_BYTES)) for _ in range(2)]
            looker.send(encode(Look(VERSION)))
            told.append(decode_to_member(silent.recv(MOST_BYTES)))
            assert [type(each) for each in told] == [Welcome, Grant, Tell]
        state, shown = (decode_to_member(looker.recv(MOST_BYTES)) for _ in range(2))
        assert isinstance(state, State) and state.members == 1
        assert isinstance(shown, Shown) and (shown.held, shown.connected) == (1, False)


def test_no_broker_is_said_and_two_places_are_refused(tmp_path: Path) -> None:
    found = run("top", "--once", "--socket", str(tmp_path / "none"))
    assert found.exit_code == 2 and "no broker answers" in " ".join(found.output.split())
    found = run("top", "--once", "--socket", "s", "--url", "http://u")
    assert found.exit_code == 2 and "not both" in found.output
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "deaf"))
        listener.listen()
        with Observer(str(tmp_path / "deaf")) as observer:
            listener.accept()[0].close()
            with pytest.raises(InvalidState, match="broker"):
                observer.look()
    with pytest.raises(InvalidArgument):
        Observer(str(tmp_path / "deaf"))


def test_a_step_that_meets_what_lacks_is_told_from_one_that_does_not() -> None:
    """A want within the free blocks is neither."""
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session:
        tenant = session.attach_bytes(make_layers([2] * 6), name="m", kv=make_spec(6, max_blocks=160))
        seen = []
        for wanted in (1, tenant.kv.free_blocks + 4, 1, 10_000, 10_000):
            session.step({"m": wanted})
            own = session.snapshot().tenants["m"]
            seen.append((own.shortages_met, own.shortages_unmet))
        assert seen == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 2)]
    config = remap.Config(reserve_blocks=20)
    with remap.Session(48 * PAGE, page_bytes=PAGE, config=config) as session:
        session.attach_bytes(make_layers([2] * 6), name="m", kv=make_spec(6, max_blocks=160))
        assert session.step({"m": 1}).added_blocks["m"] > 0  # ahead of need
        own = session.snapshot().tenants["m"]
        assert (own.shortages_met, own.shortages_unmet) == (0, 0)


# -- a session without a broker --------------------------------------------------------------------------------------------


def test_a_session_without_a_broker_shows_itself_until_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "w"
    session = remap.Session(48 * PAGE, page_bytes=PAGE)
    tenant = session.attach_bytes(make_layers([2] * 6), name="m", kv=make_spec(6, max_blocks=160))
    session.step({"m": tenant.kv.free_blocks + 4})
    with remap.advanced.show(session, str(path)), Observer(str(path)) as observer:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        before = session.snapshot()
        (shown,) = observer.look().members
        assert (shown.report, shown.held, shown.pid) == (report_of(before), 48, os.getpid())
        assert session.snapshot() == before
        found = json.loads(run("top", "--json", "--socket", str(path)).output)
        assert found["members"][0]["report"]["tenants"][0]["shortages_met"] == 1
        with pytest.raises(InvalidState, match="already"):
            remap.advanced.show(session, str(path))
        with pytest.raises(InvalidState, match="shares no pages"):
            remap.Session(device=f"unix:{path}")
        with Observer(str(path)) as other:
            other._connection.send(encode(Look(VERSION - 1)))
            with pytest.raises(InvalidState, match=f"version {VERSION}"):
                other._hear()
        assert observer.look().members[0].report is not None  # it serves on
    assert not path.exists()
    remap.advanced.show(session, str(path))  # until the session is gone
    with Observer(str(path)) as observer:
        observer.look()
        session.close()
        until(lambda: "closed" in _refusal(observer), "it says that the session is closed")
        del session, tenant
        until(lambda: not path.exists(), "it has gone")


def _refusal(observer: Observer) -> str:
    try:
        observer.look()
    except InvalidState as error:
        return str(error)
    return ""


def test_a_window_closes_whose_thread_has_seen_that_first(tmp_path: Path) -> None:
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session:
        window = Window(session, tmp_path / "w")
        window._closing = True  # as `close` says it first
        window._waker.send(b"x")
        window._thread.join(60)
        window._closing = False
        window.close()
        window.close()
        assert not window.path.exists()
        assert window._listener._socket.fileno() == window._woken.fileno() == window._waker.fileno() == -1


def test_many_look_and_one_that_reads_nothing_is_let_go(tmp_path: Path) -> None:
    path = str(tmp_path / "w")
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session, remap.advanced.show(session, path):
        with Observer(path) as deaf, pytest.raises(OSError):
            deaf._connection.settimeout(60)
            while True:
                deaf._connection.send(encode(Look(VERSION)))
        with ExitStack() as stack:
            all_of_them = [stack.enter_context(Observer(path)) for _ in range(MOST_CONNECTIONS)]
            assert len({len(each.look().members) for each in all_of_them}) == 1
            with Observer(path) as more, pytest.raises(InvalidState, match="look at the session already"):
                more.look()


def test_the_environment_shows_each_session_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REMAP_TOP", str(tmp_path / "{pid}"))
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session, Observer(str(tmp_path / str(os.getpid()))) as observer:
        assert observer.look().members[0].report == report_of(session.snapshot())
        with remap.Session(48 * PAGE, page_bytes=PAGE) as second:  # it serves all the same
            assert second.snapshot().pages.total == 48
        assert "is not shown" in caplog.text and "already" in caplog.text
