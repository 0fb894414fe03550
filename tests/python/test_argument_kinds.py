"""Arguments of the wrong kind: each is refused by name, with a typed error, before anything has changed."""

from __future__ import annotations

import odd_arguments
import pytest
from arena_worlds import PAGE, make_layers
from sharing_worlds import Shared, spec
from subprocesses import run

import remap
from remap import InvalidArgument, LimitExceeded
from remap.internals import internals

SIZES = {"a": [2] * 4, "m": [2] * 4}


@pytest.fixture
def shared():
    with Shared(SIZES, spare=4) as made:
        yield made
        made.check()


def refused(call, session=None, **fields):
    """It raises InvalidArgument with these fields, and the session is as it was."""
    before = session and session.snapshot()
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert {name: caught.value.fields[name] for name in fields} == fields
    assert not session or session.snapshot() == before


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", {"slowdown": 0.1}),
        ("config", remap.advanced.Knobs),
        ("platform", {"copy_threads": 2}),
        ("platform", remap.advanced.Platform),
    ],
)
def test_a_session_of_the_wrong_kinds(name, value):
    refused(lambda: remap.Session(4 * PAGE, page_bytes=PAGE, **{name: value}), field=name, value=value)


PLATFORM = {
    "backend": ["cuda", object()],
    "copy_threads": ["2", True, 0, -1, 1 << 70, 1.0],
    "gpu_direct_rdma": [1],
    "shareable": ["fd", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in PLATFORM.items() for value in values])
def test_a_platform_of_the_wrong_kinds(name, value):
    refused(lambda: remap.advanced.Platform(**{name: value}), field=name, value=value)


def test_a_simulated_capacity_beyond_all_addresses():
    with pytest.raises(InvalidArgument) as caught:
        remap.Session(1 << 70, "sim:GH200-96GB")
    assert caught.value.name == "capacity"


# --- attaching --------------------------------------------------------------------------------------------------------

