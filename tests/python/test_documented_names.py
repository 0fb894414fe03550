"""Names that the pages use exist: variables of the environment, the library's Python, and what blocks of Python do.

A block that imports something runs, with the names that its page has introduced. Others are read: calls of the library's
functions have to fit their signatures, also of what the pages call `session`, `tenant`, and so on (`NAMED`).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import documented
import pytest
from documented import PAGES, ROOT, Code

adapter = pytest.importorskip("remap.adapters.transformers", reason="pages have models of transformers")

import remap  # noqa: E402
from remap.adapters import settings  # noqa: E402
from remap.kv.public import HostKV, KVCache  # noqa: E402
from remap.memory.activate import ActivationReport  # noqa: E402
from remap_serve.sim import policies  # noqa: E402

VARIABLE = re.compile(r"REMAP_[A-Z0-9_]*[A-Z0-9]")
OURS_ALONE = {"REMAP_METRICS_FILE"}
"""Variables that the library sets for its own processes."""
NAMED: dict[str, tuple[type, ...]] = {
    "session": (remap.Session,),
    "tenant": (remap.Tenant,),
    "kv": (KVCache, remap.KVSpec),
    "host": (HostKV,),
    "report": (remap.StepReport,),
    "turn": (ActivationReport,),
    "attached": (adapter.Attached,),
}
ENGINES = ("vllm", "sglang")
"""What an adapter may need to be imported, and nobody has beside the other."""


# -- the environment --------------------------------------------------------------------------------------------------
@cache
def sources(*folders: str) -> str:
    """The Python in them."""
    return "".join(
        path.read_text(encoding="utf-8") for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    )


def variables(*folders: str) -> set[str]:
    """Names that stand in the Python for themselves, as in `os.environ["REMAP_MODE"]`."""
    return set(re.findall(r'"(REMAP_[A-Z0-9_]+)"', sources(*folders)))


def of_the_emulated_driver() -> set[str]:
    text = (ROOT / "tests/emulated_driver/settings.cpp").read_text(encoding="utf-8")
    return {f"REMAP_EMULATED_{name}" for name in re.findall(r'\{"\w+", "(\w+)",', text)}


def of_the_build() -> set[str]:
    return set(re.findall(r"(?:option|set)\((REMAP_\w+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")))


def in_pages() -> Iterator[tuple[str, Code]]:
    """(variable, where). `_DEVICES` behind `REMAP_EMULATED_MEMORY` is REMAP_EMULATED_DEVICES."""
    for page in PAGES:
        whole, line = "", 0
        for code in (*documented.inline(page), *documented.blocks(page)):
            for name in VARIABLE.findall(code.text):
                whole, line = name, code.line
                yield name, code
            if line == code.line and re.fullmatch(r"_[A-Z0-9_]+", code.text):
                parts = whole.split("_")
                starts = ("_".join(parts[:count]) for count in range(1, len(parts)))
                known = of_the_emulated_driver() | variables("src")
                yield next((start + code.text for start in starts if start + code.text in known), code.text), code


def test_a_variable_that_a_page_names_exists() -> None:
    known = variables("src", "bench", "tests") | of_the_emulated_driver() | of_the_build()
    assert [str(code) for name, code in in_pages() if name not in known] == []


def test_a_variable_that_the_library_reads_is_in_the_pages() -> None:
    """Or in the list to which the pages of engines send their readers."""
    told = {name for name, _ in in_pages()} | set(VARIABLE.findall(settings.__doc__ or ""))
    assert sorted((variables("src") | of_the_emulated_driver()) - told - OURS_ALONE) == []


def test_settings_in_a_sentence_are_settings() -> None:
    """`--additional-config '{"remap": {...}}'` of vLLM."""
    known = {field.name for field in dataclasses.fields(settings.Settings)}
    found = [
        set(json.loads(text)["remap"])
        for page in PAGES
        for code in documented.inline(page)
        for text in re.findall(r"""--additional-config '(.*)'""", code.text)
    ]
    assert found and set().union(*found) <= known


# -- Python -----------------------------------------------------------------------------------------------------------
def attribute(of: Any, name: str) -> Any:
    """None if it is there and has no value before an object is made. Raises AttributeError."""
    try:
        return inspect.getattr_static(of, name) if inspect.isclass(of) else getattr(of, name)
    except AttributeError:
        if inspect.isclass(of) and (name in of.__annotations__ or f"self.{name}" in inspect.getsource(of)):
            return None
        if inspect.ismodule(of):
            try:
                return importlib.import_module(f"{of.__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name in ENGINES:
                    return None
        raise


def whose(node: ast.expr, text: str) -> list[Any]:
    """What the expression may be: of a name in the pages every class that it stands for. [] for what is not ours."""
    if isinstance(node, ast.Name):
        return [remap] if node.id == "remap" else list(NAMED.get(node.id, ()))
    if not isinstance(node, ast.Attribute) or not (of := whose(node.value, text)):
        return []
    found = []
    for one in of:
        try:
            found.append(attribute(one, node.attr))
        except AttributeError:
            continue
    assert found, f"{text}: {ast.unparse(node)} does not exist"
    return [one for one in found if one is not None]


def check(tree: ast.AST, text: str) -> None:
    """Every name and every call of ours in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whose(node, text)
        if isinstance(node, ast.Call):
            for called in whose(node.func, text):
                method = (
                    isinstance(node.func, ast.Attribute) and not inspect.isclass(called) and inspect.isfunction(called)
                )
                own = method and isinstance(node.func.value, ast.Name) and node.func.value.id in NAMED
                given = [None] * (own + sum(not _omitted(one) for one in node.args))
                named = {one.arg: None for one in node.keywords if one.arg}
                try:
                    inspect.signature(called).bind_partial(*given, **named)
                except TypeError as error:
                    raise AssertionError(f"{text}: {ast.unparse(node)}: {error}") from error


