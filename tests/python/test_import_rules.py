"""The rules of who may import whom (tools/import_rules.py) hold here, and the checker sees what breaks them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from subprocesses import ROOT, load_tool

rules = load_tool("import_rules")


def test_the_sources_keep_the_rules() -> None:
    found = [*rules.check_cpp(ROOT), *rules.check_lab(ROOT)]
    checks = (rules.check_python, rules.check_circles, rules.check_floors, rules.check_wall, rules.check_names)
    for check in (*checks, rules.check_types):
        found += check(ROOT / "src")
    assert [str(each) for each in found] == []
    modules = rules.read_package(ROOT / "src")  # and they are really read
    assert {"remap", "remap.errors", "remap.session", "remap.cli.main"} <= set(modules)
    assert any(item.module == "remap._core" for item in modules["remap.session"][1])
    serve = [found for name, (_, found) in modules.items() if name.startswith("remap_serve.")]
    used = {item.module for found in serve for item in found}
    assert {f"remap.{name}" for name in rules.USED_BY_SERVE} <= used


def _package(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = tmp_path / "src" / "remap" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "src"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"policy/schedule.py": "import torch"}, "pure and imports torch"),
        ({"model/pack.py": "def f():\n    from .. import _core"}, "imports remap._core"),
        ({"../remap_serve/sim/pools.py": "from remap import _core"}, "imports remap._core"),
        ({"policy/cost.py": "from ..engine2 import f", "engine2.py": "import torch.nn as nn"}, "reaches torch"),
        ({"__init__.py": "from .session import Session", "session.py": "import torch"}, "`import remap` would load"),
        ({"session.py": "from .adapters import transformers"}, "eagerly"),
        ({"modules.py": "import transformers"}, "optional package"),
        ({"master.py": "import remap._core"}, "imports remap._core"),
    ],
)
def test_planted_violations_are_found(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    found = [str(v) for v in rules.check_python(_package(tmp_path, files))]
    assert any(expected in v for v in found), found


_FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "from .b import f", "b.py": "from .c import g", "c.py": "from . import a"}, ["a -> b -> c -> a"]),
        ({"a.py": "from .b import f", "b.py": f"{_FOR_TYPES}from .a import T"}, ["a -> b -> a"]),
        ({"a.py": "def f():\n    from remap import b", "b.py": "import remap.a"}, ["a -> b -> a"]),
        ({"a.py": "from .b import f", "b.py": "from .c import g", "c.py": "import a"}, []),
        ({"p/__init__.py": "", "p/a.py": "from . import b", "p/b.py": "from remap.p.c import x", "p/c.py": ""}, []),
    ],
)
def test_planted_circles_are_found_once(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    found = [v.message.replace("remap.", "") for v in rules.check_circles(_package(tmp_path, files))]
    assert found == [f"a circle: {circle}" for circle in expected]


def test_planted_circles_of_experiments_and_of_their_folders_are_found(tmp_path: Path) -> None:
    files = {
        "a/one.py": "from bench.lab.b import one",
        "a/two.py": "def f():\n    from .three import g",
        "a/three.py": f"{_FOR_TYPES}from .two import f",
        "b/one.py": "import math",
        "b/two.py": "from bench.lab.a.one import f",
    }
    for name, text in {"__init__.py": "", "a/__init__.py": "", "b/__init__.py": "", **files}.items():
        path = tmp_path / "bench" / "lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = [v.message.replace("bench.lab.", "") for v in rules.check_lab(tmp_path)]
    assert found == ["a circle: a.three -> a.two -> a.three", "a circle of folders: a -> b -> a"]


@pytest.mark.parametrize(
    ("name", "text", "good"),
    [
        ("policy/cost.py", "from remap.errors import Error", True),
        ("policy/cost.py", f"{_FOR_TYPES}from remap.memory.state import TenantState", False),
        ("kv/pool.py", "def f():\n    from remap.policy import views", False),
        ("memory/apply.py", f"{_FOR_TYPES}from remap.session import Session", False),
        ("memory/apply.py", "from remap.policy.views import Demand", True),
        ("model/bind.py", "from remap.kv.pool import BlockPool", False),
        ("session.py", "from remap.memory.apply import Changes", True),
        ("session.py", "from remap.adapters import vllm", False),
        ("cli/main.py", "from remap.session import Session", True),
    ],
)
def test_planted_imports_that_go_up_are_found(tmp_path: Path, name: str, text: str, good: bool) -> None:
    others = ("errors", "session", "policy/views", "kv/pool", "memory/state", "memory/apply", "adapters/vllm")
    files = {f"{other}.py": "" for other in others} | {name: text}
    files |= {f"{other.split('/')[0]}/__init__.py": "" for other in (*others, name) if "/" in other}
    assert (not list(rules.check_floors(_package(tmp_path, files)))) is good


@pytest.mark.parametrize(
    ("name", "text", "good"),
    [
        ("remap/session.py", "def f():\n    from remap_serve.engine import f", False),
        ("remap/cli/main.py", f"{_FOR_TYPES}import remap_serve.sim", False),
        ("remap_serve/engine/engine.py", "from remap import Session\nfrom remap.advanced import inside", True),
        ("remap_serve/engine/engine.py", "from remap.kv.spec import KVSpec\nfrom remap_serve.sim import clock", True),
        ("remap_serve/engine/engine.py", "from remap.kv.pool import BlockPool", False),
        ("remap_serve/engine/engine.py", "from remap.policy import turns", True),
        ("remap_serve/engine/engine.py", "from remap.policy import controller", False),
        ("remap_serve/engine/engine.py", f"{_FOR_TYPES}from remap.memory.apply import Changes", False),
    ],
)
def test_nothing_goes_through_the_wall_between_the_packages(tmp_path: Path, name: str, text: str, good: bool) -> None:
    src = _package(tmp_path, {"__init__.py": '__all__ = ["Session", "advanced"]', f"../{name}": text})
    assert (not list(rules.check_wall(src))) is good


def test_a_class_name_is_given_once(tmp_path: Path) -> None:
    files = {
        "a.py": "class Plan: ...\nclass _Entry: ...\ndef f():\n    class Plan: ...",
        "b.py": "class Plan: ...\nclass _Entry: ...\nclass Change: ...",
    }
    found = [v.message for v in rules.check_names(_package(tmp_path, files))]
    assert found == ["class Plan has the name of one in remap.a"]


def test_any_is_no_type_of_memory_and_policy(tmp_path: Path) -> None:
    files = {
        "memory/__init__.py": "",
        "memory/state.py": "from typing import Any, Protocol",
        "policy/__init__.py": "",
        "policy/_tables.py": "from typing import Any",
        "policy/cost.py": f"{_FOR_TYPES}from typing import Any",
        "session.py": "from typing import Any",
    }
    found = [v.message for v in rules.check_types(_package(tmp_path, files))]
    assert found == [
        f"remap.{name} uses Any; name the type, or take an object" for name in ("memory.state", "policy.cost")
    ]


def test_lazy_and_annotation_imports_are_allowed(tmp_path: Path) -> None:
    src = _package(
        tmp_path,
        {
            "session.py": "from typing import TYPE_CHECKING\nfrom . import _core\n"
            "if TYPE_CHECKING:\n    import torch\n    from .adapters import transformers\n"
            "def hooks():\n    from .adapters import transformers\n    import torch\n",
            "policy/schedule.py": "import math\nfrom ..errors import Error\n",
            "errors.py": "",
            "cli/main.py": "import typer\nfrom ..engine import LLMEngine\n",
        },
    )
    assert [str(v) for v in rules.check_python(src)] == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("include/remap/a.h", "#include <cuda.h>\n", "CUDA"),
        ("include/remap/a.h", '#include "core/arena_impl.h"\n', "private"),
        ("cpp/backend/host.cpp", '#include "core/arena.h"\n', "higher layer"),
        ("cpp/core/arena.cpp", '  #  include "schedule/ring.h"\n', "higher layer"),
        ("cpp/core/arena.cpp", '#include "remap/prefetcher.h"\n', "higher layer"),
        ("include/remap/backend.h", '#include "remap/arena.h"\n', "higher layer"),
        ("cpp/core/arena.cpp", "#include <torch/extension.h>\n", "torch"),
    ],
)
def test_planted_cpp_violations_are_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = [str(v) for v in rules.check_cpp(tmp_path)]
    assert len(found) == 1
    assert expected in found[0]


def test_importing_remap_loads_neither_torch_nor_an_engine() -> None:
    code = "import sys, json, remap; remap.attach; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = json.loads(result.stdout)
    heavy = ("torch", "numpy", "transformers", "typer", "rich", "remap_serve.engine", "remap.adapters", "remap.cli")
    assert "remap" in loaded
    assert [name for name in loaded if any(name == h or name.startswith(f"{h}.") for h in heavy)] == []
