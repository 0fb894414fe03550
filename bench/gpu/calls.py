"""The calls: what each runs, in which order, and how long it may take. What convinces most comes first.

    probe             page tables edited beside running kernels: does anything fault, are all bytes right (probe.cpp)
    build-and-check   the build, `remap doctor`, the conformance suite and tests/gpu (a process a file), compute-sanitizer
    measure           the figures (registry.py, ORDER["measure"])
    serve             whole engines under load (ORDER["serve"]): more than one call's worth, so the same call again takes the rest
    vllm              a real vLLM, stock and on remap (ORDER["vllm"]); more than one call's worth, too

Each is independent of the others and ends by itself before ten minutes are over: machines are rented, and commands on them cut
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from . import machine, steps
from .processes import ROOT
from .table import Step

__all__ = ["CALLS", "Call", "Task", "device_files", "names", "tasks"]


@dataclass(frozen=True)
class Call:
    """seconds, quick_s, emulated_s: its limits. measures: whether measures are a part of it."""

    name: str
    seconds: float
    quick_s: float
    emulated_s: float
    measures: bool = False

    def limit(self, *, quick: bool, emulated: bool) -> float:
        """Seconds that it may take."""
        return self.emulated_s if emulated else self.quick_s if quick else self.seconds


CALLS = {
    call.name: call
    for call in (
        Call("probe", 90, 60, 60),
        Call("build-and-check", 480, 240, 300),
        Call("measure", 480, 180, 240, measures=True),
        Call("serve", 560, 180, 180, measures=True),
        Call("vllm", 530, 180, 60, measures=True),
    )
}


@dataclass(frozen=True)
class Task:
    """A step that is still to run. least_s: it is left out if less time is left. most_s: it is stopped then. run(seconds,
    environment): the step, or why it cannot be. packages: what of machine.ENGINES it is about."""

    name: str
    least_s: float
    most_s: float
    run: Callable[[float, Mapping[str, str]], Step | str]
    packages: tuple[str, ...] = ()


def names(call: str) -> list[str]:
    """The calls that the command line means: "all" is every one."""
    return list(CALLS) if call == "all" else [call]


CONFORMANCE = ("test_backend_contract.py", "test_backend_contract_streams.py")
# By what a failure would cost; other files of that name come after them.
FIRST = ("test_gpu_session.py", "test_gpu_streams.py", "test_gpu_memory.py", "test_gpu_threads.py", "test_gpu_torch.py")
SANITIZED = ("test_gpu_streams.py", "test_gpu_memory.py")


def tasks(call: str, paths: steps.Paths, *, quick: bool, emulated: bool) -> Iterator[Task]:
    """The steps of a call, in order, without the build."""
    if call == "probe":
        yield Task("probe", 5, 90, _bound(steps.probe, paths))
    elif call == "build-and-check":
        yield Task("remap doctor", 5, 60, _bound(steps.doctor, "remap doctor", paths, ()))
        yield from _checks(paths, quick=quick, emulated=emulated)
    elif call == "serve":
        for name in ("vllm", "sglang"):
            yield Task(f"{name} adapter", 5, 90, partial(_adapter, name, paths), (name,))


def device_files(*, emulated: bool) -> list[str]:
    """Files of tests/gpu in the order of the run. The suite's own tests need no GPU: they are left out where time is rented."""
    there = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    own = {name for name in there if name.startswith("test_bench_")}
    return [
        *(name for name in FIRST if name in there),
        *sorted(there - own - set(FIRST)),
        *(sorted(own) if emulated else ()),
    ]


def _checks(paths: steps.Paths, *, quick: bool, emulated: bool) -> Iterator[Task]:
    for file in CONFORMANCE:
        yield _file_of_tests("tests/python", file, paths, ())
    chosen = ("-m", "not slow") if quick else ()
    for file in device_files(emulated=emulated):
        yield _file_of_tests("tests/gpu", file, paths, chosen)
    if emulated:  # it runs no device code that a sanitizer could look at
        yield Task("small case", 5, 60, _bound(steps.small_case, paths))
        return
    title = "compute-sanitizer memcheck, "
    yield Task(f"{title}small case", 20, 240, _bound(steps.sanitizer, f"{title}small case", paths, steps.SMALL_CASE))
    if quick:
        return
    for file in SANITIZED:
        arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"tests/gpu/{file}")
        yield Task(f"{title}{file}", 30, 240, _bound(steps.sanitizer, f"{title}{file}", paths, arguments))
    yield Task("C++ tests", 60, 240, _bound(steps.cpp_tests, paths))


def _file_of_tests(folder: str, file: str, paths: steps.Paths, chosen: tuple[str, ...]) -> Task:
    """A process of its own, so that one that dies costs one file."""
    name = f"{folder}/{file}"
    return Task(name, 8, 200, _bound(steps.tests, name, paths, (name, *chosen)))


def _adapter(name: str, paths: steps.Paths, seconds: float, environment: Mapping[str, str]) -> Step | str:
    """Whether an engine that is installed can be entered; serving with it on a GPU is no part of this suite yet."""
    version = machine.engines()[name]
    if version is None:
        return f"{name} is not installed"
    if name != "vllm":
        return f"{name} {version} is installed; its test is tests/engines/sglang/test_graphs.py"
    return steps.doctor("vllm adapter", paths, ("--vllm",), seconds=seconds, environment=environment)


def _bound(function: Callable[..., Step | str], *arguments: object) -> Callable[[float, Mapping[str, str]], Step | str]:
    return lambda seconds, environment: function(*arguments, seconds=seconds, environment=environment)
