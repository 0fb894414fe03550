"""Each source that is shipped names its license in its first line: `python tools/spdx.py` writes it where it lacks.

With `--check` it writes nothing, and names the files that lack it (exit code 1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = "SPDX-License-Identifier: Apache-2.0"
COMMENTS = {".py": "# ", ".cpp": "// ", ".h": "// "}


def lacking() -> Iterator[Path]:
    """Sources of the wheel and of the C++ package, without the line."""
    for folder in ("src/remap", "cpp", "include", "python"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in COMMENTS and not path.read_text(encoding="utf-8").startswith(
                COMMENTS[path.suffix] + TEXT
            ):
                yield path


if __name__ == "__main__":
    found = list(lacking())
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(f"{path.relative_to(ROOT)}: no license; python tools/spdx.py" for path in found))
    for path in found:
        path.write_text(f"{COMMENTS[path.suffix]}{TEXT}\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