def _omitted(node: ast.expr) -> bool:
    """`...`, or `*these`."""
    return isinstance(node, ast.Starred) or (isinstance(node, ast.Constant) and node.value is ...)


def pieces() -> Iterator[tuple[Code, ast.AST]]:
    """Python of the pages that can be read: blocks, and code in sentences that begins with one of our names."""
    for page in PAGES:
        for code in documented.blocks(page):
            if code.kind == "python" and not code.text.startswith("# src/"):  # quotations, which test_docs.py compares
                yield code, ast.parse(code.text)
        for code in documented.inline(page):
            if re.match(rf"(remap|{'|'.join(NAMED)})\.\w", code.text):
                try:
                    yield code, ast.parse(code.text.replace("=)", "=...)").replace("=,", "=...,"))
                except SyntaxError:
                    continue  # `session.step({name: Demand(blocks), ...})` and the like


def test_names_and_arguments_of_ours_exist() -> None:
    for code, tree in pieces():
        if f'"{code.text}"' not in sources("src"):  # the name of a logger, or of a range for profilers
            check(tree, str(code))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "remap.sesion",
            "remap.advanced.no",
            "remap.Session(budget=1)",
            "session.steps({})",
            "tenant.forward(phases=1)",
        ),
        *(
            "remap.KVSpec(..., blocks=1)",
            "kv.copy_away(ids)",
            "remap.Config(speed=1)",
            "report.moves",
            "remap.policy.nothing",
        ),
    ],
)
def test_the_check_finds_what_is_wrong(text: str) -> None:
    with pytest.raises(AssertionError, match=r"remap|session|tenant|kv|report"):
        check(ast.parse(text), "here")


IMPORTING = [
    code
    for page in PAGES
    for code in documented.blocks(page)
    if code.kind == "python" and "import " in code.text and page.name != "README.md"  # test_docs.py runs the README's
]


@pytest.mark.parametrize("code", IMPORTING, ids=lambda code: f"{code.page}:{code.line}")
def test_a_block_that_imports_runs(code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names of its page's text, and in little memory."""
    torch = pytest.importorskip("torch", reason="the blocks serve models")
    transformers = pytest.importorskip("transformers", reason="the blocks serve models")
    from test_documented_commands import save_model, write_requests

    from remap_serve.engine import LLMEngine

    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "MODEL", layers=8)
    write_requests(tmp_path / "requests.jsonl")
    model = transformers.AutoModelForCausalLM.from_pretrained("MODEL").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("MODEL")
    shape = {"layers": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    text = code.text.replace("    ...,", "    **shape,").replace('"8GiB"', '"256MiB"').replace('"600MiB"', '"64MiB"')
    with remap.Session("64MiB") as session:
        known = {"model": model, "tokenizer": tokenizer, "shape": shape}
        if "engine," in text and "engine =" not in text:
            tenant = session.attach(model, kv=remap.KVSpec(**shape, min_blocks=64, max_blocks=64), hooks=False)
            known["engine"] = LLMEngine(model, tenant, session=session)
        known["inputs"] = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        exec(compile(text, str(code), "exec"), known)
    if code.page.endswith("offline.md"):
        _, told = (block.text for block in documented.blocks(ROOT / "docs/offline.md") if block.kind == "json")
        kinds = [set(json.loads(line)) for line in told.splitlines()]
        found = [set(json.loads(line)) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(found) == 2 and all(keys | {"text"} in [kind | {"text"} for kind in kinds] for keys in found)


def test_a_source_that_a_page_names_is_there() -> None:
    folders = ("src", "cpp", "include", "python", "bench", "tests", "tools", "examples")
    there = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        str(code)
        for page in PAGES
        for code in documented.inline(page)
        for name in re.findall(r"(?<![\w*<])[\w/]+\.(?:py|h|cpp|sh)\b(?!\()", code.text)
        if not any(path.endswith(f"/{name.lstrip('/')}") for path in there)
    ]
    assert missing == []


def test_policies_of_the_simulators_page_exist() -> None:
    """Each name of its two tables, and each of the words that may follow `remap:`."""
    text = "".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("simulate", "notes/simulate"))
    tables = re.findall(r"^\| name \| behaviour.*?\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert len(tables) == 2
    names = []
    for row in "\n".join(tables).splitlines():
        first, second = row.split("|")[1:3]
        names += re.findall(r"`([^`]+)`", first)
        if "remap:A+B" in first:
            names.remove("remap:A+B")
            names += [
                word if word.startswith("remap") else f"remap:{word}" for word in re.findall(r"`([\w:=.-]+)`", second)
            ]
    names.remove("remap.advanced.Knobs")
    assert len(names) > 20
    for name in names:
        assert policies.find(name).name, name


def test_the_simulators_page_counts_its_tables() -> None:
    tables = ROOT / "src/remap/policy/tables"
    machines, models = (
        len(json.loads((tables / f"{name}.json").read_text(encoding="utf-8"))[name]) for name in ("machines", "models")
    )
    said = f"{machines} machines and {models} models come with the package"
    assert said in (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
