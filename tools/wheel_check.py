"""Is this a wheel that imports everywhere? `python tools/wheel_check.py build/dist/remap_*.whl`

1. `auditwheel show` calls it manylinux: it needs no libraries but those that every Linux of that age has.
2. Its module links neither the CUDA driver nor torch, asks the linker for no driver function, and shows nothing to others but
   the function that Python calls.
3. In a new virtual environment, without torch and without a driver, it imports, opens an arena on the CPU, and says readably
   that there is no driver.
4. `remap doctor` runs there with the extra `cli`, and `remap plan` says what to install.
5. With the wheel of remap-serve, if one is given, `remap plan` runs, and the templates of pages are there.

`--installed` does 3 alone, for the interpreter that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

# What the module may not be linked with, by the beginnings of library names.
FOREIGN_LIBRARIES = ("libcuda", "libcudart", "libnvidia", "libtorch", "libc10", "libpython")
# Functions of the CUDA driver and runtime: cuInit, cudaMalloc. A C++ name begins with _Z.
CUDA_SYMBOL = re.compile(r"^(cu|cuda)[A-Z]")

INSTALLED_CHECK = """
import sys
import remap
from remap import _core

with remap.Session(capacity="16MiB", device="cpu") as session:
    assert session.snapshot().pages.total == 8
libraries = {line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if ".so" in line}
foreign = sorted(name for name in libraries if name.startswith(FOREIGN))
assert not foreign, f"importing remap loaded {foreign}"
assert "torch" not in sys.modules
try:
    _core.make_cuda_backend(library="/nonexistent/libcuda.so.1")
except remap.DriverError as error:
    assert "/nonexistent/libcuda.so.1" in str(error), f"the error does not name the library: {error}"
else:
    raise AssertionError("a backend without a driver")
"""

TEMPLATES_CHECK = """
import jinja2

pages = jinja2.Environment(loader=jinja2.PackageLoader("remap_serve.cli"))
names = pages.list_templates()
assert "demo.html.j2" in names, names
for name in names:
    pages.get_template(name)
print(*names)
"""


def installed_check() -> str:
    """The program for step 3: exits with 0, or with an AssertionError that says what is wrong."""
    names = tuple(
        name for name in FOREIGN_LIBRARIES if name != "libpython"
    )  # an interpreter may be linked with its own
    return INSTALLED_CHECK.replace("FOREIGN", repr(names))


def clean_environment() -> dict[str, str]:
    """This process's environment without what would choose a device, a driver or another copy of the package."""
    return {k: v for k, v in os.environ.items() if not k.startswith("REMAP_") and k not in ("PYTHONPATH", "PYTHONHOME")}


def platform_tag(wheel: Path) -> str:
    """What `auditwheel show` calls the wheel: "manylinux_2_28_x86_64", or "linux_x86_64" for one that fits no policy."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"auditwheel ended with {done.returncode} on {wheel}:\n{done.stdout}{done.stderr}")
    return str(json.loads(done.stdout)["overall_tag"])


def linkage(module: Path) -> tuple[list[str], list[str], list[str]]:
    """(libraries that it names as needed, undefined symbols, symbols that it shows to others) of a shared library."""
    from elftools.elf.elffile import ELFFile

    with module.open("rb") as file:
        elf = ELFFile(file)
        needed = [
            tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"
        ]
        symbols = [symbol for symbol in elf.get_section_by_name(".dynsym").iter_symbols() if symbol.name]
        undefined = [symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"]
        shown = [symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"]
    return needed, undefined, shown


def foreign_links(module: Path) -> list[str]:
    """What the module is linked with and should not be; empty if all is well."""
    needed, undefined, _ = linkage(module)
    return [name for name in needed if name.startswith(FOREIGN_LIBRARIES)] + [
        name for name in undefined if CUDA_SYMBOL.match(name)
    ]


def needless_exports(module: Path) -> list[str]:
    """Symbols that the module shows to others and should not (python/exports.map says why); empty if all is well."""
    return [name for name in linkage(module)[2] if not name.startswith("PyInit_")]


def run(command: list[str | Path], code: int = 0) -> str:
    """What it said on standard output, or, of a code that is not 0, on standard error. Raises SystemExit if it ends with
    another."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=clean_environment(), cwd="/")
    if done.returncode != code:
        raise SystemExit(f"{command[0]} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done.stderr if code else done.stdout


def check_wheel(wheel: Path, serve: Path | None) -> None:
    """All steps; raises SystemExit at the first that fails."""
    tag = platform_tag(wheel)
    print(f"auditwheel: {tag}")
    if not tag.startswith("manylinux"):
        raise SystemExit(f"{wheel.name} fits no manylinux policy: `auditwheel show` says why")
    with tempfile.TemporaryDirectory(prefix="remap-wheel-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            modules = [name for name in archive.namelist() if name.endswith(".so")]
            if len(modules) != 1:
                raise SystemExit(f"{wheel.name} has {len(modules)} shared libraries, expected one: {modules}")
            module = Path(archive.extract(modules[0], folder))
        foreign = foreign_links(module)
        if foreign:
            raise SystemExit(f"{modules[0]} is linked with {', '.join(foreign)}")
        shown = needless_exports(module)
        if shown:
            raise SystemExit(f"{modules[0]} shows {len(shown)} symbols to others, {shown[0]} among them; expected none")
        print(f"linked with: {', '.join(linkage(module)[0])}")

        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python, pip = environment / "bin" / "python", [environment / "bin" / "python", "-m", "pip", "install", "-q"]
        run([*pip, "--no-deps", wheel.resolve()])
        run([python, "-c", installed_check()])
        print("a clean environment: imports, opens an arena, misses the driver readably")
        run([*pip, f"{wheel.resolve()}[cli]"])
        report = json.loads(run([environment / "bin" / "remap", "doctor", "--json"]))
        print(f"remap doctor: {len(report['checks'])} checks, ok: {report['ok']}")
        plan: list[str | Path] = [environment / "bin" / "remap", "plan", "--help"]
        print(run(plan, 2).strip())
        if serve is not None:
            run([*pip, "--no-deps", serve.resolve()])
            print(run(plan).strip().splitlines()[0].strip())
            print(f"templates: {run([python, '-c', TEMPLATES_CHECK]).strip()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", nargs="?", type=Path, help="of remap-llm")
    parser.add_argument("serve", nargs="?", type=Path, help="of remap-serve")
    parser.add_argument("--installed", action="store_true", help="check the remap that this interpreter imports")
    arguments = parser.parse_args()
    if arguments.installed:
        run([sys.executable, "-c", installed_check()])
        print("installed: imports, opens an arena, misses the driver readably")
    elif arguments.wheel is not None:
        check_wheel(arguments.wheel, arguments.serve)
    else:
        parser.error("a wheel, or --installed")
