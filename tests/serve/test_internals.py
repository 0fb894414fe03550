"""What `remap_serve` reads of `internals(tenant)` is what `remap.internals` promises to it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import remap_serve
from remap import internals
from remap.kv.cache import TenantKV
from remap.tenant import Internals
from remap_serve.engine.block_pool import SchedulerBlocks

SOURCES = sorted(Path(remap_serve.__file__).parent.rglob("*.py"))


def _promised() -> tuple[set[str], set[str]]:
    """(of the tenant, of its KV cache)"""
    of_tenant, of_kv = (internals.__doc__ or "").split("Of `internals(tenant).kv`")
    lines = (re.findall(r"^    (\w[\w, ]*?) \*? *  ", part, re.MULTILINE) for part in (of_tenant, of_kv))
    tenant, kv = ({name for line in part for name in line.split(", ")} for part in lines)
    return tenant, kv


def _read() -> tuple[set[str], set[str]]:
    """Attributes that are read of what `internals` returns, and of its `kv`; also by way of a name that it was given."""
    read: dict[str, set[str]] = defaultdict(set)

    def kind(node: ast.expr, names: dict[str, str]) -> str:
        match node:
            case ast.Call(func=ast.Name("internals")):
                return "tenant"
            case ast.Attribute(value, "kv") if kind(value, names) == "tenant":
                return "kv"
            case ast.Name() | ast.Attribute(ast.Name("self")):
                return names.get(ast.unparse(node), "")
        return ""

    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        mine: dict[str, str] = {}
        for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
            names = {name: what for name, what in mine.items() if name.startswith("self.")}
            for node in ast.walk(scope):
                if isinstance(node, ast.Assign) and scope is not tree:
                    target, value = node.targets[0], node.value
                    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                    pairs = zip(target.elts, value.elts) if both else [(target, value)]  # type: ignore[attr-defined]
                    names |= {ast.unparse(one): what for one, other in pairs if (what := kind(other, names))}
            mine |= names
            for node in ast.walk(scope):
                match node:
                    case ast.Attribute(value, name):
                        read[kind(value, names)].add(name)
                    case ast.Call(ast.Name("getattr" | "hasattr"), [value, ast.Constant(str(name)), *_]):
                        read[kind(value, names)].add(name)
    return read["tenant"], read["kv"]


def test_engines_read_what_is_promised_and_what_is_promised_is_there() -> None:
    promised_tenant, promised_kv = _promised()
    read_tenant, read_kv = _read()
    scheduler = {name for name in vars(SchedulerBlocks) if not name.startswith("_")}
    assert promised_tenant == read_tenant
    assert promised_kv >= read_kv | scheduler
    assert promised_kv - scheduler - read_kv <= {"spec", "max_blocks", "tensors"}
    for name in promised_tenant:
        assert hasattr(Internals, name) or name in {"session", "layer_bytes", "kv"}, name
    stored = {"spec", "max_blocks", "block_tokens", "host", "pool", "geometry", "copied_out_bytes", "copied_in_bytes"}
    for name in promised_kv:
        assert hasattr(TenantKV, name) or name in stored, name
