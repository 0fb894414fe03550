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
from seen import SEEN

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


def seen(family: str, round: int) -> list[dict[str, Any]]:
    """The burst, with a picture, or a sound, in two of three prompts: another one in each round."""
    found = SEEN.get(family)
    if found is None:
        return BURST
    return [
        {**each, "prompt": [*each["prompt"][:7], *found.marks, *each["prompt"][7:]], found.kind: [100 * round + index]}
        if found.always or index % 3
        else each
        for index, each in enumerate(BURST)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tokens(vllm: Vllm, family: str):
    sees = family.startswith("qwen3.5") or "vision_config" in FAMILIES[family].shape
    more = vision(vllm.folder / "vision") if sees else {}
    model, engine = vllm.family(family, **more), dict(FAMILIES[family].engine)
    if family in SEEN:
        engine |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {SEEN[family].kind: 1}}
    little = {"kv_cache_memory_bytes": engine.pop("kv_cache_memory_bytes")} if "kv_cache_memory_bytes" in engine else {}
    rounds = [seen(family, round) for round in range(2 if family in SEEN else 1)]
    sides: list[dict[str, Any]] = [stock("stock", rounds, **engine), remap("remap", rounds, **engine, **little)]
    # What it sees is rounded by linear layers before the first token is: both sides have the same kernels.
    found = vllm.serve([{**side, "model": model} for side in sides], plain_linear=family in SEEN, **more)
    assert_remapped(found["remap"])
    assert max(found["remap"]["rounds"][0]["alphas"]) >= 1
    expected = answers(found["stock"])
    assert answers(found["remap"]) == expected
    assert max(len({*answer}) for answer in expected[0]) > 4, "the model repeats itself: the test shows nothing"
    if family in SEEN:
        changed = [one != other for one, other in zip(*expected)]
        holds = [SEEN[family].kind in each for each in rounds[0]]
        assert 2 * sum(changed) > sum(holds), "its tokens are not those of what it sees"
        assert not any(one and not there for one, there in zip(changed, holds))
