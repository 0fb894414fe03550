"""What a user of torch naturally does with an attached model: each is right, or raises; nothing computes with other bytes.

Each test replays one failure of the first inspection: what its docstring says happened, silently, before it was mended.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from remap.internals import internals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import (  # noqa: E402
    LAYERS,
    addresses_of,
    bytes_of,
    generate,
    ids_for,
    kv_spec,
    layers_of,
    logits_of,
    make,
    save_weights,
)  # fmt: skip
from torch import nn  # noqa: E402

import remap  # noqa: E402
from remap import InvalidArgument, InvalidState, advanced  # noqa: E402
from remap.adapters.hooks import attach_hooks  # noqa: E402
from remap.model.hooks import OURS  # noqa: E402

PAGE = 16384
MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])


class World:
    """A model in a session, with the hooks that attach puts in, and its twin outside. A context manager."""

    def __init__(self, kind="llama", *, mode="aliased", remapped=0, prove=True, model=None, **attach):
        self.model = model or make(kind)
        self.bare = copy.deepcopy(self.model)
        self.ids = ids_for(2, 7)
        self.expected = logits_of(self.bare, self.ids)
        self.session = remap.Session(180 * PAGE, page_bytes=PAGE, mode=mode)
        self.tenant = self.session.attach(self.model, kv=kv_spec(self.model, max_blocks=1200), name="m", **attach)
        if prove:
            self.right()
        if remapped:
            self.remap(remapped)
            assert len(self.tenant.streamed) == remapped + 1

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.session.close()
        if kind is None:
            self.right()
            for owner in (*self.model.modules(), *self.model.parameters()):
                assert not any(getattr(value, OURS, False) for value in owner.__dict__.values())

    def remap(self, layers, *more):
        advanced.remap(self.session, "m", layers, *more)
        advanced.settle(self.session)  # until regions are re-pointed there is nothing behind them, and a device faults

    def logits(self):
        return logits_of(self.model, self.ids)

    def right(self):
        assert torch.equal(self.logits(), self.expected)

    def bracketed(self):
        with self.tenant.forward():
            self.logits()

    def bypassed(self, call=None, layers=None):
        """The pass raises when it is left, names the layers, and the next one is right again."""
        away = tuple(layers or self.tenant.streamed)
        advanced.settle(self.session)
        with pytest.raises(InvalidState, match="discarded") as caught:
            (call or self.logits)()
        assert (caught.value.tenant, caught.value.layer, caught.value.layers) == ("m", away[0], away)
        assert not internals(self.tenant).in_pass


def equal(state, expected):
    assert list(state) == list(expected)
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def unhooked(module):
    return not (module._forward_hooks or module._forward_pre_hooks or module._state_dict_hooks)


# --- a pass that does not wait for its layers -------------------------------------------------------------------------


@MODES
def test_hooks_are_attached_by_attach_and_go_with_the_tenant(mode):
    """A model whose user forgot attach_hooks computed with whatever the ring held."""
    model = make("llama")
    before = {module: list(module.__dict__) for module in model.modules()}
    with World(model=model, mode=mode, remapped=4) as world:
        world.right()
        assert world.session.snapshot().tenants["m"].copies > 0
        assert torch.equal(generate(world.model, world.ids)[0], generate(world.bare, world.ids)[0])
    assert {module: list(module.__dict__) for module in model.modules()} == before
    assert all(unhooked(module) for module in model.modules())


@MODES
def test_a_pass_without_hooks_raises(mode):
    """hooks=False was said, and then nobody called wait."""
    with World(mode=mode, prove=False, hooks=False, remapped=3) as world:
        world.bypassed(world.bracketed)
        assert internals(world.tenant).times() is None  # what a missed pass took says nothing about a pass
        with pytest.raises(KeyError), world.tenant.forward():
            raise KeyError  # the caller's exception is what is told, not that the layers were not waited for
        hooks = attach_hooks(layers_of(world.model), world.tenant, model=world.model)
        world.right()
        hooks.remove()
        hooks.remove()
        away = world.tenant.streamed
        world.remap(0)
        world.bypassed(world.bracketed, away)  # on its way home is no less wrong than streamed
        with attach_hooks(layers_of(world.model), world.tenant, model=world.model):
            world.right()
        world.bracketed()  # everything is at home, and was waited for: nothing is needed


@MODES
def test_hooks_that_somebody_took_out_are_missed(mode):
    """Somebody put the calls of one streamed layer, of all, or of the head back to torch's own."""
    with World(mode=mode, remapped=LAYERS, extra_layers=["lm_head"]) as world:
        del world.model.lm_head._call_impl
        world.bypassed(layers=[LAYERS])
        del layers_of(world.model)[1]._call_impl
        world.bypassed(layers=[1, LAYERS])
        for layer in layers_of(world.model):
            layer.__dict__.pop("_call_impl", None)
        world.bypassed()


