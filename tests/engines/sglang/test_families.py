"""SGLang answers with layers away what it answers without remap: each family that docs/notes/runs.md says it runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import Engines

from families import FAMILIES, VOCABULARY

TESTS = Path(__file__).parents[2]
DRAW = random.Random(3)
BURST = [
    {"prompts": [[DRAW.randrange(3, VOCABULARY) for _ in range(5 + 3 * i)] for i in range(8)], "new": 130, "idle": 2}
]
EAGER = {"max_running_requests": 8, "schedule_conservativeness": 0.1, "disable_radix_cache": True}
SAVE = (
    "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import families; "
    "families.save(sys.argv[2], pathlib.Path(sys.argv[2]))"
)


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.sglang])
def test_its_tokens(engines: Engines, family: str):
    made = engines.run("-c", SAVE, str(TESTS), family)
    assert made.returncode == 0, made.stdout
    weights = sum(each.stat().st_size for each in (engines.work / family).glob("*.safetensors"))
    engine = {**EAGER, "dtype": FAMILIES[family].engine.get("dtype", "float32")}
    short = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": str(weights * 101 // 100 + (4 << 20)), "REMAP_SLOWDOWN": "1000"}
    plenty = engines.serve({**engine, "max_total_tokens": 4096}, BURST, family)
    found = engines.serve(engine, BURST, family, **short)
    assert plenty.returncode == found.returncode == 0, found.log[-4000:]
    assert found.tokens == plenty.tokens
    assert max(found.remapped) >= 1 and found.remapped[-1] == found.retracted == 0
