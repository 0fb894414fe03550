"""Runs on this machine in processes of their own, in alternating rounds, with equal tokens: what `real` and `offline` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from remap.cli.machine import machine_info
from remap.errors import InvalidArgument, InvalidState

from . import seeds
from .apart import run_apart

__all__ = [
    "Suite",
    "compare",
    "empty",
    "find_in",
    "loads_of",
    "machine_of",
    "require_machine",
    "run_missing",
    "run_name",
    "table",
]


class Named(Protocol):
    """A case: a dataclass of JSON's types with a name."""

    @property
    def name(self) -> str: ...


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
    """Markdown: a line for each case and policy."""
    lines = [
        seeds.Line(
            (case.name,),
            {policy: [run_name(case.name, policy, number) for number in range(suite.rounds)] for policy in policies},
        )
        for case in suite.cases
    ]
    return seeds.table(data["points"], ("case",), lines, columns, worst_first=True, of="rounds")


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
    """Run what `data` lacks with `python -m MODULE SUITE CASE POLICY`, round by round, and write `path` after each run: a run
    that is stopped loses one. Every token is compared with those of the first run of the first policy.

    Raises InvalidArgument (field path) for a file of another machine before anything runs, and InvalidState for tokens
    that are not the first policy's or a run that fails; what was run before stays in the file then.
    """
    require_machine(data, path)
    cases = tuple(cases)
    for number in range(rounds):
        for case in cases:
            for policy in policies:
                name = run_name(case, policy, number)
                if name in data["points"]:
                    continue
                found = run_apart(name, module, suite, case, policy, threads=threads)
                if policy == policies[0]:
                    data["tokens"].setdefault(case, found["tokens"])
                compare(name, found["tokens"], data["tokens"][case], policies[0])
                data["points"][name] = found["figures"]
                seeds.write(path, data)
                print(name, file=sys.stderr, flush=True)


def compare(name: str, found: Mapping[str, str], wanted: Mapping[str, str], policy: str) -> None:
    """Raises InvalidState (fields run, different, requests) if a request's tokens are not the wanted ones, `policy`'s."""
    requests = {**wanted, **found}
    different = [one for one in requests if wanted.get(one) != found.get(one)]
    if different:
        raise InvalidState(
            f"{name}: the tokens of {len(different)} of {len(requests)} requests are not those of {policy}, the first is "
            f"{different[0]!r}; this run was not kept",
            run=name,
            different=len(different),
            requests=len(requests),
        )


def machine_of(data: Mapping[str, Any]) -> str:
    """The machine of the results, in words."""
    said = "{cpu}, {cores} cores, {memory}, {os}, torch {torch}, transformers {transformers}, remap {remap}"
    return said.format(**data["machine"]) if data["machine"] else "no machine yet"


def loads_of(data: Mapping[str, Any]) -> str:
    """The 1-minute load before the runs."""
    loads = [point["load_1min_before"] for point in data["points"].values()]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else "not taken"
