"""`bench.lab broker`: what a grant of pages takes by messages to a broker, and by a ledger in shared memory.

python -m bench.lab broker                  measures (half a minute), writes the file and prints the table
python -m bench.lab broker --quick          fewer grants: that it runs
python -m bench.lab broker --report-only    prints the table of what is stored
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.lab import ROOT

from remap.errors import InvalidArgument
from remap_serve.cli.machine import machine_now
from remap_serve.sim.results import percentile

from . import kills
from .messages import FREE, Member, Pages, give, serve
from .shared import SharedLedger

__all__ = ["QUICK", "RESULTS", "SETTINGS", "Settings", "report", "run_broker"]

RESULTS = ROOT / "bench" / "results" / "broker-prototypes.json"
ASKER, DONOR = 1, 2
WAYS = ("messages", "shared ledger")
KINDS = ("free pages", "a donor's pages")


@dataclass(frozen=True)
class Settings:
    """grants: of each way, kind and round. kills: of each kind."""

    pages: int = 4096
    pages_a_grant: int = 64
    rounds: int = 5
    grants: int = 2000
    kills: int = 100


SETTINGS = Settings()
QUICK = Settings(rounds=3, grants=50, kills=3)

Grant = Callable[[], range]
Hand = Callable[[range, int], None]


@contextmanager
def _by_messages(settings: Settings) -> Iterator[tuple[Grant, Hand]]:
    """A broker, an idle donor, and this process, which asks."""
    pairs = {n: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for n in (ASKER, DONOR)}

    def broker() -> None:
        for mine, _ in pairs.values():
            mine.close()
        serve({number: its for number, (_, its) in pairs.items()}, Pages.free(settings.pages))

    def donor() -> None:
        for number, (mine, its) in pairs.items():
            its.close()
            if number != DONOR:
                mine.close()
        give(pairs[DONOR][0])

    with ExitStack() as stack:
        for mine, its in pairs.values():
            stack.callback(mine.close)
            stack.callback(its.close)
        stack.enter_context(kills.child(broker))
        stack.enter_context(kills.child(donor))
        for _, its in pairs.values():
            its.close()
        member = Member(pairs[ASKER][0])
        yield lambda: member.want(settings.pages_a_grant), member.hand


@contextmanager
def _by_shared_ledger(settings: Settings) -> Iterator[tuple[Grant, Hand]]:
    """An idle donor, and this process, which asks."""
    ledger = SharedLedger(settings.pages)
    with kills.child(lambda: ledger.donate(DONOR)):
        yield lambda: ledger.want(ASKER, DONOR, settings.pages_a_grant), ledger.hand


@contextmanager
def _busy_core(busy: bool) -> Iterator[None]:
    """Another process that computes all the time, on whichever core it is put."""

    def body() -> None:
        while True:
            sum(range(10_000))

    with ExitStack() as stack:
        if busy:
            stack.enter_context(kills.child(body))
        yield


def _times(grant: Grant, hand: Hand, kind: str, settings: Settings) -> list[int]:
    """Nanoseconds of each grant. What is handed back in between is not timed."""
    to = FREE
    if kind == KINDS[1]:  # nothing is free: all but the donor's pages are the asker's
        to = DONOR
        for _ in range(settings.pages // settings.pages_a_grant):
            last = grant()
        hand(last, DONOR)
    found = []
    for _ in range(settings.grants):
        begin = time.perf_counter_ns()
        pages = grant()
        found.append(time.perf_counter_ns() - begin)
        if len(pages) != settings.pages_a_grant:
            raise RuntimeError(f"{len(pages)} pages were granted")
        hand(pages, to)
    return found


def measure(settings: Settings) -> dict[str, Any]:
    """All figures. The ways alternate within a round."""
    found: dict[str, Any] = {"settings": asdict(settings), "machine": machine_now(), "grants": []}
    open_by = dict(zip(WAYS, (_by_messages, _by_shared_ledger)))
    for number in range(settings.rounds):
        for busy in (False, True):
            for kind in KINDS:
                for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                    with _busy_core(busy), open_by[way](settings) as (grant, hand):
                        times = _times(grant, hand, kind, settings)
                    found["grants"].append(
                        {
                            "way": way,
                            "kind": kind,
                            "busy": busy,
                            "round": number,
                            "p50_us": statistics.median(times) / 1e3,
                            "p99_us": percentile([each / 1e3 for each in times], 0.99),
                            "most_us": max(times) / 1e3,
                            "load_1min": round(os.getloadavg()[0], 2),
                        }
                    )
    ledger = SharedLedger(settings.pages)
    each = range(settings.kills)
    holders = [kills.holder_killed(ledger) for _ in each]
    brokers = [kills.broker_killed() for _ in each]
    ends = [kills.end_of_file_and_process() for _ in each]
    locks = [kills.record_lock_of_a_member(other_namespace=number % 2 == 1) for number in each]
    freed = [lock for lock in locks if lock is not None]
    gaps = [(process - file) / 1e3 for file, process in ends]
    found["kills"] = {
        "n": settings.kills,
        "holder_killed_us": _spread([ns / 1e3 for ns, _ in holders]),
        "holder_killed_old_ledger": sum(whole for _, whole in holders),
        "holder_stopped_keeps_all_out": kills.holder_stopped(ledger),
        "waiter_killed_lock_handed_on": [kills.waiter_killed(ledger, same_number=False) for _ in each[:10]],
        "waiter_of_another_container_killed_lock_handed_on": [
            kills.waiter_killed(SharedLedger(settings.pages), same_number=True) for _ in each[:10]
        ],
        "record_locks": {"n": len(freed), "seen_and_freed": sum(right for right, _ in freed)},
        "record_lock_freed_us": _spread([ns / 1e3 for _, ns in freed]),
        "broker_killed_us": _spread([ns / 1e3 for ns, _ in brokers]),
        "broker_killed_told": sum(told for _, told in brokers),
        "broker_stopped_keeps_waiting": kills.broker_stopped(),
        "waits_s": kills.WAITS_S,
        "process_ends_behind_its_socket_us": _spread(gaps),
        "process_ends_behind_its_socket": sum(gap > 0 for gap in gaps),
    }
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "p99": percentile(list(values), 0.99), "most": max(values)}


def report(data: Mapping[str, Any]) -> str:
    """Markdown: medians of the rounds, with the range."""

    def cell(way: str, kind: str, busy: bool, name: str) -> str:
        rows = [x[name] for x in data["grants"] if (x["way"], x["kind"], x["busy"]) == (way, kind, busy)]
        return f"{statistics.median(rows):,.0f} ({min(rows):,.0f} to {max(rows):,.0f})"

    out = ["| grant of | beside | way | P50, us | P99, us | longest, us |", "|---|---|---|---|---|---|"]
    for kind in KINDS:
        for busy in (False, True):
            for way in WAYS:
                cells = " | ".join(cell(way, kind, busy, name) for name in ("p50_us", "p99_us", "most_us"))
                out.append(f"| {kind} | {'a busy process' if busy else 'nothing'} | {way} | {cells} |")
    return "\n".join(out)


def run_broker(path: Path, settings: Settings, *, report_only: bool = False) -> str:
    """Measure and write the file, unless report_only. Returns the table. Raises InvalidArgument for a file of others."""
    if not report_only:
        data = measure(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    try:
        return report(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"{path} is not a result of `broker` ({type(error).__name__}); measure first",
            field="results",
            value=str(path),
        ) from error
