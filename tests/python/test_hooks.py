"""Hooks wait for every layer, in order, in one pass a call; failures leave nothing open (real tenants: test_museum_torch)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes import FakeTenant  # noqa: E402
from models import LAYERS, generate, ids_for, layers_of, make  # noqa: E402

from remap.adapters.hooks import attach_hooks  # noqa: E402
from remap.errors import InvalidArgument  # noqa: E402

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


def test_the_caller_may_bracket_the_pass_himself():
    model, ids = make("llama"), ids_for(2, 4)
    tenant = FakeTenant(LAYERS, modules=layers_of(model))
    with attach_hooks(layers_of(model), tenant):
        with tenant.forward(phase="prefill", tokens=8):
            model(ids)
        with pytest.raises(InvalidArgument):
            model(ids)  # no pass is open: the tenant's own refusal passes through
    assert tenant.calls == ONE_PASS


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("broken", [0, 2, LAYERS - 1])
def test_an_exception_in_a_layer_abandons_the_pass(monkeypatch, error, broken):
    model, ids = make("llama"), ids_for(2, 4)
    tenant = FakeTenant(LAYERS, modules=layers_of(model))

    def fail(*args, **kwargs):
        raise error("stop")

    with attach_hooks(layers_of(model), tenant, model=model):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(layers_of(model)[broken].mlp, "forward", fail)
            model(ids)
        assert (tenant.abandoned, tenant.in_pass) == (1, False)
        assert tenant.calls == [*ONE_PASS[: 2 * broken], ("wait", broken)]
        tenant.calls.clear()
        model(ids)
        assert tenant.calls == ONE_PASS
