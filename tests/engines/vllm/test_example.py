"""examples/04_vllm as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import run

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "04_vllm/burst.py"


def test_the_burst_preempts_on_stock_vllm_and_not_on_remap(tmp_path: Path) -> None:
    said = run([str(EXAMPLE)], cwd=tmp_path, timeout_s=600)
    ((stock, ours, same, count),) = re.findall(
        r"^preemptions: (\d+) as it is, (\d+) on remap; tokens as before: (\d+) of (\d+)$", said, re.MULTILINE
    )
    assert int(stock) > 0 == int(ours) and same == count == "12"
