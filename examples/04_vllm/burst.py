"""A burst of prompts, served by vLLM as it is and on remap, with the same memory for KV cache at the start.

pip install '.[vllm]' && python examples/04_vllm/burst.py [MODEL]
"""

import random
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

# What REMAP_ENABLE=1 adds to `vllm serve`. Any wait is allowed: so small a model computes for too short a time to hide a copy.
REMAP = {
    "worker_cls": "remap.adapters.vllm.Worker",
    "scheduler_cls": "remap.adapters.vllm.Scheduler",
    "additional_config": {"remap": {"slowdown": 1000}},
}


def small_model(folder: str) -> str:
    """A Llama of 26 MB with random weights: large enough ones that each layer decides what the next token is."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=8,
        vocab_size=512,
        initializer_range=0.08,
        max_position_embeddings=1024,
        eos_token_id=None,
        **shape,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def serve(model: str, prompts: list[list[int]], **engine) -> tuple[list[list[int]], int]:
    """(tokens of each answer, preemptions)."""
    llm = LLM(
        model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, max_num_seqs=16, block_size=32,
        kv_cache_memory_bytes=9 << 20, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, **engine,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    (preempted,) = (each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
    return [list(each.outputs[0].token_ids) for each in answers], preempted


if __name__ == "__main__":  # engines may start processes, which import this file
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(20 + 5 * number)] for number in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else small_model(folder)
        stock, before = serve(model, prompts)
        ours, after = serve(model, prompts, **REMAP)
    same = sum(a == b for a, b in zip(stock, ours))
    print(f"preemptions: {before} as it is, {after} on remap; tokens as before: {same} of {len(prompts)}")
