"""More models than memory under the engine: who is given a turn takes the pages of the others, and every token is the same."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import remap
from remap.errors import InvalidState
from remap.internals import internals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import kv_spec, make  # noqa: E402
from sim_models import kv_spec as sim_spec  # noqa: E402

from remap import _core  # noqa: E402
from remap.policy.hidden import lateness_beyond  # noqa: E402
from remap_serve.engine import LLMEngine, Request, SamplingParams, SharedEngines  # noqa: E402
from remap_serve.sim.worlds import masters  # noqa: E402

PAGE = 16384
KINDS = ("llama", "qwen3", "llama-odd", "llama", "qwen3")


def requests(names: list[str]) -> dict[str, list[Request]]:
    rng = random.Random(3)
    made: dict[str, list[Request]] = {name: [] for name in names}
    for number in range(3 * len(names)):
        prompt = tuple(rng.randrange(3, 50) for _ in range(rng.randint(4, 24)))
        made[names[number % len(names)]].append(
            Request(f"{number}", prompt, SamplingParams(max_tokens=rng.randint(2, 8)))
        )
    return made


def serve(memory: int | None, quantum_s: float, host_kv: Any = "auto") -> tuple[Any, list[Any], int]:
    """(tokens, activations, the most models whose layers were all at home at once)."""
    models = {f"m{i}": make(kind, seed=i) for i, kind in enumerate(KINDS)}
    knobs = remap.advanced.Knobs(min_idle=0.0)
    with remap.Session(memory or 64 << 20, page_bytes=PAGE, config=knobs, host_kv=host_kv) as session:
        engines = {}
        for name, model in models.items():
            spec = kv_spec(model, min_blocks=8, max_blocks=4000)
            tenant = session.attach(
                model, name=name, kv=spec, active=False, pages="none" if memory else "own", hooks=False
            )
            engines[name] = LLMEngine(model, tenant, session=session, max_num_seqs=4, max_batch_tokens=32)
        shared = SharedEngines(session, engines, quantum_s=quantum_s)
        home = 0

        def look(*_: Any) -> None:
            nonlocal home
            home = max(home, sum(not session._tenants[name].pages.cold for name in models))

        result = shared.run(requests(list(models)), look)
        remap.advanced.check(session)
        for name in models:
            assert internals(engines[name].tenant).stats().abandoned == 0
        return result.tokens(), list(result.activations), home


@pytest.mark.parametrize("quantum_s", [math.inf, 0.003])
def test_tokens_are_those_of_ample_memory(quantum_s: float) -> None:
    ample, _, all_of_them = serve(None, quantum_s)
    tokens, activations, home = serve(2 << 20, quantum_s)
    assert tokens == ample and all_of_them == len(KINDS) and 1 <= home <= 2  # at once
    assert {turn.tenant for turn in activations} == {f"m{i}" for i in range(len(KINDS))}
    assert (
        sum(turn.restored_layers > 0 for turn in activations) >= len(KINDS) - home
    )  # others had come ahead of their turn


def test_a_model_without_pages_reads_as_ever_and_leaves_whole() -> None:
    """What torch may do with it meanwhile; its tensors' addresses never change, and detaching gives its weights back."""
    model, other = make("llama"), make("qwen3", seed=1)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ids = torch.tensor([[5, 7, 9, 11]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with remap.Session(2 << 20, page_bytes=PAGE) as session:
        session.attach(other, name="other", kv=kv_spec(other, min_blocks=8))
        tenant = session.attach(model, name="m", kv=kv_spec(model, min_blocks=8), active=False, pages="none")
        assert internals(tenant).cold == tuple(range(tenant.layers)) == session.snapshot().tenants["m"].cold
        addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        with pytest.raises(InvalidState):
            model.generate(ids, max_new_tokens=4, do_sample=False)
        for parameter in model.parameters():
            str(parameter.sum())  # whatever it says, the process lives
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert session.activate("m", alone=True).activated and internals(tenant).cold == ()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        assert addresses == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        session.deactivate("m", pages="none")
        assert session.activate("other").activated
        session.detach("m")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_and_the_head_go_and_come_with_the_layers(tied: bool) -> None:
    """Last of all, and first: a pass waits for them when it begins. Buffers and what the model writes stay."""
    model, other = make("llama"), make("qwen3", seed=1)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.register_buffer("seen", torch.ones(8))
    nbytes = sum(tensor.nbytes for name, tensor in model.named_parameters() if ".layers." not in name)
    assert nbytes > PAGE
    ids = torch.tensor([[5, 7, 9, 11]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    embedded = model.model.embed_tokens(ids)
    with remap.Session(2 << 20, page_bytes=PAGE) as session:
        session.attach(other, name="other", kv=kv_spec(other, min_blocks=8))
        tenant = session.attach(model, name="m", kv=kv_spec(model, min_blocks=8), active=False, pages="none")
        kept = session.snapshot().tenants["m"].resident_bytes
        assert kept == 2 * PAGE  # of the buffers, and of what shows while nothing is there
        assert tenant.layers == len(model.model.layers) == len(internals(tenant).cold)
        for _ in range(2):
            with pytest.raises(InvalidState, match="outside of a pass"):
                model.model.embed_tokens(ids)
            report = session.activate("m", alone=True)
            assert report.activated and report.restored == tuple(range(tenant.layers))
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
            assert torch.equal(model.model.embed_tokens(ids), embedded)
            assert session.snapshot().tenants["m"].resident_bytes >= kept + nbytes
            session.deactivate("m", pages="none")
            assert session.snapshot().tenants["m"].resident_bytes == kept and model.seen.sum() == 8
            remap.advanced.check(session)
        session.activate("m", alone=True)
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)  # now these bytes are nowhere else
        session.deactivate("m", pages="none")
        assert session.snapshot().tenants["m"].resident_bytes >= kept + nbytes
        assert internals(tenant).cold == tuple(range(tenant.layers))
        assert session.activate("m").activated and torch.equal(model.model.embed_tokens(ids), embedded)
        remap.advanced.check(session)


def test_they_come_from_the_weights_file(tmp_path: Any) -> None:
    """As layers do. A state dict has the right bytes meanwhile."""
    model = make("llama")
    model.save_pretrained(tmp_path)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ids = torch.tensor([[5, 7, 9, 11]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with remap.Session(2 << 20, page_bytes=PAGE) as session:
        options = {"kv": kv_spec(model, min_blocks=8), "active": False, "pages": "none", "weights": tmp_path}
        session.attach(model, name="m", **options)
        for _ in range(2):
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            assert session.activate("m").activated
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
            session.deactivate("m", pages="none")
        session.detach("m")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_was_attached_active_keeps_what_stands_outside_of_its_layers() -> None:
    """It has no second copy of these tensors, so nothing could bring them back."""
    model = make("llama")
    ids = torch.tensor([[5, 7, 9, 11]])
    with remap.Session(2 << 20, page_bytes=PAGE) as session:
        session.attach(model, name="m", kv=kv_spec(model, min_blocks=8))
        embedded = model.model.embed_tokens(ids)
        session.deactivate("m", pages="none")
        assert session.snapshot().tenants["m"].cold and torch.equal(model.model.embed_tokens(ids), embedded)


def test_what_is_written_while_a_layer_is_away_is_told_and_harms_nobody() -> None:
    """In place, into a model that never had pages: nothing else changes, its activation refuses, and the others go on."""
    model, other = make("llama"), make("qwen3", seed=1)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with remap.Session(2 << 20, page_bytes=PAGE) as session:
        session.attach(other, name="other", kv=kv_spec(other, min_blocks=8))
        attached = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
        session.attach(model, name="m", kv=kv_spec(model, min_blocks=8), active=False, pages="none")
        written = model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                parameter.data.fill_(3.0)  # torch keeps no version of these
            written.fill_(3.0)
        assert all(torch.equal(tensor, attached[name]) for name, tensor in other.state_dict().items())
        pages = session.snapshot().pages
        with pytest.raises(InvalidState) as refused:
            session.activate("m", alone=True)
        assert refused.value.fields == {"tenant": "m", "written": {1: ["model.layers.1.mlp.down_proj.weight"]}}
        assert session.snapshot().pages == pages and session.snapshot().tenants["other"].active
        session.step({"other": 2})
        remap.advanced.check(session)
        with pytest.warns(RuntimeWarning, match="down_proj"):
            session.detach("m")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("lent", [True, False])
def test_a_write_into_a_layer_that_is_away_is_told_before_it_comes_home(lent: bool) -> None:
    """Its load would hide that: the model would compute with the old weights, and nothing would say so."""
    model, other = make("llama"), make("qwen3", seed=1)
    ids = torch.tensor([[5, 7, 9, 11]])
    with remap.Session(4 << 20, page_bytes=PAGE) as session:
        tenant = session.attach(model, name="m", kv=kv_spec(model, min_blocks=8, max_blocks=4000))
        session.attach(other, name="other", kv=kv_spec(other, min_blocks=8))
        model.generate(ids, max_new_tokens=2, do_sample=False)
        if lent:
            session.deactivate("m")
            remap.advanced.lend(session, "m", 3)
        else:
            remap.advanced.remap(session, "m", 3)
        layer = tenant.streamed[0]
        with torch.no_grad():
            model.model.layers[layer].mlp.down_proj.weight.zero_()
        for _ in range(20):  # the controller would have it home by now
            session.step({"other": 1})
        assert layer in tenant.streamed
        with pytest.raises(InvalidState) as refused:
            if lent:
                session.activate("m")
            else:
                remap.advanced.remap(session, "m", 0)
        assert list(refused.value.fields["written"]) == [layer] and layer in tenant.streamed
        remap.advanced.check(session)
        with pytest.warns(RuntimeWarning, match="lost"):
            session.detach("m")


def test_a_module_in_the_place_of_another_is_no_lost_write() -> None:
    """As an adapter of weights is put in, around a layer that is lent: its old tensor is written by nobody, and comes home."""
    model, other = make("llama"), make("qwen3", seed=1)
    ids = torch.tensor([[5, 7, 9, 11]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with remap.Session(4 << 20, page_bytes=PAGE) as session:
        tenant = session.attach(model, name="m", kv=kv_spec(model, min_blocks=8))
        session.attach(other, name="other", kv=kv_spec(other, min_blocks=8))
        model.generate(ids, max_new_tokens=2, do_sample=False)
        session.deactivate("m")
        remap.advanced.lend(session, "m", 3)
        layer = model.model.layers[tenant.streamed[0]]
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj)
        assert session.activate("m").activated and not tenant.streamed
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("compute_s", [1e-4, 5e-3])
def test_a_pass_begins_when_the_first_layer_has_come(compute_s: float) -> None:
    """In virtual time: a cold model's first pass ends by the slower of its load and its computation, and one layer's time. Its
    pages were another model's; the driver takes its time for each page that is mapped, and zeroes take theirs."""
    layers, nbytes, rate = 24, 32 << 20, 55e9
    driver = {"map_s": 2e-6, "set_access_s": 3.6e-5, "unmap_s": 2.6e-5, "copy_setup_s": 1e-5}
    made = _core.make_sim_backend(
        capacity_bytes=2 << 30,
        h2d_bytes_per_s=rate,
        d2h_bytes_per_s=rate,
        hbm_bytes_per_s=3e12,
        contention=False,
        **driver,
    )
    kv = sim_spec(layers, 1, 64, 16, 4, 64)
    with remap.Session((layers + 6) * nbytes, platform=remap.advanced.Platform(backend=made)) as session:
        tenants = {
            name: session.attach_bytes(masters([nbytes] * layers), name=name, kv=kv, active=False, pages="none")
            for name in ("a", "b")
        }
        stream = made.create_stream()

        def first_pass(name: str) -> float:
            begun = made.now
            assert session.activate(name, alone=True).activated
            with tenants[name].forward(stream=stream):
                for layer in range(layers):
                    tenants[name].wait(layer)
                    made.compute(stream, compute_s)
                    tenants[name].done(layer)
            made.finish(stream)
            return float(made.now - begun)

        first_pass("a")
        seconds = [first_pass(name) for name in ("b", "a", "b")]
        load_s, computed_s = layers * (nbytes / rate + 1e-5), layers * compute_s
        bound = max(load_s + compute_s, computed_s + nbytes / rate)
        assert max(seconds) <= 1.1 * bound, (seconds, load_s, computed_s)


@pytest.mark.parametrize("compute_s", [2e-4, 4e-4])
def test_the_certified_first_layers_hide_the_loading_of_the_rest(compute_s: float) -> None:
    """In virtual time: the first pass of a model that kept them takes at most 1.2 times as long as a warm one; with one layer in
    four fewer it would take longer."""
    layers, nbytes, rate = 24, 32 << 20, 55e9
    made = _core.make_sim_backend(
        capacity_bytes=2 << 30, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, hbm_bytes_per_s=3e12, contention=False
    )
    kv = sim_spec(layers, 1, 64, 16, 4, 64)
    knobs = remap.advanced.Knobs(reload_s=0.0)
    platform = remap.advanced.Platform(backend=made)
    with remap.Session((layers + 6) * nbytes, config=knobs, platform=platform) as session:
        tenant = session.attach_bytes(masters([nbytes] * layers), name="a", kv=kv, active=False, pages="none")
        stream = made.create_stream()

        def first_pass() -> float:
            begun = made.now
            assert session.activate("a").activated
            with tenant.forward("prefill", 8, stream=stream):
                for layer in range(layers):
                    tenant.wait(layer)
                    made.compute(stream, compute_s)
                    tenant.done(layer)
            made.finish(stream)
            return float(made.now - begun)

        load_s = first_pass()
        first_pass()
        warm_s = first_pass()
        session.deactivate("a", pages="auto")
        kept = layers - len(session.snapshot().tenants["a"].cold)
        certified_s = first_pass()
        assert certified_s <= 1.2 * warm_s < load_s and 0 < kept < layers, (kept, certified_s, warm_s)
        late = lateness_beyond([compute_s] * layers, [nbytes / rate] * layers)
        assert late[kept - kept // 4 - 1] > 0.0


@pytest.mark.parametrize("host_kv", [0, "auto"])
def test_a_model_that_grew_into_its_own_layers_comes_back_behind_a_small_one(host_kv: Any) -> None:
    """What a small one leaves is too little for the large one's layers beside its live KV: some of its requests give theirs up.
    Their model's turn raised OutOfMemory, and a server ended them all."""
    large, small = make("llama"), make("qwen3", seed=1)
    small.model.layers = small.model.layers[:1]
    small.config.num_hidden_layers = 1
    rng = random.Random(5)
    asked = {
        name: [
            Request(
                f"{name}{number}", tuple(rng.randrange(3, 50) for _ in range(20)), SamplingParams(max_tokens=tokens)
            )
            for number in range(count)
        ]
        for name, count, tokens in (("large", 8, 24), ("small", 3, 3))
    }

    def served(memory: int, engines_asked: Any) -> Any:
        knobs = remap.advanced.Knobs(min_idle=0.0, reserve_blocks=0, slowdown=100.0)
        with remap.Session(memory, page_bytes=4096, config=knobs, host_kv=host_kv) as session:
            engines = {}
            for name, model in (("large", large), ("small", small)):
                spec = kv_spec(model, min_blocks=8, max_blocks=4000, layers=len(model.model.layers))
                tenant = session.attach(model, name=name, kv=spec, active=False, pages="none", hooks=False)
                engines[name] = LLMEngine(model, tenant, session=session, max_num_seqs=8, max_batch_tokens=64)
            shared = SharedEngines(session, engines, quantum_s=0.0)
            away = 0

            def look(*_: Any) -> None:
                nonlocal away
                away = max(away, int(engines["large"].tenant.remapped))

            result = shared.run(engines_asked, look)
            remap.advanced.check(session)
            return result.tokens(), away

    expected, _ = served(64 << 20, asked)
    weights = sum(parameter.nbytes for parameter in large.parameters())
    found, away = served((weights // 4096 + 28) * 4096, asked)
    assert away > 0
    assert found == expected