class Around(nn.Module):
    """Instead of a layer: calls its `forward`, past its hooks, or leaves it out, as early exit does."""

    def __init__(self, inner, skip):
        super().__init__()
        self.__dict__.update(inner=inner, skip=skip, attention_type=getattr(inner, "attention_type", None))

    def forward(self, hidden, *args, **kwargs):
        return hidden if self.skip else self.inner.forward(hidden, *args, **kwargs)


@MODES
@pytest.mark.parametrize("skip", [False, True])
def test_a_layer_that_runs_past_its_hooks_is_missed(mode, skip):
    """A layer called as `layer.forward(...)`, a replaced `layer.__call__`, a layer that early exit skips."""
    with World(mode=mode, remapped=2) as world:
        layers, streamed = layers_of(world.model), world.tenant.streamed
        kept = list(layers)
        for victims in ([layer for layer in range(LAYERS) if layer not in streamed], streamed[-1:]):
            for victim in victims:
                layers._modules[str(victim)] = Around(kept[victim], skip)
            if victims == streamed[-1:]:
                world.bypassed(layers=victims)
            else:
                world.logits()  # of resident ones it is harmless, and not the library's business
            layers._modules.update({str(index): layer for index, layer in enumerate(kept)})
            world.right()


def test_attach_hooks_wants_the_layers_themselves_all_and_in_order():
    """Hooks on other modules, in another order, or twice were accepted, and waited for the wrong layers."""
    with World(prove=False, hooks=False) as world:
        layers, other = list(layers_of(world.model)), list(layers_of(world.bare))
        for modules, index in (
            ([], None),
            (layers[: LAYERS // 2], None),
            ([*layers, world.model.lm_head], None),
            ([layers[0], *layers[:-1]], 1),
            ([layers[1], layers[0], *layers[2:]], 0),
            (other, 0),
        ):
            with pytest.raises(InvalidArgument) as caught:
                attach_hooks(modules, world.tenant, model=world.model)
            assert caught.value.fields.get("index") == index
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        assert "forward" not in world.model.__dict__
        with attach_hooks(layers, world.tenant, model=world.model), pytest.raises(InvalidState):
            attach_hooks(layers, world.tenant)
    with World() as world, pytest.raises(InvalidState):
        attach_hooks(layers_of(world.model), world.tenant)


@MODES
def test_nothing_is_streamed_before_a_whole_pass_was_seen(mode):
    """A model that runs past its hooks was streamed, and found out in wrong tokens, if at all."""
    with World(mode=mode, prove=False, active=True) as world:
        everything = remap.Demand(blocks=world.tenant.kv.max_blocks)

        def refused(call, *arguments, layers=tuple(range(LAYERS))):
            with pytest.raises(InvalidState) as caught:
                call(world.session, "m", *arguments)
            assert caught.value.fields.get("layers", layers) == layers

        refused(advanced.remap, 1)
        refused(advanced.remap, 0.5, 1, "slices")
        refused(advanced.lend, 1)
        world.remap(0)
        report = world.session.step({"m": everything})
        assert report.unmet_blocks["m"] > 0 and world.tenant.streamed == ()
        assert "no pass has waited for every layer" in report.reason["m"]
        attributes = layers_of(world.model)[2].__dict__
        taken = attributes.pop("_call_impl")
        world.right()
        refused(advanced.remap, 1, layers=(2,))
        attributes["_call_impl"] = taken
        world.right()
        can_wait = remap.Demand(everything.blocks, can_wait=True)
        report = world.session.step({"m": can_wait})  # a decode pass hides less than this one, and will come
        assert world.tenant.streamed == () and "none decoded" in report.reason["m"]
        world.session.step({"m": everything})
        assert world.tenant.streamed
        world.right()


def test_an_idle_tenant_lends_before_its_first_pass():
    """What it lends comes home before that pass, or is looked for in it."""
    with World(prove=False, active=False) as world:
        advanced.lend(world.session, "m", 3)
        assert len(world.tenant.streamed) == 4
        assert world.session.activate("m").activated
        world.right()
        world.remap(2)
        world.right()


def test_layers_called_outside_of_a_pass_are_refused_while_layers_stream():
    """`model.model(...)` runs the layers without the bracket: a change that was not settled yet would not be either."""
    with World() as world:
        hidden = world.model.model(world.ids).last_hidden_state
        world.remap(3)
        with pytest.raises(InvalidState) as caught:
            world.model.model(world.ids)
        assert (caught.value.tenant, caught.value.layer) == ("m", 0)
        with world.tenant.forward("prefill", 14):
            assert torch.equal(world.model.model(world.ids).last_hidden_state, hidden)


def test_the_reference_engine_proves_itself_without_hooks_false():
    """It calls wait and done by itself, and never calls a layer as a module: the hooks see nothing."""
    from remap_serve.engine import LLMEngine, Request, SamplingParams

    with World(prove=False) as world:
        prompt = ids_for(1, 9)
        expected = generate(world.bare, prompt, 8)[0][0, 9:].tolist()
        engine = LLMEngine(world.model, world.tenant, session=world.session)
        for turn in range(3):
            request = Request(f"r{turn}", tuple(prompt[0].tolist()), SamplingParams(max_tokens=8))
            assert list(engine.run([request]).outputs[f"r{turn}"].tokens) == expected
            world.remap(turn + 2)


def test_backward_through_streamed_layers_is_refused():
    """Autograd keeps the tensor, not its bytes: gradients were computed with another layer's weights."""
    with World() as world:
        for model in (world.model, world.bare):
            model(world.ids).logits.sum().backward()  # resident: as ever
        pairs = zip(world.model.parameters(), world.bare.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
        world.model.zero_grad()
        before = world.model(world.ids).logits
        world.remap(3)
        for out in (before, world.model(world.ids).logits):
            with pytest.raises(InvalidState, match="backward"):
                out.sum().backward()
        world.model.zero_grad()


@pytest.mark.host
@pytest.mark.filterwarnings("ignore")  # that dynamo cannot trace the core
@pytest.mark.parametrize("compile", ["model", "layers", "in place"])
def test_a_compiled_model_waits_or_raises(compile):
    """torch.compile traces hooks, or runs past them."""
    with World() as world:
        called = torch.compile(world.model, backend="eager") if compile == "model" else world.model
        for module in {"model": [], "layers": layers_of(world.model), "in place": [world.model]}[compile]:
            module.compile(backend="eager")
        with torch.no_grad():
            for remapped in (0, 3):
                world.remap(remapped)
                for _ in range(2):
                    assert torch.equal(called(world.ids, use_cache=False).logits, world.expected)
        torch._dynamo.reset()
        for module in world.model.modules():
            module._compiled_call_impl = None


class Plain(nn.Module):
    """Of one tensor to one tensor, as tracing wants it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids, use_cache=False).logits


def test_a_traced_model_is_refused():
    """What is traced computes with the tensors' memory and knows no hooks."""

    with World() as world, pytest.raises(InvalidState, match="trace"):
        torch.jit.trace(Plain(world.model), (world.ids,), check_trace=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_refused(strict):
    # The strict way goes by dynamo, which cannot trace the core.
    refused = torch._dynamo.exc.Unsupported if strict else InvalidState
    with World() as world, pytest.raises(refused):
        torch.export.export(Plain(world.model), (world.ids,), strict=strict)


def test_data_parallel_on_the_cpu_is_the_model_itself():
    """Its replicas would share hooks and memory; without devices there are none."""
    with World(remapped=3) as world, torch.no_grad():
        assert torch.equal(nn.DataParallel(world.model)(world.ids, use_cache=False).logits, world.expected)


# --- what torch does with the weights of a model ----------------------------------------------------------------------


def saved(model, **load):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, **load)


@MODES
@pytest.mark.parametrize("kind", ["llama", "llama-odd", "opt"])
@pytest.mark.parametrize("remapped", [0, 3, 5])
def test_state_dict_has_the_model_s_bytes(kind, mode, remapped, tmp_path):
    """28 of 75 tensors were the ring's; save_pretrained's checkpoint was corrupt, and nothing said so."""
    with World(kind, mode=mode, remapped=remapped) as world:
        expected, layers, bare = world.bare.state_dict(), layers_of(world.model), layers_of(world.bare)
        for _ in range(2):
            equal(world.model.state_dict(), expected)
            world.right()
        equal(layers.state_dict(prefix="p."), bare.state_dict(prefix="p."))
        equal(layers[3].self_attn.state_dict(), bare[3].self_attn.state_dict())
        for tensor in (state := world.model.state_dict()):
            state[tensor] = state[tensor].clone().zero_()
        world.right()
        if kind != "opt":  # llama-odd ties its head to its embedding
            for model, name in ((world.model, "attached"), (world.bare, "bare")):
                model.save_pretrained(tmp_path / name)
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached").eval()
            equal(again.state_dict(), expected)
            assert torch.equal(logits_of(again, world.ids), world.expected)
            sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in ("attached", "bare")}
            assert len(sizes) == 1
            world.right()
        world.remap(0)  # loading
        equal(world.model.state_dict(), expected)
        equal(saved(world.model.state_dict()), expected)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved(model, weights_only=False),
}


@MODES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "llama-odd"])
def test_a_copy_is_a_model_that_is_not_attached(kind, mode, way):
    """deepcopy copied garbage, and the copy's calls were passes of the original."""
    duplicate = WAYS[way]
    with World(kind, mode=mode, remapped=4) as world:
        passes = world.session.snapshot().tenants["m"].passes
        copies, mlp, bare = duplicate(world.model), layers_of(world.model)[2].mlp, layers_of(world.bare)[2].mlp
        equal(copies.state_dict(), world.bare.state_dict())
        equal(duplicate(mlp).state_dict(), bare.state_dict())
        weight = duplicate(mlp.up_proj.weight)
        assert torch.equal(weight, bare.up_proj.weight)
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
        assert torch.equal(logits_of(copies, world.ids), world.expected)
        assert world.session.snapshot().tenants["m"].passes == passes
        assert (copies.lm_head.weight is copies.model.embed_tokens.weight) == (kind == "llama-odd")
        for module in copies.modules():
            assert unhooked(module) and not {"forward", "_apply", "__deepcopy__"} & set(module.__dict__)
        copies.half()
        world.right()
    assert torch.equal(logits_of(copies.float(), world.ids).argmax(-1), world.expected.argmax(-1))