WRONG = [
    ("kv", None), ("kv", {"layers": 4}), ("kv", remap.KVSpec), ("config", 0.02), ("name", 5), ("name", None),
    ("name", ["a"]), ("priority", "high"), ("priority", None), ("active", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_attaching_bytes_with_the_wrong_kinds(shared, name, value):
    given = {"name": "new", "kv": spec(4), name: value}
    refused(
        lambda: shared.session.attach_bytes(make_layers([1] * 4, 3), **given), shared.session, field=name, value=value
    )


@pytest.mark.parametrize("layers", [None, 5, b"bytes", "text", {0: b"x"}, [], object(), iter([b"x"])])
def test_layers_that_are_no_sequence_of_buffers(shared, layers):
    refused(lambda: shared.session.attach_bytes(layers, name="new", kv=spec(4)), shared.session, field="layers")


@pytest.mark.parametrize("layer", [None, 5, "text", memoryview(bytes(8))[::2], [1, 2]])
def test_a_layer_that_is_no_buffer(shared, layer):
    given = [b"x" * PAGE, layer]
    refused(lambda: shared.session.attach_bytes(given, name="new", kv=spec(2)), shared.session, field="layers", layer=1)


def test_a_kv_cache_whose_books_no_memory_holds(shared):
    before = shared.session.snapshot()
    for blocks in (10**9, 10**15):
        with pytest.raises(LimitExceeded) as caught:
            shared.session.attach_bytes(make_layers([1] * 4, 3), name="new", kv=spec(4, max_blocks=blocks))
        assert (caught.value.max_blocks, caught.value.most) == (blocks, 1 << 26)
    assert shared.session.snapshot() == before


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


@pytest.mark.parametrize(
    ("name", "value"),
    [*WRONG, *OPTIONS, ("model", "gpt2"), ("model", None), ("hooks", "yes"), ("names", ["a", "b"])],
)
def test_attaching_a_model_with_the_wrong_kinds(models, session, name, value):
    model = models.make("llama")
    given = {"model": model, "name": "new", "kv": models.kv_spec(model), name: value}
    told = {"field": name} if (name, value) in OPTIONS else {"field": name, "value": value}
    refused(lambda: session.attach(**given), session, **told)


@pytest.mark.parametrize("kind", ["llama", "llama-odd", "qwen2", "qwen3", "opt", "opt-odd"])
@pytest.mark.parametrize("field", ["kv_heads", "head_dim"])
def test_a_kv_spec_whose_shape_is_not_the_models(models, session, kind, field):
    model = models.make(kind)
    fits = models.kv_spec(model)
    right = getattr(fits, field)
    before = session.snapshot()
    for wrong in (right + 1, 2 * right, right - 1):
        with pytest.raises(InvalidArgument) as caught:
            session.attach(model, kv=models.kv_spec(model, **{field: wrong}))
        assert caught.value.fields == {"field": field, "value": wrong, "model_value": right}
    assert session.snapshot() == before
    session.attach(model, kv=fits)


def test_a_dtype_that_was_left_out(models, session):
    """bfloat16 by default; another than the model's has to be named."""
    import torch

    wide, narrow = models.make("llama"), models.make("llama", 1, torch.bfloat16)
    unsaid = {"layers": models.LAYERS, "kv_heads": 2, "head_dim": 16, "min_blocks": 1, "max_blocks": 64}
    assert remap.KVSpec(**unsaid) == remap.KVSpec(**unsaid, dtype="bfloat16")
    with pytest.raises(InvalidArgument) as caught:
        session.attach(wide, kv=remap.KVSpec(**unsaid))
    assert caught.value.fields == {"field": "dtype", "value": "bfloat16", "model_value": "float32"}
    assert session.snapshot().tenants == {}
    session.attach(narrow, kv=remap.KVSpec(**unsaid), name="as it computes")
    for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        session.attach(wide, kv=remap.KVSpec(**unsaid, dtype=dtype), name=dtype)
        session.detach(dtype)


def test_bytes_that_the_engine_lays_out_itself(models, session):
    shape = {"layers": models.LAYERS, "kv_heads": 1, "head_dim": 512, "block_tokens": 1, "dtype": "uint8"}
    session.attach(models.make("llama"), kv=remap.KVSpec(**shape, min_blocks=1, max_blocks=64))


# --- calls that name a tenant -----------------------------------------------------------------------------------------

NAMED = {
    "detach": ("name", lambda session, kv: session.detach(["a"])),
    "layer_address": ("layer", lambda session, kv: remap.advanced.layer_address(session, "a", "0")),
    "lend": ("name", lambda session, kv: remap.advanced.lend(session, "a", 1, to=["m"])),
    "activate": ("name", lambda session, kv: session.activate({})),
    **{
        f"activate, {share}": (
            "partial",
            lambda session, kv, share=share: session.activate("a", alone=True, partial=share),
        )
        for share in (-0.1, float("nan"), float("inf"), "0.5", None)
    },
    "activate, alone": ("alone", lambda session, kv: session.activate("a", alone="no")),
    "remap": ("drain", lambda session, kv: remap.advanced.remap(session, "a", 0, drain="no")),
    "settle": ("name", lambda session, kv: remap.advanced.settle(session, ["a"])),
    "declare": ("address", lambda session, kv: remap.advanced.declare_registered(session, "x", 4)),
    "declare, negative": ("address", lambda session, kv: remap.advanced.declare_registered(session, -5, 4)),
    "declare, beyond": ("nbytes", lambda session, kv: remap.advanced.declare_registered(session, 4096, 1 << 70)),
    "withdraw": ("address", lambda session, kv: remap.advanced.withdraw_registered(session, None, None)),
    "free": ("ids", lambda session, kv: kv.free(5)),
    "subscribe": ("listener", lambda session, kv: kv.subscribe(5)),
}


@pytest.mark.parametrize("call", NAMED)
def test_calls_with_the_wrong_kinds(shared, call):
    field, made = NAMED[call]
    refused(lambda: made(shared.session, shared.engines["a"].tenant.kv), shared.session, field=field)


# --- steps and passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-5, True, 5.0, None, {"blocks": 5}, remap.Demand])
def test_a_demand_that_is_none_leaves_the_others_unmet(shared, wrong):
    """ "a" comes first and wants layers: before, it had them by the time that the other was looked at."""
    demands = {"a": remap.Demand(blocks=10), "m": wrong}
    refused(lambda: shared.session.step(demands), shared.session, field="demand", value=wrong, tenant="m")


def test_a_number_of_blocks_is_a_demand(shared):
    wanted = {"a": 10}
    shared.session.step(wanted)
    assert wanted == {"a": 10} and shared.session.snapshot().tenants["a"].free_blocks >= 10


@pytest.mark.parametrize("wrong", [5, "a", ["a"], [("a", remap.Demand(1))]])
def test_demands_that_are_no_mapping(shared, wrong):
    refused(lambda: shared.session.step(wrong), shared.session, field="demand")


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("phase", value) for value in ("decod", None, 1)), *(("tokens", value) for value in (-5, 1.5, "3", None, True))],
)
def test_a_pass_of_no_such_shape(shared, field, value):
    tenant = shared.engines["a"].tenant
    refused(lambda: tenant.forward(**{field: value}), field=field, value=value)
    assert not internals(tenant).in_pass


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


