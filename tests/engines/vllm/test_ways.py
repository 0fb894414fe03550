"""The ways into an engine: as a plugin without flags in processes of their own, two ranks, compiled, adapters, 8-bit weights, a
real model; and two engines of one process that share an arena."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Vllm
from test_tokens import BURST, LAYERS, LITTLE, SETTINGS, answers, assert_remapped, remap, stock

SHORT = BURST[::2] + BURST[-1:]  # enough to need more than there is, when all arrive at once
# 13 blocks in memory, and the user's ceiling of 20: less than what one layer gives. Four requests need 18.
CEILING = {"num_gpu_blocks_override": 20, "max_model_len": 512, "kv_cache_memory_bytes": 13 << 18}
FOUR = BURST[:4]
SUBPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


FOUR_BITS = ("int4", "gptq", "awq")  # compressed-tensors, GPTQ, AWQ


def four_bit_kernels() -> bool:
    """vLLM's kernels for processors without AVX-512 have none for 4-bit weights: there stock vLLM ends in an AttributeError."""
    import vllm._custom_ops  # noqa: F401  loads them
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


@pytest.fixture(scope="module")
def one(vllm: Vllm) -> Any:
    """Engines one after the other in one process."""
    compiled = {"enforce_eager": False, "compilation_config": {"mode": 3, "compile_sizes": []}}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    mixed = [{**request, "lora": "tiny-lora"} if i % 2 else request for i, request in enumerate(SHORT)]
    bfloat, little = {"dtype": "bfloat16"}, {"kv_cache_memory_bytes": 6 << 20}
    eight = {"model": "tiny-int8"}
    in_four = [
        {**make(f"{name}, {kind}", [BURST], **bfloat, **engine), "model": f"tiny-{kind}"}
        for kind in FOUR_BITS
        for name, make, engine in (("plenty", stock, {}), ("little", stock, little), ("remap", remap, little))
    ]
    return vllm.serve(
        [
            stock("plenty", [SHORT]),
            remap("compiled", [SHORT], **compiled),
            stock("plenty, adapter", [mixed], **lora),
            remap("adapter", [mixed], **lora),
            *(in_four if four_bit_kernels() else ()),
            stock("plenty, four", [FOUR]),
            remap("a ceiling in blocks", [FOUR, FOUR], **CEILING),
            {
                **remap("a ceiling in tokens", [FOUR, FOUR], max_model_len=512, kv_cache_memory_bytes=13 << 18),
                "settings": {**SETTINGS, "max_tokens": 20 * 32},
            },
            {**remap("8 bits", [], **bfloat, **little), **eight, "refused": True},
        ],
        VLLM_CACHE_ROOT=str(vllm.folder / "cache"),
    )


def test_as_a_plugin_without_flags_in_another_process(vllm: Vllm, one: Any):
    plugin = {**SUBPROCESS, "REMAP_ENABLE": "1", "REMAP_SLOWDOWN": "1000", "REMAP_MAX_TOKENS": "2560"}
    run = {"name": "remap", "remap": True, "engine": LITTLE, "rounds": [SHORT, SHORT]}
    found = vllm.serve([run], **plugin)["remap"]
    assert found["manifest"]["most_blocks"] == 2560 // 32  # of the 114 that there could be
    assert_remapped(found)
    assert answers(found) == answers(one["plenty"]) * 2


def test_two_ranks(vllm: Vllm, one: Any):
    """Half of each layer and of each block is on each rank: what changes on one changes on the other."""
    half = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 4 << 20}
    found = vllm.serve([remap("remap", [SHORT, SHORT], **half)], **SUBPROCESS)["remap"]
    assert_remapped(found)
    assert answers(found) == answers(one["plenty"]) * 2
    first, second = found["ranks"]
    assert first == second
    assert any("reload 1 layers" in reason for reason in found["decisions"])


def test_compiled(one: Any):
    assert_remapped(one["compiled"])
    assert answers(one["compiled"]) == answers(one["plenty"])


@pytest.mark.parametrize("name", ["a ceiling in blocks", "a ceiling in tokens"])
def test_the_cache_grows_to_a_ceiling_inside_of_a_layer(one: Any, name: str):
    run = one[name]
    assert run["manifest"]["first_blocks"] < 14 and run["manifest"]["most_blocks"] == 20
    assert_remapped(run)
    assert max(run["rounds"][0]["alphas"]) == 1
    assert answers(run) == answers(one["plenty, four"]) * 2


