"""Two models in one session, both remapped by hand and serving in turns: neither can see or disturb the other."""

from __future__ import annotations

import random

import pytest

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import (  # noqa: E402
    LAYERS,
    Served,
    generate,
    kv_spec,
    logits_of,
    make,
    minimum_bytes,
)

PAGE = 16384
EVERY = [(alpha, beta) for beta in (1, 2) for alpha in range(LAYERS - beta + 1)]


def served(session, kind, name, **kv):
    model = make(kind, seed=len(name))
    return Served(session, model, name, kv_spec(model, **kv))


def session_for(kinds, spare=0, mode="aliased"):
    models = [make(kind) for kind in kinds]
    least = sum(minimum_bytes(model, kv_spec(model), PAGE) for model in models)
    return remap.Session(least + spare * PAGE, page_bytes=PAGE, mode=mode)


def conserved(session):
    pages = session.snapshot().pages
    assert pages.free + pages.params + pages.kv + pages.ring + pages.outside + pages.quarantine == pages.total


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("seed", range(2))
def test_both_are_remapped_and_serve_in_turns(mode, seed):
    rng = random.Random(f"{mode}{seed}")
    with session_for(["llama", "opt"], spare=12, mode=mode) as session:
        pair = [served(session, "llama", "a"), served(session, "opt", "bb", layout="layer_major")]
        bare = {"a": make("llama", seed=1), "bb": make("opt", seed=2)}
        tokens = {each.name: generate(bare[each.name], each.batches[0])[0] for each in pair}
        for _ in range(25):
            one = rng.choice(pair)
            try:
                one.remap(*rng.choice(EVERY), rng.choice(["uniform", "nested"]))
            except remap.OutOfBlocks:
                assert one.live
            if one.kv.free_blocks:
                one.fill_blocks(rng.randint(0, one.kv.free_blocks), rng)
            for each in rng.sample(pair, 2):
                each.check()
                if rng.random() < 0.7:
                    each.right()
            if one.live:
                one.free_blocks(rng.randint(0, len(one.live)), rng)
            conserved(session)
        for each in pair:
            assert torch.equal(generate(each.model, each.batches[0])[0], tokens[each.name])
            assert session.snapshot().tenants[each.name].copies > 0
            each.hooks.remove()
    for each in pair:
        each.right()


def test_passes_of_two_tenants_may_overlap():
    """Layer by layer in turns, both streaming; a step for one is refused only while *its* pass is open."""
    with session_for(["llama", "qwen2"]) as session:
        one, other = served(session, "llama", "a"), served(session, "qwen2", "bb")
        one.remap(4)
        other.remap(3, 2)
        nested = []

        def serve_the_other(*args):
            other.right()
            nested.append(True)

        handle = one.model.model.layers[2].register_forward_hook(serve_the_other)
        one.right()
        assert nested == [True, True]  # a batch each
        with one.tenant.forward():
            with pytest.raises(remap.InvalidState):
                one.remap(1)
            other.remap(1)
            other.whole()
            assert torch.equal(logits_of(one.model, one.batches[0]), one.expected[0])  # a part of the open pass
        handle.remove()
        one.whole()
