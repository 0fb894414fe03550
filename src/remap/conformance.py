# SPDX-License-Identifier: Apache-2.0
"""Whether an engine does what remap asks of one (docs/adopt.md): its own serving, while layers leave and come home at random.

    from remap import conformance

    def serve(session):             # attach the model, answer some requests, return the answers; let the session be
        ...

    for outcome in conformance.check(serve, capacity="36MiB", page_bytes="256KiB"):
        print(outcome)              # outcome.problems is empty, or says what went wrong

Each case opens a session of its own and calls `serve` with it, which does the same each time. In place of the controller
something restless decides in each `session.step` of the engine's. So the engine sees more growth, shrinking and moved blocks in a
minute than in a day of service, in the way in which it sees them there, and has to give the answers that it gives with every
layer at home.

It finds tables that do not follow `report.moved` (the pool hands out scattered ids here, so that some are in the way of layers),
layers that run without `wait`, writes beyond the usable blocks or into weights, blocks that are never freed, engines that never
step, that close the session, or leave a pass open. It cannot find: a race of the engine's threads that the case's order hides;
answers that are wrong in the first case too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from remap import advanced
from remap.errors import Error
from remap.internals import internals
from remap.kv.pool import BlockPool
from remap.policy.views import NONE, Decision, Demand, TenantView
from remap.session import Session

__all__ = ["CASES", "Case", "Outcome", "check"]

Serve = Callable[[Session], object]


@dataclass(frozen=True)
class Case:
    """layers: what part of those that can leave are away at a step, from the random generator, what part is away now, and the
    step's number. mode: of the session."""

    name: str
    layers: Callable[[random.Random, float, int], float]
    mode: str = "aliased"


def _restless(rng: random.Random, now: float, step: int) -> float:
    return rng.random() if rng.random() < 0.5 else now


