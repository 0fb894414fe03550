"""Pack vLLM, its packages and this checkout for a machine without a network: two parts of less than 64 MiB each.

    python -m bench.gpu.vllm.pack OUT python3.12 [--work build/vllm-pack]

The Python is of the machine's version. It downloads the wheels (vLLM's by its tested version), and builds remap. What lies in
--work is not fetched again. The machine has torch, triton, numpy and transformers itself. vLLM asks for a newer torch, but its
libraries name no C++ symbol of torch's, and load with 2.11.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VLLM = "0.32.0"
MOST_BYTES = 64 << 20
ARCHITECTURE = 90  # Hopper's, as a fat binary's entries name it
# Libraries that a dense model in bfloat16 on Hopper does not load.
WITHOUT = ("_vllm_fa2_C", "_flashkda", "_deepselect", "_flashmla", "_qutlass", "deep_gemm", "_rust")
# Kernels of other devices, headers, and sources that vLLM would compile.
FOLDERS = ("fmha_sm100", "cutlass", "static", "include", "csrc")
LEFT_OUT = (".hpp", ".h", ".cuh", ".cu", ".js", ".css", ".png", ".map")
PRUNED = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
_FATBIN, _SASS, _PTX = 0xBA55ED50, 2, 1


def wanted(name: str, nbytes: int) -> bool:
    """Whether a file of vLLM's wheel is carried. name: within the wheel."""
    path = Path(name)
    if any(part in FOLDERS for part in path.parts) or (path.suffix == ".so" and any(each in name for each in WITHOUT)):
        return False
    if path.suffix == ".json" and "configs" in name:
        return "H200" in path.name  # tables of tuned kernels
    return nbytes == 0 or not (path.suffix in LEFT_OUT or path.name == "vllm-rs")


def fat_entries(data: bytes | bytearray, begin: int, end: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """The entries of each fat binary in this part of a library: (kind, architecture, where its code is, bytes)."""
    at = begin
    while (at := data.find(struct.pack("<I", _FATBIN), at, end)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, stop, found = at + header, at + header + size, []
        while entry < stop:
            kind, _, own = struct.unpack_from("<HHI", data, entry)
            (payload,) = struct.unpack_from("<Q", data, entry + 8)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            found.append((kind, architecture, entry + own, payload))
            entry += own + payload
        yield found
        at = stop


def pruned(data: bytes, begin: int, end: int, architecture: int = ARCHITECTURE) -> bytearray:
    """The library with zeros for device code of other architectures, so that it compresses. Sizes, offsets and headers stay, so a
    driver finds what it found before: code of this architecture, or where there is none the newest PTX that it may compile."""
    made = bytearray(data)
    for entries in fat_entries(data, begin, end):
        kept = [each for each in entries if each[0] == _SASS and each[1] == architecture]
        if not kept:
            kept = sorted(
                (each for each in entries if each[0] == _PTX and each[1] <= architecture), key=lambda each: each[1]
            )[-1:]
        for each in entries:
            if each not in kept:
                made[each[2] : each[2] + each[3]] = bytes(each[3])
    return made


def section(library: Path, name: str = ".nv_fatbin") -> tuple[int, int]:
    """(begin, end) of a section in the file. Raises SystemExit if there is none."""
    told = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"{re.escape(name)}\s+\S+\s+\S+\s+(\w+)\s+(\w+)", told)
    if found is None:
        raise SystemExit(f"{library} has no section {name}; nothing was packed")
    begin = int(found[1], 16)
    return begin, begin + int(found[2], 16)


def packed(out: Path, root: Path, names: Iterable[str]) -> None:
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for name in names:
            archive.add(root / name, name)


def run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, stdout=sys.stderr)


def vllm_tree(python: str, work: Path) -> Path:
    """vLLM's files, without what is not carried, and with pruned libraries."""
    tree, wheels = work / "vllm", work / "wheels"
    if tree.exists():
        return tree
    run(python, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, f"vllm=={VLLM}")
    (wheel,) = wheels.glob("vllm-*.whl")
    half = work / "half"
    shutil.rmtree(half, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for each in archive.infolist():
            if not each.is_dir() and wanted(each.filename, each.file_size):
                archive.extract(each, half)
    for name in PRUNED:
        (library,) = half.rglob(f"{name}*.so")
        library.write_bytes(pruned(library.read_bytes(), *section(library)))
    half.rename(tree)
    return tree


def site(python: str, work: Path, kind: str, *what: object) -> Path:
    """Packages in a folder of their own."""
    made, half = work / kind, work / f"{kind}-half"
    if not made.exists():
        shutil.rmtree(half, ignore_errors=True)
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", half, *what)
        half.rename(made)
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    made.add_argument("out", type=Path)
    made.add_argument("python", help="of the machine's version")
    made.add_argument("--work", type=Path, default=ROOT / "build" / "vllm-pack")
    return made


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    tree = vllm_tree(given.python, given.work)
    packages = site(given.python, given.work, "deps", "-r", Path(__file__).with_name("packages.txt"))
    shutil.rmtree(given.work / "remap", ignore_errors=True)  # this checkout's, each time
    build = site(
        given.python,
        given.work,
        "build",
        "pybind11",
        "scikit-build-core",
        "pathspec",
        "packaging",
        "hatchling",
        "trove-classifiers",
        "pluggy",
    )
    os.environ["PYTHONPATH"] = str(build)
    for folder in (ROOT, ROOT / "src/remap_serve"):
        run(
            given.python,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            given.work / "own",
            folder,
        )
    site(given.python, given.work, "remap", *sorted((given.work / "own").glob("remap_*.whl")))
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    packed(given.out / "a.tar.xz", tree, files)
    packed(given.out / "b.tar.xz", given.work, (packages.name, "remap"))
    for part in ("a", "b"):
        nbytes = (given.out / f"{part}.tar.xz").stat().st_size
        print(f"{part}.tar.xz: {nbytes / 2**20:.1f} MiB", flush=True)
        if nbytes >= MOST_BYTES:
            raise SystemExit(
                f"part {part} has {nbytes} bytes, {MOST_BYTES} are carried at most; leave more out (WITHOUT, packages.txt)"
            )


if __name__ == "__main__":
    main()
