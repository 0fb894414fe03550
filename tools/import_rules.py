"""Who may import whom. Run as `python tools/import_rules.py`; tests/python/test_import_rules.py runs it as well.

    errors, config, sizes, locking, notebook, report <- policy, kv, model <- memory <- session, tenant
    session, tenant <- adapters, cli        the wall        remap <- remap_serve: engine <- cluster <- sim, cli

Two packages: `remap_serve` imports `remap`, never the other way round, and of it what engines are promised and USED_BY_SERVE.

Python: no two modules import each other, directly or in a circle, imports for annotations (`if TYPE_CHECKING`) counted,
nor do two folders of LAB; a package imports from lower floors only (FLOORS). The pure modules import neither torch nor
`remap._core`, nor anything here that does; `remap._core` is imported in few, named files; adapters and the command line
are never imported eagerly from outside themselves. "Eagerly" means when the module is imported: at its top level, not
inside a function and not under `if TYPE_CHECKING`. No module reads another's underscore names: that is ruff's rule
SLF001 (pyproject.toml). A class name without an underscore is the name of one class of the package (NAMED_BY_OTHERS
apart). `Any` is no type of memory/ and policy/ (ANY_OF_FILES apart).

C++: public headers and the core know neither Python, torch nor the CUDA toolkit, and a lower layer never includes a
higher one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE, SERVE = "remap", "remap_serve"
LAB = "bench/lab"
# Pure: no memory, no torch, no C++ core; the simulator and production run the same code.
PURE = (
    *("errors", "config", "sizes", "report", "schedule", "policy", "kv.spec", "model.pack"),
    *("remap_serve.policy", "remap_serve.sim", "remap_serve.cluster.messages", "remap_serve.cluster.control"),
    *("remap_serve.cluster.groups", "remap_serve.cluster.ledger", "remap_serve.cluster.service"),
    *("remap_serve.cluster.lanes", "remap_serve.cluster.slots", "remap_serve.cluster.pool"),
)
# What a pure module may never reach, directly or through another module of the package.
IMPURE_ROOTS = ("torch", "transformers", f"{PACKAGE}._core")
# The wiring, which makes devices, sessions and changes, and the doctor, which asks the driver: nobody else knows the C++ core.
CORE_IMPORTERS = (
    *(
        "session",
        "kv.pool",
        "memory.attach",
        "memory.apply",
        "memory.draft",
        "memory.pages",
        "memory.device",
        "memory.shared_pages",
        "model.source",
    ),
    *("cli.doctor_cuda", "cli.doctor_link"),
)
# Loaded on request only. Of the simulator, what serves: it runs the reference engine's scheduler and turns.
SIMULATOR = (
    *("advice", "engine", "passes", "running", "scheduling", "sequences", "serving", "setup", "timeline", "worlds"),
)
LAZY = (
    *("adapters", "broker", "cli", "metrics", "remap_serve.cli", "remap_serve.cluster", "remap_serve.engine"),
    *(f"remap_serve.sim.{name}" for name in SIMULATOR),
)
# Heavy or optional packages: nobody outside LAZY may load them when the package is imported.
OPTIONAL_PACKAGES = (
    *("transformers", "typer", "rich", "jinja2", "gguf", "safetensors", "accelerate", "vllm", "sglang"),
    *("triton", "flashinfer", "nvtx", "cuda", "ray", "msgspec", "fastapi", "uvicorn", "prometheus_client"),
    *("starlette", "httpx"),
)

# What `remap_serve` imports of the library beside the names of `remap` itself, module by module: the contract for engines
# (`remap.advanced`, `remap.internals`), plain values, what a machine is and what it costs, and what its commands share with the
# library's.
USED_BY_SERVE = (
    *(
        "advanced",
        "internals",
        "errors",
        "config",
        "sizes",
        "extras",
        "rate_limited",
        "arguments",
        "metrics",
        "process_turn",
    ),
    *("kv.spec", "model.footprint", "memory.activate", "memory.device", "adapters.vllm"),
    *("policy.hardware", "policy.hidden", "policy.kv_stream", "policy.maxplus", "policy.near_names", "policy.rental"),
    *("policy.schedule", "policy.slices", "policy.turns", "policy.views"),
    *("cli.errors", "cli.log_lines", "cli.options", "cli.smollm2"),
)

# What each package, or module, of the core imports from others here, besides itself. What stands above (adapters, cli,
# remap_serve) may import any of it; nothing here may import them.
BASE = ("errors", "config", "sizes", "locking", "moved", "notebook", "nvtx", "report", "extras", "rate_limited")
CORE = (
    *(
        "policy",
        "kv",
        "model",
        "memory",
        "tenant",
        "internals",
        "session",
        "arguments",
        "advanced",
        "conformance",
        "schedule",
        "entry",
        "joined",
        "shown",
        "ranks",
        "process_turn",
    ),
    "_core",
)
# Of the command line, what every command shares, and the doctor's.
CLI = tuple(
    f"cli.{name}"
    for name in (
        *("main", "errors", "log_lines", "options", "check", "smollm2"),
        *("doctor", "doctor_cuda", "doctor_link", "doctor_vllm"),
    )
)
FLOORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, BASE),
    "policy": BASE,
    "kv": BASE,
    "model": (*BASE, "kv.spec", "_core"),
    "memory": (*BASE, "policy", "kv", "model", "_core"),
    "tenant": (*BASE, "policy", "kv", "model", "memory", "arguments"),
    "internals": ("tenant",),
    "session": (*BASE, "policy", "kv", "model", "memory", "tenant", "arguments", "_core", "joined", "shown"),
    "metrics": BASE,
    "broker": (*BASE, "memory", "metrics"),
    "joined": (*BASE, "memory", "broker"),
    "shown": (*BASE, "broker"),
    # Engines bring the adapters into their processes: nothing of the reference engine, the simulator or the cluster comes along.
    "adapters": (*BASE, *CORE),
    # The command line loads all other commands by entry points (remap.cli.main.installed).
    **dict.fromkeys(CLI, (*BASE, *CORE, "adapters", *CLI)),
}

# Names that users type into an engine's own options, where the engine's word for it is the best one.
NAMED_BY_OTHERS = {
    "HostKV": "remap.adapters.vllm.host_kv",  # vLLM's spec_name
    "Scheduler": "remap.adapters.vllm.scheduler",  # vLLM's --scheduler-cls
}

# Where no value may be of type Any, so that the type checker sees every field that a change writes.
TYPED = ("memory", "policy")
ANY_OF_FILES = ("policy._tables", "policy.hardware")  # the contents of JSON files

CPP_LAYERS = ("backend", "core", "schedule")
# The layer that declares each public header; error.h and fork.h serve all of them.
PUBLIC_HEADERS = {
    "remap/backend.h": "backend",
    "remap/backends.h": "backend",
    "remap/sim.h": "backend",
    "remap/plan.h": "core",
    "remap/arena.h": "core",
    "remap/executor.h": "core",
    "remap/schedule.h": "schedule",
    "remap/prefetcher.h": "schedule",
}
CPP_FORBIDDEN = re.compile(r"^(cuda|cuda_runtime|cuda_runtime_api|nvrtc)\.h$|^(torch|ATen|c10|pybind11)/|^Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')


@dataclass(frozen=True)
class Import:
    """One imported module, by its absolute name."""

    module: str
    line: int
    eager: bool
    annotation: bool = False  # under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Violation:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import of a module's source, relative ones resolved; those for annotations only are marked."""
    found: list[Import] = []
    base = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, eager: bool, annotation: bool = False) -> None:
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                visit(child, False, True)
            for child in node.orelse:
                visit(child, eager, annotation)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            eager = False
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, eager, annotation) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = base[: len(base) - (node.level - 1)] if node.level else []
            origin = ".".join([*parent, *([node.module] if node.module else [])])
            # `from remap import session` imports a module, `from remap.session import Session` a name: list both.
            found.append(Import(origin, node.lineno, eager, annotation))
            found.extend(Import(f"{origin}.{alias.name}", node.lineno, eager, annotation) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, eager, annotation)

    visit(ast.parse(source), True)
    return found


