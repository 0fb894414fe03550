"""An engine of one's own with continuous batching, in 119 lines. The numbers are those of docs/adopt.md: attach (1), step (2),
allocate and free (3), forward (4), wait and done (5).

pip install '.[transformers]' && python examples/02_own_engine.py
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import remap

BLOCK = 16  # tokens in a KV block


@dataclass
class Sequence:
    tokens: list[int]
    end: int  # how many tokens it ends with
    cached: int = 0  # of how many tokens keys and values are in its blocks
    blocks: list[int] = field(default_factory=list)

    def missing(self) -> int:
        return -(-len(self.tokens) // BLOCK) - len(self.blocks)


@torch.inference_mode()
def forward(model, tenant, batch):
    """One pass over the new tokens of all sequences, one behind the other. Returns the next token of each."""
    counts = [len(each.tokens) - each.cached for each in batch]
    new = [(each, place) for each in batch for place in range(each.cached, len(each.tokens))]
    hidden = model.model.embed_tokens(torch.tensor([each.tokens[place] for each, place in new]))
    cos, sin = model.model.rotary_emb(hidden[None], torch.tensor([[place for _, place in new]]))
    block = torch.tensor([each.blocks[place // BLOCK] for each, place in new])
    offset = torch.tensor([place % BLOCK for _, place in new])
    with tenant.forward(phase="decode" if max(counts) == 1 else "prefill", tokens=len(new)):  # 4
        for i, layer in enumerate(model.model.layers):
            tenant.wait(i)  # 5: the layer's weights are in place
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                project(normed)
                .view(1, len(new), -1, attention.head_dim)
                .transpose(1, 2)  # (1, heads, tokens, head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys, values = tenant.kv.tensors[i]  # each (blocks, BLOCK, kv_heads, head_dim)
            keys[block, offset], values[block, offset] = k[0].transpose(0, 1), v[0].transpose(0, 1)
            outs = []
            for each, queries in zip(batch, q.split(counts, dim=2)):
                past = [
                    kv[each.blocks].flatten(0, 1)[: len(each.tokens)].transpose(0, 1)[None] for kv in (keys, values)
                ]
                seen = torch.arange(len(each.tokens)) <= torch.arange(each.cached, len(each.tokens))[:, None]
                outs.append(F.scaled_dot_product_attention(queries, *past, attn_mask=seen, enable_gqa=True))
            hidden = hidden + attention.o_proj(torch.cat(outs, dim=2).transpose(1, 2).reshape(len(new), -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            tenant.done(i)  # 5: its memory may be overwritten
    last = torch.tensor(counts).cumsum(0) - 1
    return model.lm_head(model.model.norm(hidden[last])).argmax(-1).tolist()


def serve(session, model, tenant, waiting, most=16):
    """Answer all of them, greedily. Returns how many were preempted."""
    running, preempted = [], 0
    while waiting or running:
        next_ones = waiting[: most - len(running)]
        wanted = sum(each.missing() for each in running + next_ones)
        report = session.step({tenant.name: wanted})  # 2: before anybody is preempted
        moved = report.moved.get(tenant.name, {})
        for each in running:
            each.blocks = [moved.get(block, block) for block in each.blocks]
        while sum(each.missing() for each in running) > tenant.kv.free_blocks:  # no layer could give that much
            last = running.pop()
            tenant.kv.free(last.blocks)  # 3
            last.blocks, last.cached = [], 0  # computed again later
            waiting.insert(0, last)
            preempted += 1
            next_ones = []
        for each in running:
            each.blocks += tenant.kv.allocate(each.missing())  # 3
        for each in next_ones:
            if each.missing() <= tenant.kv.free_blocks:
                each.blocks += tenant.kv.allocate(each.missing())
                running.append(each)
                waiting.remove(each)
        for each, token in zip(running, forward(model, tenant, running)):
            each.cached = len(each.tokens)
            each.tokens.append(token)
        for each in [each for each in running if len(each.tokens) == each.end]:
            tenant.kv.free(each.blocks)
            running.remove(each)
    return preempted


torch.set_num_threads(1)  # so small a model gains nothing from more, which wait for each other on a busy machine
torch.manual_seed(0)
shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, vocab_size=1000, eos_token_id=None, **shape)).eval()
prompts = [torch.randint(1000, (length,)).tolist() for length in range(20, 84, 8)]
expected = [model.generate(torch.tensor([each]), max_new_tokens=16, do_sample=False)[0].tolist() for each in prompts]
for layers in (0, None):  # without remap, and with as many layers as it takes
    # slowdown: such small layers hide no copy, so any wait is allowed; the default, 0.02, is for models of true size.
    config = remap.Config(max_layers=layers, slowdown=1000)
    with remap.Session("36MiB", page_bytes="256KiB", config=config) as session:
        kv = remap.KVSpec(
            layers=8, kv_heads=4, head_dim=32, block_tokens=BLOCK, dtype="float32", min_blocks=16, max_blocks=256
        )
        tenant = session.attach(model, name="llama", kv=kv, hooks=False)  # 1
        sequences = [Sequence(list(each), len(each) + 16) for each in prompts]
        preempted = serve(session, model, tenant, list(sequences))
        same = sum(each.tokens == tokens for each, tokens in zip(sequences, expected))
        seen = session.snapshot().tenants["llama"]
        print(
            f"{preempted} preemptions, {seen.copies} layers streamed, tokens as by generate(): {same} of {len(prompts)}"
        )
