"""docs/notes/runs.md is what the table of families says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_families_is_that_of_the_table() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "runs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, "the page is not that of the table: python tools/runs.py\n" + made.stderr
