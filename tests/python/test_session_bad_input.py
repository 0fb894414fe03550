"""Bad input to a session: each is refused with a typed error and numbers, and nothing has changed (promise 1)."""

from __future__ import annotations

import contextlib

import pytest

import remap
from remap.internals import internals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import LAYERS, addresses_of, ids_for, kv_spec, layers_of, logits_of, make, minimum_bytes, state_of  # noqa: E402

from remap import InvalidArgument, OutOfBlocks, OutOfMemory  # noqa: E402
from remap.adapters.hooks import attach_hooks  # noqa: E402

PAGE = 16384


class Watched:
    """A session, models that must not change, and `refused`: a block that must raise and change nothing."""

    def __init__(self, *models, pages=160):
        self.session = remap.Session(pages * PAGE, page_bytes=PAGE)
        self.models = list(models)
        self.ids = ids_for(2, 5)
        self.expected = [logits_of(model, self.ids) for model in models]

    @contextlib.contextmanager
    def refused(self, error, **fields):
        snapshot = state_of(self.session)
        addresses = [addresses_of(model) for model in self.models]
        with pytest.raises(error) as caught:
            yield caught
        for name, value in fields.items():
            assert caught.value.fields[name] == value, (name, caught.value.fields)
        remap.advanced.check(self.session)
        assert state_of(self.session) == snapshot
        assert [addresses_of(model) for model in self.models] == addresses
        for model, expected in zip(self.models, self.expected, strict=True):
            assert torch.equal(logits_of(model, self.ids), expected)


@pytest.fixture(scope="module")
def shared_model():
    return make("llama")


@pytest.fixture
def bare(shared_model):
    """Not attached; whatever is tried must leave it so."""
    watched = Watched(shared_model)
    yield watched
    watched.session.close()


@pytest.fixture
def attached():
    model = make("llama")
    watched = Watched(model)
    watched.tenant = watched.session.attach(model, kv=kv_spec(model), name="m", hooks=False)
    watched.hooks = attach_hooks(layers_of(model), watched.tenant, model=model)
    yield watched
    watched.hooks.remove()
    watched.session.close()


# --- the session itself -------------------------------------------------------------------------------------------


def opening(**arguments):
    return lambda: remap.Session(**{"capacity": "1MiB", "page_bytes": PAGE, **arguments})


OUT_OF_RANGE = [
    ("slowdown", -1.0), ("reserve_blocks", 0.5), ("max_layers", -1), ("ttft_s", 0.0), ("tbt_s", 0), ("tbt_s", float("inf")),
    ("tbt_s", True), ("lends", 1),
]  # fmt: skip
REFUSED = [
    *((opening(**{name: size}), {"name": name, "value": size}) for name in ("capacity", "page_bytes")
      for size in ("24 apples", "GiB", "1.5B", "-1GiB", "", "1e9", None, 1.5, True, -1)),
    # No capacity is too small for a page of 0 bytes.
    *((opening(capacity="24MiB", page_bytes=page), {} if page else {"field": "page_bytes"})
      for page in (0, 1000, 4095, 4097, "6KB", 12 * 1024 + 1, 12288, 3 << 20)),
    *((opening(**each), each) for each in ({"device": "cuda:x"}, {"device": "tpu"}, {"mode": "fast"}, {"mode": 0})),
    *((lambda kind=kind, name=name, value=value: kind(**{name: value}), {"field": name, "value": value})
      for kind in (remap.Config, remap.advanced.Knobs) for name, value in OUT_OF_RANGE),
    (lambda: remap.Config(ttft_s=float("nan")), {"field": "ttft_s"}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "fields"), REFUSED)
def test_what_no_session_and_no_config_can_have(call, fields):
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert fields.items() <= caught.value.fields.items()


def test_a_tenant_has_the_sessions_config_or_its_own():
    config, own = remap.Config(slowdown=0.5, max_layers=3, lends=False), remap.Config(max_layers=1)
    knobs = remap.advanced.Knobs.of(config)
    assert (knobs.slowdown, knobs.max_layers, knobs.lends) == (0.5, 3, False)
    assert remap.advanced.Knobs.of(knobs) is knobs
    kv = remap.KVSpec(layers=4, kv_heads=1, head_dim=32, dtype="float32", min_blocks=1, max_blocks=8)
    with remap.Session("1MiB", page_bytes=4096, config=config) as session:
        for name, given, most in (("one", None, 3), ("other", own, 1)):
            tenant = session.attach_bytes([bytes(4096)] * 4, name=name, kv=kv, config=given)
            assert internals(tenant)._state.config.max_layers == most


def test_a_capacity_below_one_page_says_the_minimum():
    with pytest.raises(InvalidArgument) as caught:
        remap.Session("1MiB")
    assert caught.value.fields == {"capacity": 2**20, "page_bytes": 2**21, "minimum_bytes": 2**21}
    with pytest.raises(InvalidArgument):
        remap.Session(0, page_bytes=PAGE)
    remap.Session(caught.value.minimum_bytes).close()


# --- attach -------------------------------------------------------------------------------------------------------


def ghost():
    small = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=11, num_hidden_layers=2))


def found(path):
    return {"path": path, "candidates": {"model.layers": LAYERS}}


