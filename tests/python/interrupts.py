"""KeyboardInterrupt at every point of a change (test_fault_sweep.py has them), one a run; afterwards everything must work.

    points = "lines"     before every line of the package that the call comes to
             "signals"   wherever CPython would really raise it: at a function's start, after a call, at a backward jump

A `finally` or the end of a `with` begins outside of what it closes: no signal can arrive there (nothing is looked at in
between), and no code could defend itself. So points that another handler covers than the instruction before are left
out.

After the interrupt, in another thread and within a time limit (a lock that stays locked shows as a deadlock): what is
seen is what was before the call or what is after it; the next report tells what moved; every live block has its tag, every
layer its bytes in passes of every tenant, every free block can be used; the same call has its full effect; all other
calls work; close gives everything back.

`sweep` tries so many points of some cases (0: all), in a process of their own, which prints one JSON line for each finding.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import functools
import gc
import json
import os
import random
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import subprocesses
from sharing_worlds import Faulty, Hosting
from test_fault_sweep import CASES_OF_PLANS, HOSTED, INTERRUPTED, Case

import remap
from remap.errors import Error
from remap.internals import internals

CASES = {case.name: case for case in (*CASES_OF_PLANS, *INTERRUPTED, *HOSTED)}
BLOCKS = ("allocate", "free", *(case.name for case in HOSTED))  # calls of the engine alone
PACKAGE = str(Path(remap.__file__).resolve().parent) + os.sep
BUILT_ON_IT = os.path.join(os.path.dirname(PACKAGE.rstrip(os.sep)), "remap_serve", "")
PATIENCE_S = 5.0
# Files whose functions change nothing but what they return.
PURE = re.compile(
    r"((policy/\w+|policy/donors/\w+|kv/spec|memory/(bounds|moves|plan|view)|config|report|sizes)\.py:\d+( < )?)*"
)

# -- the interrupt -----------------------------------------------------------------------------------------------------

_CHECKS = {"CALL", "CALL_FUNCTION_EX", "RESUME"}  # CPython looks for signals there, and at backward jumps


@functools.cache
def points_of(code: CodeType, points: str) -> frozenset[int]:
    """Offsets of the instructions before which an interrupt may come."""
    return frozenset(_points_of(code, points))


def _points_of(code: CodeType, points: str) -> Iterator[int]:
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def covered(offset: int) -> tuple[int, int]:
        """(what handles an exception there, how deep): (-1, -1) if nothing does."""
        return next(((each.target, each.depth) for each in entries if each.start <= offset < each.end), (-1, -1))

    def leaves(origin: int, target: int) -> bool:
        return covered(origin) != covered(target) and covered(target)[1] <= covered(origin)[1]

    # Where a `with` or a `try` is left, by falling out of it or by a jump: what closes it is called first, and no signal arrives
    # before that call has been made.
    instructions = list(dis.get_instructions(code))
    left = {each.argval for each in instructions if each.opcode in dis.hasjrel and leaves(each.offset, each.argval)}
    opname_at = {each.offset: each.opname for each in instructions}
    before, closing = None, False
    for each in instructions:
        if each.offset in left or (before is not None and leaves(before.offset, each.offset)):
            closing = True
        elif before is not None and before.opname in _CHECKS:
            closing = False
        same = before is None or covered(before.offset) == covered(each.offset)
        # From 3.12 on a comprehension is a part of its function, with a handler that puts its variables back. What a trace
        # function raises in it passes every handler (seen with 3.12.1; a signal there does not).
        handler = covered(each.offset)[0]
        same = same and (handler < 0 or points == "signals" or opname_at[handler] == "PUSH_EXC_INFO")
        after_check = before is not None and (before.opname in _CHECKS)
        if same and not closing and (points != "signals" or after_check):
            yield each.offset
        if points == "signals" and "BACKWARD" in each.opname and covered(each.argval) == covered(each.offset):
            yield each.argval
        before = each


def _path(name: str) -> str:
    built = name.removeprefix("remap_serve/")
    return PACKAGE + name if built == name else BUILT_ON_IT + built


class Interrupt:
    """A trace function that raises once, at the `at`-th point; with at = -1 it counts only. files: of the package, or below
    remap_serve/, where points are; all by default."""

    def __init__(self, at: int, points: str, files: Sequence[str] = ()) -> None:
        self.at, self.points, self.count, self.where = at, points, 0, ""
        self.files = tuple(_path(name) for name in files)
        self.seen: list[str] = []  # where each point is, if at = -1
        self._event = "line" if points == "lines" else "opcode"

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        # What __del__ raises goes to nobody, whoever wrote it.
        name = frame.f_code.co_filename
        if not name.startswith(self.files or (PACKAGE, BUILT_ON_IT)) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = self.points != "lines"
        return self._local

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == self._event and frame.f_lasti in points_of(frame.f_code, self.points):
            if self.count == self.at:
                self.count += 1
                self.where = where_of(frame)
                raise KeyboardInterrupt
            if self.at < 0:
                self.seen.append(where_of(frame))
            self.count += 1
        return self._local


def where_of(frame: FrameType) -> str:
    """The line, and the lines that called it, innermost first, as far as they are the package's."""
    places = []
    each: FrameType | None = frame
    while each is not None and each.f_code.co_filename.startswith((PACKAGE, BUILT_ON_IT)):
        name = each.f_code.co_filename.replace(BUILT_ON_IT, "remap_serve/").replace(PACKAGE, "")
        places.append(f"{name}:{each.f_lineno}")
        each = each.f_back
    return " < ".join(places)


