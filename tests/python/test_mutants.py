"""The mutants (tools/mutants.py) still apply to the sources and name tests that exist; what a run means is judged right."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from subprocesses import ROOT, load_tool

tool = load_tool("mutants")
each_mutant = pytest.mark.parametrize("mutant", tool.MUTANTS, ids=lambda mutant: mutant.name)


def _tests_in(path: Path) -> set[str]:
    """The names of the tests of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@each_mutant
def test_a_mutant_applies_and_is_a_change_of_code(mutant: Any) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1
    changed = tool.mutated(source, mutant)
    assert changed is not None
    assert changed != source
    if not mutant.is_cpp:
        # Comments and layout are not in the tree: a mutant that changes only these would be none.
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@each_mutant
def test_a_mutant_names_tests_that_exist(mutant: Any) -> None:
    assert mutant.tests
    for test in mutant.tests:
        if mutant.is_cpp:
            assert (ROOT / "tests" / "cpp" / f"{test}.cpp").is_file()
            continue
        name, _, function = test.partition("::")
        (path,) = (path for suite in ("python", "serve") if (path := ROOT / "tests" / suite / name).is_file())
        assert not function or function.partition("[")[0] in _tests_in(path)


def test_all_areas_have_mutants_and_names_are_unique() -> None:
    names = [mutant.name for mutant in tool.MUTANTS]
    assert len(names) == len(set(names)) >= 40
    areas = Counter(mutant.area for mutant in tool.MUTANTS)
    assert set(areas) == {"planner", "schedule", "controller", "pool", "lending", "executor", "cluster", "engine"}
    assert min(areas.values()) >= 5
    for mutant in tool.MUTANTS:
        assert mutant.breaks.endswith(".")
        assert mutant.file.startswith(("cpp/",) if mutant.is_cpp else ("src/remap/", "src/remap_serve/", "bench/lab/"))


@pytest.mark.parametrize(
    ("code", "pytests", "ctests"),
    [
        (0, tool.SURVIVED, tool.SURVIVED),
        (1, tool.KILLED, tool.NOT_JUDGED),
        (2, tool.NOT_JUDGED, tool.NOT_JUDGED),  # interrupted: an error while collecting, too
        (3, tool.NOT_JUDGED, tool.NOT_JUDGED),
        (4, tool.NOT_JUDGED, tool.NOT_JUDGED),
        (5, tool.NOT_JUDGED, tool.NOT_JUDGED),  # no test was found
        (8, tool.NOT_JUDGED, tool.KILLED),
        (-11, tool.NOT_JUDGED, tool.NOT_JUDGED),
        (None, tool.KILLED, tool.KILLED),
    ],
)
def test_only_failed_tests_and_time_kill(code: int | None, pytests: str, ctests: str) -> None:
    assert tool.judge_pytest(tool.Ended(code, "")).outcome == pytests
    assert tool.judge_ctest(tool.Ended(code, "")).outcome == ctests


def test_a_mutant_whose_text_is_not_there_once_does_not_apply() -> None:
    mutant = tool.Mutant("pool-x", "src/remap/kv/pool.py", "a = 1", "a = 2", "It is wrong.", ("test_kv.py",))
    assert tool.mutated("a = 1\nb = 1\n", mutant) == "a = 2\nb = 1\n"
    assert tool.mutated("a = 1\na = 1\n", mutant) is None
    assert tool.mutated("b = 1\n", mutant) is None
    assert (mutant.module, mutant.area, mutant.is_cpp) == ("remap.kv.pool", "pool", False)


def test_a_copy_is_as_it_was_after_a_mutant(tmp_path: Path) -> None:
    copy = tool.Copy(tmp_path, ["src/remap/kv/spec.py"])
    path = tmp_path / "src" / "remap" / "kv" / "spec.py"
    source = path.read_text(encoding="utf-8")
    mutant = next(mutant for mutant in tool.MUTANTS if mutant.file == "src/remap/kv/spec.py")
    with copy.with_mutant(mutant) as applies:
        assert applies
        assert path.read_text(encoding="utf-8") == tool.mutated(source, mutant)
    assert path.read_text(encoding="utf-8") == source
    gone = tool.Mutant("pool-x", "src/remap/moved.py", "a = 1", "a = 2", "It is wrong.", ("test_kv.py",))
    with copy.with_mutant(gone) as applies:
        assert not applies


def test_what_becomes_of_a_mutant_is_told_apart(tmp_path: Path) -> None:
    """In a copy of the sources and of one small file of tests: what they import is the copy, and only a failed test kills."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "src" / "remap").rglob("*.py")]
    suite = (f"tests/python/{name}.py" for name in ("conftest", "suite", "effort", "fixtures", "test_rental"))
    copy = tool.Copy(tmp_path, [*files, "pyproject.toml", *suite])
    copy.add_core(tool.compiled_core())

    def verdict(text: str, replacement: str) -> Any:
        test = "test_rental.py::test_dwell_and_forfeit"
        return tool.try_python(
            copy, tool.Mutant("x", "src/remap/policy/rental.py", text, replacement, "It is wrong.", (test,))
        )

    dwell = "or self._steps < self.dwell:"
    assert verdict(dwell, "or self._steps < 1:").outcome == tool.KILLED
    assert verdict(dwell, "or self.dwell > self._steps:").outcome == tool.SURVIVED
    assert verdict("of nothing", "of something").outcome == tool.GONE
    unfit = verdict("class HeadroomGuard:", "import none_such\nclass HeadroomGuard:")
    assert unfit.outcome == tool.NOT_JUDGED
    assert "ModuleNotFoundError" in unfit.detail
    copy.env["PYTHONPATH"] = str(tmp_path / "plugin")  # remap itself is found where it is installed then
    (tmp_path / "plugin").mkdir()
    (tmp_path / "src" / "remap_mutants_plugin.py").rename(tmp_path / "plugin" / "remap_mutants_plugin.py")
    elsewhere = verdict(dwell, "or self._steps < 1:")
    assert elsewhere.outcome == tool.NOT_JUDGED
    assert "not from the copy" in elsewhere.detail


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    env = tool.Copy(tmp_path, []).env
    assert tool.run((sys.executable, "-c", "print(1); raise SystemExit(7)"), tmp_path, env, 60.0) == tool.Ended(
        7, "1\n"
    )
    assert tool.run((sys.executable, "-c", "import time; time.sleep(600)"), tmp_path, env, 0.2).code is None


def test_selecting_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.selected(None) == list(tool.MUTANTS)
    assert {mutant.area for mutant in tool.selected("pool-")} == {"pool"}
    assert {mutant.file for mutant in tool.selected("*/lend.py")} == {"src/remap/memory/lend.py"}
    assert tool.main(["--list", "--only", "pool-"]) == 0
    assert "pool-block-counted-twice" in capsys.readouterr().out
    for wrong in (["--only", "no such mutant"], ["--jobs", "0"], ["--jobs", "x"], ["more"]):
        with pytest.raises(SystemExit) as ended:
            tool.main(wrong)
        assert ended.value.code == 2
