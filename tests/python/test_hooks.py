"""Hooks: plain model calls and generate() wait for every layer, in order, in one pass a call; failures leave nothing
open.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fakes import FakeTenant  # noqa: E402

from remap.adapters.hooks import attach_hooks  # noqa: E402
from remap.errors import InvalidArgument, InvalidState  # noqa: E402

LAYERS = 3
ONE_PASS = [(call, layer) for layer in range(LAYERS) for call in ("wait", "done")]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def ids():
    return torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])


def test_generate_runs_unchanged_one_pass_a_token(model, ids):
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    tenant = FakeTenant(LAYERS, modules=model.model.layers)
    with attach_hooks(model.model.layers, tenant, model=model):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert tenant.calls == ONE_PASS * 5
    assert tenant.passes == [("prefill", 8)] + [("decode", 2)] * 4
    assert tenant.abandoned == 0


def test_remove_leaves_no_trace(model, ids):
    before = (
        dict(model.__dict__),
        [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model.model.layers],
    )
    tenant = FakeTenant(LAYERS, modules=model.model.layers)
    hooks = attach_hooks(model.model.layers, tenant, model=model)
    model(ids)
    hooks.remove()
    hooks.remove()
    model(ids)
    assert tenant.calls == ONE_PASS
    assert dict(model.__dict__).keys() == before[0].keys()
    assert [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model.model.layers] == before[1]
    attach_hooks(model.model.layers, tenant, model=model).remove()


def test_the_caller_may_bracket_the_pass_himself(model, ids):
    tenant = FakeTenant(LAYERS, modules=model.model.layers)
    with attach_hooks(model.model.layers, tenant):
        with tenant.forward(phase="prefill", tokens=8):
            model(ids)
        with pytest.raises(InvalidArgument):
            model(ids)  # no pass is open: the tenant's own refusal passes through
    assert tenant.calls == ONE_PASS


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("broken", range(LAYERS))
def test_an_exception_in_a_layer_abandons_the_pass(model, ids, monkeypatch, error, broken):
    tenant = FakeTenant(LAYERS, modules=model.model.layers)

    def fail(*args, **kwargs):
        raise error("stop")

    with attach_hooks(model.model.layers, tenant, model=model):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[broken].mlp, "forward", fail)
            with pytest.raises(error):
                model(ids)
        assert tenant.abandoned == 1
        assert not tenant.in_pass
        assert tenant.calls == [*ONE_PASS[: 2 * broken], ("wait", broken)]
        tenant.calls.clear()
        model(ids)
        assert tenant.calls == ONE_PASS


def test_refusals_attach_nothing(model):
    tenant = FakeTenant(LAYERS, modules=model.model.layers)
    layers = model.model.layers
    with pytest.raises(InvalidArgument):
        attach_hooks([], tenant)
    with pytest.raises(InvalidArgument):
        attach_hooks([layers[0], layers[0]], tenant)
    hooks = attach_hooks(layers, tenant, model=model)
    with pytest.raises(InvalidState):
        attach_hooks(layers, tenant, model=model)
    hooks.remove()
    assert all(not layer._forward_pre_hooks and not layer._forward_hooks for layer in layers)
    assert "forward" not in model.__dict__


def test_phase_counts_positions_however_the_input_is_given(model, ids):
    tenant = FakeTenant(LAYERS, modules=model.model.layers)
    with attach_hooks(model.model.layers, tenant, model=model):
        model(input_ids=ids)
        model(inputs_embeds=torch.zeros(1, 1, 32))
    assert tenant.passes == [("prefill", 8), ("decode", 1)]
