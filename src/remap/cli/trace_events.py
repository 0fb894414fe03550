# SPDX-License-Identifier: Apache-2.0
"""What sessions have done, as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show: a process a member,
a row a model, and one of the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remap.broker.messages import Shown, ShownEvent
from remap.broker.observer import Seen

__all__ = ["Recording"]

_SESSION = 0  # the row of what is no model's


class Recording:
    """What several looks have seen of each member. lost: events that had gone before somebody looked again."""

    def __init__(self) -> None:
        self._members: dict[int, Shown] = {}
        self._events: dict[int, list[ShownEvent]] = {}
        self.lost = 0

    @property
    def events(self) -> int:
        return sum(map(len, self._events.values()))

    @property
    def members(self) -> int:
        return len(self._members)

    def add(self, seen: Seen) -> None:
        """One look: what was seen before is not added again."""
        for shown, events in zip(seen.members, seen.events, strict=True):
            self._members[shown.member] = shown
            known = self._events.setdefault(shown.member, [])
            last = known[-1].number if known else None
            new = [event for event in events if last is None or event.number > last]
            if new and last is not None:
                self.lost += new[0].number - last - 1
            known += new

    def document(self) -> dict[str, Any]:
        """Of JSON's types. Moments are microseconds of the machine's monotonic clock, in order."""
        return {
            "traceEvents": [*self._names(), *sorted(self._made(), key=lambda each: each["ts"])],
            "displayTimeUnit": "ms",
            "otherData": {"events": self.events, "lost": self.lost},
        }

    def _rows(self, member: int) -> dict[str, int]:
        """Model -> its row."""
        tenants = dict.fromkeys(event.tenant for event in self._events[member] if event.tenant)
        return {"": _SESSION, **{tenant: row for row, tenant in enumerate(tenants, 1)}}

    def _names(self) -> Iterator[dict[str, Any]]:
        """A process of the trace is a member: one of the machine may have several sessions."""
        for number, shown in self._members.items():
            said = shown.name if str(shown.pid) in shown.name else f"{shown.name} (process {shown.pid})"
            for kind, row, name in (
                ("process_name", _SESSION, said),
                *(("thread_name", row, tenant or "session") for tenant, row in self._rows(number).items()),
            ):
                yield {"ph": "M", "name": kind, "pid": number, "tid": row, "args": {"name": name}}

    def _made(self) -> Iterator[dict[str, Any]]:
        for number in self._members:
            rows = self._rows(number)
            for event in self._events[number]:
                made = {
                    "name": event.text if event.kind == "pass" else event.kind,
                    "cat": event.kind,
                    "ts": 1e6 * event.begin_s,
                    "pid": number,
                    "tid": rows[event.tenant],
                    "args": {**event.values, **({"why": event.text} if event.text and event.kind != "pass" else {})},
                }
                if event.kind in ("pass", "step", "ask"):
                    yield {**made, "ph": "X", "dur": 1e6 * event.seconds}
                else:
                    yield {**made, "ph": "i", "s": "t"}
                if event.kind == "pass" and event.values.get("timed_passes"):
                    args = {"waited": event.values["waited_ms"], "copies": event.values["copies_ms"]}
                    ends = 1e6 * (event.begin_s + event.seconds)
                    yield {"ph": "C", "name": f"{event.tenant}: ms", "ts": ends, "pid": number, "args": args}