def test_a_kv_cache_in_8_bits(vllm: Vllm):
    """A quarter of the bytes, which leave, come and move as others do. The same kernels on both sides: what differs in the last
    bit of float32 may be a whole step of such a number.
    """
    eight = {"kv_cache_dtype": "fp8"}
    plenty = {**stock("plenty", [BURST], **eight), "refused": True}
    run = vllm.serve(
        [plenty, {**remap("remap", [BURST], **eight, kv_cache_memory_bytes=9 << 18), "refused": True}],
        plain_linear=True,
    )
    if run["plenty"].get("error") == "NotImplementedError":
        pytest.skip(run["plenty"]["text"])  # vLLM's own: the processor cannot
    assert_remapped(run["remap"])
    assert max(run["remap"]["rounds"][0]["alphas"]) >= 1
    assert answers(run["remap"]) == answers(run["plenty"])


def test_with_an_adapter(one: Any):
    """Every second request with a LoRA adapter."""
    assert_remapped(one["adapter"])
    assert answers(one["adapter"]) == answers(one["plenty, adapter"])
    for i, (found, other) in enumerate(zip(answers(one["adapter"])[0], answers(one["plenty"])[0])):
        assert i % 2 == 0 or found != other  # it matters


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_weights_in_4_bits(one: Any, kind: str):
    """They are tensors that kernels read, packed anew behind the load."""
    if not four_bit_kernels():
        pytest.skip("this processor has no AVX-512: vLLM has no 4-bit kernels for it")
    assert one[f"little, {kind}"]["preempted"] > 0
    assert_remapped(one[f"remap, {kind}"])
    assert answers(one[f"remap, {kind}"]) == answers(one[f"plenty, {kind}"])


def test_quantised_weights(one: Any):
    """In 8 bits oneDNN keeps them, unless the CPU has AMX: then remap refuses."""
    eight = one["8 bits"]
    if "error" in eight:
        assert eight["error"] == "InvalidState" and "8-bit" in eight["text"]
    else:
        assert torch.cpu._is_amx_tile_supported()


def test_two_engines_of_one_process_share_an_arena(vllm: Vllm):
    """The idle one lends; when it is asked it gets its layers back. Each has room for half of the burst alone."""
    capacity = 2 * (26 + 9) << 20
    settings = {**SETTINGS, "arena": "one", "capacity": capacity}

    def engine(name: str) -> dict[str, Any]:
        return {**remap(name, []), "settings": settings, "keep": True}

    names = ("first", "second")

    run = vllm.serve(
        [
            stock("plenty", [BURST]),
            engine("first"),
            engine("second"),
            *({"name": f"{name} {n}", "use": name, "remap": True, "rounds": [BURST]} for n in "12" for name in names),
            {"name": "sleeps", "use": "first", "remap": True, "load": ["sleep", 1]},
            {"name": "second alone", "use": "second", "remap": True, "rounds": [BURST]},
            {"name": "wakes", "use": "first", "remap": True, "load": ["wake_up"], "rounds": [BURST]},
        ]
    )
    for name in (f"{name} {n}" for n in "12" for name in names):
        assert run[name]["preempted"] == 0
        assert answers(run[name]) == answers(run["plenty"])
        assert run[name]["shared"]["lent"] > 0
    assert run["sleeps"]["loaded"].get("error") is None, run["sleeps"]
    assert sorted(run["sleeps"]["shared"]["cold"].values()) == [0, LAYERS]  # its pages are for anybody
    for name in ("second alone", "wakes"):
        assert run[name]["preempted"] == 0
        assert answers(run[name]) == answers(run["plenty"])
    assert set(run["wakes"]["shared"]["cold"].values()) == {0}


def test_a_real_model(vllm: Vllm):
    """SmolLM2-135M in bfloat16: 20 MB of KV cache hold half of what 12 requests need."""
    bfloat = {"dtype": "bfloat16", "max_model_len": 512}
    burst = [{"prompt": list(range(1000 + 50 * i, 1020 + 53 * i)), "new": 100} for i in range(12)]
    real = {"model": vllm.smollm2()}
    run = vllm.serve(
        [
            {**stock("plenty", [burst], **bfloat), **real},
            {**remap("remap", [burst], **bfloat, kv_cache_memory_bytes=20 << 20), **real},
        ]
    )
    assert_remapped(run["remap"])
    assert max(run["remap"]["rounds"][0]["alphas"]) >= 2
    assert answers(run["remap"]) == answers(run["plenty"])
