"""Attach a model: its layers become KV blocks when blocks are wanted, and come home afterwards. Tokens do not change.

pip install '.[transformers]' && python examples/01_attach.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remap

torch.manual_seed(0)
shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, vocab_size=1000, eos_token_id=None, **shape)).eval()
prompt = torch.tensor([[1, 2, 3]])


def answer() -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=16, do_sample=False)


expected = answer()
kv = remap.KVSpec(layers=8, kv_heads=4, head_dim=32, dtype="float32", min_blocks=16, max_blocks=2048)
# slowdown: how long a pass may wait for layers, as a share of its computation. So small a model computes for too short a time to
# hide a copy, so this example allows any wait; the default is 0.02.
with remap.Session("40MiB", page_bytes="256KiB", config=remap.Config(slowdown=1000)) as session:
    tenant = session.attach(model, name="llama", kv=kv)  # weights and KV cache share 40 MiB now
    answer()  # a whole pass: from now on layers may stream
    print(f"{tenant.kv.usable_blocks} KV blocks to start with")

    report = session.step({"llama": 150})  # an engine says how many blocks it wants to take, before each pass
    print(f"{tenant.kv.usable_blocks} after a step that asks for 150: {report.reason['llama']}")
    blocks = tenant.kv.allocate(150)
    print(f"tokens identical while layers stream: {torch.equal(answer(), expected)}")

    tenant.kv.free(blocks)
    steps = 0
    while session.snapshot().tenants["llama"].remapped and steps < 10_000:
        session.step({"llama": 0})  # the pressure has ended
        steps += 1
    print(f"all layers are home after {steps} idle steps, {tenant.kv.usable_blocks} blocks stay")
    print(f"tokens identical: {torch.equal(answer(), expected)}")
