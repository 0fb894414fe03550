"""A session on the device: results and addresses never change, whatever is remapped and however busy the device is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rig import Reader, Rig, one_pass

import remap


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_logits_are_bit_identical_for_every_alpha(gpu: Any, models: Any, buffers: int, mode: str) -> None:
    with Rig(gpu, models, mode=mode) as rig:
        rig.check()
        for alpha in (*range(1, rig.layers - buffers + 1), 0):
            remap.advanced.remap(rig.session, "m", alpha, buffers)
            for _ in range(3):
                rig.check()


@pytest.mark.parametrize("kind", ["opt", "qwen3"])
def test_generate_gives_the_same_tokens_while_layers_come_and_go(gpu: Any, models: Any, kind: str) -> None:
    with Rig(gpu, models, kind) as rig:
        tokens, scores = models.generate(rig.model, rig.ids, 6)
        rng = random.Random(3)
        for _ in range(6):
            remap.advanced.remap(rig.session, "m", rng.randrange(rig.layers - 1), rng.choice((1, 2)))
            again, same = models.generate(rig.model, rig.ids, 6)
            assert rig.torch.equal(again, tokens)
            assert rig.torch.equal(same, scores)


def test_changes_between_passes_that_nobody_waited_for(raw: Any) -> None:
    """Each change finds the stream full of passes that still read the layers: nothing may be taken from under them."""
    tenant, marks = raw
    rng = random.Random(5)
    with Reader(tenant, 6 * tenant.layers) as reader:
        for _ in range(30):
            one_pass(tenant, reader, tenant.stream, tenant.handle)
            if reader.full:
                reader.end(marks, tenant.handle)
            buffers, selection = rng.choice((1, 2)), rng.choice(("uniform", "nested"))
            remap.advanced.remap(tenant.session, "raw", rng.randrange(tenant.layers - buffers + 1), buffers, selection)
        reader.end(marks, tenant.handle)
        remap.advanced.check(tenant.session)


def test_changes_while_kernels_keep_the_device_busy(real_gpu: Any, models: Any) -> None:
    """The same with a model: every pass stands behind a kernel that spins, and the host never waits."""
    import torch

    with Rig(real_gpu, models) as rig:
        rng = random.Random(7)
        results = []
        for _ in range(20):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                results.append(rig.model(rig.ids, use_cache=False).logits)
            remap.advanced.remap(rig.session, "m", rng.randrange(rig.layers - 1), 1)
        for result in results:
            assert torch.equal(result, rig.expected)


def test_kv_blocks_keep_their_bytes_when_layers_return(gpu: Any, models: Any) -> None:
    """Blocks in pages that go back are moved; the report says where."""
    with Rig(gpu, models) as rig:
        remap.advanced.remap(rig.session, "m", 3, 1)
        kv = rig.tenant.kv
        ids = kv.allocate(kv.free_blocks)
        kv.free(ids[:-5])
        for number, block in enumerate(ids[-5:]):
            for tensor in kv.tensors:
                tensor[:, block] = float(number + 1)
        moved = remap.advanced.remap(rig.session, "m", 0).moved.get("m", {})
        for number, block in enumerate(ids[-5:]):
            for tensor in kv.tensors:
                assert bool((tensor[:, moved.get(block, block)] == number + 1).all())
        rig.check()


def test_a_model_that_leaves_is_whole_and_computes_the_same(gpu: Any, models: Any) -> None:
    with Rig(gpu, models) as rig:
        remap.advanced.remap(rig.session, "m", 3, 2)
        rig.check()
        rig.session.detach("m")
        rig.hooks.remove()
        assert {tensor.device.type for tensor in rig.model.parameters()} == {rig.torch.device(rig.device).type}
        assert rig.torch.equal(rig.logits(), rig.expected)
