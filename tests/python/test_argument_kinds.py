"""Arguments of the wrong kind: each is refused by name, with a typed error, before anything has changed."""

from __future__ import annotations

import odd_arguments
import pytest
from arena_worlds import PAGE, make_layers
from sharing_worlds import Shared, spec
from subprocesses import run

import remap
from remap import InvalidArgument, LimitExceeded, advanced
from remap.internals import internals

SIZES = {"a": [2] * 4, "m": [2] * 4}


@pytest.fixture
def shared():
    with Shared(SIZES, spare=4) as made:
        yield made
        made.check()


@pytest.fixture(scope="module")
def still():
    """Nothing that is done in it changes it."""
    with Shared(SIZES, spare=4) as made:
        before = made.session.snapshot()
        yield made
        assert made.session.snapshot() == before
        made.check()


def refused(call, session=None, **fields):
    """It raises InvalidArgument with these fields, and the session is as it was."""
    before = session and session.snapshot()
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert {name: caught.value.fields[name] for name in fields} == fields
    assert not session or session.snapshot() == before


# --- one by one, what the sweep at the end does not come to -----------------------------------------------------------


def attach(world, layers=None, **given):
    layers = make_layers([1] * 4, 3) if layers is None else layers
    return world.session.attach_bytes(layers, **{"name": "new", "kv": spec(4), **given})


@pytest.mark.parametrize("layer", [None, 5, "text", memoryview(bytes(8))[::2], [1, 2]])
def test_a_layer_that_is_no_buffer(still, layer):
    refused(lambda: attach(still, [b"x" * PAGE, layer], kv=spec(2)), still.session, field="layers", layer=1)


@pytest.mark.parametrize("wrong", [-5, True, 5.0, None, {"blocks": 5}, remap.Demand])
def test_a_demand_that_is_none_leaves_the_others_unmet(still, wrong):
    """ "a" comes first and wants layers: before, it had them by the time that the other was looked at."""
    demands = {"a": remap.Demand(blocks=10), "m": wrong}
    refused(lambda: still.session.step(demands), still.session, field="demand", value=wrong, tenant="m")


@pytest.mark.parametrize("call", ["wait", "done", "ready"])
def test_a_negative_layer_is_told_as_it_is(still, call):
    """An int was expected, it said, and another value came, of type int."""
    with pytest.raises(InvalidArgument, match="-1") as caught:
        getattr(internals(still.engines["a"].tenant), call)(-1)
    assert caught.value.field == "layer"


def test_a_simulated_capacity_beyond_all_addresses():
    refused(lambda: remap.Session(1 << 70, "sim:GH200-96GB"), name="capacity")


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        *(({"max_blocks": blocks}, {"max_blocks": blocks, "most": 1 << 26}) for blocks in (10**9, 10**15)),
        ({"max_blocks": 9, "host_blocks": 1 << 62}, {}),
        ({"max_blocks": 9, "head_dim": 1 << 60, "min_blocks": 0}, {}),
    ],
)
def test_a_kv_cache_that_no_memory_and_no_address_holds(still, more, fields):
    kv = remap.KVSpec(**{"layers": 4, "kv_heads": 1, "head_dim": 64, "min_blocks": 1, **more})
    with pytest.raises(LimitExceeded) as caught:
        attach(still, kv=kv)
    assert {name: caught.value.fields[name] for name in fields} == fields


# --- a torch model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models

    return models


@pytest.fixture
def session():
    with remap.Session(400 * 16384, page_bytes=16384) as made:
        yield made


OPTIONS = [("layers", 5), ("mutable", 5), ("mutable", [5]), ("weights", 5), ("weights", [5]), ("extra_layers", 5)]
OPTIONS += [("weights", "\0"), ("weights", "\ud800")]
OTHERS = [("kv", None), ("config", 0.02), ("name", 5), ("priority", "high"), ("active", "yes"), ("model", "gpt2")]
OTHERS += [("model", None), ("hooks", "yes"), ("names", ["a", "b"])]


def test_attaching_a_model_with_the_wrong_kinds(models, session):
    model = models.make("llama")
    given = {"model": model, "name": "new", "kv": models.kv_spec(model)}
    for name, value in OPTIONS + OTHERS:
        told = {"field": name} if (name, value) in OPTIONS else {"field": name, "value": value}
        refused(lambda: session.attach(**{**given, name: value}), session, **told)  # noqa: B023  called at once


