"""Hooks wait for every layer, in order, in one pass a call, and name it. What they mean for the bytes: test_museum_torch.py."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes import FakeTenant  # noqa: E402
from models import LAYERS, generate, ids_for, layers_of, make  # noqa: E402

from remap.adapters.hooks import attach_hooks  # noqa: E402

ONE_PASS = [(call, layer) for layer in range(LAYERS) for call in ("wait", "done")]


def test_a_pass_a_call_with_its_phase_and_tokens():
    model, ids = make("llama"), ids_for(2, 4)
    expected = generate(model, ids, 5)[0]
    tenant = FakeTenant(LAYERS, modules=layers_of(model))
    with attach_hooks(layers_of(model), tenant, model=model):
        assert torch.equal(generate(model, ids, 5)[0], expected)
        assert tenant.passes == [("prefill", 8)] + [("decode", 2)] * 4
        assert (tenant.calls, tenant.abandoned) == (ONE_PASS * 5, 0)
        model(input_ids=ids)
        model(inputs_embeds=torch.zeros(1, 1, 64))
    assert tenant.passes[5:] == [("prefill", 8), ("decode", 1)]
    model(ids)
    assert tenant.calls == ONE_PASS * 7