CASES = (
    Case("at home", lambda rng, now, step: 0.0),
    Case("away", lambda rng, now, step: 1.0),
    Case("to and fro", lambda rng, now, step: float(step // 2 % 2)),
    Case("restless", _restless),
    Case("restless, only owned pages mapped", _restless, mode="strict"),
)
"""The first gives the answers with which the others' are compared."""


@dataclass
class Outcome:
    """steps, grown, shrunk, moved: how often the engine stepped, and how many steps added blocks, brought layers home and moved
    blocks. copies: layers that were streamed. external: some tenant's engine has its own allocator, for which nothing moves.
    problems: what went wrong, each in a sentence; empty if nothing did."""

    case: str
    seed: int
    steps: int = 0
    grown: int = 0
    shrunk: int = 0
    moved: int = 0
    copies: int = 0
    external: bool = False
    problems: list[str] = field(default_factory=list)
    answers: object = None

    def __str__(self) -> str:
        told = "; ".join(self.problems) or "conforms"
        return (
            f"{self.case} (seed {self.seed}): {told} [{self.steps} steps, {self.grown} grew, {self.shrunk} shrank, "
            f"{self.moved} moved blocks, {self.copies} layers streamed]"
        )


def check(
    serve: Serve,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    cases: Sequence[Case] = CASES,
    equal: Callable[[Any, Any], bool] = lambda one, other: bool(one == other),
    **session: Any,
) -> Iterator[Outcome]:
    """The outcome of each case, and of the random ones with each seed.

    serve: attaches one tenant or several to the session, answers, and returns what `equal` compares; the session stays open.
    What it raises is a problem of the case. session: what `Session` takes, without `mode`; memory for the weights and a good part
    of the KV. Where no case has moved a block, the last one's problem is that nothing is known of how the engine's tables follow.
    Cases in strict mode, in which a stray access ends the process by SIGSEGV, are not run behind a problem, and say so.
    """
    first: Outcome | None = None
    moved = troubled = False
    runs = [(case, seed) for case in cases for seed in (seeds if case.layers is _restless else seeds[:1])]
    for case, seed in runs:
        if troubled and case.mode == "strict":
            yield Outcome(case.name, seed, problems=["not run: mend the problems of the cases before it first"])
            continue
        outcome = _run(serve, case, seed, session)
        moved |= outcome.moved > 0 or outcome.external
        if first is None:
            first = outcome
        elif not first.problems and not outcome.problems and not equal(first.answers, outcome.answers):
            outcome.problems.append(f"its answers differ from those of {first.case!r}")
        troubled |= bool(outcome.problems)
        if not (moved or troubled) and first is not outcome and (case, seed) == runs[-1]:
            outcome.problems.append(
                "inconclusive: no block moved in any case, so whether tables follow report.moved is not known; give the engine "
                "more requests of different lengths, or the session less memory"
            )
        yield outcome


def _run(serve: Serve, case: Case, seed: int, options: Mapping[str, Any]) -> Outcome:
    outcome = Outcome(case.name, seed)
    session = _Watched(case, outcome, **options)
    try:
        outcome.answers = serve(session)
        session.judge()
        session.close()
    except Exception as error:  # noqa: BLE001  the engine's own code: whatever it raises is what is to be told
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        with suppress(Error):  # it may be inside of a pass for ever
            session.close()
    return outcome


class _Restless:
    """A tenant's controller, but for its decisions."""

    def __init__(self, state: Any, case: Case, outcome: Outcome) -> None:
        self._state, self._real, self._case, self._outcome = state, state.controller, case, outcome
        self._rng = random.Random(outcome.seed)
        self._step = 0
        self._buffers = self._rng.choice((1, 2))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def decide(self, view: TenantView, demand: Demand) -> Decision:
        lacking = max(0, demand.blocks - view.free_blocks)
        take = min(lacking, view.free_pool_blocks)
        alpha, buffers = self._amount(view)
        self._step += 1
        if alpha < view.remapped and not lacking:
            return Decision("shrink", 0, alpha, buffers, "to see whether the engine follows", 0.0, 0)
        alpha = max(alpha, view.remapped)
        if alpha == view.remapped and not take:
            return NONE
        gained = take + int((alpha - view.remapped) * view.blocks_per_layer)
        return Decision(
            "grow", take, alpha, buffers, "to see whether the engine follows", 0.0, max(0, lacking - gained)
        )

    def _amount(self, view: TenantView) -> tuple[int, int]:
        """(how many layers, or pages of each, should be away, ring buffers)."""
        buffers = view.buffers if view.remapped else self._buffers
        most = max(0, min(view.max_remapped, view.streamable - buffers))
        now = view.remapped / most if most else 0.0
        alpha = round(self._case.layers(self._rng, now, self._step) * most)
        if not view.seen or view.lends:
            return view.remapped, max(1, buffers)
        selection = "slices" if self._state.slicing else "nested"
        while alpha > view.remapped and not self._state.possible(self._state.streaming_at(alpha, buffers, selection)):
            alpha -= 1
        return alpha, max(1, buffers)


class _Scattered:
    """A pool's `allocate` that hands out any free blocks. The pool's own hands out the lowest, seldom in a layer's way."""

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self._pool, self._allocate, self._rng = pool, pool.allocate, random.Random(seed)

    def __call__(self, count: int, into: list[int]) -> list[int]:
        ids = self._allocate(count)  # refuses as the pool does
        ids += self._allocate(self._pool.free_blocks)
        self._rng.shuffle(ids)
        self._pool.free(ids[count:])
        into += sorted(ids[:count])
        return into


class _Watched(Session):
    """A session whose tenants are decided for by the case, and which counts the engine's calls."""

    def __init__(self, case: Case, outcome: Outcome, **options: Any) -> None:
        super().__init__(**options, mode=case.mode)
        self._case, self._outcome = case, outcome
        self._attached = False

    def attach(self, *arguments: Any, **named: Any) -> Any:
        return self._decided_for(super().attach(*arguments, **named))

    def attach_bytes(self, *arguments: Any, **named: Any) -> Any:
        return self._decided_for(super().attach_bytes(*arguments, **named))

    def detach(self, name: str, **named: Any) -> None:
        self._look(name)
        super().detach(name, **named)

    def _look(self, name: str) -> None:
        """At the weights of a tenant, before it goes."""
        self._outcome.copies += self.snapshot().tenants[name].copies
        self._outcome.external |= internals(self.tenants[name]).kv.pool.external
        written = advanced.differing(self, name)
        if written:
            told = f"layers {sorted(written)} of {name!r} were written: blocks beyond the usable ones, or weights"
            self._outcome.problems.append(told)

    def _decided_for(self, tenant: Any) -> Any:
        self._attached = True

        def replace(core: Any) -> None:
            state = core.tenant(tenant.name)
            state.controller = _Restless(state, self._case, self._outcome)
            vars(state.kv.pool)["allocate"] = _Scattered(state.kv.pool, self._outcome.seed)

        self.exclusively(replace)
        return tenant

    def step(self, demand: Any = None) -> Any:
        before = {name: each.remapped for name, each in self.tenants.items()}
        report = super().step(demand)
        outcome = self._outcome
        outcome.steps += 1
        outcome.grown += any(report.added_blocks.values())
        outcome.moved += any(report.moved.values())
        outcome.shrunk += any(each.remapped < before.get(name, 0) for name, each in self.tenants.items())
        return report

    def judge(self) -> None:
        """Note the faults found now that the engine has answered."""
        problems = self._outcome.problems
        if self.closed:
            problems.append("the engine has closed the session that it was given")
            return
        advanced.check(self)
        if not self._attached:
            problems.append("the engine has attached nothing")
        if not self._outcome.steps:
            problems.append("the engine never called session.step")
        for name, each in self.snapshot().tenants.items():
            if each.live_blocks and not internals(self.tenants[name]).kv.pool.external:
                problems.append(f"{each.live_blocks} blocks of {name!r} were not freed")
            self._look(name)
        if self._case is not CASES[0] and not self._outcome.copies:
            problems.append("no layer streamed: give the session less memory, or the engine more to do")