@pytest.mark.parametrize("kind", ["llama", "llama-odd", "qwen2", "qwen3", "opt", "opt-odd"])
def test_a_kv_spec_whose_shape_is_not_the_models(models, session, kind):
    model = models.make(kind)
    fits = models.kv_spec(model)
    for field in ("kv_heads", "head_dim"):
        right = getattr(fits, field)
        for wrong in (right + 1, 2 * right, right - 1):
            with pytest.raises(InvalidArgument) as caught:
                session.attach(model, kv=models.kv_spec(model, **{field: wrong}))
            assert caught.value.fields == {"field": field, "value": wrong, "model_value": right}
    assert session.snapshot().tenants == {}
    session.attach(model, kv=fits)


def test_a_dtype_that_was_left_out(models, session):
    """bfloat16 by default; another than the model's has to be named. Bytes may be laid out as the engine likes."""
    import torch

    wide, narrow = models.make("llama"), models.make("llama", 1, torch.bfloat16)
    unsaid = {"layers": models.LAYERS, "kv_heads": 2, "head_dim": 16, "min_blocks": 1, "max_blocks": 64}
    assert remap.KVSpec(**unsaid) == remap.KVSpec(**unsaid, dtype="bfloat16")
    with pytest.raises(InvalidArgument) as caught:
        session.attach(wide, kv=remap.KVSpec(**unsaid))
    assert caught.value.fields == {"field": "dtype", "value": "bfloat16", "model_value": "float32"}
    assert session.snapshot().tenants == {}
    session.attach(narrow, kv=remap.KVSpec(**unsaid), name="as it computes")
    own = {"kv_heads": 1, "head_dim": 512, "block_tokens": 1}
    for dtype, shape in (("bfloat16", {}), ("float8_e4m3fn", {}), ("int8", {}), ("uint8", own)):
        session.attach(wide, kv=remap.KVSpec(**{**unsaid, **shape}, dtype=dtype), name=dtype)
        session.detach(dtype)


# --- what there is ----------------------------------------------------------------------------------------------------


def test_a_number_of_blocks_is_a_demand(shared):
    wanted = {"a": 10}
    shared.session.step(wanted)
    assert wanted == {"a": 10} and shared.session.snapshot().tenants["a"].free_blocks >= 10


def test_shapes_of_passes_that_there_are(shared):
    numpy = pytest.importorskip("numpy")
    engine = shared.engines["a"]
    for phase in ("decode", "prefill", "mixed"):
        for tokens in (0, 1, 4096, numpy.int64(7)):
            with engine.tenant.forward(phase=phase, tokens=tokens):
                for layer in range(engine.tenant.layers):
                    engine.tenant.wait(layer)
                    engine.tenant.done(layer)
    assert shared.session.snapshot().tenants["a"].passes == 12


@pytest.mark.parametrize("name", ["reload_s", "ttft_s"])
def test_a_bound_in_seconds_that_no_int_holds(name):
    config = advanced.Knobs(**{name: 1.7e308})
    with Shared(SIZES, config=config, options={"m": {"active": False}}) as world:
        for _ in range(3):
            world.engines["a"].serve()
            world.step(a=300)
        world.check()


# --- every public call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", odd_arguments.CALLS)
def test_no_odd_argument_ends_in_a_bare_error(call: str) -> None:
    """Wrong kinds, numbers of 5000 digits, NaN, lone surrogates, nested and endless collections, each in turn, are named."""
    assert [*odd_arguments.bare(call)] == []


def test_every_public_call_is_tried() -> None:
    assert odd_arguments.missing() == []


@pytest.mark.parametrize("call", [advanced.check, advanced.internals, advanced.show])
def test_what_is_no_session_and_no_tenant(call):
    """AttributeError, and `internals(5)` was 5."""
    given = {"path": "socket"} if call is advanced.show else {}
    refused(lambda: call(5, **given), value=5)


@pytest.mark.parametrize("behind", odd_arguments.TAKEN)
def test_every_public_call_is_refused_when_it_comes_too_late(behind: str) -> None:
    """Behind `close` the pool gave blocks out, a listener and an offer were taken, and the session was shown; in a forked child
    `offer` and `open` did as if they had changed something."""
    done = run(f"import odd_arguments; print(*odd_arguments.accepted({behind!r}), sep=chr(10))")
    assert (done.returncode, done.stdout.strip().strip("0")) == (0, ""), done.stdout + done.stderr
