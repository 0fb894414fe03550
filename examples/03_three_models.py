"""Three models in one arena take turns: the idle ones lend their layers' memory to the busy one, and get it back.

pip install '.[transformers]' && python examples/03_three_models.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remap

torch.set_num_threads(1)  # so small models gain nothing from more, which wait for each other on a busy machine
NAMES = ("ada", "bell", "curie")
WANTED = 200  # blocks: more than there are before somebody lends
shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
config = LlamaConfig(num_hidden_layers=8, vocab_size=1000, eos_token_id=None, **shape)
prompt = torch.tensor([[1, 2, 3]])
models, expected = {}, {}
for seed, name in enumerate(NAMES):
    torch.manual_seed(seed)
    models[name] = LlamaForCausalLM(config).eval()
    expected[name] = models[name].generate(prompt, max_new_tokens=8, do_sample=False)

kv = remap.KVSpec(layers=8, kv_heads=4, head_dim=32, dtype="float32", min_blocks=16, max_blocks=2048)
# reload_s: how late the first pass of an idle model may be because it has lent layers.
knobs = remap.advanced.Knobs(slowdown=1000, reload_s=10, min_idle=0)
with remap.Session("112MiB", page_bytes="256KiB", config=knobs) as session:
    tenants = {name: session.attach(models[name], name=name, kv=kv, active=False) for name in NAMES}
    for name in (*NAMES, *NAMES):
        turn = session.activate(name, alone=True)  # its layers come home first; all others are idle from here
        assert turn.activated, turn.reason
        cache = tenants[name].kv
        before = cache.usable_blocks
        report = session.step({name: WANTED})
        blocks = cache.allocate(WANTED)
        lent = {each: sum(seen.lent_to.values()) for each, seen in session.snapshot().tenants.items()}
        same = torch.equal(models[name].generate(prompt, max_new_tokens=8, do_sample=False), expected[name])
        print(
            f"{name}'s turn: {before} blocks, then {cache.usable_blocks}; tokens identical: {same}; pages lent: {lent}"
        )
        cache.free(blocks)  # the turn is over: nothing of it stays in the others' pages
