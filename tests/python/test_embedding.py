"""What is not in a layer: an embedding that stays in host memory, and an lm_head that streams like a layer."""

from __future__ import annotations

import pytest

import remap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LAYERS, addresses_of, generate, ids_for, kv_spec, layers_of, logits_of, make  # noqa: E402

from remap_serve.engine import LLMEngine, Request, SamplingParams  # noqa: E402

PAGE = 16384


def session_for() -> remap.Session:
    return remap.Session(160 * PAGE, page_bytes=PAGE)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokens_are_the_same_while_the_head_streams_and_the_embedding_is_on_the_host(kind: str) -> None:
    model, ids = make(kind), ids_for(1, 9)
    expected, tokens = logits_of(model, ids), generate(model, ids, 8)[0][0, 9:].tolist()
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with session_for() as plain:
        resident = plain.attach(make(kind), kv=kv_spec(model))
        whole = plain.snapshot().tenants[resident.name].pages.params
    with session_for() as session:
        extra = ["lm_head"] if kind == "llama" else [model.lm_head]
        tenant = session.attach(model, kv=kv_spec(model), extra_layers=extra, embedding="host")
        assert tenant.layers == LAYERS + 1
        saved = whole - session.snapshot().tenants[tenant.name].pages.params
        assert saved >= embedding.numel() * embedding.element_size() // PAGE - 1
        assert torch.equal(logits_of(model, ids), expected)
        for layers, buffers in (*((alpha, 1) for alpha in range(LAYERS + 1)), (LAYERS - 1, 2), (LAYERS, 1)):
            remap.advanced.remap(session, tenant.name, layers, buffers, "nested")
            assert torch.equal(logits_of(model, ids), expected), layers
        assert session.snapshot().tenants[tenant.name].copies > 0 and LAYERS in tenant.streamed
        engine = LLMEngine(model, tenant, session=session)
        result = engine.run([Request("one", tuple(ids[0].tolist()), SamplingParams(max_tokens=8))])
        assert list(result.outputs["one"].tokens) == tokens
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert torch.equal(logits_of(model, ids), expected)


def test_a_tied_embedding_and_a_wrong_name_are_refused_before_anything_changes() -> None:
    model = make("llama-odd")
    kv = kv_spec(model, max_blocks=1500)
    addresses, layer = addresses_of(model), layers_of(model)[0]
    with session_for() as session:
        for what, options, words in (
            (model, {"embedding": "host"}, "shares its memory"),
            (model, {"embedding": "disk"}, "'device' or 'host'"),
            (model, {"extra_layers": "head"}, "no module 'head'"),
            (layer, {"layers": [layer.mlp], "embedding": "host"}, "no input embedding"),
        ):
            with pytest.raises(remap.InvalidArgument, match=words) as caught:
                session.attach(what, kv=kv, **options)
            assert caught.value.fields.get("shared", ["lm_head.weight"]) == ["lm_head.weight"]
        assert addresses_of(model) == addresses
        assert session.snapshot().pages.free == session.snapshot().pages.total
        tenant = session.attach(model, kv=kv, extra_layers="lm_head", hooks=False)
        remap.advanced.remap(session, tenant.name, LAYERS - 1)
        assert LAYERS not in tenant.streamed  # tied: it has no bytes of its own
