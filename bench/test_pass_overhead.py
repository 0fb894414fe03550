"""A pass with nothing remapped against the bare model: the promise is that nobody can measure a difference.

The model has SmolLM2's layers (random weights, fewer of them); the bare one is a copy in ordinary memory. The other baseline
is the attached model itself with its hooks taken out, which leaves out what it costs to read weights through shared memory.
Blocks of passes alternate, each behind a pass that is not timed: putting hooks in makes the interpreter learn anew. As a
control, a second bare copy is measured in the same way: what it differs by is the luck of physical memory.
"""

from __future__ import annotations

import copy
import time

import pytest
from measure import median, record, seconds_of

import remap

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS = 12
ROUNDS = 40
BLOCK = 4
BATCH = 8


def _model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


CONTROL = "bare model, of another bare model (control)"


@pytest.mark.parametrize("baseline", ["bare model", "same tensors, no hooks", CONTROL])
def test_pass_with_nothing_remapped(benchmark, baseline):
    from remap.adapters.hooks import attach_hooks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bare = _model()
    model = copy.deepcopy(bare)
    ids = torch.randint(1, 1000, (BATCH, 1))
    spec = remap.KVSpec(layers=LAYERS, kv_heads=3, head_dim=64, dtype="float32", min_blocks=8, max_blocks=256)
    times: list[float] = []

    def run(which) -> torch.Tensor:
        return which(ids, use_cache=False).logits

    with torch.inference_mode(), remap.Session("256MiB") as session:
        attached = []
        if baseline != CONTROL:
            tenant = session.attach(model, kv=spec, name="m", hooks=False)
            attached.append(attach_hooks(model.model.layers, tenant, model=model))
        other = model if baseline == "same tensors, no hooks" else bare

        def block(which) -> None:
            for _ in range(BLOCK):
                run(which)

        def setup() -> None:
            if other is model:
                attached.pop().remove()
            run(other)
            begun = time.perf_counter()
            block(other)
            times.append((time.perf_counter() - begun) / BLOCK)
            if other is model:
                attached.append(attach_hooks(model.model.layers, tenant, model=model))
            run(model)

        expected = run(bare)
        for _ in range(5):
            assert torch.equal(run(model), expected)
            run(other)
        benchmark.pedantic(lambda: block(model), setup=setup, rounds=ROUNDS)
        assert torch.equal(run(model), expected)
        for hooks in attached:
            hooks.remove()
    torch.set_num_threads(threads)
    ours = [seconds / BLOCK for seconds in seconds_of(benchmark)]
    record(
        benchmark,
        f"pass, alpha = 0 / {baseline}",
        median(mine / theirs for mine, theirs in zip(ours, times)),
        "x",
        ours,
        target=None if baseline == CONTROL else 1.01,
        ratio_of_minima=min(ours) / min(times),
        ratio_of_medians=median(ours) / median(times),
        baseline_median_us=median(times) * 1e6,
    )