def interrupted(
    act: Callable[[], Any], at: int, points: str, files: Sequence[str] = ()
) -> tuple[Interrupt, Any, BaseException | None]:
    """(the interrupt, what the call returned, what it raised)."""
    interrupt, result, error = Interrupt(at, points, files), None, None
    if points == "signals":  # 3.12 looks when tracing begins whether a frame wants every instruction
        sys._getframe().f_trace_opcodes = True
    sys.settrace(interrupt)
    try:
        result = act()
    except (KeyboardInterrupt, Error) as raised:
        error = raised
    finally:
        sys.settrace(None)
    if error is not None:
        _forget_frames(error)
    return interrupt, result, error


def _forget_frames(error: BaseException | None) -> None:
    while error is not None:  # frames keep alive what the call had begun
        error.__traceback__ = None
        error = error.__context__


# -- one run -----------------------------------------------------------------------------------------------------------


def within(seconds: float, act: Callable[[], None]) -> str:
    """Runs it in a thread of its own. What went wrong, or "". Who stands at the same place after so many seconds is in a
    deadlock; who has only become slow, on a busy machine, has moved on."""
    problem = [""]

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
            place = traceback.extract_tb(error.__traceback__)
            ours = [f"{Path(each.filename).name}:{each.lineno}" for each in place][-4:]
            problem[0] = f"{type(error).__name__}: {str(error)[:300]} [{' > '.join(ours)}]"
            _forget_frames(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    before: list[tuple[str, int | None]] = []
    while True:
        thread.join(seconds)
        if not thread.is_alive():
            return problem[0]
        frame = sys._current_frames().get(thread.ident or 0)
        stack = [(each.filename, each.lineno) for each in traceback.extract_stack(frame)] if frame else []
        if stack and stack == before:
            return f"deadlock in {' > '.join(f'{Path(name).name}:{line}' for name, line in stack[-4:])}"
        before = stack


def outline(session: remap.Session) -> dict[str, Any]:
    """What a caller sees, and what a call may change only as a whole. No epoch: nobody computes with it."""
    if session.closed:
        return {}
    snapshot = session.snapshot()
    return {
        name: {
            "streamed": each.streamed,
            "buffers": each.buffers,
            "pages": str(each.pages),
            "lent": (each.lent_pages, dict(each.lent_to), each.borrowed_pages),
            "blocks": (each.usable_blocks, each.free_blocks, each.live_blocks, each.withdrawn_blocks),
            "host": (session._tenants[name].kv.host.live_ids(), each.streamed_blocks),
            "active": each.active,
            "pinned": each.pinned,
            "cold": each.cold,
        }
        for name, each in snapshot.tenants.items()
    } | {"free": snapshot.pages.free, "unsettled": remap.advanced.unsettled(session)}


@dataclass
class Reference:
    """What an uninterrupted run shows."""

    before: dict[str, Any]
    after: dict[str, Any]
    points: list[str]  # where each point is

    def distinct(self) -> list[int]:
        """The first and the last point of each place: loops over layers and pages come to one very often. What happens
        inside of pure mathematics is one place with the line that asked for it."""
        places = [where[len(PURE.match(where)[0]) :] for where in self.points]  # type: ignore[index]
        first = {place: at for at, place in reversed(list(enumerate(places)))}
        last = {place: at for at, place in enumerate(places)}
        if " < " not in self.points[-1]:  # it returns: its answer is on its way, and nobody can tell whether it came
            last.pop(places[-1])
        return sorted({*first.values(), *last.values()})


def prepared(case: Case, mode: str) -> Faulty:
    world = case.world(mode)
    case.prepare(world)
    return world


def reference(case: Case, mode: str, points: str) -> Reference:
    world = prepared(case, mode)
    before = outline(world.session)
    interrupt, _, error = interrupted(lambda: case.change(world), -1, points)
    after = outline(world.session)
    problem = f"{error!r}" if error else within(PATIENCE_S, lambda: afterwards(case, world, after))
    assert not problem, f"{case.name}, not interrupted at all: {problem}"
    return Reference(before, after, interrupt.seen)


def afterwards(case: Case, world: Faulty, after: dict[str, Any]) -> None:
    """Carry on: whatever there is to do with the session, with every byte looked at."""
    session, engines = world.session, world.engines
    if not after:
        world.close()
        return
    remap.advanced.check(session)
    for name in {*session._tenants, *engines}:  # who was attached without being told, or is half gone, is detached
        if name in session._tenants and (name not in engines or internals(engines[name].tenant)._state.leaving):
            session.detach(name)
        if name not in session._tenants:
            engines.pop(name, None)
    for engine in engines.values() if case.name in BLOCKS else ():
        live = set(engine.kv.pool.live_ids())  # who never saw the ids finds them in the pool
        engine.kv.free(live.difference(engine.held))
        for block in set(engine.held).difference(live):
            del engine.held[block]
    if isinstance(world, Hosting):
        world.forget_host()
    world.tell(session.step())
    use(world)
    gone_or_come = ("detach" in case.name or case.name == "attach") and len(engines) != len(world.SIZES)
    if case.name not in BLOCKS and not gone_or_come:
        case.change(world)
        now = outline(session)
        assert case.plans or _settled(now) == _settled(after), f"made again, the call leaves {_difference(after, now)}"
        use(world)
    remap.advanced.settle(session)
    for engine in engines.values():
        if engine.external is not None:
            engine.external.finish(list(engine.external.used))
        else:
            engine.free()
    for name in engines:
        assert any(world.tell(session.activate(name)).activated for _ in range(2)), name
        world.remap(name, 0)
        assert not engines[name].tenant.streamed and not internals(engines[name].tenant).lent_pages
    use(world)
    world.detach("b") if "b" in engines else None
    world.attach("later", [1, 1], 5)
    use(world)
    world.close()


def use(world: Faulty) -> None:
    """All free blocks are written and read, so that a layer which still shows them reads wrong; then passes."""
    for engine in world.engines.values():
        engine.poison()
    world.check()


def _settled(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in seen.items() if name != "unsettled"}


def _difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    found = []
    for name in sorted({*expected, *got}):
        one, other = expected.get(name), got.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{name}.{key}: {one[key]} -> {other[key]}" for key in one if one[key] != other[key]]
        elif one != other:
            found.append(f"{name}: {one} -> {other}")
    return "; ".join(found)


class Finding(NamedTuple):
    """What broke. kind: "wrong" (a failure), "swallowed", or "between" (neither before nor after, of several plans). place: the
    situation and the line that was interrupted."""

    kind: str
    place: str
    what: str


def try_at(case: Case, mode: str, points: str, at: int, known: Reference) -> list[Finding]:
    """What broke."""
    world = prepared(case, mode)
    interrupt, _, error = interrupted(lambda: case.change(world), at, points)
    if not interrupt.where:  # the core's threads were faster this time, and the call had fewer points
        world.close()
        return []
    say(f"# {case.name}, {mode}, {points} {at}: {interrupt.where}")
    found: list[Finding] = []

    def note(kind: str, what: str) -> None:
        what = f"{case.name}, {mode}, {points} {at}: interrupted at {interrupt.where}: {what}"
        found.append(Finding(kind, f"{case.name}: {interrupt.where.split(' < ')[0]}", what))

    if error is None:
        note("swallowed", "the interrupt was swallowed")
    seen: list[dict[str, Any]] = [{}]

    def look() -> None:
        try:
            seen[0] = outline(world.session)
        except Error:
            if known.after:
                raise  # closing may have begun: then it is refused, or it is seen

    problem = within(PATIENCE_S, look)
    if problem:
        note("wrong", f"looking: {problem}")
        if problem.startswith("deadlock"):
            return found
    elif known.after and _settled(seen[0]) not in (_settled(known.before), _settled(known.after)):
        to_before, to_after = _difference(known.before, seen[0]), _difference(known.after, seen[0])
        note("wrong" if case.whole else "between", f"neither before ({to_before}) nor after ({to_after})")
    problem = within(PATIENCE_S, lambda: afterwards(case, world, known.after))
    if problem:
        note("wrong", f"afterwards: {problem}")
        with contextlib.suppress(BaseException):
            if not problem.startswith("deadlock"):
                world.session.close()
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(names: Sequence[str], mode: str, points: str, budget: int) -> None:
    faulthandler.enable()
    gc.disable()
    for case in (CASES[name] for name in names):
        known = reference(case, mode, points)
        chosen = known.distinct()
        if budget and len(chosen) > budget:
            chosen = sorted(random.Random(f"{case.name}{mode}").sample(chosen, budget))
        for at in chosen:
            for each in try_at(case, mode, points, at, known):
                say(f"! {json.dumps(each)}")
        gc.collect()
    sys.stdout.flush()
    os._exit(0)  # threads that hang are among the findings


def sweep(names: Sequence[str], mode: str, points: str, budget: int) -> tuple[list[Finding], int]:
    """(what broke, how many interrupts were tried) of some cases, in a process of their own: a finding may be a crash."""
    program = f"import interrupts; interrupts.main({[*names]!r}, {mode!r}, {points!r}, {budget})"
    done = subprocesses.run(program, timeout_s=3600.0)
    lines = done.stdout.splitlines()
    findings = [Finding(*json.loads(line[2:])) for line in lines if line.startswith("! ")]
    tried = [line for line in lines if line.startswith("# ")]
    if done.returncode != 0:
        findings.append(Finding("wrong", "", f"exit code {done.returncode} behind {tried[-1:]}: {done.stderr[-2000:]}"))
    return findings, len(tried)