@MODES
def test_load_state_dict_raises_while_layers_are_away(mode):
    """It wrote into the ring, mixed old and new weights, and was found 28 passes later."""
    other = make("llama", seed=5)
    with World(mode=mode, remapped=3) as world:
        before, streamed = addresses_of(world.model), world.tenant.streamed
        one, its = (layers_of(model)[streamed[1]].mlp for model in (world.model, other))
        for module, state, layers in ((world.model, other, streamed), (one, its, streamed[1:2])):
            for assign in (False, True):
                with pytest.raises(InvalidState) as caught:
                    module.load_state_dict(state.state_dict(), assign=assign)
                assert caught.value.layers == layers
        assert addresses_of(world.model) == before
        world.right()
        world.remap(0)
        world.right()  # all have come home
        world.model.load_state_dict(other.state_dict())
        world.expected = logits_of(other, world.ids)
        world.right()
        with pytest.raises(InvalidArgument) as refused:
            world.remap(1)
        assert len(refused.value.pinned) >= LAYERS - 1  # they are not what their master copies are any more
        world.right()


MOVES = {
    "half": lambda model: model.half(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "double": lambda model: model.double(),
}


@MODES
@pytest.mark.parametrize("remapped", [0, 3])
def test_moving_or_converting_raises_and_changes_nothing(mode, remapped):
    """Its addresses changed under the session, and streamed layers were converted from the ring."""
    with World(mode=mode, remapped=remapped) as world:
        before = addresses_of(world.model)
        for module in (world.model, layers_of(world.model), layers_of(world.model)[1].mlp, world.model.lm_head):
            for way, move in MOVES.items():
                with pytest.raises(InvalidState) as caught:
                    move(module)
                assert caught.value.tenant == "m", way
        assert addresses_of(world.model) == before
        world.right()
        assert world.model.to("cpu") is world.model
        world.model.float().to(torch.float32).train().eval().requires_grad_(False).requires_grad_(True)
        world.right()
        assert world.tenant.written == {}
        world.remap(2)
        world.right()
    world.model.bfloat16()  # once detached it is a model like any other


@MODES
def test_weights_that_are_replaced_or_written_are_found_in_the_next_pass(mode):
    """Quantisers and FSDP exchange parameters; an optimiser's write into the ring was found 28 passes later."""
    with World(mode=mode, remapped=3) as world:

        def found():
            with pytest.raises(InvalidState) as caught:
                world.logits()
            return set(caught.value.written)

        layer = layers_of(world.model)[world.tenant.streamed[0]].mlp
        kept = layer.up_proj
        layer.up_proj = nn.Linear(kept.in_features, kept.out_features, bias=False)
        assert found() == {world.tenant.streamed[0]}
        layer.up_proj = kept
        world.right()
        for parameter in world.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(world.model.parameters(), lr=0.5).step()
        assert found() == found() == set(world.tenant.streamed)
        for call in (world.model.state_dict, lambda: copy.deepcopy(world.model)):
            with pytest.raises(InvalidState):
                call()
        with pytest.warns(RuntimeWarning, match="lost"):
            world.session.close()
        world.expected = world.logits()
        world.model.zero_grad()


def test_dynamic_quantisation_of_a_copy_sees_the_right_bytes():
    """quantize_dynamic makes a deepcopy first."""
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this torch has no quantised kernels")
    with World(remapped=4) as world:
        quantise = torch.ao.quantization.quantize_dynamic
        quantised, expected = (quantise(model, {nn.Linear}) for model in (world.model, world.bare))
        assert torch.equal(logits_of(quantised, world.ids), logits_of(expected, world.ids))


def run(source, *arguments):
    """A script in an interpreter of its own, with its sessions on the CPU."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "REMAP_DEVICE": "cpu"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.host
def test_wrapping_for_distributed_training_is_refused_or_found():
    """DistributedDataParallel sends rank 0's parameters to all the others: it would have sent the ring."""
    done = run(
        """
        import torch, tempfile, os
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from test_museum_torch import World, pytest
        from remap import InvalidState
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with World(remapped=3) as world:
            with pytest.raises(RuntimeError, match="parameter"):
                DistributedDataParallel(world.model)
            world.right()
            with pytest.raises(InvalidState):
                fully_shard(world.model.model.layers[world.tenant.streamed[0]], mesh=init_device_mesh("cpu", (1,)))
                world.logits()
            os._exit(7)
        """
    )
    assert done.returncode == 7, done.stdout + done.stderr


# --- what users do with the modules meanwhile ---------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A layer or a Linear behind another name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.__dict__.update(attention_type=getattr(inner, "attention_type", None))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Once(nn.Module):
    def forward(self, weight):
        return weight * 1.0


def wrap_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Wrapped(layer)


def wrap_linears(model):
    for layer in model.model.layers:
        layer.mlp.up_proj = Wrapped(layer.mlp.up_proj)


def wrap_the_head(model):
    model.lm_head = Wrapped(model.lm_head)


def insert_a_layer(model):
    class Nothing(nn.Module):
        attention_type = "full_attention"

        def forward(self, hidden, **kwargs):
            return hidden

    model.model.layers.insert(0, Nothing())
    model.config.num_hidden_layers += 1


def compile_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")


def rename_tensors(model):
    for layer in model.model.layers:
        weight = layer.mlp._parameters["weight_of_up"] = layer.mlp.up_proj._parameters.pop("weight")
        layer.mlp.up_proj.__dict__["weight"] = weight


def remove_adapters(model):
    for layer in model.model.layers:
        del layer.adapter


def new_parameters(model):
    """The same memory in new objects, as code before `requires_grad_` does it."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.data)


def parametrize(model):
    for layer in model.model.layers:
        nn.utils.parametrize.register_parametrization(layer.mlp.up_proj, "weight", Once())


def prune(model):
    import torch.nn.utils.prune

    for layer in model.model.layers:
        torch.nn.utils.prune.identity(layer.mlp.up_proj, "weight")


def remove_a_layer(model):
    del model.model.layers[1]
    model.config.num_hidden_layers -= 1


CHANGES = [
    wrap_layers,
    wrap_linears,
    wrap_the_head,
    insert_a_layer,
    compile_layers,
    prune,
    rename_tensors,
    remove_adapters,
]
# While layers are away these read or replace what the ring shows, or skip a layer: the next pass says so.
AT_HOME = [new_parameters, parametrize, remove_a_layer]


@pytest.mark.filterwarnings("ignore")  # that dynamo cannot trace the core
@pytest.mark.parametrize("remapped", [0, 3])
@pytest.mark.parametrize("change", [*CHANGES, *AT_HOME], ids=lambda change: change.__name__)
def test_bytes_come_back_whatever_their_names_are_by_then(change, remapped):
    """4 to 24 of 26 tensors were zero after close, silently: they were looked up by the names that they had at attach."""
    model = make("llama")
    for layer in model.model.layers:
        layer.adapter = nn.Linear(8, 8)
    with World(model=model, remapped=remapped) as world:
        tensors = [*model.parameters(), *model.buffers()]
        expected = [tensor.detach().clone() for tensor in [*world.bare.parameters(), *world.bare.buffers()]]
        change(model), change(world.bare)
        world.expected = logits_of(world.bare, world.ids)
        if remapped and change in AT_HOME:
            with pytest.raises(InvalidState):
                world.logits()
        else:
            world.right()
            state = model.state_dict()
            equal(state, world.bare.state_dict())
            if not remapped:
                world.remap(2) if change in CHANGES else advanced.check(world.session)
                world.right()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if change in AT_HOME else "error")
            world.session.close()
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))
        if not (remapped and change in AT_HOME):
            equal(state, world.bare.state_dict())  # what was taken while it was attached
    torch._dynamo.reset()


def test_hooks_of_others_see_their_layer_whenever_they_were_registered():
    """One that came after attach ran behind `done`, or before `wait`: it read another layer's bytes now and then."""
    with World(remapped=4) as world:
        layers, seen = layers_of(world.model), []

        def look(module, *_):
            if module in set(layers):
                index = list(layers).index(module)
                seen.append(torch.equal(module.mlp.up_proj.weight, layers_of(world.bare)[index].mlp.up_proj.weight))

        ways = [nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_forward_hook]
        handles = [way(look) for way in ways]
        for layer in layers:
            handles += [layer.register_forward_pre_hook(look, prepend=True), layer.register_forward_pre_hook(look)]
            handles += [layer.register_forward_hook(look), layer.register_forward_hook(look, always_call=True)]
            handles += [layer.mlp.register_forward_hook(lambda *_, layer=layer: look(layer))]
        for _ in range(3):
            world.right()
        assert seen == [True] * (3 * 7 * LAYERS)
        for handle in handles:
            handle.remove()


def test_a_parent_gets_a_childs_weight_from_its_state_dict():
    """Its own forward runs when the ring shows other layers: reading `child.weight` there is not seen (docs/torch.md)."""
    with World(remapped=4) as world:
        expected, seen = layers_of(world.bare)[0].mlp.state_dict(), []
        forward = type(world.model.model).forward

        def reads(*args, **kwargs):
            out = forward(world.model.model, *args, **kwargs)
            seen.append(layers_of(world.model)[0].mlp.state_dict())
            return out

        world.model.model.forward = reads
        world.right()
        equal(seen[0], expected)
        del world.model.model.forward


# --- the ways in which trainers write weights: the table of docs/torch.md -----------------------------------------------


def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return made


def sgd(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.zero_grad()


def ema(model):
    average = torch.optim.swa_utils.AveragedModel(
        copy.deepcopy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(make("llama", seed=5))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), average.module.parameters()):
            mine.copy_(theirs)


def data_copies(model):
    for mine, theirs in zip(model.parameters(), make("llama", seed=5).parameters()):
        mine.data.copy_(theirs)


def data_replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.5)


