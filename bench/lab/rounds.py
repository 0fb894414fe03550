"""Runs on this machine in processes of their own, in alternating rounds, of the same requests: what `real`, `offline` and
`cluster` share.

Policies put requests into other batches, and some compute tokens a second time, which may round otherwise (docs/promises.md, 4).
Where two tokens are equally good, two right runs may choose different ones, and go on with different texts. So requests with
other tokens are counted, and do not end a run. No policy here promises more: none has the batches of another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cli.machine import machine_info

from . import seeds
from .apart import run_apart

__all__ = [
    "DIFFER",
    "Suite",
    "count_different",
    "empty",
    "find_in",
    "loads_of",
    "machine_of",
    "require_machine",
    "run_missing",
    "run_name",
    "said_of_tokens",
    "table",
]


class Named(Protocol):
    """A case: a dataclass of JSON's types with a name."""

    @property
    def name(self) -> str: ...


DIFFER = seeds.Column(
    "requests_that_differ", "requests with other tokens", show=lambda counts: [f"{x:.0f}" for x in counts]
)
_SAID_OF_TOKENS = """Requests with other tokens: than in the first run of `{first}`. Requests in all: {requests}.
Policies put requests into other batches, and what is recomputed is computed in another one; that may round otherwise, and where
two tokens are equally good the answer goes on as another text."""

CaseT = TypeVar("CaseT", bound=Named)


@dataclass(frozen=True)
class Suite(Generic[CaseT]):
    """The cases of one file of results. threads: that compute in each process of a run."""

    cases: tuple[CaseT, ...]
    rounds: int
    threads: int = 1

    def settings(self) -> dict[str, Any]:
        """All of it but the number of rounds, of JSON's types: runs made with other settings do not count."""
        cases: list[Any] = list(self.cases)
        made: dict[str, Any] = json.loads(json.dumps({"cases": [*map(asdict, cases)], "threads": self.threads}))
        return made


def find_in(suites: Mapping[str, Suite[CaseT]], suite: str, case: str) -> tuple[Suite[CaseT], CaseT]:
    """By name. Raises InvalidArgument (fields suite and case) if there is no such case."""
    for one in suites[suite].cases if suite in suites else ():
        if one.name == case:
            return suites[suite], one
    raise InvalidArgument(
        f"no case {case!r} in the suite {suite!r}; nothing was run; there are "
        f"{', '.join(f'{name}: {one.name}' for name, its in suites.items() for one in its.cases)}",
        suite=suite,
        case=case,
    )


def table(
    data: Mapping[str, Any], suite: Suite[CaseT], policies: Sequence[str], columns: Sequence[seeds.Column]
) -> str:
    """Markdown: a line for each case and policy. Runs that have no count of requests with other tokens were kept only if there
    was none."""
    points = {name: {DIFFER.key: 0.0, **point} for name, point in data["points"].items()}
    lines = [
        seeds.Line(
            (case.name,),
            {policy: [run_name(case.name, policy, number) for number in range(suite.rounds)] for policy in policies},
        )
        for case in suite.cases
    ]
    return seeds.table(points, ("case",), lines, [*columns, DIFFER], worst_first=True, of="rounds")


def run_name(case: str, policy: str, number: int) -> str:
    """Of a run in the file of results. number: of its round."""
    return f"{case} | {policy} | {number}"


def empty(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A file of results in which nothing was run yet."""
    return {"settings": settings, "machine": {}, "tokens": {}, "points": {}}


def require_machine(data: dict[str, Any], path: Path) -> None:
    """Note the machine. Raises InvalidArgument (field path) for a file of another one."""
    machine = machine_info()
    if data["machine"] not in ({}, machine):
        raise InvalidArgument(
            f"the results in {path} were measured on another machine or with other versions, {data['machine']}, "
            f"and this is {machine}; nothing was run; name another file",
            field="path",
            value=str(path),
        )
    data["machine"] = machine


def run_missing(
    data: dict[str, Any],
    path: Path,
    module: str,
    suite: str,
    cases: Iterable[str],
    policies: Sequence[str],
    rounds: int,
    threads: int,
) -> None:
    """Run what `data` lacks with `python -m MODULE SUITE CASE POLICY`, round by round, every other one backwards, and write
    `path` after each run: a run that is stopped loses one. Every token is compared with those of the first run of the first
    policy; the figure requests_that_differ counts requests with others.

    Raises InvalidArgument (field path) for a file of another machine before anything runs, and InvalidState for answers to other
    requests or of other lengths than the first policy's, or a run that fails; what was run before stays in the file then.
    """
    require_machine(data, path)
    cases = tuple(cases)
    for number in range(rounds):
        for case in cases:
            for policy in policies[:: -1 if number % 2 else 1]:  # so that none is always the one that comes later
                name = run_name(case, policy, number)
                if name in data["points"]:
                    continue
                found = run_apart(name, module, suite, case, policy, threads=threads)
                if policy == policies[0]:
                    data["tokens"].setdefault(case, found["tokens"])
                different = count_different(name, found["tokens"], data["tokens"][case], policies[0])
                data["points"][name] = {**found["figures"], DIFFER.key: different}
                seeds.write(path, data)
                print(name, file=sys.stderr, flush=True)


def count_different(name: str, found: Mapping[str, str], wanted: Mapping[str, str], policy: str) -> int:
    """How many requests have other tokens than `policy`'s, the wanted ones: as many, since answers have fixed lengths.

    Raises InvalidState (fields run, different, requests) for a request that only one of both has, or that has more or fewer
    tokens: that is no rounding.
    """
    requests = {**wanted, **found}
    wrong = [one for one in requests if _length(wanted.get(one)) != _length(found.get(one))]
    if wrong:
        raise InvalidState(
            f"{name}: {len(wrong)} of {len(requests)} requests have no answer, or one of another length, where {policy} has one; "
            f"the first is {wrong[0]!r}; this run was not kept",
            run=name,
            different=len(wrong),
            requests=len(requests),
        )
    return sum(wanted[one] != found[one] for one in requests)


def _length(tokens: str | None) -> int | None:
    return None if tokens is None else len(tokens.split())


def said_of_tokens(data: Mapping[str, Any], first: str) -> str:
    """For a page: what the column DIFFER counts."""
    counts = "; ".join(f"{len(tokens)} ({case})" for case, tokens in sorted(data["tokens"].items()))
    return _SAID_OF_TOKENS.format(first=first, requests=counts or "none yet")


def machine_of(data: Mapping[str, Any]) -> str:
    """The machine of the results, in words."""
    said = "{cpu}, {cores} cores, {memory}, {os}, torch {torch}, transformers {transformers}, remap {remap}"
    return said.format(**data["machine"]) if data["machine"] else "no machine yet"


def loads_of(data: Mapping[str, Any]) -> str:
    """The 1-minute load before the runs."""
    loads = [point["load_1min_before"] for point in data["points"].values()]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else "not taken"