def _full(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the tables above: those of the library have no package."""
    return tuple(name if name.startswith(f"{SERVE}.") else f"{PACKAGE}.{name}" for name in names)


def _files(src: Path, packages: Iterable[str] = (PACKAGE, SERVE)) -> list[Path]:
    return [path for package in packages for path in sorted((src / package).rglob("*.py"))]


def _within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def read_package(src: Path, packages: Iterable[str] = (PACKAGE, SERVE)) -> dict[str, tuple[Path, list[Import]]]:
    """Module name -> (its file, its imports), for every module of the packages below `src`."""
    modules = {}
    for path in _files(src, packages):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = (path, imports(path.read_text(encoding="utf-8"), name, is_package))
    return modules


def _eager_closure(modules: dict[str, tuple[Path, list[Import]]], start: str) -> dict[str, str]:
    """Modules of the package that importing `start` loads -> the module that asked for it. The package's own
    `__init__` is not followed: Python runs it before any module, and a rule of its own keeps it light."""
    reached: dict[str, str] = {start: start}
    queue = [start]
    while queue:
        current = queue.pop()
        for item in modules[current][1]:
            if item.eager and item.module in modules and item.module != PACKAGE and item.module not in reached:
                reached[item.module] = current
                queue.append(item.module)
    return reached


def imports_of(modules: dict[str, tuple[Path, list[Import]]]) -> dict[str, dict[str, int]]:
    """Module -> the modules of the package that it imports, for whatever purpose -> a line. `from remap import x` is an import of
    x, and a package's `__init__` is one only where it is imported for its names."""
    graph: dict[str, dict[str, int]] = {}
    for name, (_, found) in modules.items():
        wanted = {item.module: item.line for item in found if item.module in modules and item.module != name}
        # `from remap.kv import pool` lists remap.kv and remap.kv.pool: the former is only on the way.
        on_the_way = {origin for origin in wanted if any(other.startswith(f"{origin}.") for other in wanted)}
        graph[name] = {other: line for other, line in wanted.items() if other not in on_the_way and other != PACKAGE}
    return graph


def _circle(graph: dict[str, dict[str, int]], start: str) -> list[str]:
    """The shortest way from `start` back to it; empty if there is none."""
    ways = {other: [start, other] for other in graph[start]}
    queue = list(ways)
    while queue:
        current = queue.pop(0)
        if current == start:
            return ways[current]
        for other in graph.get(current, {}):
            if other not in ways:
                ways[other] = [*ways[current], other]
                queue.append(other)
    return []


def check_circles(src: Path, packages: Iterable[str] = (PACKAGE, SERVE)) -> Iterator[Violation]:
    """Modules that import each other in a circle, imports for annotations counted: each circle once."""
    modules = read_package(src, packages)
    graph = imports_of(modules)
    for circle in _circles(graph):
        yield Violation(modules[circle[0]][0], graph[circle[0]][circle[1]], f"a circle: {' -> '.join(circle)}")


def check_lab(root: Path) -> Iterator[Violation]:
    """The same of the experiments' modules, and of their folders."""
    yield from check_circles(root, (LAB,))
    modules = read_package(root, (LAB,))
    graph: dict[str, dict[str, int]] = {}
    for name, wanted in imports_of(modules).items():
        for other, line in wanted.items():
            own, its = (".".join(each.split(".")[:3]) for each in (name, other))
            if own != its:
                graph.setdefault(own, {})[its] = line
    for circle in _circles(graph):
        yield Violation(root / LAB, 0, f"a circle of folders: {' -> '.join(circle)}")


def _circles(graph: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    told: set[frozenset[str]] = set()
    for name in graph:
        circle = _circle(graph, name)
        if circle and frozenset(circle) not in told:
            told.add(frozenset(circle))
            yield circle


def check_floors(src: Path) -> Iterator[Violation]:
    """Imports of the core that go up, or beside."""
    modules = read_package(src)
    for name, wanted in imports_of(modules).items():
        floor = next((one for one in FLOORS if _within(name, (f"{PACKAGE}.{one}",))), None)
        if floor is None:
            continue
        allowed = tuple(f"{PACKAGE}.{one}" for one in (floor, *FLOORS[floor]))
        for other, line in wanted.items():
            if not _within(other, allowed):
                yield Violation(
                    modules[name][0], line, f"{name} imports {other}; {floor} imports only {', '.join(allowed)}"
                )


def check_wall(src: Path) -> Iterator[Violation]:
    """Imports of the library that reach what is built on it, and of that which reach behind the library's page."""
    used, promised = _full(USED_BY_SERVE), _public(src)
    for name, (path, found) in read_package(src).items():
        for item in found:
            if not _within(name, (SERVE,)):
                if _within(item.module, (SERVE,)):
                    yield Violation(path, item.line, f"{name} imports {item.module}, which is built on {PACKAGE}")
            elif _within(item.module, (PACKAGE,)) and item.module.count(".") and not _within(item.module, used):
                parents = any(one.startswith(f"{item.module}.") for one in used)  # `from remap.kv.spec import` lists it
                public = item.module.count(".") == 1 and item.module.rpartition(".")[2] in promised
                if not parents and not public:
                    yield Violation(path, item.line, f"{name} imports {item.module}, which is no part of USED_BY_SERVE")


def _public(src: Path) -> set[str]:
    """The names that `import remap` promises."""
    tree = ast.parse((src / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {each.value for found in lists for each in ast.walk(found) if isinstance(each, ast.Constant)}


def check_names(src: Path) -> Iterator[Violation]:
    """Class names that stand for two classes."""
    known: dict[str, str] = {}
    for path in _files(src):
        module = ".".join(path.relative_to(src).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if NAMED_BY_OTHERS.get(node.name) == module:
                continue
            other = known.setdefault(node.name, module)
            if other != module:
                yield Violation(path, node.lineno, f"class {node.name} has the name of one in {other}")


def check_types(src: Path) -> Iterator[Violation]:
    """Uses of Any."""
    typed = tuple(f"{PACKAGE}.{name}" for name in TYPED)
    apart = tuple(f"{PACKAGE}.{name}" for name in ANY_OF_FILES)
    for name, (path, found) in read_package(src).items():
        if not _within(name, typed) or _within(name, apart):
            continue
        for item in found:
            if item.module == "typing.Any":
                yield Violation(path, item.line, f"{name} uses Any; name the type, or take an object")


def check_python(src: Path) -> Iterator[Violation]:
    """Violations among the modules below `src`."""
    modules = read_package(src)
    pure, lazy, wiring = _full(PURE), _full(LAZY), _full(CORE_IMPORTERS)
    for name, (path, found) in modules.items():
        for item in found:
            if item.annotation:
                continue
            if _within(item.module, (f"{PACKAGE}._core",)) and not _within(name, wiring):
                yield Violation(path, item.line, f"{name} imports remap._core; only {', '.join(wiring)} may")
            if _within(name, pure) and _within(item.module, IMPURE_ROOTS):
                yield Violation(path, item.line, f"{name} is pure and imports {item.module}")
            if not item.eager or _within(name, lazy):
                continue
            if _within(item.module, lazy):
                yield Violation(path, item.line, f"{name} imports {item.module} eagerly; it is loaded on request only")
            if _within(item.module, OPTIONAL_PACKAGES):
                yield Violation(path, item.line, f"{name} imports the optional package {item.module} eagerly")
        if _within(name, pure):
            for other, asked_by in _eager_closure(modules, name).items():
                impure = [i for i in modules[other][1] if i.eager and _within(i.module, IMPURE_ROOTS)]
                if other != name and impure and not _within(other, pure):
                    message = f"{name} is pure but reaches {impure[0].module} through {asked_by} -> {other}"
                    yield Violation(path, 1, message)
    if PACKAGE in modules:
        path, found = modules[PACKAGE]
        for other in _eager_closure(modules, PACKAGE):
            for item in modules[other][1]:
                if item.eager and _within(item.module, ("torch", *OPTIONAL_PACKAGES)):
                    yield Violation(modules[other][0], item.line, f"`import {PACKAGE}` would load {item.module}")


def _layer_of_file(path: Path, root: Path) -> str | None:
    """The layer that a source or header belongs to; None for what serves all layers."""
    parts = path.relative_to(root).parts
    if parts[0] == "include":
        return PUBLIC_HEADERS.get("/".join(parts[1:]))
    return parts[1] if len(parts) > 2 and parts[1] in CPP_LAYERS else None


def _layer_of_include(target: str) -> str | None:
    """The layer of an included name: a public header by the table, a private one by its folder."""
    folders = [part for part in target.split("/")[:-1] if part in CPP_LAYERS]
    return PUBLIC_HEADERS.get(target) or (folders[0] if folders else None)


def check_cpp(root: Path) -> Iterator[Violation]:
    """Violations among the includes of include/ and cpp/."""
    files = [
        p for folder in ("include", "cpp") for p in sorted((root / folder).rglob("*")) if p.suffix in (".h", ".cpp")
    ]
    for path in files:
        own = _layer_of_file(path, root)
        public = path.is_relative_to(root / "include")
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(text)
            if not match:
                continue
            target = match.group(1)
            other = _layer_of_include(target)
            if CPP_FORBIDDEN.search(target):
                yield Violation(path, number, f"includes {target}: no CUDA headers, torch or Python here")
            if public and other and not target.startswith("remap/"):
                yield Violation(path, number, f"a public header includes the private {target}")
            elif own and other and CPP_LAYERS.index(other) > CPP_LAYERS.index(own):
                yield Violation(path, number, f"the {own} layer includes {target}, of the higher layer {other}")


def main(root: Path) -> int:
    """Print the violations; the number of them is the exit code's truth."""
    src = root / "src"
    violations = [
        *check_python(src),
        *check_circles(src),
        *check_lab(root),
        *check_floors(src),
        *check_wall(src),
        *check_names(src),
        *check_types(src),
        *check_cpp(root),
    ]
    for violation in violations:
        print(violation)
    modules = len(read_package(root / "src"))
    print(f"import rules: {len(violations)} violations in {modules} modules")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
