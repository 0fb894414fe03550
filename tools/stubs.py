"""src/remap/_core.pyi: the C++ core as the type checker sees it, generated from its bindings.

    python tools/stubs.py make     writes it (make stubs)
    python tools/stubs.py check    exit code 1 if the installed core has other names or signatures

What is written is what pybind11 says of each function in its docstring. A binding that names a C++ type there, since the type is
bound later or a default has no name in Python, is an error: mend the binding.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "src" / "remap" / "_core.pyi"
HEADER = "# Generated from the bindings (python/*.cpp): make stubs. tools/import_rules.py says which modules may use the core.\n"
ENUMS = "ErrorKind|HostUse|ShareableHandle:remap._core"
"""Enumerations whose members are defaults."""
BUFFER = ("collections.abc.Buffer", "typing_extensions.Buffer")
"""What pybind11 says of a buffer from Python 3.12 on, and before, which every Python has: with its import."""
IMPORTED = "import typing_extensions\n"


def generated() -> str:
    """The stub of the core that `import remap` finds. Raises subprocess.CalledProcessError, after what pybind11-stubgen said, for
    a signature that is no Python."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"remap._core -o {folder} --enum-class-locations {ENUMS} --exit-code"  # of what it can't read
        subprocess.run([sys.executable, "-m", "pybind11_stubgen", *options.split()], check=True)
        made = Path(folder) / "remap" / "_core.pyi"
        text = made.read_text(encoding="utf-8").replace(*BUFFER)
        if IMPORTED not in text:
            text = text.replace("import typing\n", f"import typing\n{IMPORTED}", 1)
        made.write_text(HEADER + text, encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "ruff", "format", "-q", "--config", ROOT / "pyproject.toml", made], check=True
        )
        return made.read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("make", "check"))
    command = parser.parse_args().command
    made = generated()
    if command == "make":
        STUB.write_text(made, encoding="utf-8")
        return 0
    if made == STUB.read_text(encoding="utf-8"):
        return 0
    print(
        f"{STUB.relative_to(ROOT)} is not what the core says of itself; nothing was changed. `make stubs` writes it",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
