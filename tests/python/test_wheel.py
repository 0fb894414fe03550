"""One wheel imports everywhere: its module is linked with nothing of CUDA or torch, and fails readably without a driver.

The checks are those of tools/wheel_check.py, which `make wheel-check` runs on a whole wheel in a clean environment.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from subprocesses import ROOT, load_tool

from remap import _core
from remap.errors import DriverError

MODULE = Path(_core.__file__)


checks = load_tool("wheel_check")


@pytest.fixture
def elftools() -> None:
    pytest.importorskip("elftools", reason="pyelftools comes with auditwheel: pip install '.[dev]'")


@pytest.mark.usefixtures("elftools")
def test_the_module_is_linked_with_nothing_of_cuda_or_torch() -> None:
    assert checks.foreign_links(MODULE) == []
    needed, undefined, _ = checks.linkage(MODULE)
    assert any(name.startswith("libc.so") for name in needed), needed  # the reader sees what there is
    assert "PyModule_Create2" in undefined or "PyModuleDef_Init" in undefined


@pytest.mark.usefixtures("elftools")
def test_the_module_shows_nothing_but_its_entry() -> None:
    """With a compiler that has a static C++ library alone, its symbols would mix with those of numpy's and torch's."""
    assert checks.linkage(MODULE)[2] == ["PyInit__core"]
    assert checks.needless_exports(MODULE) == []


def test_what_counts_as_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = ["libc.so.6", "libcuda.so.1", "libtorch_cpu.so", "libstdc++.so.6"]
    functions = ["cuInit", "cudaMalloc", "memcpy", "curl_easy_init", "_ZN5remap4cuda5ApiC1Ev", "cuMemMap"]
    shown = ["PyInit__core", "_ZNSt8numpunctIcE2idE"]
    monkeypatch.setattr(checks, "linkage", lambda module: (libraries, functions, shown))
    expected = ["libcuda.so.1", "libtorch_cpu.so", "cuInit", "cudaMalloc", "cuMemMap"]
    assert checks.foreign_links(MODULE) == expected
    assert checks.needless_exports(MODULE) == shown[1:]


@pytest.mark.usefixtures("elftools")
def test_auditwheel_calls_a_wheel_of_it_manylinux(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: pip install '.[dev]'")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = tmp_path / f"remap_llm-0-{tag}-{tag}-linux_{checks.os.uname().machine}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(MODULE, f"remap/{MODULE.name}")
        about = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n"
        archive.writestr("remap_llm-0.dist-info/WHEEL", about)
        archive.writestr("remap_llm-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: remap-llm\nVersion: 0\n")
        archive.writestr(
            "remap_llm-0.dist-info/RECORD", f"remap/{MODULE.name},,\n"
        )  # auditwheel looks at what is listed
    assert checks.platform_tag(wheel).startswith("manylinux_")


def test_it_has_every_file_of_the_sources() -> None:
    """Templates and tables too, which no import would miss."""
    wanted = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    wanted -= {Path("remap_serve/pyproject.toml"), Path("remap_serve/README.md")}
    assert {Path("remap_serve/cli/templates/demo.html.j2"), Path("remap/policy/tables/machines.json")} <= wanted
    assert [str(path) for path in sorted(wanted) if not (MODULE.parent.parent / path).is_file()] == []


def run(program: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
        capture_output=True, text=True, timeout=60, env=checks.clean_environment(),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_it_imports_and_works_where_there_is_no_driver() -> None:
    check = checks.installed_check()
    assert run(check) == (0, "")
    code, said = run("import ctypes.util\nctypes.CDLL('libm.so.6')\n" + check.replace("libcudart", "libm.so"))
    assert code == 1 and "importing remap loaded ['libm.so.6']" in said


@pytest.mark.parametrize("library", ["/nonexistent/libcuda.so.1", "libm.so.6"], ids=["missing", "not CUDA"])
def test_a_backend_without_a_driver_says_which_library_and_what_next(library: str) -> None:
    for ask in (_core.probe_cuda, _core.make_cuda_backend):
        with pytest.raises(DriverError) as caught:
            ask(library=library)
        assert caught.value.library == library
        assert library in str(caught.value)
