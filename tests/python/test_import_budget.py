"""`import remap` is cheap: what it loads is counted. How long that takes is a benchmark (bench/test_import_time.py): processor
time depends on what else the machine does, by its caches."""

from __future__ import annotations

import subprocess
import sys

MOST_OWN, MOST_OTHERS = 89, 90
"""Modules: of remap, and of Python's own (74 and 70 with Python 3.11; other versions have other internals)."""
PROGRAM = """
import sys
before = set(sys.modules)
import remap
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def test_import_remap_loads_few_modules_and_no_package_of_others() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300, capture_output=True, text=True)
    loaded = done.stdout.split()
    own = [name for name in loaded if name.partition(".")[0] == "remap"]
    others = {name.partition(".")[0] for name in loaded} - {"remap"}
    assert others <= sys.stdlib_module_names, sorted(others - sys.stdlib_module_names)
    assert 0 < len(own) <= MOST_OWN and len(loaded) - len(own) <= MOST_OTHERS, loaded
