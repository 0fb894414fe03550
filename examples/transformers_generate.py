"""A transformers model whose KV cache outgrows its memory budget: layers become KV cache, and come home afterwards.

pip install '.[transformers]' && python examples/transformers_generate.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remap

torch.manual_seed(0)
shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
config = LlamaConfig(num_hidden_layers=8, vocab_size=1000, eos_token_id=None, pad_token_id=0, **shape)
model = LlamaForCausalLM(config).eval()
inputs = {"input_ids": torch.randint(1, 1000, (8, 64))}
inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
expected = model.generate(**inputs, max_new_tokens=256, do_sample=False)

# Weights take 35 MiB, the KV cache of these 8 sequences 20 MiB more.
with remap.attach(model, capacity="48MiB") as attached:
    out = model.generate(**inputs, max_new_tokens=256, do_sample=False)
    now = attached.snapshot
    print(f"tokens identical: {torch.equal(out, expected)}")
    print(f"{now.remapped} of {now.layers} layers are KV cache now, {now.copies} times one was streamed")

    prompts = [[5, 6, 7], [8, 9, 10, 11]]  # transformers' continuous batching over the same blocks
    done = model.generate_batch(prompts, continuous_batching_config=attached.continuous_batching(), max_new_tokens=8)
    print(f"generate_batch: {[len(each.generated_tokens) for each in done.values()]} tokens")

    del out
    steps = 0
    while attached.snapshot.remapped and steps < 10_000:  # an idle server: nothing is wanted
        attached.step()
        steps += 1
    print(f"{attached.snapshot.remapped} layers are away after {steps} idle steps")