# --- absurd, and of the right kind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reload_s", "ttft_s"])
def test_a_bound_in_seconds_that_no_int_holds(name):
    config = remap.advanced.Knobs(**{name: 1.7e308})
    with Shared({"a": [2] * 4, "b": [2] * 4}, config=config, options={"b": {"active": False}}) as world:
        for _ in range(3):
            world.engines["a"].serve()
            world.step(a=300)
        world.check()


def test_counts_that_no_float_holds():
    for value in (1 << 63, 1 << 1030, 10**5000):
        refused(lambda value=value: remap.Demand(value), field="blocks")
        refused(lambda value=value: remap.Config(reserve_blocks=value), field="reserve_blocks")
        refused(lambda value=value: spec(4, max_blocks=value), field="max_blocks")


@pytest.mark.parametrize("more", [{"host_blocks": 1 << 62}, {"head_dim": 1 << 60, "min_blocks": 0}])
def test_a_kv_cache_that_no_address_reaches(shared, more):
    given = {"layers": 4, "kv_heads": 1, "head_dim": 64, "min_blocks": 1, "max_blocks": 9, **more}
    before = shared.session.snapshot()
    with pytest.raises(LimitExceeded):
        shared.session.attach_bytes(make_layers([1] * 4, 3), name="new", kv=remap.KVSpec(**given))
    assert shared.session.snapshot() == before


def test_a_name_that_is_no_text(shared):
    given = make_layers([1] * 4, 3)
    refused(lambda: shared.session.attach_bytes(given, name="\ud800", kv=spec(4)), shared.session, field="name")


@pytest.mark.parametrize("path", ["\0", "\ud800"])
def test_a_path_that_no_file_has(path):
    from remap.arguments import require_options

    refused(lambda: require_options(None, (), path, None, (), True), field="weights", value=path)


# --- every public call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", odd_arguments.CALLS)
def test_no_odd_argument_ends_in_a_bare_error(call: str) -> None:
    """Wrong kinds, numbers of 5000 digits, NaN, lone surrogates, nested and endless collections, each in turn."""
    assert [*odd_arguments.bare(call)] == []


def test_every_public_call_is_tried() -> None:
    assert odd_arguments.missing() == []


@pytest.mark.parametrize("call", [remap.advanced.check, remap.advanced.internals, remap.advanced.show])
def test_what_is_no_session_and_no_tenant(call):
    """AttributeError, and `internals(5)` was 5."""
    given = {"path": "socket"} if call is remap.advanced.show else {}
    refused(lambda: call(5, **given), value=5)


@pytest.mark.parametrize("behind", odd_arguments.TAKEN)
def test_every_public_call_is_refused_when_it_comes_too_late(behind: str) -> None:
    """Behind `close` the pool gave blocks out, a listener and an offer were taken, and the session was shown; in a forked child
    `offer` and `open` did as if they had changed something."""
    done = run(f"import odd_arguments; print(*odd_arguments.accepted({behind!r}), sep=chr(10))")
    assert (done.returncode, done.stdout.strip().strip("0")) == (0, ""), done.stdout + done.stderr


def test_bare_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(count: int) -> int:
        return count + 1

    monkeypatch.setitem(odd_arguments.CALLS, "strict", (lambda world: strict, {"count": 1}))
    found = [*odd_arguments.bare("strict")]
    assert len(found) > 30 and all("TypeError" in each for each in found)


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (remap.advanced.place, {"first": 0, "end": 4, "hold": ["1"]}),
        (remap.advanced.place, {"first": 0, "end": 4, "fill": range(1 << 40)}),
        (remap.advanced.filled, {"layer": [1]}),
        (remap.advanced.read_layer, {"layer": 0, "offset": "0", "address": 0, "nbytes": 0}),
        (remap.advanced.rewrite, {"write": "weights"}),
    ],
)
def test_verbs_by_hand_with_the_wrong_kinds(shared, verb, given):
    name, value = list(given.items())[-1] if "offset" not in given else ("offset", "0")
    refused(lambda: verb(shared.session, "a", **given), shared.session, field=name, value=value)


@pytest.mark.parametrize("call", ["wait", "done", "ready"])
@pytest.mark.parametrize("layer", [1 << 40, -1, "0", None, [0], 0.5])
def test_brackets_of_no_layer(shared, call, layer):
    with pytest.raises(InvalidArgument) as caught:
        getattr(internals(shared.engines["a"].tenant), call)(layer)
    assert caught.value.field == "layer"
    assert layer != -1 or "-1" in str(caught.value), "an int was expected, it said, and another value came, of type int"


def test_brackets_on_no_stream(shared):
    with pytest.raises(InvalidArgument) as caught:
        shared.engines["a"].tenant.wait(0, "stream")
    assert caught.value.field == "stream"