# What is said instead of what fits (of the model, its layers and those of another model), and what the error says.
WRONG = [
    *((lambda m, own, other, path=path: {"layers": path}, found(path))
      for path in ("model.layer", "layers", "model.layers.0", "model.embed_tokens", "", "model..layers")),
    (lambda m, own, other: {"layers": []}, {}),
    (lambda m, own, other: {"layers": [*own, own[0]]}, {}),
    (lambda m, own, other: {"layers": other}, {}),
    (lambda m, own, other: {"layers": [*own[:-1], "six"]}, {}),
    (lambda m, own, other: {"layers": [*own, own[0].mlp]}, {}),
    (lambda m, own, other: {"layers": own[1:]}, {"kv_layers": LAYERS, "model_layers": LAYERS - 1}),
    *((lambda m, own, other, layers=layers: {"kv": kv_spec(m, layers=layers)}, {"kv_layers": layers, "model_layers": LAYERS})
      for layers in (LAYERS - 1, LAYERS + 1)),
    (lambda m, own, other: {"kv": kv_spec(m, layers=1, dtype="uint8", layout="layer_major", streamed_blocks=1,
                                               host_blocks=1)},
     {"kv_layers": 1, "model_layers": LAYERS}),
    (lambda m, own, other: {"model": ghost(), "kv": kv_spec(m, layers=2)},
     {"device": "meta", "expected": "cpu", "path": "model.embed_tokens.weight"}),
    (lambda m, own, other: {"weights": "/nonexistent/model.safetensors"}, {}),
    (lambda m, own, other: {"weights": []}, {}),
    (lambda m, own, other: {"mutable": "*.bias"}, {"mutable": "*.bias"}),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "fields"), WRONG)
def test_attaching_what_does_not_fit(bare, wrong, fields):
    (model,) = bare.models
    given = {
        "model": model,
        "kv": kv_spec(model),
        **wrong(model, list(layers_of(model)), list(layers_of(make("llama", 1)))),
    }
    with bare.refused(InvalidArgument, **fields):
        bare.session.attach(**given)


@pytest.mark.parametrize("kind", ["llama", "opt-odd"])
@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_exactly_the_minimum_works_and_a_page_less_does_not(kind, layout):
    model = make(kind)
    expected = logits_of(model, ids_for(1, 5))
    kv = kv_spec(model, min_blocks=5, layout=layout)
    least = minimum_bytes(model, kv, PAGE)
    for capacity in (least - PAGE, least - 1):
        with remap.Session(capacity, page_bytes=PAGE) as session:
            with pytest.raises(OutOfMemory) as caught:
                session.attach(model, kv=kv)
            error = caught.value
            assert error.minimum_bytes == error.requested * PAGE == least
            assert error.free == least // PAGE - 1
            assert (session.snapshot().pages.free, session.snapshot().tenants) == (error.free, {})
    assert torch.equal(logits_of(model, ids_for(1, 5)), expected)
    with remap.Session(least, page_bytes=PAGE) as session:
        tenant = session.attach(model, kv=kv, hooks=False)
        assert session.snapshot().pages.free == 0
        assert tenant.kv.usable_blocks >= 5
        with attach_hooks(layers_of(model), tenant, model=model):
            remap.advanced.remap(session, "model", 3)
            assert torch.equal(logits_of(model, ids_for(1, 5)), expected)


def test_a_name_or_a_model_attached_already(attached):
    (model,) = attached.models
    other = make("opt")
    with attached.refused(InvalidArgument, tenant="m"):
        attached.session.attach(other, kv=kv_spec(other), name="m")
    first = "model.embed_tokens.weight"
    with attached.refused(InvalidArgument, path=first):
        attached.session.attach(model, kv=kv_spec(model, min_blocks=1), name="again")
    with remap.Session(160 * PAGE, page_bytes=PAGE) as elsewhere:
        with attached.refused(InvalidArgument, path=first):
            elsewhere.attach(model, kv=kv_spec(model), name="m")
        with attached.refused(InvalidArgument, path=first.removeprefix("model.")):
            elsewhere.attach(model.model, kv=kv_spec(model), name="m")  # a part of it
    attached.hooks.remove()
    attached.session.detach("m")
    attached.session.attach(model, kv=kv_spec(model), name="m")


# --- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "buffers"),
    [(6, 1), (5, 2), (7, 1), (-1, 1), (2, 0), (2, 3), (1, -1), (2.0, 1), (True, 1), ("2", 1), (2, None)],
)
def test_remap_out_of_range(attached, layers, buffers):
    remap.advanced.remap(attached.session, "m", 2, 1)
    with attached.refused(InvalidArgument, layers=layers, buffers=buffers) as caught:
        remap.advanced.remap(attached.session, "m", layers, buffers)
    assert caught.value.streamable == LAYERS
    assert caught.value.maximum == (LAYERS - 2 if buffers in (2, 3) else LAYERS - 1)


def test_a_name_of_nothing_beside_one_that_there_is(attached):
    """(Alone, in every call: test_argument_kinds.py.)"""
    with attached.refused(InvalidArgument, tenant="n"):
        attached.session.step({"m": 10**4, "n": 10**4})


def test_remap_beyond_the_kv_region():
    model = make("llama")
    with remap.Session(160 * PAGE, page_bytes=PAGE) as session:
        session.attach(model, kv=kv_spec(model, max_blocks=6), name="m", hooks=False)
        with pytest.raises(InvalidArgument) as caught:
            remap.advanced.remap(session, "m", 2)
        assert caught.value.max_blocks == 6 and caught.value.pages > 0


def test_remap_back_while_blocks_are_live(attached):
    remap.advanced.remap(attached.session, "m", 4, 1)
    kv = attached.tenant.kv
    live = kv.allocate(kv.free_blocks)
    for layers, buffers in ((0, 1), (3, 1), (2, 2)):
        with attached.refused(OutOfBlocks, usable=len(live)) as caught:
            remap.advanced.remap(attached.session, "m", layers, buffers)
        assert caught.value.requested > caught.value.free
    kv.free(live)
    remap.advanced.remap(attached.session, "m", 0)
    with attached.refused(OutOfBlocks, requested=10**6):
        kv.allocate(10**6)
