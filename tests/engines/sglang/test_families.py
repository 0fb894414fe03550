"""SGLang answers with layers away what it answers without remap: each family that docs/notes/runs.md says it runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import Engines

from families import FAMILIES, VOCABULARY

TESTS = Path(__file__).parents[2]
ROOM = 8 << 20  # bytes beside the weights, at most
DRAW = random.Random(3)
BURST = [
    {"prompts": [[DRAW.randrange(3, VOCABULARY) for _ in range(5 + 3 * i)] for i in range(8)], "new": 130, "idle": 2}
]
EAGER = {"max_running_requests": 8, "schedule_conservativeness": 0.1, "disable_radix_cache": True}


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.sglang == "runs"])
def test_its_tokens(forks: Engines, family: str):
    made = forks.run(str(TESTS / "families.py"), family, family)
    assert made.returncode == 0, made.stdout
    weights = sum(each.stat().st_size for each in (forks.work / family).glob("*.safetensors"))
    vllm, published = FAMILIES[family].engine, json.dumps(FAMILIES[family].published)
    engine = {**EAGER, "dtype": vllm.get("dtype", "float32"), "json_model_override_args": published}
    capacity = weights * 101 // 100 + min(ROOM, vllm.get("kv_cache_memory_bytes", ROOM))
    short = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": str(capacity), "REMAP_SLOWDOWN": "1000"}
    plenty = forks.serve({**engine, "max_total_tokens": 4096}, BURST, family)
    found = forks.serve(engine, BURST, family, **short)
    assert plenty.returncode == found.returncode == 0, found.log[-4000:]
    assert found.tokens == plenty.tokens
    assert max(found.remapped) >= 1 and found.remapped[-1] == found.retracted == 0
