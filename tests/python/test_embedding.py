"""What is not in a layer: an embedding that stays in host memory, and an lm_head that streams like a layer."""

from __future__ import annotations

import pytest

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LAYERS, ids_for, kv_spec, layers_of, logits_of, make  # noqa: E402

from remap.adapters.hooks import attach_hooks  # noqa: E402
from remap.engine import LLMEngine, Request, SamplingParams  # noqa: E402

PAGE = 16384


def session_for() -> remap.Session:
    return remap.Session(160 * PAGE, page_bytes=PAGE)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_are_the_same_while_the_head_streams_and_the_embedding_is_on_the_host(kind: str) -> None:
    model = make(kind)
    ids = ids_for(2, 7)
    expected = logits_of(model, ids)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with session_for() as plain:
        resident = plain.attach(make(kind), kv=kv_spec(model))
        whole = plain.snapshot().tenants[resident.name].pages.params
    with session_for() as session:
        tenant = session.attach(model, kv=kv_spec(model), extra_layers=["lm_head"], embedding="host", hooks=False)
        assert tenant.layers == LAYERS + 1
        nbytes = embedding.numel() * embedding.element_size()
        assert whole - session.snapshot().tenants[tenant.name].pages.params >= nbytes // PAGE - 1
        with attach_hooks([*layers_of(model), model.lm_head], tenant, model=model):
            for alpha in range(LAYERS + 1):
                remap.advanced.remap(session, tenant.name, alpha, 1, "nested")
                assert torch.equal(logits_of(model, ids), expected), alpha
            remap.advanced.remap(session, tenant.name, LAYERS - 1, 2)
            assert torch.equal(logits_of(model, ids), expected)
            assert session.snapshot().tenants[tenant.name].copies > 0
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert torch.equal(logits_of(model, ids), expected)


def test_the_head_can_be_the_only_thing_that_streams_in_the_engine() -> None:
    model = make("llama")
    with torch.inference_mode():
        ids = ids_for(1, 9)[0]
        expected = model.generate(ids[None], max_new_tokens=8, do_sample=False)[0, 9:].tolist()
    with session_for() as session:
        tenant = session.attach(model, kv=kv_spec(model), extra_layers=[model.lm_head], embedding="host", hooks=False)
        remap.advanced.remap(session, tenant.name, LAYERS, 1)
        assert LAYERS in tenant.streamed
        engine = LLMEngine(model, tenant, session=session)
        result = engine.run([Request("one", tuple(ids.tolist()), SamplingParams(max_tokens=8))])
        assert list(result.outputs["one"].tokens) == expected


def test_a_tied_embedding_and_a_wrong_name_are_refused_before_anything_changes() -> None:
    model = make("llama-odd")
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    with session_for() as session:
        with pytest.raises(remap.InvalidArgument, match="shares its memory") as caught:
            session.attach(model, kv=kv_spec(model), embedding="host")
        assert caught.value.shared == ["lm_head.weight"]
        with pytest.raises(remap.InvalidArgument, match="'device' or 'host'"):
            session.attach(model, kv=kv_spec(model), embedding="disk")
        with pytest.raises(remap.InvalidArgument, match="no module 'head'"):
            session.attach(model, kv=kv_spec(model), extra_layers="head")
        with pytest.raises(remap.InvalidArgument, match="no input embedding"):
            session.attach(layers_of(model)[0], layers=[layers_of(model)[0].mlp], kv=kv_spec(model), embedding="host")
        assert [tensor.data_ptr() for tensor in model.parameters()] == addresses
        assert session.snapshot().pages.free == session.snapshot().pages.total
        tenant = session.attach(model, kv=kv_spec(model), extra_layers="lm_head")  # tied: it has no bytes of its own
        assert LAYERS not in tenant._state.order
