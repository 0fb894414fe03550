"""Print the requirements of extras of both distributions, one a line: `python tools/extras.py test dev`.

The Makefile installs them before the package itself is built (linters and CMake must be there even when the C++ does
not compile), so that every version bound stands in a pyproject.toml alone. The name `build` means build-system.requires.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10: every pip carries the same parser
    from pip._vendor import tomli as tomllib

SERVE = Path("src/remap_serve/pyproject.toml")  # of what is built on the library


def requirements(pyproject: Path, names: list[str]) -> list[str]:
    """Requirement strings of the named extras, in order, each once. Raises SystemExit naming the known ones."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    known = {"build": table["build-system"]["requires"]}
    for file in (pyproject, pyproject.parent / SERVE):
        known |= tomllib.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no extra {', '.join(unknown)} in {pyproject}; there are {', '.join(sorted(known))}")
    return list(dict.fromkeys(requirement for name in names for requirement in known[name]))


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).resolve().parent.parent / "pyproject.toml", sys.argv[1:])))
