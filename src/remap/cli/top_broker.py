# SPDX-License-Identifier: Apache-2.0
"""The display of `remap top --socket`: a broker's memory, its members, their models, and the last decisions with their
reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import to_builtins
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from remap.broker.messages import Report, Shown
from remap.broker.observer import Seen
from remap.sizes import show_size

__all__ = ["document", "tables"]

DECISIONS = 12


def document(seen: Seen) -> dict[str, Any]:
    """Of JSON's types: the fields of `remap.broker.messages.State`, and members as `Shown`."""
    return _untagged({**to_builtins(seen.state), "members": to_builtins(seen.members)})


def _untagged(value: Any) -> Any:
    """Without msgspec's names of messages."""
    if isinstance(value, dict):
        return {name: _untagged(each) for name, each in value.items() if name != "type"}
    return [_untagged(each) for each in value] if isinstance(value, list | tuple) else value


def tables(seen: Seen) -> list[Table]:
    """One of members; of models and of decisions, if there are any."""
    found = [_members(seen)]
    reports = [(each, each.report) for each in seen.members if each.report is not None]
    if any(report.tenants for _, report in reports):
        found.append(_models(reports))
    if any(report.decisions for _, report in reports):
        found.append(_decisions(reports))
    return found


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    made = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in texts:
        made.add_column(name, overflow="fold")
    for name in numbers:
        made.add_column(name, justify="right", overflow="fold")
    for name in last:
        made.add_column(name, overflow="fold")
    return made


def _members(seen: Seen) -> Table:
    state, page = seen.state, seen.state.page_bytes
    total, free = show_size(state.pages * page), show_size(state.free * page)
    title = f"{total} in pages of {show_size(page)}: {free} of no member, {state.waiting} wants that are not met"
    if state.unknown:
        title += (
            f"; processes of the broker before this one are awaited, which may have {show_size(state.unknown * page)}"
        )
    numbers = ("has", "free", "weights", "KV", "ring", "lent", "waits", "allowed", "said")
    made = _table(title, ("member", "process"), numbers)
    for each in seen.members:
        report = each.report
        own = (report.free, report.params, report.kv, report.ring) if report else ()
        made.add_row(
            _plain(f"{each.member}" if each.name == f"process {each.pid}" else f"{each.member} {each.name}"),
            f"{each.pid}" if each.connected else f"{each.pid}, has left",
            show_size(each.held * page),
            *(show_size(pages * page) for pages in own),
            *([] if report else 4 * ["-"]),
            show_size(each.lent * page),
            *((f"{report.waited:.1%}", f"{report.allowed:.1%}") if report else ("-", "-")),
            f"{each.age_s:.1f} s ago" if report else "nothing yet",
        )
    return made


def _models(reports: list[tuple[Shown, Report]]) -> Table:
    numbers = (
        *("layers", "away", "KV blocks used", "free", "of", "borrowed pages", "shortages", "met", "passes"),
        *("copies", "copied", "waited", "a pass", "certified"),
    )
    made = _table("models", ("member", "model", "serves"), numbers)
    for member, report in reports:
        for each in report.tenants:
            serves = "yes" if each.active else f"no, {each.cold} cold" if each.cold else "no"
            made.add_row(
                *(str(member.member), _plain(each.name), serves),
                *(str(each.layers), f"{each.remapped:g}"),
                *(str(blocks) for blocks in (each.live_blocks, each.free_blocks, each.usable_blocks)),
                *(str(each.borrowed_pages), str(each.shortages_met + each.shortages_unmet), str(each.shortages_met)),
                *(str(each.passes), str(each.copies), show_size(each.copied_bytes), f"{each.stall_s:.3g} s"),
                *(f"{1e3 * seconds:.3g} ms" for seconds in (each.seen_stall_s, each.predicted_stall_s)),
            )
        if report.attached > len(report.tenants):
            more = f"and {report.attached - len(report.tenants)} more"
            made.add_row(str(member.member), more, *(len(numbers) + 1) * [""])
    return made


def _decisions(reports: list[tuple[Shown, Report]]) -> Table:
    made = _table("last decisions, newest last", ("member", "model"), ("epoch", "blocks short"), ("why",))
    for row in list(_reasons(reports))[-DECISIONS:]:
        made.add_row(*row)
    return made


def _reasons(reports: list[tuple[Shown, Report]]) -> Iterator[tuple[Any, ...]]:
    for member, report in reports:
        for each in report.decisions[-max(1, DECISIONS // len(reports)) :]:
            numbers = (str(each.epoch), str(each.unmet_blocks) if each.unmet_blocks else "-")
            yield (str(member.member), _plain(each.tenant), *numbers, _plain(each.reason))


def _plain(text: str) -> Text:
    """As it is: no markup, and nothing that a terminal would obey."""
    return Text("".join(each if each.isprintable() else "?" for each in text))
