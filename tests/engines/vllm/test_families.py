"""vLLM answers with layers away what it answers without remap: each family of models that docs/notes/runs.md names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Vllm
from test_tokens import BURST, answers, assert_remapped, remap, stock

from families import FAMILIES

SGLANG = (
    Path(sys.prefix) / "sglang"
)  # what tests/engines/sglang/setup.sh installs: torchvision, and what lets it be imported


def vision(folder: Path) -> dict[str, str]:
    """torchvision beside a torch without CUDA, for models whose module in vLLM reads pictures, too."""
    found = [
        SGLANG / "site" / "torchvision",
        SGLANG / "site" / "torchvision.libs",
        SGLANG / "stub" / "sitecustomize.py",
    ]
    if not found[0].exists():
        pytest.skip("vLLM's module of this family needs torchvision, which tests/engines/sglang/setup.sh installs")
    folder.mkdir(exist_ok=True)
    for each in found:
        if not (folder / each.name).exists():
            (folder / each.name).symlink_to(each)
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])}


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tokens(vllm: Vllm, family: str):
    more = vision(vllm.folder / "vision") if family.startswith("qwen3.5") or "pictures" in family else {}
    model, engine = vllm.family(family), dict(FAMILIES[family].engine)
    little = {"kv_cache_memory_bytes": engine.pop("kv_cache_memory_bytes")} if "kv_cache_memory_bytes" in engine else {}
    sides: list[dict[str, Any]] = [stock("stock", [BURST], **engine), remap("remap", [BURST], **engine, **little)]
    found = vllm.serve([{**side, "model": model} for side in sides], **more)
    assert_remapped(found["remap"])
    assert max(found["remap"]["rounds"][0]["alphas"]) >= 1
    assert answers(found["remap"]) == answers(found["stock"])