def quantised(model):
    for layer in layers_of(model):
        up = layer.mlp.up_proj
        with torch.no_grad():
            layer.mlp.up_proj = nn.Linear(up.in_features, up.out_features, bias=False)
            layer.mlp.up_proj.weight.copy_(torch.quantize_per_tensor(up.weight, 0.01, 0, torch.qint8).dequantize())


SEEN = [sgd, ema, foreach, quantised, data_replaced]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("write", [*SEEN, data_copies], ids=lambda write: write.__name__)
def test_weights_written_while_all_layers_are_at_home_stay_written(write):
    """What a counter sees pins its layers; for what it does not see there is `advanced.rewrite`."""
    with World() as world:
        write(world.bare)
        if write is data_copies:
            advanced.rewrite(world.session, "m", lambda: write(world.model))
        else:
            write(world.model)
        world.expected = logits_of(world.bare, world.ids)
        world.right()
        if write is data_copies:
            world.remap(3)
        else:
            with pytest.raises(InvalidArgument) as refused:
                world.remap(1)
            assert len(refused.value.pinned) >= LAYERS - 1
        world.right()
        equal(world.model.state_dict(), world.bare.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("write", [*SEEN, data_copies], ids=lambda write: write.__name__)
def test_weights_written_while_layers_are_away_are_never_mixed_with_older_ones(write):
    """`state_dict()` gave new bytes of layers at home and old ones of the others: a trainer pushed that to its servers."""
    with World(remapped=3) as world:
        if write is ema:
            with pytest.raises(InvalidState):  # the copy is right, the write is found
                write(world.model)
                world.logits()
        else:
            write(world.model)
            if (
                write is not data_copies
            ):  # no counter sees it: the bytes of layers at home show it to whoever copies them
                with pytest.raises(InvalidState):
                    world.logits()
        for call in (world.model.state_dict, lambda: copy.deepcopy(world.model), lambda: pickle.dumps(world.model)):
            with pytest.raises(InvalidState):
                call()
        with pytest.warns(RuntimeWarning, match="lost"):
            world.session.close()
        world.expected = world.logits()


@pytest.mark.parametrize("when", ["before attach", "away", "merged at once"])
def test_an_adapter_is_merged_whole_or_not_at_all(when):
    """A merge while layers were away was lost in those, and `state_dict()` was half merged; so was what came home."""
    model = make("llama")
    if when == "before attach":
        adapted(model)
    with World(model=model, remapped=3) as world:
        if when != "before attach":
            adapted(world.bare)
        both = [adapted(model) if when != "before attach" else model, world.bare]
        world.expected = logits_of(world.bare, world.ids)
        if when != "merged at once":
            world.right()
        tuners = [
            [each for each in one.modules() if hasattr(each, "merge_adapter") or hasattr(each, "merged")]
            for one in both
        ]
        merging = [[each for each in one if hasattr(each, "lora_A") and hasattr(each, "merge")] for one in tuners]
        before = bytes_of(world.bare)
        for way in ("merge", "unmerge"):
            with pytest.raises(InvalidState) as caught:
                [getattr(each, way)() for each in merging[0]]
            assert caught.value.layers
        equal(model.state_dict(), {name: before.get(name, value) for name, value in world.bare.state_dict().items()})
        world.right()
        world.remap(0)
        world.right()
        for each in merging[0] + merging[1]:
            each.merge()
        world.expected = logits_of(world.bare, world.ids)
        world.right()
        equal(model.state_dict(), world.bare.state_dict())
        with pytest.raises(InvalidArgument) as refused:
            world.remap(1)
        assert len(refused.value.pinned) >= LAYERS - 1
        world.right()
        # So that layers may go afterwards:
        for each in merging[1]:
            each.unmerge()
        advanced.rewrite(world.session, "m", lambda: [each.unmerge() for each in merging[0]])
        world.expected = logits_of(world.bare, world.ids)
        world.remap(3)
        world.right()
        equal(model.state_dict(), world.bare.state_dict())


def test_an_adapter_may_be_taken_out_while_layers_are_away():
    """After `unload()` and close the layers were zero; with layers away every pass was refused for another reason."""
    model = make("llama")
    expected = logits_of(model, ids_for(2, 7))
    tuned = adapted(model)
    with World(model=model, remapped=3) as world:
        assert tuned.unload() is model
        world.bare, world.expected = make("llama"), expected
        world.right()
        world.remap(4)
        world.right()
        equal(model.state_dict(), world.bare.state_dict())
    equal(model.state_dict(), world.bare.state_dict())


# --- the weights file -------------------------------------------------------------------------------------------------


def from_file(path, **options):
    world = World(weights=path, **options)
    if world.session.device != "cpu":
        world.session.close()
        pytest.skip("on a device master copies are page-locked copies: the file is not used after attach")
    master = internals(world.tenant)._state.source.keep_alive[0]
    assert sorted(master.files) == list(range(LAYERS)), master.reason
    internals(world.tenant)._state.prefetcher.drain()  # what the last pass has issued ahead has been read
    return world


def refused(world, path, *calls):
    for call in calls:
        with pytest.raises(InvalidState) as caught:
            call()
        assert caught.value.file == str(path)
        assert caught.value.expected != caught.value.found


class Original:
    """The file as it was: `back` puts the same bytes into it, with its old time of modification."""

    def __init__(self, path):
        self.path, self.content, found = path, path.read_bytes(), path.stat()
        self.times = found.st_atime_ns, found.st_mtime_ns

    def later(self, ns=10**9):
        os.utime(self.path, ns=(self.times[0], self.times[1] + ns))

    def back(self):
        with self.path.open("r+b") as file:
            file.truncate(len(self.content))
            file.write(self.content)
        self.later(0)

    def detached(self, world):
        """Closes the world: what was read from the file is as it was."""
        world.session.detach("m")
        equal(bytes_of(world.model), bytes_of(world.bare))
        with world:
            pass


@MODES
@pytest.mark.parametrize("way", ["overwrite", "truncate", "grow", "touch"])
def test_a_weights_file_that_changes_is_refused(mode, way, tmp_path):
    """Overwriting it changed the weights silently; truncating it ended the process."""
    path = save_weights(make("llama"), tmp_path)
    original, world = Original(path), from_file(path, mode=mode, remapped=3)
    world.right()
    internals(world.tenant)._state.prefetcher.drain()
    with path.open("r+b") as file:
        if way == "truncate":
            file.truncate(5000)
        elif way != "touch":
            file.write(original.content + b"x" if way == "grow" else bytes(len(original.content)))
    original.later(0 if way in ("truncate", "grow") else 10**9)
    calls = [world.logits, world.logits, lambda: world.remap(0), world.model.state_dict]
    calls += [lambda: copy.deepcopy(world.model), lambda: world.session.detach("m"), world.session.close]
    refused(world, path, *calls)
    home = next(layer for layer in range(LAYERS) if layer not in world.tenant.streamed)
    equal(layers_of(world.model)[home].mlp.state_dict(), layers_of(world.bare)[home].mlp.state_dict())
    original.back()
    with pytest.raises(InvalidState):  # what was read in between is not known: it can only go
        world.logits()
    original.detached(world)


@MODES
@pytest.mark.parametrize("way", ["rename", "delete", "chmod"])
def test_a_weights_file_that_is_replaced_or_deleted_lives_on(mode, way, tmp_path):
    """The mapping is of the old file, which stays as it is until it is unmapped."""
    path, other = save_weights(make("llama"), tmp_path), tmp_path / "other"
    other.write_bytes(b"something else")
    with from_file(path, mode=mode, remapped=3) as world:
        {"rename": lambda: other.rename(path), "delete": path.unlink, "chmod": lambda: path.chmod(0o400)}[way]()
        for remapped in (4, 1, 0, 5):
            world.remap(remapped)
            world.right()
            equal(world.model.state_dict(), world.bare.state_dict())


@MODES
def test_a_weights_file_that_changes_while_all_is_resident_costs_only_the_remapping(mode, tmp_path):
    """Its layers are pinned, as written ones are, and passes go on."""
    path = save_weights(make("llama"), tmp_path)
    with from_file(path, mode=mode, remapped=2) as world:
        world.remap(0)
        world.right()
        path.write_bytes(b"")
        world.right()
        with pytest.raises(InvalidArgument) as caught:
            world.remap(2)
        assert caught.value.pinned
        assert set(map(tuple, world.tenant.written.values())) == {(str(path),)}
        report = world.session.step({"m": remap.Demand(blocks=world.tenant.kv.max_blocks)})
        assert report.unmet_blocks["m"] > 0 and world.tenant.streamed == ()
        world.right()
        equal(world.model.state_dict(), world.bare.state_dict())


@MODES
def test_a_weights_file_that_changes_inside_a_pass_is_told_when_it_ends(mode, tmp_path):
    """Bytes that were copied then may be either: the pass's results go, and so do layers that came home in it."""
    path = save_weights(make("llama"), tmp_path)
    original, world = Original(path), from_file(path, mode=mode, remapped=3)
    world.remap(1)  # some layers load in this pass
    handle = layers_of(world.model)[2].register_forward_hook(lambda *_: original.later())
    refused(world, path, world.logits)
    handle.remove()
    refused(world, path, lambda: world.session.detach("m"))
    original.back()
    original.detached(world)


@pytest.mark.slow
def test_truncating_the_weights_file_does_not_end_the_process(tmp_path):
    """SIGBUS in the copy thread."""
    done = run(
        """
        import os, sys
        from test_museum_torch import from_file, make, save_weights
        from pathlib import Path
        import remap
        for mode in ("aliased", "strict"):
            path = save_weights(make("llama"), Path(sys.argv[1]), mode)
            world = from_file(path, mode=mode, remapped=3)
            os.truncate(path, 100)
            for call in (world.logits, world.model.state_dict, world.session.close):
                try:
                    call()
                except remap.InvalidState as error:
                    print(error.fields["found"])
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(100, ") == 6
